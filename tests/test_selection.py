"""The best step by held-out tokens per round: kept, found again, and what the bundle is of."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from training_lab import Killed, Lab, assert_bit_equal, metrics, stop_at, weights

from spectrain.drafters.scoring import DepthScores
from spectrain.errors import SpectrainError
from spectrain.selection import Selection
from spectrain.training import Trainer

pytestmark = pytest.mark.usefixtures("one_accelerator")

SCORES = {2: 1.1, 4: 1.4, 6: 1.3, 8: 1.4, 10: 1.2, 12: 1.5, 14: 1.3, 16: 1.0}
"""Tokens per round at each validation: step 4 is the best until 12, and 8 only its equal."""


def run_of(lab: Lab, folder: Path, **config) -> Trainer:
    """16 steps whose validations say SCORES; checkpoints by their own rule at 6 and 12."""
    given = {"select": "best", "epochs": 2, "validate_every": 2, "keep": 1, **config}
    trainer = lab.trainer(folder, **given)

    def validate() -> DepthScores:
        committed = round(100 * SCORES[trainer.scheduler.last_epoch])
        return DepthScores([1], [0.5], [1], [1], [1], started=1, rounds=100, committed=committed)

    trainer.validate = validate  # type: ignore[method-assign]
    return trainer


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def best(folder: Path) -> dict:
    return json.loads((folder / "checkpoints" / "best.json").read_text())


def test_of_equals_the_one_that_comes_closer_is_the_best():
    """While nothing is accepted every validation is 1.0: the least trained step must not be the bundle."""
    selection = Selection()
    for step, alpha in ((2, 0.1), (4, 0.3), (6, 0.2), (8, 0.3)):
        selection = selection.after(step, 1.0, alpha)
    assert (selection.step, selection.since) == (4, 2)
    assert selection.after(10, 1.1, 0.0).step == 10


def test_the_first_of_equals_is_the_best_and_others_count_as_no_better():
    selection, seen = Selection(), []
    for step, score in SCORES.items():
        selection = selection.after(step, score)
        seen.append((selection.step, selection.since))
    assert seen == [(2, 0), (4, 0), (4, 1), (4, 2), (4, 3), (12, 0), (12, 1), (12, 2)]
    assert selection == Selection(12, 1.5, 2)
    assert selection.exhausted(2)
    assert not selection.exhausted(3)
    assert not selection.exhausted(None)


def test_the_best_checkpoint_is_kept_and_is_what_the_run_leaves(lab, tmp_path):
    kept: dict[int, list[str]] = {}
    trainer = run_of(lab, tmp_path)
    step = trainer._step

    def watched(batches, number):
        kept[number] = names(tmp_path) if number > 2 else []
        return step(batches, number)

    trainer._step = watched  # type: ignore[method-assign]
    trainer.run()
    assert kept[7] == kept[12] == ["best.json", "step-000004", "step-000006"]
    assert kept[13] == ["best.json", "step-000012"]
    assert names(tmp_path) == ["best.json", "step-000012", "step-000016"]
    assert best(tmp_path) == {"checkpoint": "step-000012", "step": 12, "tokens_per_round": 1.5}
    assert trainer.chosen == 12
    assert trainer.choice == "step 12 of 16, the best on the held-out rows: 1.50 tokens per round"
    bundle = load_file(tmp_path / "checkpoints" / "step-000012" / "bundle" / "model.safetensors")
    last = load_file(tmp_path / "checkpoints" / "step-000016" / "bundle" / "model.safetensors")
    assert_bit_equal(weights(trainer), bundle)
    assert any(not torch.equal(bundle[name], last[name]) for name in bundle)


def test_the_last_step_where_a_recipe_asks_for_it(lab, tmp_path):
    trainer = run_of(lab, tmp_path, select="last")
    trainer.run()
    assert names(tmp_path) == ["step-000016"]
    assert (trainer.chosen, trainer.choice) == (16, "step 16 of 16, the last")
    AcceleratorState._reset_state(True)
    with pytest.raises(SpectrainError, match=r"select is best, which is step 12 .*step-000012 is not there.*=last"):
        run_of(lab, tmp_path).run()


def test_patience_stops_and_is_remembered_and_more_of_it_goes_on(lab, tmp_path):
    """Nothing better than step 4 at 6, 8 and 10."""
    trainer = run_of(lab, tmp_path / "patient", patience=3)
    last = trainer.run()
    assert (last["step"], last["stopped_early"], trainer.chosen) == (10, True, 4)
    assert names(tmp_path / "patient") == ["best.json", "step-000004", "step-000010"]

    again = run_of(lab, tmp_path / "patient", patience=3)
    again._step = None  # type: ignore[method-assign, assignment]
    assert again.run() == last
    assert_bit_equal(weights(again), weights(trainer))

    more = run_of(lab, tmp_path / "patient", patience=4)
    more.run()
    whole = run_of(lab, tmp_path / "whole")
    whole.run()
    assert more.chosen == whole.chosen == 12
    assert_bit_equal(weights(more), weights(whole))
    recorded = metrics(tmp_path / "patient")
    assert [row.pop("stopped_early", None) for row in recorded].count(True) == 1
    assert recorded == metrics(tmp_path / "whole")


@pytest.mark.parametrize("stops", [(3,), (5, 7), (9, 13), (16,)])
def test_an_interrupted_run_chooses_as_the_unbroken_one(lab, tmp_path, stops):
    whole = run_of(lab, tmp_path / "whole", patience=4)
    whole.run()
    for stop in stops:
        with pytest.raises(Killed):
            stop_at(run_of(lab, tmp_path / "broken", patience=4), stop).run()
    again = run_of(lab, tmp_path / "broken", patience=4)
    again.run()
    assert again.chosen == whole.chosen
    assert_bit_equal(weights(again), weights(whole))
    assert metrics(tmp_path / "broken") == metrics(tmp_path / "whole")
    assert best(tmp_path / "broken") == best(tmp_path / "whole")
    assert names(tmp_path / "broken") == names(tmp_path / "whole")


def test_a_run_without_a_record_of_its_best_goes_on(lab, tmp_path):
    """As runs were before there was a choice."""
    with pytest.raises(Killed):
        stop_at(run_of(lab, tmp_path, select="last"), 8).run()
    file = tmp_path / "checkpoints" / "step-000006" / "progress.json"
    progress = json.loads(file.read_text())
    del progress["selection"]
    file.write_text(json.dumps(progress))
    trainer = run_of(lab, tmp_path)
    trainer.run()
    assert trainer.chosen == 12


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda folder: (folder / "progress.json").write_text("{}"),
            r"step-000016 is damaged \(progress.json: its keys",
        ),
        (lambda folder: (folder / "progress.json").write_text("{"), r"step-000016 is damaged \(progress.json: "),
        (lambda folder: os.truncate(next((folder / "state").glob("*.safetensors")), 100), "its state does not load"),
        (lambda folder: (folder.parents[1] / "metrics.jsonl").unlink(), "metrics.jsonl is missing or empty"),
    ],
)
def test_damaged_state_is_named_with_what_to_do(lab, tmp_path, damage, said):
    run_of(lab, tmp_path, keep=2).run()
    damage(tmp_path / "checkpoints" / "step-000016")
    with pytest.raises(SpectrainError, match=said):
        run_of(lab, tmp_path, keep=2).run()


def test_a_broken_note_of_the_best_is_written_again(lab, tmp_path):
    run_of(lab, tmp_path).run()
    wanted = best(tmp_path)
    (tmp_path / "checkpoints" / "best.json").write_text("{broken")
    run_of(lab, tmp_path).run()
    assert best(tmp_path) == wanted
