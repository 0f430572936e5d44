"""What `train --dry-run` says, and that it does nothing."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from spectrain import cli
from spectrain import rates as device_rates
from spectrain.config import load_recipe
from spectrain.data import conversations
from spectrain.dry_run import row_lengths
from spectrain.errors import SpectrainError
from spectrain.pipeline import Run
from spectrain.workload import workload


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


def test_after_a_run_they_are_exact_and_done_and_nothing_is_measured(
    finished_run, make_recipe, tmp_path, capsys, monkeypatch
):
    recipe = make_recipe(tmp_path)
    shutil.copytree(finished_run / "run", tmp_path / "run")
    before = files(tmp_path)
    steps = json.loads((tmp_path / "run/training/metrics.jsonl").read_text().splitlines()[-1])["step"]
    for name in ("measure_flops", "measure_bandwidth"):
        monkeypatch.setattr(device_rates, name, lambda *_: pytest.fail("nothing is left that takes time"))
    said = plan(capsys, recipe)
    assert f"optimizer steps: {steps} (exactly), {steps} of them done" in said
    assert said.endswith("training is done: nothing is left to estimate\n")
    assert "note:" not in said
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("call", "calls", "rate"), [(0.1, 1 + 5, 10), (4, 1 + 2, 0.25), (6, 1 + 1, 1 / 6), (30, 1, 1 / 30)]
)
def test_measuring_has_an_end_on_a_machine_that_is_slow(monkeypatch, call, calls, rate):
    """The first call is to warm up, unless it has taken all the time there is."""
    clock = [0.0]
    monkeypatch.setattr(device_rates.time, "perf_counter", lambda: clock[0])
    seen = []

    def work() -> None:
        seen.append(1)
        clock[0] += call

    assert device_rates._per_second(work, torch.device("cpu")) == pytest.approx(rate)
    assert len(seen) == pytest.approx(calls, abs=call == 0.1)  # tenths do not add up exactly


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
    told = row_lengths(recipe, workload(recipe))
    rows = Run(recipe, progress=False).prepare().train_rows
    assert list(told) == [len(row.ids) for row in rows]
    assert len(rows) == 9
    assert list(row_lengths(recipe, workload(recipe))) == list(told)  # from what was prepared


def test_given_answers_are_encoded_once(make_recipe, tmp_path, capsys, monkeypatch):
    path, seen = make_recipe(tmp_path), []
    for name in ("train", "heldout"):
        file = tmp_path / f"{name}.jsonl"
        rows = [json.loads(line) | {"completion": "yes."} for line in file.read_text(encoding="utf-8").splitlines()]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    real = conversations._encode
    monkeypatch.setattr(conversations, "_encode", lambda chat, *rest: seen.append(chat.place) or real(chat, *rest))
    assert "(exactly)" in plan(capsys, path, "regenerate=null")
    assert len(seen) == len(set(seen)) == 8 + 4


def test_rates_that_are_given_are_not_measured(make_recipe, tmp_path, capsys, monkeypatch):
    recipe = make_recipe(tmp_path)
    for name in ("measure_flops", "measure_bandwidth"):
        monkeypatch.setattr(device_rates, name, lambda *_: pytest.fail("nothing is left to be measured"))
    cli.train([str(recipe), "--dry-run", "--tflops", "2", "--bandwidth", "30"])
    told = capsys.readouterr()
    assert "2 TFLOP/s at a utilisation of 40%, 30 GB/s (as given)" in told.out
    assert "measuring" not in told.err


@pytest.mark.parametrize(
    ("options", "named"),
    [(["--dry-run", "--tflops", "0"], "--tflops 0.0: expected a finite number above 0"),
     (["--bandwidth", "30"], "--bandwidth tells --dry-run how fast a device is; add --dry-run")],
)  # fmt: skip
def test_rates_that_make_no_sense_are_told(make_recipe, tmp_path, options, named):
    with pytest.raises(SpectrainError, match=named):
        cli.train([str(make_recipe(tmp_path)), *options])
    assert not (tmp_path / "run").exists()
