"""Checkpoints are whole or not there; the latest is the one of the highest step; metrics follow them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from spectrain.checkpoints import Checkpoints, Metrics, Progress
from spectrain.errors import SpectrainError

pytestmark = pytest.mark.usefixtures("one_accelerator")

RUN = {"optim": {"lr": 0.1, "betas": [0.9, 0.95]}, "seed": 0}


class Session:
    """A model of one number, its optimizer, and the checkpoints of both."""

    def __init__(self, folder: Path, keep: int = 2, run: dict | None = None) -> None:
        accelerator = Accelerator(cpu=True)
        model = torch.nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self.checkpoints = Checkpoints(folder, accelerator, keep, run or RUN)

    def train(self, value: float) -> None:
        self.model.weight.data.fill_(value)
        (self.model.weight.sum() * value).backward()
        self.optimizer.step()

    def save(self, step: int, save_bundle=lambda path: path.mkdir()) -> None:
        self.checkpoints.save(Progress(step, 0.5 * step), save_bundle)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_holds_a_bundle_and_all_that_going_on_needs(tmp_path):
    session = Session(tmp_path)
    assert session.checkpoints.resume() == Progress()
    session.train(3.0)
    session.save(7, lambda path: (path.mkdir(), (path / "weights").write_text("mine")))
    weight, state = session.model.weight.clone(), session.optimizer.state_dict()["state"][0]
    assert names(tmp_path) == ["step-000007"]
    assert names(tmp_path / "step-000007") == ["bundle", "progress.json", "state"]
    assert (tmp_path / "step-000007" / "bundle" / "weights").read_text() == "mine"

    again = Session(tmp_path)
    assert again.checkpoints.resume() == Progress(7, 3.5)
    assert torch.equal(again.model.weight, weight)
    for name, value in again.optimizer.state_dict()["state"][0].items():
        assert torch.equal(value, state[name]), name


def test_the_latest_are_kept_by_step_not_by_name_or_time(tmp_path):
    """As text, step 1000000 comes before step 999998, and a copied folder may carry any time."""
    session = Session(tmp_path)
    for step in (999_997, 999_998, 999_999, 1_000_000):
        session.train(float(step))
        session.save(step)
        for path in session.checkpoints.all():
            os.utime(path, (2e9 - step, 2e9 - step))
    assert [path.name for path in session.checkpoints.all()] == ["step-999999", "step-1000000"]
    assert names(tmp_path) == ["step-1000000", "step-999999"]
    assert Session(tmp_path).checkpoints.resume().step == 1_000_000


@pytest.mark.parametrize("keep", [1, 3])
def test_as_many_are_kept_as_asked(tmp_path, keep):
    session = Session(tmp_path, keep)
    for step in (5, 10, 15, 20):
        session.save(step)
    assert [path.name for path in session.checkpoints.all()] == ["step-000005", "step-000010", "step-000015",
                                                                 "step-000020"][-keep:]  # fmt: skip


class Killed(BaseException):
    """What no code handles."""


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt, Killed])
@pytest.mark.parametrize("where", ["state", "bundle"])
def test_one_that_fails_half_way_is_not_there_and_the_one_before_is(tmp_path, error, where):
    session = Session(tmp_path)
    session.train(1.0)
    session.save(5)
    first = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def dies(path, *_):
        Path(path).mkdir()
        (Path(path) / "half").write_text("written")
        raise error

    session.train(2.0)
    if where == "state":
        session.checkpoints.accelerator.save_state = dies
    with pytest.raises(error):
        session.save(10, dies)
    assert names(tmp_path) == ["step-000005"]
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == first
    assert Session(tmp_path).checkpoints.resume().step == 5


def test_what_a_killed_process_left_is_neither_loaded_nor_in_the_way(tmp_path):
    Session(tmp_path).save(5)
    (tmp_path / ".step-000010.partial" / "state").mkdir(parents=True)
    (tmp_path / "step-000020").mkdir()  # copied in part: no progress.json
    session = Session(tmp_path)
    assert session.checkpoints.resume().step == 5
    session.save(10)
    assert [path.name for path in session.checkpoints.all()] == ["step-000005", "step-000010"]
    assert ".step-000010.partial" not in names(tmp_path)


def test_saving_a_step_again_replaces_it(tmp_path):
    session = Session(tmp_path)
    session.save(5, lambda path: (path.mkdir(), (path / "old").touch()))
    session.save(5, lambda path: (path.mkdir(), (path / "new").touch()))
    assert names(tmp_path / "step-000005" / "bundle") == ["new"]


def test_another_run_does_not_go_on_from_here(tmp_path):
    session = Session(tmp_path)
    session.train(3.0)
    session.save(5)
    other = Session(tmp_path, run={**RUN, "optim": {"lr": 0.1, "betas": [0.9, 0.99]}})
    before = other.model.weight.clone()
    with pytest.raises(
        SpectrainError, match=r"step-000005 belongs to another run.* optim\.betas\[1\]: 0\.95 against 0\.99"
    ):
        other.checkpoints.resume()
    assert torch.equal(other.model.weight, before)


def test_metrics_after_a_checkpoint_are_forgotten(tmp_path):
    log = Metrics(tmp_path / "run" / "metrics.jsonl")
    assert log.read() == []
    log.forget_after(0)
    for step in range(1, 6):
        log.append({"step": step, "loss": 1 / step})
    with log.file.open("a") as file:
        file.write('{"step": 6, "lo')
    assert [values["step"] for values in log.read()] == [1, 2, 3, 4, 5]
    log.forget_after(3)
    log.append({"step": 4, "loss": 0.25})
    assert log.read() == [{"step": step, "loss": 1 / step} for step in (1, 2, 3, 4)]
    assert names(tmp_path / "run") == ["metrics.jsonl"]
