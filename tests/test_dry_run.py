"""What `train --dry-run` says, and that it does nothing."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from spectrain import cli
from spectrain.config import load_recipe
from spectrain.dry_run import row_lengths
from spectrain.errors import SpectrainError
from spectrain.pipeline import Run


def plan(capsys, recipe: Path, *overrides: str) -> str:
    cli.train([str(recipe), *overrides, "--dry-run"])
    return capsys.readouterr().out


def files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_before_anything_is_prepared_steps_are_about(make_recipe, tmp_path, capsys):
    recipe = make_recipe(tmp_path)
    before = files(tmp_path)
    said = plan(capsys, recipe)
    assert files(tmp_path) == before
    assert "rows: 8 to train on, 4 held out" in said
    assert re.search(r"optimizer steps: \d+ \(about, .*\), 0 of them done", said)
    assert "memory of a process in training:" in said
    assert "time of everything from the start:" in said


def test_after_a_run_they_are_exact_and_done(finished_run, make_recipe, tmp_path, capsys):
    recipe = make_recipe(tmp_path)
    shutil.copytree(finished_run / "run", tmp_path / "run")
    before = files(tmp_path)
    steps = json.loads((tmp_path / "run/training/metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert f"optimizer steps: {steps} (exactly), {steps} of them done" in plan(capsys, recipe)
    assert files(tmp_path) == before


def test_every_process_counts_and_one_tells(make_recipe, tmp_path, capsys, monkeypatch):
    recipe = make_recipe(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "4 process(es)" in plan(capsys, recipe)
    monkeypatch.setenv("RANK", "1")
    assert plan(capsys, recipe) == ""


def test_a_row_that_no_micro_batch_holds_is_told_now(finished_run, make_recipe, tmp_path, capsys):
    recipe = make_recipe(tmp_path)
    shutil.copytree(finished_run / "run", tmp_path / "run")
    with pytest.raises(SpectrainError, match=r"a micro-batch holds 8"):
        plan(capsys, recipe, "training.micro_batch_tokens=8")


def test_traffic_that_is_not_here_is_counted_by_hand_elsewhere(make_recipe, tmp_path, capsys):
    recipe = make_recipe(tmp_path)
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(SpectrainError, match=r"--dry-run: .*--tokens.*options of spectrain estimate"):
        plan(capsys, recipe)


def test_rows_are_those_that_training_would_see(make_recipe, tmp_path):
    """Bad ones and repeated ones are left out here as they are there."""
    path = make_recipe(tmp_path)
    for name in ("train", "heldout"):
        file = tmp_path / f"{name}.jsonl"
        rows = [json.loads(line) | {"completion": "yes."} for line in file.read_text(encoding="utf-8").splitlines()]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    twin = json.dumps({"prompt": "same", "completion": "again"}) + "\n"
    with (tmp_path / "train.jsonl").open("a", encoding="utf-8") as file:
        file.write("{\n" + twin + twin)
    recipe = load_recipe(path, ["regenerate=null", "data.bad_rows=drop", "data.duplicates=drop"])
    assert len(row_lengths(recipe)) == len(Run(recipe, progress=False).prepare().train_rows) == 9
