"""Two runs in one folder: the second is refused, whichever way the first may end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from spectrain.config import load_recipe
from spectrain.errors import SpectrainError
from spectrain.occupied import working_in
from spectrain.pipeline import Run

HOLD = """
import sys
from spectrain.occupied import working_in
with working_in(sys.argv[1]):
    print("there", flush=True)
    sys.stdin.read()
"""


class Other:
    """Another process that works in a folder until it is told to end, or killed."""

    def __init__(self, folder: Path) -> None:
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
        self.process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], env=environment, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "there\n"

    def end(self, how: signal.Signals | None = None) -> None:
        if how is not None:
            self.process.send_signal(how)
        self.process.communicate(timeout=60)


@pytest.fixture
def other():
    started: list[Other] = []

    def start(folder: Path) -> Other:
        started.append(Other(folder))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.end()  # not killed: it takes its files with it


def refusal(folder: Path) -> str:
    with pytest.raises(SpectrainError) as error, working_in(folder):
        pass
    return str(error.value)


@pytest.mark.parametrize("how", [None, signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_folder_is_free_again_however_the_first_ended(tmp_path, other, how):
    first = other(tmp_path / "run")
    told = refusal(tmp_path / "run")
    assert told.startswith(f"{tmp_path / 'run'}: another process (pid {first.process.pid}) works in this folder")
    assert "choose another output" in told
    first.end(how)
    with working_in(tmp_path / "run"):
        pass
    assert list(tmp_path.rglob("*")) in ([], [tmp_path / "run"])  # a killed one leaves the folder


@pytest.mark.parametrize("stage", ["train", "prepare", "evaluate"])
def test_every_stage_of_a_run_refuses_a_folder_that_another_works_in(finished_run, make_recipe, tmp_path, other, stage):
    place = {"train": "run/training", "prepare": "shared/data", "evaluate": "run/evaluation"}[stage]
    overrides = {
        "train": [],
        "prepare": [f"prepared={tmp_path / 'shared'}"],
        "evaluate": [f"output={finished_run / 'run'}"],
    }[stage]
    run = Run(load_recipe(make_recipe(tmp_path), overrides), progress=False)
    folder = (finished_run if stage == "evaluate" else tmp_path) / place
    first = other(folder)
    with pytest.raises(SpectrainError, match=rf"{folder}: another process \(pid {first.process.pid}\)"):
        getattr(run, stage)()
    if stage != "evaluate":
        assert [path.name for path in folder.iterdir() if not path.name.startswith(".")] == []


def test_rows_are_shared_with_a_run_that_trains(finished_run, make_recipe, tmp_path, other):
    other(finished_run / "run" / "training")
    overrides = [f"prepared={finished_run / 'run'}"]
    assert Run(load_recipe(make_recipe(tmp_path), overrides), progress=False).prepare().train_rows


def test_a_stage_inside_another_goes_on_and_the_outer_one_keeps_the_folder(tmp_path):
    found: list[str] = []
    with working_in(tmp_path):
        with working_in(tmp_path / "." / ""):
            pass
        thread = threading.Thread(target=lambda: found.append(refusal(tmp_path)))
        thread.start()
        thread.join()
    assert f"(pid {os.getpid()})" in found[0]
    assert list(tmp_path.iterdir()) == []


def test_an_error_frees_the_folder_and_leaves_what_was_written(tmp_path):
    def stopped():
        with working_in(tmp_path / "run"):
            (tmp_path / "run" / "mine").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mine"]
    with working_in(tmp_path / "run"):
        pass


def test_other_processes_of_the_same_launcher_belong_to_the_run(tmp_path, other, monkeypatch):
    other(tmp_path)
    state = type("Second", (), {"is_main_process": False})
    monkeypatch.setattr("spectrain.occupied.processes", state)
    with working_in(tmp_path):
        pass
