"""What a run tells of itself: numbers in a file, a tracker and a picture, and never what people wrote."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from training_lab import Lab

from spectrain.config import load_recipe
from spectrain.drafters.scoring import DepthScores, score_batch
from spectrain.pipeline import Run
from spectrain.tracking import draw, flatten, peak_memory

pytestmark = pytest.mark.usefixtures("one_accelerator")

STATUS = Path("/proc/self/status")


def test_metrics_are_flattened_for_trackers():
    nested = {"loss": 1.0, "validation": {"alpha": [0.5, 0.25], "deep": {"x": 1}}, "step": 3}
    assert flatten(nested) == {
        "loss": 1.0, "validation/alpha/0": 0.5, "validation/alpha/1": 0.25, "validation/deep/x": 1, "step": 3,
    }  # fmt: skip


@pytest.mark.skipif(not STATUS.exists(), reason="only Linux tells of itself there")
def test_peak_memory_is_what_the_system_says():
    lines = dict(line.split(":") for line in STATUS.read_text().splitlines())
    assert peak_memory(torch.device("cpu")) == pytest.approx(1024 * int(lines["VmHWM"].split()[0]), rel=0.05)


def test_every_step_says_how_it_went(tmp_path):
    Lab(tmp_path / "lab").trainer(tmp_path, epochs=1).run()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    every = {"step", "epoch", "seconds", "loss", "lr", "gradient_norm", "supervised", "tokens_per_second", "padding",
             "peak_memory"}  # fmt: skip
    assert [every <= row.keys() for row in rows] == [True] * 8
    assert rows[-1]["validation"].keys() == {"tokens_per_round", "alpha", "conditional", "positions"}
    assert all(row["peak_memory"] > 1 << 20 and row["tokens_per_second"] > 0 for row in rows)


def test_acceptance_of_the_rows_trained_on_is_told_now_and_then(tmp_path):
    lab = Lab(tmp_path / "lab")
    trainer = lab.trainer(tmp_path, epochs=1, acceptance_every=3)
    trainer.run()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "acceptance" in row] == [3, 6]
    planned = next(iter(lab.trainer(tmp_path / "other", accumulation=4).curriculum.steps(0)))
    assert len(planned.batches) == 4
    scores = [score_batch(trainer.drafter, lab.store.batch(batch), lab.target.head) for batch in planned.batches]
    want = sum(scores, DepthScores())  # of all micro-batches, with the weights from before the step
    found = trainer._step(planned.batches, 9)["acceptance"]
    assert found["positions"] == want.positions
    assert found["conditional"] == want.conditional()
    assert found["alpha"] == pytest.approx(want.mean_alpha())
    assert "acceptance" not in trainer._step(planned.batches, 10)


def test_a_picture_of_few_or_many_validations(tmp_path):
    row = {"loss": 1.0, "validation": {"tokens_per_round": 1.5, "conditional": [0.5, 0.25]}}
    for count in (1, 30):
        draw([{**row, "step": step} for step in range(1, count + 1)], 1, tmp_path / f"{count}.png")
        assert (tmp_path / f"{count}.png").read_bytes().startswith(b"\x89PNG")


TRACKERS = [
    "wandb",
    pytest.param("tensorboard", marks=pytest.mark.skipif(
        importlib.util.find_spec("tensorboard") is None, reason="the extra tensorboard is not installed")),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("tracker", TRACKERS)
def test_no_text_of_the_traffic_is_tracked(make_recipe, tmp_path, monkeypatch, tracker):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    recipe = make_recipe(tmp_path)
    secret = "supercalifragilistic"
    for name in ("train", "heldout"):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(path.read_text().replace(" + ", f" {secret} "))
    Run(load_recipe(recipe, [f"training.tracker={tracker}"]), progress=False).train()
    folder = tmp_path / "run" / "training"
    looked, size = 0, 0
    for path in folder.rglob("*"):
        if path.is_file() and "checkpoints" not in path.parts:
            looked, size = looked + 1, size + path.stat().st_size
            assert secret.encode() not in path.read_bytes(), path
    assert (folder / "training.png").stat().st_size > 1000
    tracked = [path for path in folder.rglob("*") if path.suffix == ".wandb" or "tfevents" in path.name]
    assert tracked
    assert b"validation" in b"".join(path.read_bytes() for path in tracked)
    assert looked > 2
    assert size > 1000
