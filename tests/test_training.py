"""The training loop: the same run split any way, interrupted anywhere, is the same run."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from training_lab import (
    LONGEST,
    TIMES,
    Killed,
    Lab,
    assert_bit_equal,
    first_gradients,
    metrics,
    stop_at,
    weights,
)

from spectrain.data.batches import plan_epoch
from spectrain.data.features import FeatureStore
from spectrain.drafters.eagle3 import Eagle3Drafter
from spectrain.drafters.scoring import score_batch
from spectrain.errors import SpectrainError
from spectrain.training import Curriculum, OptimConfig, Trainer, TrainingConfig

pytestmark = pytest.mark.usefixtures("one_accelerator")


# --- the same run split any way -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "accumulation"), [(2 * LONGEST, 4), (3 * LONGEST, 3), (LONGEST, 8)])
def test_the_same_rows_in_more_micro_batches_have_the_same_gradients(lab, tmp_path, tokens, accumulation):
    whole, want = first_gradients(lab.trainer(tmp_path / "whole", micro_batch_tokens=8 * LONGEST))
    split, got = first_gradients(lab.trainer(tmp_path / "split", micro_batch_tokens=tokens, accumulation=accumulation))
    assert (whole - split).norm() < 1e-6 * whole.norm()
    assert got["loss"] == pytest.approx(want["loss"], rel=1e-6)
    assert got["gradient_norm"] == pytest.approx(want["gradient_norm"], rel=1e-6)
    assert got["supervised"] == want["supervised"] == sum(sum(row.mask) - 1 for row in lab.rows)


def test_a_micro_batch_with_nothing_supervised_adds_nothing(lab, tmp_path):
    """Its answer is one token long; it lies between the others of the same step."""
    short = replace(lab.rows[0], conversation="short", mask=[0] * (len(lab.rows[0].ids) - 1) + [1])
    store = lab.store_of("mixed", [*lab.rows, short])
    want, _ = first_gradients(lab.trainer(tmp_path / "without", accumulation=8))
    trainer = lab.trainer(tmp_path / "with", store=store, accumulation=9)
    seen = []
    backward = trainer._backward
    trainer._backward = lambda batch, weights: seen.append(backward(batch, weights).item()) or torch.tensor(seen[-1])
    got, _ = first_gradients(trainer)
    assert seen.count(0.0) == 1
    assert seen[-1] != 0.0 or seen[0] != 0.0
    assert (got - want).norm() < 1e-6 * want.norm()


def test_a_step_with_nothing_supervised_is_a_step_of_zeros(lab, tmp_path):
    short = replace(lab.rows[0], conversation="short", mask=[0] * (len(lab.rows[0].ids) - 1) + [1])
    trainer = lab.trainer(tmp_path, store=lab.store_of("mixed", [*lab.rows, short]))
    values = trainer._step([[8]], 1)
    assert (values["loss"], values["gradient_norm"], values["supervised"]) == (0.0, 0.0, 0)


def test_nothing_supervised_at_all_is_an_error(lab, tmp_path):
    """Every answer is one token: the first depth of EAGLE needs two in a row."""
    rows = [replace(row, mask=[0] * (len(row.ids) - 1) + [1]) for row in lab.rows]
    with pytest.raises(SpectrainError, match=r"nothing is supervised in the 8 train rows: none has 2 answer tokens"):
        lab.trainer(tmp_path, store=lab.store_of("short", rows))


def test_only_masks_are_read_until_a_step_begins_and_then_one_micro_batch_at_a_time(lab, tmp_path, monkeypatch):
    """Rows may be long and the store large: neither the check at the start nor accumulation holds features."""
    events: list[Any] = []
    real, answer = FeatureStore.batch, FeatureStore.answer
    monkeypatch.setattr(FeatureStore, "answer", lambda store, row: events.append("mask") or answer(store, row))
    monkeypatch.setattr(FeatureStore, "batch", lambda *args: events.append(args[1]) or real(*args))
    trainer = lab.trainer(tmp_path, accumulation=4)
    assert events == ["mask", "mask"]  # the first row of either side has something supervised
    events.clear()
    backward = trainer._backward
    trainer._backward = lambda *args: events.append("backward") or backward(*args)  # type: ignore[method-assign]
    batches = next(trainer.curriculum.steps(0)).batches
    trainer._step(batches, 1)
    assert events == ["mask"] * 4 + [event for rows in batches for event in (rows, "backward")]


def test_every_row_is_trained_once_an_epoch_whatever_the_split():
    lengths = [5 + row % 7 for row in range(31)]
    config = TrainingConfig(micro_batch_tokens=24, accumulation=2, epochs=3)
    for processes in (1, 2, 3):
        curriculum = Curriculum(lengths, config, processes)
        steps = list(curriculum.steps(0))
        assert len(steps) == curriculum.total_steps()
        for epoch in range(3):
            rows = [row for step in steps if step.epoch == epoch for batch in step.batches for row in batch]
            assert sorted(rows) == list(range(31))
        assert all(len(step.batches) <= 2 * processes for step in steps)
        assert [step.number for step in steps] == list(range(1, len(steps) + 1))
        assert list(curriculum.steps(5)) == steps[5:]


def test_a_run_takes_no_more_steps_than_it_may():
    lengths = [5 + row % 7 for row in range(31)]
    whole = Curriculum(lengths, TrainingConfig(micro_batch_tokens=24, epochs=2), 1)
    for most in (1, 7, whole.total_steps(), whole.total_steps() + 1):
        capped = Curriculum(lengths, TrainingConfig(micro_batch_tokens=24, epochs=2, steps=most), 1)
        assert capped.total_steps() == min(most, whole.total_steps())
        assert list(capped.steps(0)) == list(whole.steps(0))[:most]
        assert list(capped.steps(1)) == list(whole.steps(1))[: most - 1]


# --- learning rate --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant_with_warmup"])
def test_the_rate_of_every_step(schedule):
    optim = OptimConfig(warmup=0.25, schedule=schedule)
    rates = [optim.rate(step, 40) for step in range(1, 41)]
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    if schedule == "constant_with_warmup":
        assert rates[10:] == [1.0] * 30
    else:
        assert all(0 < later < earlier for earlier, later in itertools.pairwise(rates[9:]))
        assert rates[-1] < 0.04
    assert optim.rate(1, 1) == 1.0  # a run of one step trains
    assert OptimConfig(warmup=0.0, schedule=schedule).rate(1, 10) == 1.0


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_warm_up_peaks_at_optimizer_step_10(lab, tmp_path, accumulation):
    trainer = lab.trainer(
        tmp_path, micro_batch_tokens=2 * LONGEST, accumulation=accumulation, epochs=10 * accumulation, depths=1,
        optim={"warmup": 0.25}, validate_every=1000, checkpoint_every=1000,
    )  # fmt: skip
    assert trainer.total_steps == 40
    trainer.run()
    rates = [values["lr"] for values in metrics(tmp_path)]
    assert rates[:10] == pytest.approx([1e-3 * step / 10 for step in range(1, 11)])
    assert max(rates) == rates[9] == pytest.approx(1e-3)
    assert rates[10] < rates[9]


def test_a_world_that_accelerate_does_not_see_is_refused(lab, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SpectrainError, match=r"WORLD_SIZE is 2 but Accelerate sees 1 process"):
        lab.trainer(tmp_path)


# --- what a drafter may ask of the loop -----------------------------------------------------------------------------


def test_parameter_groups_have_their_share_of_every_rate(lab, tmp_path, monkeypatch):
    """AdamW's first step is the rate's size whatever the gradient, so it shows the rate."""

    def groups(self: Eagle3Drafter) -> list[dict[str, Any]]:
        slow = list(self.fc.parameters())
        known = {id(p) for p in slow}
        rest = [p for p in self.parameters() if p.requires_grad and id(p) not in known]
        return [{"params": rest, "lr_scale": 2.0}, {"params": slow, "lr_scale": 0.25}]

    monkeypatch.setattr(Eagle3Drafter, "parameter_groups", groups)
    trainer = lab.trainer(tmp_path, epochs=1, optim={"warmup": 0.5})
    rates: list[list[float]] = []
    moved: list[tuple[float, float]] = []
    step = trainer.optimizer.step

    def watched() -> None:
        before = (trainer.drafter.norm.weight.clone(), trainer.drafter.fc.weight.clone())
        rates.append([group["lr"] for group in trainer.optimizer.param_groups])
        step()
        after = (trainer.drafter.norm.weight, trainer.drafter.fc.weight)
        moved.append(tuple(float((a - b).detach().abs().max()) for a, b in zip(after, before, strict=True)))  # type: ignore[arg-type]

    trainer.optimizer.step = watched
    trainer.run()
    for number, (fast, slow) in enumerate(rates, 1):
        rate = 1e-3 * trainer.optim.rate(number, 8)
        assert (fast, slow) == (pytest.approx(2 * rate), pytest.approx(rate / 4))
    assert moved[0] == (pytest.approx(2 * 1e-3 / 4, rel=1e-2), pytest.approx(1e-3 / 4 / 4, rel=1e-2))
    recorded = [values["lr"] for values in metrics(tmp_path)]
    assert recorded == pytest.approx([1e-3 * trainer.optim.rate(number, 8) for number in range(1, 9)])


def test_the_drafter_hears_of_every_step_before_it_also_after_an_interruption(lab, tmp_path, monkeypatch):
    heard: list[tuple[int, int]] = []
    monkeypatch.setattr(Eagle3Drafter, "set_progress", lambda self, step, total: heard.append((step, total)))
    trainer = stop_at(lab.trainer(tmp_path, epochs=2), 9)
    step = trainer._step
    trainer._step = lambda batches, number: heard.append((0, number)) or step(batches, number)  # type: ignore[method-assign, func-returns-value]
    with pytest.raises(Killed):
        trainer.run()
    assert heard == [pair for number in range(1, 10) for pair in ((number, 16), (0, number))]
    heard.clear()
    lab.trainer(tmp_path, epochs=2).run()
    assert heard == [*((number, 16) for number in range(7, 17)), (16, 16)]  # and as it is left


def test_depths_decay_and_auxiliaries_count_in_full(lab, tmp_path, monkeypatch):
    """Each over its own positions; with D-PACE no depth decays."""
    trainer = lab.trainer(tmp_path)
    monkeypatch.setattr(Eagle3Drafter, "auxiliary_shifts", lambda self: (1, 4))
    counts = trainer._global_counts([list(range(5)), [5, 6, 7]])
    answers = [sum(row.mask) for row in lab.rows]
    assert counts == [sum(n - lost for n in answers) for lost in (1, 2, 0, 3)]
    decay = trainer.loss.decay
    assert trainer._weights(counts) == [1 / counts[0], decay / counts[1], 1 / counts[2], 1 / counts[3]]
    assert trainer._weights([0, 0, 0, 5]) == [1, decay, 1, 1 / 5]
    trainer.loss = trainer.loss.model_copy(update={"positions": "d_pace"})
    assert trainer._weights(counts) == [1 / count for count in counts]


# --- interruptions --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unbroken(lab, tmp_path_factory):
    """8 rows, one a step, 3 epochs, a checkpoint every 6 steps: weights, optimizer state and metrics of a whole run."""
    folder = tmp_path_factory.mktemp("unbroken")
    AcceleratorState._reset_state(True)
    trainer = lab.trainer(folder, epochs=3)
    trainer.run()
    return weights(trainer), trainer.optimizer.state_dict()["state"], metrics(folder)


@pytest.mark.parametrize("stops", [(1,), (6,), (7,), (9,), (15,), (15, 17), (3, 14, 24)])
def test_an_interrupted_run_ends_bit_equal_to_the_unbroken_one(lab, tmp_path, unbroken, stops):
    """Before the first checkpoint, right at one, right after, in the middle of an epoch; once, twice, three times."""
    for stop in stops:
        with pytest.raises(Killed):
            stop_at(lab.trainer(tmp_path, epochs=3), stop).run()
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 99, "loss')  # cut off while writing
    trainer = lab.trainer(tmp_path, epochs=3)
    torch.manual_seed(1234)  # whatever happened before
    last = trainer.run()
    final, state, recorded = unbroken
    assert_bit_equal(weights(trainer), final)
    for key, value in trainer.optimizer.state_dict()["state"].items():
        assert_bit_equal(value, state[key])
    assert metrics(tmp_path) == recorded
    assert [values["step"] for values in recorded] == list(range(1, 25))
    assert {name: value for name, value in last.items() if name not in TIMES} == recorded[-1]


@pytest.mark.parametrize(
    ("stop", "told"),
    [
        (4, "stopped after step 3 of 24; a checkpoint is written every 6 steps (training.checkpoint_every): the same "
            "command trains from the start, for there is none yet\n"),
        (11, "stopped after step 10 of 24; a checkpoint is written every 6 steps (training.checkpoint_every): the same "
             "command goes on from step-000006\n"),
    ],
)  # fmt: skip
def test_one_that_is_stopped_tells_what_the_same_command_goes_on_from(lab, tmp_path, capsys, stop, told):
    trainer = lab.trainer(tmp_path, epochs=3)
    step = trainer._step

    def stopped(batches: Any, number: int) -> Any:
        if number == stop:
            raise KeyboardInterrupt
        return step(batches, number)

    trainer._step = stopped
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    assert capsys.readouterr().err.endswith(told)
    assert lab.trainer(tmp_path, epochs=3).checkpoints.latest().step == (6 if stop > 6 else 0)


def test_an_interrupted_checkpoint_leaves_none_and_the_one_before(lab, tmp_path, unbroken):
    trainer = lab.trainer(tmp_path, epochs=3)
    save = trainer.save_bundle

    def dies(path: Path) -> None:
        save(path)
        if "000012" in str(path):
            raise Killed

    trainer.save_bundle = dies
    with pytest.raises(Killed):
        trainer.run()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000006"]
    again = lab.trainer(tmp_path, epochs=3)
    again.run()
    assert_bit_equal(weights(again), unbroken[0])
    assert metrics(tmp_path) == unbroken[2]


def test_a_finished_run_is_not_repeated(lab, tmp_path, unbroken):
    first = lab.trainer(tmp_path, epochs=3).run()
    trainer = stop_at(lab.trainer(tmp_path, epochs=3), 25)
    trainer._step = None  # type: ignore[method-assign, assignment]
    assert trainer.run() == first
    assert metrics(tmp_path) == unbroken[2]
    bundle = load_file(tmp_path / "checkpoints" / "step-000024" / "bundle" / "model.safetensors")
    assert_bit_equal(bundle, unbroken[0])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"optim": {"lr": 2e-3}}, r"optim\.lr: 0\.001 against 0\.002"),
        ({"epochs": 4}, r"training\.epochs: 3 against 4"),
        ({"accumulation": 2}, r"training.accumulation times the processes: 1 against 2"),
        ({"depths": 3}, r"drafter\.depths: 2 against 3"),
    ],
)
def test_a_run_with_other_settings_does_not_go_on_from_here(lab, tmp_path, change, named):
    with pytest.raises(Killed):
        stop_at(lab.trainer(tmp_path, epochs=3), 7).run()
    before = (tmp_path / "metrics.jsonl").read_text()
    with pytest.raises(SpectrainError, match=named):
        lab.trainer(tmp_path, **{"epochs": 3, **change}).run()
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_other_rows_do_not_go_on_from_here(lab, tmp_path):
    with pytest.raises(Killed):
        stop_at(lab.trainer(tmp_path, epochs=3), 7).run()
    with pytest.raises(SpectrainError, match=r"what is trained on \(data\.train, .* against"):
        lab.trainer(tmp_path, epochs=3, store=lab.store_of("reversed", lab.rows[::-1])).run()


@pytest.fixture(scope="module")
def twenty(tmp_path_factory) -> Lab:
    return Lab(tmp_path_factory.mktemp("twenty"), rows=20)


def test_20_rows_stopped_at_step_7_of_epoch_2_and_resumed_twice(twenty, tmp_path):
    """CASES C28: the same rows in the same order, rates, losses and weights."""

    def trainer(folder: Path, seen: list[Any]) -> Trainer:
        made = twenty.trainer(folder, epochs=3, checkpoint_every=4)
        step = made._step
        made._step = lambda batches, number: seen.append(batches) or step(batches, number)  # type: ignore[method-assign, func-returns-value]
        return made

    order: list[Any] = []
    whole = trainer(tmp_path / "whole", order)
    whole.run()
    for epoch in range(3):
        rows = [row for batches in order[20 * epoch : 20 * epoch + 20] for batch in batches for row in batch]
        assert sorted(rows) == list(range(20))
    pieces: list[list[Any]] = [[], [], []]
    for seen, stop in zip(pieces, (20 + 7, 20 + 9), strict=False):
        with pytest.raises(Killed):
            stop_at(trainer(tmp_path / "broken", seen), stop).run()
    last = trainer(tmp_path / "broken", pieces[2])
    last.run()
    assert pieces == [order[:26], order[24:28], order[28:]]
    assert metrics(tmp_path / "broken") == metrics(tmp_path / "whole")
    assert_bit_equal(weights(last), weights(whole))


# --- health ---------------------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_a_number_stops_with_the_rows_and_changes_nothing(lab, tmp_path, monkeypatch):
    trainer = lab.trainer(tmp_path, epochs=3, micro_batch_tokens=2 * LONGEST)

    real = FeatureStore.batch

    def poisoned(store: Any, rows: Any, device: Any) -> Any:
        batch = real(store, rows, device)
        return replace(batch, taps_BTF=batch.taps_BTF * torch.nan) if 3 in rows else batch

    batches = plan_epoch(trainer.curriculum.lengths, 2 * LONGEST, 0, 0)
    at = next(number for number, rows in enumerate(batches) if 3 in rows)
    monkeypatch.setattr(FeatureStore, "batch", poisoned)
    before: list[dict[str, torch.Tensor]] = []
    step = trainer._step
    trainer._step = lambda *arguments: before.append(weights(trainer)) or step(*arguments)  # type: ignore[method-assign]
    with pytest.raises(SpectrainError) as caught:
        trainer.run()
    assert f"at step {at + 1} " in str(caught.value)
    named = ", ".join(f"row {row} of conversation 'row-{row}'" for row in batches[at])
    assert f"({named})" in str(caught.value)
    assert "nan" in str(caught.value)
    assert_bit_equal(weights(trainer), before[-1])
    assert len(metrics(tmp_path)) == at if at else not (tmp_path / "metrics.jsonl").read_text()


def test_of_several_micro_batches_the_one_that_is_no_number_is_named(lab, tmp_path, monkeypatch):
    real = FeatureStore.batch

    def poisoned(store: Any, rows: Any, device: Any) -> Any:
        batch = real(store, rows, device)
        return replace(batch, taps_BTF=batch.taps_BTF * torch.nan) if 3 in rows else batch

    monkeypatch.setattr(FeatureStore, "batch", poisoned)
    with pytest.raises(SpectrainError, match=r"at step 1 \(row 3 of conversation 'row-3'\): training has diverged"):
        lab.trainer(tmp_path, accumulation=8).run()
    assert not (tmp_path / "checkpoints").exists()


def test_a_run_of_another_optimizer_does_not_go_on_from_here(lab, tmp_path):
    """And one of the usual optimizer says nothing of it, as before there was a choice."""
    trainer = lab.trainer(tmp_path)
    assert "name" not in trainer.checkpoints.run["optim"]
    with pytest.raises(Killed):
        stop_at(trainer, 7).run()
    with pytest.raises(SpectrainError, match=r"optim.*name"):
        lab.trainer(tmp_path, optim={"name": "adamw_fused"}).run()


def test_validation_is_the_score_of_the_held_out_rows(lab, tmp_path):
    trainer = lab.trainer(tmp_path)
    scores = trainer.validate()
    batch = lab.heldout.batch(range(len(lab.heldout)))
    want = score_batch(trainer.drafter, batch, lab.target.head, trainer.config.validation_depths)
    assert (scores.positions, scores.survived, scores.reached) == (want.positions, want.survived, want.reached)
    assert scores.alpha == pytest.approx(want.alpha)
    assert len(scores.positions) == 5  # deeper than it is trained for
    assert trainer.drafter.training


def test_the_loss_falls_and_the_held_out_scores_rise(lab, tmp_path):
    lab.trainer(tmp_path, epochs=20, micro_batch_tokens=4 * LONGEST, optim={"lr": 5e-3, "clip": 0.5}).run()
    recorded = metrics(tmp_path)
    assert recorded[-1]["loss"] < 0.6 * recorded[0]["loss"]
    validated = [values["validation"] for values in recorded if "validation" in values]
    assert validated[-1]["alpha"][0] > validated[0]["alpha"][0]
    assert all(values["gradient_norm"] > 0 for values in recorded)


def test_bfloat16_computes_in_half_and_keeps_full_weights(lab, tmp_path):
    full, _ = first_gradients(lab.trainer(tmp_path / "full", micro_batch_tokens=8 * LONGEST))
    AcceleratorState._reset_state(True)
    trainer = lab.trainer(tmp_path / "half", micro_batch_tokens=8 * LONGEST, precision="bf16")
    half, _ = first_gradients(trainer)
    assert 1e-5 < (half - full).norm() / full.norm() < 5e-2
    assert (trainer.drafter.norm.weight != 1).all()  # in bfloat16 a step this small would be lost
    assert trainer.validate().alpha[0] > 0


def test_what_a_drafter_draws_differs_by_step_and_by_micro_batch(lab, tmp_path, monkeypatch):
    trainer, seeds, real = lab.trainer(tmp_path, accumulation=4), list[int](), torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda seed: seeds.append(seed) or real(seed))
    trainer.run()
    assert len(set(seeds)) == len(seeds) == trainer.total_steps * 4
