"""A target that is trained with its heads: what moves, what does not, and what is saved of it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

from spectrain.bundle import Belonging, Trained, load_drafter, read_bundle, save_drafter, target_of
from spectrain.data.batches import live_batch
from spectrain.drafters.joint import JointConfig, MovingTarget
from spectrain.drafters.medusa import MedusaConfig, MedusaDrafter
from spectrain.drafters.objective import DrafterLoss, LossConfig
from spectrain.drafters.scoring import score_batch
from spectrain.errors import SpectrainError
from spectrain.identity import compare_targets
from spectrain.manifest import MANIFEST_FILE, publishable, with_target
from spectrain.speculator import generate, load_bundle
from spectrain.target import load_target
from spectrain.training import OptimConfig, Trainer, TrainingConfig

JOINT = JointConfig(rank=4, alpha=8, anchor=2.0, warmup=0.5)


@pytest.fixture
def target(tiny_target):
    """Its own, since it is changed: adapters stay in it."""
    return tiny_target("llama", vocab=24, padding=8, dtype=torch.float32)


def built(target, joint=JOINT, **settings):
    config = MedusaConfig(**{"heads": 2, "joint": joint, **settings})
    return MedusaDrafter.build(config, target, torch.zeros(target.vocab_size))


def moved(drafter, seed=0, size=0.1):
    """As after some training: adapters that change the target, in the joint phase."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    drafter.set_progress(2, 2)
    return drafter


@pytest.fixture
def batch(target, make_rows):
    return live_batch(target, make_rows(target, 4))


def weights(drafter, value=0.01):
    return [value] * (len(drafter.shifts()) + len(drafter.auxiliary_shifts()))


def loss(drafter, target, batch, **settings):
    return DrafterLoss(drafter, target.head, LossConfig(**settings))(batch, weights(drafter))


def test_adapters_lie_in_every_linear_layer_and_change_nothing_at_first(target, batch):
    before = target.forward(batch.ids_BT).hidden_BTH
    moving = MovingTarget(target, JOINT)
    assert len(moving.parameters()) == 2 * 7 * target.num_layers
    assert all(parameter.dtype == torch.float32 for parameter in moving.parameters().values())
    assert torch.equal(moving.states(batch.ids_BT), before)
    assert torch.equal(target.forward(batch.ids_BT).hidden_BTH, before)


def test_a_moved_target_leaves_the_one_that_others_hold(target, batch):
    before = target.forward(batch.ids_BT).hidden_BTH
    drafter = moved(built(target))
    assert not torch.allclose(drafter._moving.states(batch.ids_BT), before, atol=1e-2)
    assert torch.equal(target.forward(batch.ids_BT).hidden_BTH, before)
    drafter._moving._tuner.unload()
    assert torch.equal(target.forward(batch.ids_BT).hidden_BTH, before)
    assert not any("lora" in name for name, _ in target.model.named_parameters())


def test_the_saved_target_says_what_the_moved_one_says(chat_folder, tmp_path):
    target = load_target(str(chat_folder))
    drafter = moved(built(target, head="shared"))
    drafter.write_more(tmp_path)
    saved = load_target(str(tmp_path / "target"))
    ids = torch.arange(3, 15)[None]
    want = drafter._moving.states(ids)
    torch.testing.assert_close(saved.forward(ids).hidden_BTH, want.detach(), rtol=1e-4, atol=1e-5)
    assert torch.equal(saved.head_weight, target.head_weight)
    assert saved.eos_ids == target.eos_ids
    assert compare_targets(saved.identity(), target.identity()).level == "different"


def test_the_heads_are_warmed_up_on_the_target_as_it_is(target, batch):
    drafter = built(target)
    drafter.set_progress(1, 2)
    assert drafter.auxiliary_shifts() == ()
    output = drafter(batch)
    assert output.teacher is None
    loss(drafter, target, batch).backward()
    assert all(p.grad is not None and not p.grad.any() for p in drafter.adapter.values())
    assert any(p.grad.any() for p in drafter.blocks.parameters())


def test_later_both_are_trained_and_nothing_else(target, batch):
    drafter = moved(built(target))
    assert drafter.auxiliary_shifts() == (1,)
    loss(drafter, target, batch).backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name
    own = {id(p) for p in drafter.parameters()}
    for name, parameter in target.model.named_parameters():
        assert id(parameter) in own or parameter.grad is None, name


def test_the_loss_is_the_heads_against_the_moved_law_and_the_moved_law_against_the_original(target, batch):
    drafter = moved(built(target))
    size = target.tokenizer_size
    head = target.head_weight[:size]
    states = drafter._moving.states(batch.ids_BT).detach()
    original, law = ((s @ head.T).log_softmax(-1) for s in (batch.hidden_BTH, states))
    want = torch.zeros(())
    for depth, block in enumerate(drafter.blocks):
        q = (block(states) @ head.T).log_softmax(-1)
        mask = drafter(batch).depths[depth].mask_BT
        for b, t in mask.nonzero().tolist():
            want = want - 0.01 * (law[b, t + 1 + depth].exp() * q[b, t]).sum()
    for b, t in drafter(batch).auxiliary[0].mask_BT.nonzero().tolist():
        want = want - 0.01 * JOINT.anchor * (original[b, t].exp() * law[b, t]).sum()
    torch.testing.assert_close(loss(drafter, target, batch), want, rtol=1e-4, atol=1e-5)


def test_scores_are_against_the_moved_target(target, batch):
    drafter = moved(built(target), size=0.2).eval()
    states = drafter._moving.states(batch.ids_BT).detach()
    seen = live_batch_of(batch, states, target)
    frozen = MedusaDrafter(MedusaConfig(heads=2), target.hidden_size, target.vocab_size)
    frozen.load_state_dict({k: v for k, v in drafter.state_dict().items() if not k.startswith("adapter.")})
    frozen.bind(target)
    found, want = score_batch(drafter, batch, target.head), score_batch(frozen, seen, target.head)
    assert found.alpha == pytest.approx(want.alpha, rel=1e-5)
    assert found.greedy == want.greedy
    assert found.alpha != pytest.approx(score_batch(frozen, batch, target.head).alpha, rel=1e-3)


def live_batch_of(batch, states, target):
    logits = target.head.logits(states)
    return replace(batch, hidden_BTH=states, log_normaliser_BT=logits.logsumexp(-1), greedy_BT=logits.argmax(-1))


def test_the_anchor_holds_the_target(target, batch):
    """The heavier it weighs, the less the target moves in as many steps."""
    gaps = []
    for anchor in (0.0, 50.0):
        torch.manual_seed(0)
        drafter = built(target, JOINT.model_copy(update={"anchor": anchor, "warmup": 0.0}))
        drafter.set_progress(1, 1)
        optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
        for _ in range(15):
            optimizer.zero_grad()
            loss(drafter, target, batch).backward()
            optimizer.step()
        states = drafter._moving.states(batch.ids_BT).detach()
        p, q = (target.head.logits(s)[..., : target.tokenizer_size].log_softmax(-1) for s in (batch.hidden_BTH, states))
        gaps.append(float((p.exp() * (p - q)).sum(-1)[batch.answer_BT].mean()))
        drafter._moving._tuner.unload()
    assert gaps[0] > 4 * gaps[1] > 0


def test_the_adapters_have_a_rate_of_their_own(target):
    drafter = built(target)
    heads, adapters = drafter.parameter_groups()
    assert (heads["lr_scale"], adapters["lr_scale"]) == (1.0, JOINT.lr_scale)
    assert len(adapters["params"]) == len(drafter.adapter)
    both = [id(p) for group in (heads, adapters) for p in group["params"]]
    assert sorted(both) == sorted(id(p) for p in drafter.parameters())


def test_a_rank_beyond_a_layer_is_refused_by_the_layers_name_and_before_anything_runs(target):
    side = min(min(m.weight.shape) for m in target.layers.modules() if isinstance(m, torch.nn.Linear))
    assert MedusaConfig(joint=JointConfig(rank=side)).taps(target) == ()
    message = (
        rf"drafter\.joint\.rank: found {side + 1}, but layer model\.layers\.0\.\S+ is \d+ x \d+; give at most {side}"
    )
    for call in (MedusaConfig(joint=JointConfig(rank=side + 1)).taps, lambda t: built(t, JointConfig(rank=side + 1))):
        with pytest.raises(SpectrainError, match=message):
            call(target)


def test_a_target_carries_adapters_once(target):
    built(target)
    with pytest.raises(SpectrainError, match="already carries adapters; load it anew"):
        built(target)


@pytest.fixture
def bundle(chat_folder, tmp_path):
    """A saved bundle, its original target, and the drafter that was saved."""
    target = load_target(str(chat_folder))
    drafter = moved(built(target))
    save_drafter(tmp_path / "bundle", drafter, Belonging.to(target), Trained({"temperature": 0.0}))
    return tmp_path / "bundle", target, drafter


def test_a_bundle_holds_its_target_and_knows_where_it_came_from(bundle):
    folder, target, _ = bundle
    manifest = read_bundle(folder).manifest
    assert manifest.derived_from.identity == target.identity()
    own = load_target(target_of(folder, manifest))
    assert compare_targets(manifest.target.identity, own.identity()).level == "identical"
    assert "target/model.safetensors" in manifest.files
    assert not any("lora" in name or "adapter" in name for name in read_bundle(folder).tensors)


def test_a_bundle_goes_with_its_own_target_and_not_with_the_original(bundle, chat_folder):
    folder, _, drafter = bundle
    own = load_target(str(folder / "target"))
    loaded, _, notes = load_drafter(folder, own)
    assert notes == ()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, drafter.state_dict()[name]), name
    with pytest.raises(SpectrainError, match=r"does not fit this target \(.*bundle/target was its own.*weights_digest"):
        load_drafter(folder, load_target(str(chat_folder)))


def test_a_program_gets_the_moved_target_by_itself(bundle):
    folder, _, _ = bundle
    speculator = load_bundle(folder)
    assert speculator.target.folder == folder / "target"
    plain = speculator.target
    answer = generate(speculator, [3, 4, 5], max_new_tokens=8, k=2)
    ids = [3, 4, 5]
    for token in answer.tokens:
        assert int(plain.logits(plain.forward(torch.tensor([ids])).hidden_BTH[0, -1]).argmax()) == token
        ids.append(token)


def test_a_bundle_without_a_file_of_its_target_is_told_incomplete(bundle, tmp_path):
    bundle, _, _ = bundle
    cut = Path(shutil.copytree(bundle, tmp_path / "cut"))
    (cut / "target" / "config.json").unlink()
    message = rf"{cut} is incomplete: target/config\.json, a file of its own target, is missing"
    shutil.copytree(bundle, tmp_path / "gone")
    shutil.rmtree(tmp_path / "gone" / "target")
    with pytest.raises(SpectrainError, match=message):
        load_bundle(cut)
    with pytest.raises(SpectrainError, match="gone is incomplete: target/"):
        load_bundle(tmp_path / "gone")


def test_a_manifest_that_forgot_the_origin_is_refused(bundle):
    folder, _, _ = bundle
    path = folder / MANIFEST_FILE
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "derived_from": None}))
    with pytest.raises(SpectrainError, match="derived_from and the files of target/ belong together"):
        read_bundle(folder)


def test_it_is_the_original_whose_name_has_to_be_public(bundle):
    folder, _, _ = bundle
    assert "not a Hub id" in publishable(read_bundle(folder).manifest)
    manifest = with_target(read_bundle(folder).manifest, "org/target", "abc")
    assert publishable(manifest) is None
    assert (manifest.derived_from.name, manifest.target.name) == ("org/target", "target")


def test_heads_can_start_from_a_bundle_of_a_frozen_target(target):
    frozen = moved(built(target, None))
    drafter = built(target)
    before = {name: p.clone() for name, p in drafter.adapter.items()}
    assert drafter.warm_start(frozen, target) == ()
    for name, tensor in frozen.state_dict().items():
        assert torch.equal(drafter.state_dict()[name], tensor), name
    assert all(torch.equal(p, before[name]) for name, p in drafter.adapter.items())


# --- in the training loop -------------------------------------------------------------------------------------------


@pytest.fixture
def trainer(tiny_target, make_rows, make_store, tmp_path):
    """A trainer of heads and target, the target loaded anew each time as a new process would."""
    AcceleratorState._reset_state(True)

    def make(folder, stop=None):
        target = tiny_target("llama", vocab=24, padding=8, dtype=torch.float32, seed=3)
        sides = [make_store(tmp_path / name, target, make_rows(target, n, seed=n)) for name, n in (("a", 8), ("b", 3))]
        torch.manual_seed(0)
        drafter = built(target)
        trainer = Trainer(
            drafter, target.head, *sides, loss=LossConfig(), optim=OptimConfig(lr=1e-2, clip=1e9), folder=folder,
            config=TrainingConfig(epochs=1, micro_batch_tokens=24, checkpoint_every=3, validate_every=100),
            save_bundle=lambda path: path.mkdir(), settings={},
        )  # fmt: skip
        step = trainer._step

        def dies(batches, number):
            if number == stop:
                raise KeyboardInterrupt
            return step(batches, number)

        trainer._step = dies
        return trainer

    yield make
    AcceleratorState._reset_state(True)


def test_adapters_wait_for_the_joint_phase_and_then_move(trainer, tmp_path):
    run = trainer(tmp_path / "run")
    total = run.total_steps
    moved_after = []
    step = run._step

    def watched(batches, number):
        values = step(batches, number)
        moved_after.append(any(p.any() for name, p in run.drafter.adapter.items() if "lora_B" in name))
        return values

    run._step = watched
    run.run()
    assert moved_after == [number > JOINT.warmup * total for number in range(1, total + 1)]
    rates = [group["initial_lr"] for group in run.optimizer.param_groups]
    assert rates == [1e-2, 1e-2 * JOINT.lr_scale]


@pytest.mark.parametrize("stop", [4, 7])
def test_an_interrupted_joint_run_ends_bit_equal(trainer, tmp_path, stop):
    """In the warm-up, and when the target already moves."""
    whole = trainer(tmp_path / "whole")
    whole.run()
    assert 3 <= JOINT.warmup * whole.total_steps < 6 < whole.total_steps
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "broken", stop).run()
    again = trainer(tmp_path / "broken")
    again.run()
    for name, tensor in whole.drafter.state_dict().items():
        assert torch.equal(again.drafter.state_dict()[name], tensor), name
