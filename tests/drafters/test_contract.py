"""What every trainable family promises; a family added to the registry is tested here by itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from spectrain.drafters.objective import DrafterLoss, LossConfig
from spectrain.losses import LOSSES, Laws, depth_weights, supervised
from spectrain.target import FeatureBatch, Target


@dataclass
class Toy:
    target: Target
    drafter: Any
    batch: FeatureBatch

    def loss(self, batch: FeatureBatch | None = None, name: Any = "forward_kl") -> Tensor:
        weights = depth_weights(len(self.drafter.shifts()), 0.5)
        return DrafterLoss(self.drafter, self.target.head, LossConfig(terms={name: 1.0}))(batch or self.batch, weights)


@pytest.fixture
def toy(family, tools, tiny_target, make_rows):
    """A target with more head rows than tokens, and rows of several lengths."""
    target = tiny_target("llama", vocab=24, padding=8, dtype=torch.float32)
    rows = make_rows(target, 5)
    drafter = tools.drafter(target, tools.config(family), rows)
    return Toy(target, drafter, tools.batch(target, drafter, rows))


def test_shapes_shifts_and_masks(toy):
    output, batch = toy.drafter(toy.batch), toy.batch
    columns = toy.target.vocab_size if output.columns_D is None else output.columns_D.numel()
    assert tuple(depth.shift for depth in output.depths) == toy.drafter.shifts(), "forward and shifts() disagree"
    for depth in output.depths:
        assert depth.hidden_BTH.shape[:2] == batch.ids_BT.shape, "a state for every position"
        assert depth.head_DH.shape == (columns, depth.hidden_BTH.shape[-1]), (
            "head_DH has a row for every id of columns_D (None: for every row of the target's), as wide as the states"
        )
        assert torch.equal(depth.mask_BT, supervised(batch.answer_BT, depth.shift)), (
            f"mask_BT is not supervised(batch.answer_BT, {depth.shift}): position t counts where tokens t+1 to "
            f"t+{depth.shift} are all answers"
        )
    if output.columns_D is not None:
        ids = output.columns_D.tolist()
        assert ids == sorted(set(ids))
        assert ids[0] >= 0
        assert ids[-1] < toy.target.tokenizer_size


def test_a_config_knows_how_many_depths_are_trained(toy):
    shifts, trained = toy.drafter.shifts(), toy.drafter.config.trained_depths
    assert len(shifts) == trained, f"shifts() are {shifts}, but trained_depths of its config is {trained}: override it"


def test_the_number_of_depths_can_be_overridden(toy):
    for depths in (1, 2):
        output = toy.drafter(toy.batch, depths)
        assert len(output.depths) == len(toy.drafter.shifts(depths)) <= depths
        for depth, full in zip(output.depths, toy.drafter(toy.batch).depths, strict=False):
            assert torch.equal(depth.hidden_BTH, full.hidden_BTH)


def test_forward_is_deterministic_also_in_training_mode(toy):
    for mode in (True, False):
        toy.drafter.train(mode)
        first, second = toy.drafter(toy.batch), toy.drafter(toy.batch)
        for a, b in zip(first.depths, second.depths, strict=True):
            assert torch.equal(a.hidden_BTH, b.hidden_BTH)
    assert torch.equal(toy.loss(), toy.loss())


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_the_loss_is_the_plain_sum_over_supervised_positions(toy, name):
    """With all logits in one tensor, and the target's law straight from the model over the ids that exist."""
    output, batch, size = toy.drafter(toy.batch), toy.batch, toy.target.tokenizer_size
    with torch.no_grad():
        logits = toy.target.model(batch.ids_BT).logits
    logits[..., size:] = -torch.inf
    law = logits.log_softmax(-1)
    law = law if output.columns_D is None else law[..., output.columns_D]
    want = torch.zeros(())
    for depth, weight in zip(output.depths, depth_weights(len(output.depths), 0.5), strict=True):
        for b, t in depth.mask_BT.nonzero().tolist():
            z = depth.hidden_BTH[b, t] @ depth.head_DH.T
            want = want + weight * LOSSES[name](Laws(z[None], law[b, t + depth.shift - 1][None]))[0]
            if depth.predicts_features:
                truth = batch.hidden_BTH[b, t + depth.shift - 1]
                want = want + weight * smooth_l1_loss(depth.hidden_BTH[b, t, : len(truth)], truth)
    gradients = torch.autograd.grad(want, list(toy.drafter.parameters()), allow_unused=True)
    got = toy.loss(name=name)
    got.backward()
    torch.testing.assert_close(got.detach(), want.detach(), rtol=1e-4, atol=1e-4)
    for (label, parameter), gradient in zip(toy.drafter.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=2e-3, atol=2e-4, msg=label)


def test_the_gradient_is_exactly_zero_outside_the_mask(toy):
    kept = []

    def keep(_module, _args, output):
        for depth in output.depths:
            depth.hidden_BTH.retain_grad()
            kept.append(depth)

    toy.drafter.register_forward_hook(keep)
    toy.loss().backward()
    assert len(kept) == len(toy.drafter.shifts())
    for depth in kept:
        touched = depth.hidden_BTH.grad.abs().sum(-1) > 0
        assert torch.equal(touched, depth.mask_BT), "a gradient outside the mask, or none inside"


def test_what_lies_behind_the_answers_changes_nothing(toy):
    """Padding may hold anything: no loss and no gradient hears of it."""
    batch = toy.batch
    end = [int(row.nonzero().max()) for row in batch.answer_BT]
    behind = torch.arange(batch.ids_BT.shape[1]) > torch.tensor(end)[:, None]
    assert behind.any()
    noise = torch.Generator().manual_seed(0)

    def noisy(values: Tensor) -> Tensor:
        other = torch.randn(values.shape, generator=noise).to(values.dtype)
        return torch.where(behind.view(*behind.shape, *[1] * (values.dim() - 2)), other, values)

    changed = replace(
        batch,
        ids_BT=torch.where(behind, 5, batch.ids_BT),
        hidden_BTH=noisy(batch.hidden_BTH),
        taps_BTF=noisy(batch.taps_BTF),
        log_normaliser_BT=noisy(batch.log_normaliser_BT),
    )
    gradients = []
    for values in (batch, changed):
        toy.drafter.zero_grad()
        toy.loss(values).backward()
        gradients.append([p.grad.clone() for p in toy.drafter.parameters()])
    assert torch.equal(toy.loss(changed), toy.loss())
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)


def test_a_batch_with_nothing_supervised_gives_zero_loss_and_zero_gradients(toy):
    """Every parameter still takes part, or processes would wait for each other's gradients for ever."""
    loss = toy.loss(replace(toy.batch, answer_BT=torch.zeros_like(toy.batch.answer_BT)))
    loss.backward()
    assert loss.item() == 0.0
    for name, parameter in toy.drafter.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_the_loss_falls_and_the_target_stays_as_it_was(toy, tools):
    before = {name: value.clone() for name, value in toy.target.model.state_dict().items()}
    losses = tools.train(toy.drafter, toy.target, toy.batch, 40)
    assert losses[-1] < 0.8 * losses[0]
    for name, parameter in toy.target.model.named_parameters():
        assert parameter.grad is None, name
        assert not parameter.requires_grad, name
        assert torch.equal(parameter, before[name]), name


def test_the_target_is_no_part_of_what_is_trained_moved_or_saved(toy):
    module = DrafterLoss(toy.drafter, toy.target.head, LossConfig())
    theirs = {parameter.data_ptr() for parameter in toy.target.model.parameters()}
    assert not theirs & {parameter.data_ptr() for parameter in module.parameters()}
    assert not theirs & {value.data_ptr() for value in module.state_dict().values()}
    assert set(module.state_dict()) == {f"drafter.{name}" for name in toy.drafter.state_dict()}


def test_building_twice_from_one_seed_gives_the_same_weights(family, toy, tools, make_rows):
    rows = make_rows(toy.target, 5)
    again = tools.drafter(toy.target, tools.config(family), rows)
    for name, value in toy.drafter.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_rows_of_a_batch_do_not_hear_of_each_other(toy, make_rows):
    """Another text in one row: states, losses and gradients of all the others stay bit for bit as they were."""
    batch = toy.batch
    other = make_rows(toy.target, 1, answer=(4, 4), seed=9)[0].ids
    for place in (0, len(batch.ids_BT) - 1):

        def replaced(values: Tensor, with_: Tensor, at: int = place) -> Tensor:
            values = values.clone()
            values[at] = with_
            return values

        length = batch.ids_BT.shape[1]
        noise = torch.Generator().manual_seed(0)
        text = torch.tensor((other * length)[:length])
        changed = replace(
            batch,
            ids_BT=replaced(batch.ids_BT, text),
            hidden_BTH=replaced(batch.hidden_BTH, torch.randn(batch.hidden_BTH[0].shape, generator=noise)),
            taps_BTF=replaced(batch.taps_BTF, torch.randn(batch.taps_BTF[0].shape, generator=noise)),
        )
        others = torch.arange(len(batch.ids_BT)) != place
        for mode in (True, False):
            toy.drafter.train(mode)
            outputs = [toy.drafter(values).depths for values in (batch, changed)]
            for one, two in zip(*outputs, strict=True):
                assert torch.equal(one.hidden_BTH[others], two.hidden_BTH[others])
        assert not torch.equal(outputs[0][0].hidden_BTH[place], outputs[1][0].hidden_BTH[place])
        losses, gradients = [], []
        for values in (batch, changed):
            silent = replace(values, answer_BT=replaced(values.answer_BT, torch.zeros(length, dtype=torch.bool)))
            toy.drafter.zero_grad()
            loss = toy.loss(silent)
            loss.backward()
            losses.append(loss.detach())
            gradients.append([parameter.grad.clone() for parameter in toy.drafter.parameters()])
        assert losses[0] > 0
        assert torch.equal(*losses)
        assert all(torch.equal(one, two) for one, two in zip(*gradients, strict=True))
