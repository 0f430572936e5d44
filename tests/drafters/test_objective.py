"""The objective: whose law is learnt, what a depth counts, auxiliaries, and the settings that choose among them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spectrain.config import parse_recipe
from spectrain.drafters.base import Auxiliary, DepthOutput, DraftOutput
from spectrain.drafters.laws import learnt_law
from spectrain.drafters.objective import DrafterLoss, LossConfig
from spectrain.drafters.scoring import score_batch, teacher_law
from spectrain.drafters.tally import Tally
from spectrain.drafters.tree_search import rank_accuracy
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler
from spectrain.heads import OutputHead
from spectrain.losses import LOSSES, Laws, supervised
from spectrain.target import FeatureBatch

B, T, H, V, K = 3, 9, 5, 12, 3
COLUMNS = torch.tensor([0, 2, 3, 5, 8, 9, 11])


class Largest(TorchDispatchMode):
    """Remembers the most elements that any tensor made under it had."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor))])
        return out


class Given(nn.Module):
    """Says these states at every depth, through one head or one each."""

    def __init__(self, states: list[Tensor], heads: list[Tensor], columns: Tensor | None, features: bool) -> None:
        super().__init__()
        self.states, self.heads = nn.ParameterList(states), heads
        self.columns_D, self.features = columns, features
        self.teacher: Any = None
        self.name = "given"
        self.auxiliary: tuple[Auxiliary, ...] = ()

    def shifts(self, depths: int | None = None) -> tuple[int, ...]:
        return tuple(range(2, 2 + len(self.states)))

    def forward(self, batch: FeatureBatch, depths: int | None = None) -> DraftOutput:
        outputs = tuple(
            DepthOutput(state, self.heads[d % len(self.heads)], shift, supervised(batch.answer_BT, shift),
                        predicts_features=self.features)
            for d, (state, shift) in enumerate(zip(self.states, self.shifts(), strict=True))
        )  # fmt: skip
        return DraftOutput(outputs, self.columns_D, self.teacher, self.auxiliary)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def lab(columns: Tensor | None = None, heads: int = 1, depths: int = K, features: bool = False) -> Any:
    head = OutputHead(randn(V, H, seed=1), None, None, V)
    blank = FeatureBatch(
        torch.randint(V, (B, T), generator=torch.Generator().manual_seed(2)),
        torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0, 1, 1, 0], [0, 0, 0, 0, 0, 1, 1, 1, 1]]).bool(),
        torch.zeros(B, T, H), torch.zeros(B, T, 0), torch.zeros(B, T), torch.zeros(B, T, dtype=torch.long),
    )  # fmt: skip
    batch = blank.as_seen(2 * randn(B, T, H, seed=3), head)
    width = V if columns is None else len(columns)
    own = [randn(width, H, seed=10 + number).requires_grad_() for number in range(heads)]
    drafter = Given([randn(B, T, H, seed=20 + d) for d in range(depths)], own, columns, features)
    return SimpleNamespace(head=head, batch=batch, drafter=drafter, parameters=[*drafter.states, *own])


def value_of(lab: Any, weights: Any = (1.0, 0.5, 0.25), chunk: int = 256, **settings: Any) -> Tensor:
    return DrafterLoss(lab.drafter, lab.head, LossConfig(**settings), chunk)(lab.batch, list(weights))


def by_position(lab: Any, loss: str, law: Tensor) -> dict[tuple[int, int, int], tuple[Tensor, Tensor]]:
    """Loss and acceptance of every supervised (row, position, depth) for log-probabilities [B, T, V]."""
    law = law if lab.drafter.columns_D is None else law[..., lab.drafter.columns_D]
    found = {}
    for d, depth in enumerate(lab.drafter(lab.batch).depths):
        for b, t in depth.mask_BT.nonzero().tolist():
            z, log_p = depth.hidden_BTH[b, t] @ depth.head_DH.T, law[b, t + depth.shift - 1]
            laws = Laws(z[None], log_p[None])
            found[b, t, d] = LOSSES[loss](laws)[0], laws.acceptance[0]
    return found


def exact(lab: Any, hidden: Tensor | None = None) -> Tensor:
    return lab.head.logits(lab.batch.hidden_BTH if hidden is None else hidden).log_softmax(-1)


def same(got: Tensor, want: Tensor, parameters: list[Tensor]) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    gradients = [torch.autograd.grad(value, parameters, retain_graph=True) for value in (got, want)]
    for found, expected in zip(*gradients, strict=True):
        assert expected.abs().sum() > 0
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


# --- mixtures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, K])
def test_the_loss_of_a_mixture_is_the_sum_of_those_of_its_parts(heads):
    case, terms = lab(COLUMNS, heads), {"forward_kl": 0.3, "total_variation": 2.0, "negative_log_acceptance": 0.5}
    parts = sum(weight * value_of(case, terms={name: 1.0}, chunk=4) for name, weight in terms.items())
    same(value_of(case, terms=terms, chunk=4), parts, case.parameters)
    plain = sum(
        (1.0, 0.5, 0.25)[d] * weight * loss
        for name, weight in terms.items()
        for (_, _, d), (loss, _) in by_position(case, name, exact(case)).items()
    )
    same(value_of(case, terms=terms, chunk=4), plain, case.parameters)


def test_settings_say_what_is_wrong():
    assert LossConfig().terms == {"forward_kl": 1.0}
    for settings, message in (
        ({"terms": {"kl": 1}}, r"there is no loss 'kl'; did you mean 'forward_kl' or 'reverse_kl'\?"),
        ({"terms": {"total_variaton": 1}}, r"did you mean 'total_variation'\?"),
        ({"terms": {"hinge": 1}}, r"there is no loss 'hinge'; there are forward_kl, reverse_kl, "),
        ({"terms": {}}, r"expected at least one loss with a weight above 0"),
        ({"terms": {"forward_kl": 0}}, r"expected at least one loss with a weight above 0"),
        ({"terms": {"forward_kl": -1}}, r"found weight -1.0 of forward_kl, expected 0 or more"),
        ({"terms": {"forward_kl": float("nan")}}, r"terms.forward_kl\n  Input should be a finite number"),
        ({"name": "lk_hybrid", "weight": 0.1}, r"found name and weight, .* terms: \{lk_hybrid: 0.1\}"),
    ):
        with pytest.raises(ValidationError, match=message):
            LossConfig(**settings)


def test_a_recipe_with_an_unknown_loss_says_where_and_which_there_are():
    values = {"target": {"name": "x"}, "data": {"train": ["y"]}, "drafter": {"type": "medusa"}, "output": "z"}
    with pytest.raises(
        SpectrainError, match=r"^here: loss\.terms: there is no loss 'kl'; did you mean 'forward_kl' or"
    ):
        parse_recipe(values | {"loss": {"terms": {"kl": 1}}}, "here")
    with pytest.raises(SpectrainError, match=r"^here: unknown key 'loss\.term'; did you mean 'loss\.terms'\?"):
        parse_recipe(values | {"loss": {"term": {"forward_kl": 1}}}, "here")
    with pytest.raises(SpectrainError, match=r"^here: loss: found name, expected .* terms: \{total_variation: 1.0\}"):
        parse_recipe(values | {"loss": {"name": "total_variation"}}, "here")
    assert parse_recipe(values | {"data": {"train": ["y"], "teacher_top_k": 64}}, "here").data.teacher_top_k == 64


# --- the answers as teacher -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [None, COLUMNS])
@pytest.mark.parametrize("heads", [1, K])
def test_answers_as_teacher_are_cross_entropy_on_the_rows_own_tokens(columns, heads):
    case = lab(columns, heads)
    want, outside = torch.zeros(()), 0
    for d, depth in enumerate(case.drafter(case.batch).depths):
        for b, t in depth.mask_BT.nonzero().tolist():
            token = case.batch.ids_BT[b, t + depth.shift]
            if columns is not None and token not in columns:
                outside += 1
                continue
            place = token if columns is None else columns.tolist().index(token)
            logits = depth.hidden_BTH[b, t] @ depth.head_DH.T
            want = want + (1.0, 0.5, 0.25)[d] * nn.functional.cross_entropy(logits[None], place[None] if columns is None
                                                                            else torch.tensor([place]))  # fmt: skip
    assert (outside > 0) == (columns is not None)
    same(value_of(case, teacher="answers", chunk=4), want, case.parameters)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_token_that_the_drafter_cannot_say_pulls_at_nothing(name):
    case = lab(COLUMNS)
    case.batch = replace(case.batch, ids_BT=torch.full((B, T), 1))
    loss = value_of(case, teacher="answers", terms={name: 1.0})
    assert loss.item() == 0.0
    assert not any(gradient.any() for gradient in torch.autograd.grad(loss, case.parameters))


# --- a moved target, and auxiliaries ----------------------------------------------------------------------------------


def test_a_jointly_trained_target_is_the_teacher_and_auxiliaries_keep_to_the_original():
    case = lab()
    moved = randn(B, T, H, seed=7)
    plain = value_of(case)
    extra_BTH, extra_DH = nn.Parameter(randn(B, T, H, seed=8)), randn(V, H, seed=9)
    mask_BT = supervised(case.batch.answer_BT, 1)
    case.drafter.teacher = case.batch.as_seen(moved, case.head)
    case.drafter.auxiliary = (Auxiliary(extra_BTH, extra_DH, 1, mask_BT, 3.0, cap=2.0),)
    found = by_position(case, "reverse_kl", exact(case, moved))
    want = sum((1.0, 0.5, 0.25)[d] * loss for (_, _, d), (loss, _) in found.items())
    law = exact(case)
    for b, t in mask_BT.nonzero().tolist():
        z = torch.tanh(extra_BTH[b, t] @ extra_DH.T / 2.0) * 2.0
        want = want - 0.2 * 3.0 * (law[b, t].exp() * z.log_softmax(-1)).sum()
    got = value_of(case, (1.0, 0.5, 0.25, 0.2), chunk=4, terms={"reverse_kl": 1.0})
    same(got, want, [*case.parameters, extra_BTH])
    assert abs(got.item() - plain.item()) > 0.1
    with pytest.raises(ValueError, match="shorter"):
        value_of(case)  # no weight of the auxiliary


def test_an_auxiliary_has_the_targets_columns_that_exist():
    case = lab()
    case.head = OutputHead(torch.cat([case.head.weight_VH, torch.ones(4, H)]), None, None, V)
    extra_BTH, extra_DH = nn.Parameter(randn(B, T, H, seed=8)), case.head.weight_VH[:V]
    mask_BT = supervised(case.batch.answer_BT, 1)
    case.drafter.columns_D = torch.arange(V)
    case.drafter.auxiliary = (Auxiliary(extra_BTH, extra_DH, 1, mask_BT, 1.0),)
    law, z = case.head.logits(case.batch.hidden_BTH)[..., :V].log_softmax(-1), (extra_BTH @ extra_DH.T).log_softmax(-1)
    same(value_of(case, (0.0, 0.0, 0.0, 1.0)), -(law.exp() * z).sum(-1)[mask_BT].sum(), [extra_BTH])


def test_scores_and_ranks_are_against_the_moved_target_too():
    case = lab()
    moved = case.batch.as_seen(randn(B, T, H, seed=7), case.head)
    want = score_batch(case.drafter, moved, case.head)
    ranks = rank_accuracy(case.drafter, [moved], case.head, Sampler(temperature=1.0), ranks=3)
    before = score_batch(case.drafter, case.batch, case.head)
    case.drafter.teacher = moved
    assert score_batch(case.drafter, case.batch, case.head) == want != before
    assert rank_accuracy(case.drafter, [case.batch], case.head, Sampler(temperature=1.0), ranks=3) == ranks


def test_as_seen_is_the_law_of_the_new_states_where_an_answer_follows():
    case, hidden = lab(), randn(B, T, H, seed=5).requires_grad_()
    seen, asked = case.batch.as_seen(hidden, case.head), supervised(case.batch.answer_BT, 1)
    logits = case.head.logits(hidden.detach())
    torch.testing.assert_close(seen.log_normaliser_BT[asked], logits.logsumexp(-1)[asked])
    assert torch.equal(seen.greedy_BT[asked], logits.argmax(-1)[asked])
    assert not seen.log_normaliser_BT[~asked].any()
    assert not seen.greedy_BT[~asked].any()
    assert torch.equal(seen.hidden_BTH, hidden.detach())
    assert not seen.hidden_BTH.requires_grad
    assert seen.ids_BT is case.batch.ids_BT
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(case.batch.as_seen(hidden, case.head).log_normaliser_BT, seen.log_normaliser_BT)


@pytest.mark.parametrize("positions", ["decay", "d_pace"])
def test_no_tensor_grows_with_positions_times_columns(positions):
    """Twice the rows make the largest tensor no larger: that of a chunk's logits."""
    case, sizes = lab(), []
    for rows in (8, 16):
        batch = replace(case.batch, **{n: v[:1].repeat(rows, *[1] * (v.dim() - 1)) for n, v in vars(case.batch).items()
                                       if v is not None})  # fmt: skip
        wide = OutputHead(randn(3000, H), None, None, 3000)
        drafter = Given([randn(rows, T, H, seed=d) for d in range(K)], [randn(3000, H)], None, False)
        loss = DrafterLoss(drafter, wide, LossConfig(positions=positions), 12)  # type: ignore[arg-type]
        seen = batch.as_seen(batch.hidden_BTH, wide)
        with Largest() as largest:
            loss(seen, [1.0] * K).backward()
        sizes.append(largest.elements)
    assert sizes == [12 * 3000] * 2


# --- D-PACE -----------------------------------------------------------------------------------------------------------


def starts_of(found: dict[tuple[int, int, int], Any]) -> list[list[tuple[int, int, int]]]:
    return [[(b, t, d) for d in range(K) if (b, t, d) in found] for b, t in sorted({(b, t) for b, t, _ in found})]


@pytest.mark.parametrize("chunk", [1, 4, 7, 256])
@pytest.mark.parametrize("heads", [1, K])
@pytest.mark.parametrize("columns", [None, COLUMNS])
def test_pace_without_smoothing_climbs_the_expected_accepted_length(columns, heads, chunk):
    """Σ w_d (-log a_d) has exactly the gradient of -Σ_m Π_{i<=m} a_i, by autograd through the products."""
    case = lab(columns, heads)
    found = by_position(case, "forward_kl", exact(case))
    length = torch.zeros(())
    for start in starts_of(found):
        length = length + torch.stack([found[place][1] for place in start]).cumprod(0).sum()
    want = torch.autograd.grad(-length, case.parameters)
    loss = value_of(case, [1.0] * K, chunk, positions="d_pace", smoothing=0.0, terms={"negative_log_acceptance": 1.0})
    for got, expected in zip(torch.autograd.grad(loss, case.parameters), want, strict=True):
        assert expected.abs().sum() > 0
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("teacher", ["target", "answers"])
@pytest.mark.parametrize("features", [False, True])
def test_pace_weighs_every_loss_of_a_position_beside_its_depths_weight(teacher, features):
    case, weights = lab(heads=K, features=features), (0.9, 0.3, 0.2)
    following = nn.functional.one_hot(case.batch.ids_BT.roll(-1, dims=1), V).float().log()
    law = exact(case) if teacher == "target" else following
    found, want = by_position(case, "forward_kl", law), torch.zeros(())
    states = case.drafter(case.batch).depths
    for start in starts_of(found):
        s = [0.25 + 0.75 * found[place][1].item() for place in start]
        reached = torch.tensor(s).cumprod(0).tolist()
        for b, t, d in start:
            loss = found[b, t, d][0]
            if features:
                truth = case.batch.hidden_BTH[b, t + states[d].shift - 1]
                loss = loss + 2.0 * nn.functional.smooth_l1_loss(states[d].hidden_BTH[b, t], truth)
            want = want + weights[d] * sum(reached[d:]) * loss
    got = value_of(case, weights, 5, positions="d_pace", smoothing=0.25, teacher=teacher, regression=2.0)
    same(got, want, case.parameters)


def test_pace_with_one_depth_is_refused():
    with pytest.raises(SpectrainError, match=r"loss\.positions: found d_pace, but this given drafter trains one"):
        value_of(lab(depths=1), [1.0], positions="d_pace")
    assert value_of(lab(depths=1), [1.0]).item() > 0


def test_pace_with_nothing_supervised_is_zero():
    case = lab()
    case.batch = replace(case.batch, answer_BT=torch.zeros(B, T, dtype=torch.bool))
    loss = value_of(case, positions="d_pace")
    assert loss.item() == 0.0
    assert not any(gradient.any() for gradient in torch.autograd.grad(loss, case.parameters))


# --- the likeliest tokens ---------------------------------------------------------------------------------------------


def with_top(case: Any, k: int) -> None:
    batch, asked = case.batch, supervised(case.batch.answer_BT, 1)
    summary = case.head.summary(batch.hidden_BTH[asked], k)
    ids, log_p = torch.zeros(B, T, k, dtype=torch.int32), torch.zeros(B, T, k)
    ids[asked], log_p[asked] = summary.top_ids_NK, summary.top_log_p_NK
    case.batch = replace(batch, top_ids_BTK=ids, top_log_p_BTK=log_p)


@pytest.mark.parametrize("columns", [None, COLUMNS])
@pytest.mark.parametrize("k", [V, 3, 1])
@pytest.mark.parametrize("positions", ["decay", "d_pace"])
def test_the_likeliest_tokens_are_the_law_cut_to_them(columns, k, positions):
    """With all of them it is the law; one that is not stored has no mass, and what is left is not scaled up."""
    case = lab(columns)
    law = exact(case)
    cut = torch.where(law >= law.topk(k).values[..., -1:], law, -torch.inf)
    whole = value_of(case, positions=positions)
    with_top(case, k)
    got = value_of(case, positions=positions, chunk=4)
    if k == V:
        same(got, whole, case.parameters)
    if positions == "decay":
        want = sum((1.0, 0.5, 0.25)[d] * loss for (_, _, d), (loss, _) in by_position(case, "forward_kl", cut).items())
        same(got, want, case.parameters)
    assert k == V or abs(got.item() - whole.item()) > 0.01


def test_stored_tokens_need_no_product_with_the_targets_head(monkeypatch):
    case = lab(COLUMNS)
    with_top(case, 4)
    monkeypatch.setattr(OutputHead, "logits", lambda *_: pytest.fail("the head was asked"))
    assert value_of(case).isfinite()


def test_scores_are_against_the_whole_law_whatever_is_stored():
    case = lab(COLUMNS)
    want = score_batch(case.drafter, case.batch, case.head)
    with_top(case, 1)
    assert score_batch(case.drafter, case.batch, case.head) == want
    places = torch.tensor([2, 3, 2])
    cut = learnt_law(case.batch, case.head, None, places)(slice(0, 3))
    assert (cut > -torch.inf).sum(-1).tolist() == [1, 1, 1]
    assert teacher_law(case.batch, case.head, places)(slice(0, 3)).isfinite().all()
    assert case.batch.as_seen(case.batch.hidden_BTH, case.head).top_ids_BTK is None


# --- acceptance on the rows trained on ----------------------------------------------------------------------------


def tallied(lab: Any, chunk: int, **settings: Any) -> tuple[Tensor, Tally]:
    objective = DrafterLoss(lab.drafter, lab.head, LossConfig(**settings), chunk)
    objective.tally = Tally()
    return objective(lab.batch, [1.0, 0.5, 0.25]), objective.tally


@pytest.mark.parametrize("chunk", [1, 7, 256])
@pytest.mark.parametrize("positions", ["decay", "d_pace"])
@pytest.mark.parametrize(("columns", "heads"), [(None, 1), (COLUMNS, 1), (COLUMNS, K)])
def test_a_tally_is_the_score_of_the_same_rows_and_changes_no_gradient(columns, heads, positions, chunk):
    it = lab(columns, heads)
    # Right for depths to be reached, as the states are the target's own, and wrong now and then.
    for depth, state in enumerate(it.drafter.states):
        state.data[:, : T - depth - 1] = it.batch.hidden_BTH[:, depth + 1 :]
        state.data[:, depth::4] *= -1
    it.drafter.heads[0].data.copy_(it.head.weight_VH if columns is None else it.head.weight_VH[columns])
    want, got = value_of(it, chunk=chunk, positions=positions), tallied(it, chunk, positions=positions)
    assert torch.equal(got[0], want)
    gradients = [torch.autograd.grad(value, it.parameters) for value in (got[0], want)]
    assert all(map(torch.equal, *gradients))
    scores, found = score_batch(it.drafter, it.batch, it.head), got[1].scores
    for name in ("positions", "greedy", "survived", "reached", "started"):
        assert getattr(found, name) == getattr(scores, name)
    assert 0 < sum(found.survived) < sum(found.reached)
    assert found.alpha == pytest.approx(scores.alpha, rel=1e-5)
    told = got[1].describe(found)
    assert told == {"alpha": found.mean_alpha(), "conditional": found.conditional(), "positions": found.positions}


def test_alpha_is_told_only_of_the_targets_whole_law():
    it = lab()
    whole = tallied(it, 4)[1]
    answers = tallied(it, 4, teacher="answers")[1]
    law = it.head.logits(it.batch.hidden_BTH).log_softmax(-1).topk(3)
    it.batch = replace(it.batch, top_ids_BTK=law.indices.int(), top_log_p_BTK=law.values)
    cut = tallied(it, 4)[1]
    assert whole.describe(whole.scores)["alpha"] == pytest.approx(whole.scores.mean_alpha())
    for partly in (answers, cut):
        told = partly.describe(partly.scores)
        assert told["alpha"] is None
        assert told["conditional"] == whole.scores.conditional()


def test_a_tally_of_nothing_is_zeros():
    it = lab()
    it.batch = replace(it.batch, answer_BT=torch.zeros_like(it.batch.answer_BT))
    found = tallied(it, 4)[1]
    assert found.describe(found.scores) == {"alpha": [0.0] * K, "conditional": [0.0] * K, "positions": [0] * K}
