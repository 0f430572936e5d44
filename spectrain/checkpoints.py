"""What a training run leaves behind step by step, and how an interrupted one finds its place again.

A checkpoint is a loadable bundle beside the state needed to go on, whole or not there at all.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn

from spectrain.distributed import whole
from spectrain.errors import SpectrainError
from spectrain.files import atomic_file, write_json
from spectrain.identity import first_difference
from spectrain.selection import Selection
from spectrain.settings import RUN

BEST_FILE, PROGRESS_FILE = "best.json", "progress.json"


@dataclass(frozen=True)
class Progress:
    """Where a run stands: steps done, seconds spent, and its best validation."""

    step: int = 0
    seconds: float = 0.0
    selection: Selection = field(default_factory=Selection)


class Checkpoints:
    """Folders ``step-000200/`` with ``bundle/`` and ``state/``; the latest ``keep`` stay.

    ``run`` says, in JSON values, what the numbers depend on: a run with another does not go on from here. With
    ``keep_best`` the checkpoint of the best validation stays as well, and ``best.json`` names it. ``module`` is what
    may be sharded over processes.
    """

    def __init__(self, folder: Path, accelerator: Accelerator, keep: int, run: dict[str, Any], *,
                 keep_best: bool = False, module: nn.Module | None = None) -> None:  # fmt: skip
        self.folder, self.accelerator, self.keep, self.run = folder, accelerator, keep, run
        self.keep_best, self.module = keep_best, nn.Module() if module is None else module

    def at(self, step: int) -> Path:
        """The folder of a step's checkpoint, whether or not there is one."""
        return self.folder / f"step-{step:06d}"

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return complete(self.folder)

    def steps(self) -> list[int]:
        """Their steps, ascending."""
        return [_step(path) for path in self.all()]

    def latest(self) -> Progress:
        """Where the run goes on from: its latest checkpoint, or the start."""
        found = self.all()
        if not found:
            return Progress()
        progress = read_progress(found[-1])
        return Progress(progress["step"], progress["seconds"], Selection(**progress.get("selection", {})))

    @contextmanager
    def telling_when_stopped(self, step: Callable[[], int], total: int, every: int) -> Iterator[None]:
        """On Ctrl-C the main process says after which ``step`` of ``total`` it came, and what the same command goes on
        from. Nothing is written then: it may have come in the middle of a step."""
        try:
            yield
        except KeyboardInterrupt:
            found = self.all()
            if self.accelerator.is_main_process:
                then = f"goes on from {found[-1].name}" if found else "trains from the start, for there is none yet"
                print(f"stopped after step {step()} of {total}; a checkpoint is written every {every} steps "
                      f"(training.checkpoint_every): the same command {then}", file=sys.stderr, flush=True)  # fmt: skip
            raise

    def resume(self) -> Progress:
        """Load the latest checkpoint, if there is one."""
        if self.accelerator.is_main_process:
            for left in self.folder.glob(".step-*"):  # by a process that was killed
                shutil.rmtree(left)
        if not self.all():
            return Progress()
        check_run(self.folder, self.run)
        progress = self.latest()
        self.load(progress.step)
        self._name_best(progress.selection)
        return progress

    def load(self, step: int) -> None:
        """Weights, optimizer and random state as they were at a step's checkpoint, on all processes."""
        try:
            self.accelerator.load_state(str(self.at(step) / "state"))
        except Exception as error:  # weights, optimizer, scheduler and random state each have their own reader
            raise _damaged(self.at(step), f"its state does not load, {type(error).__name__}: {error}") from error

    def chosen(self, selection: Selection) -> int:
        """The step whose bundle is the run's: of the best validation, or the latest checkpoint's."""
        if not self.keep_best or selection.step is None:
            return self.steps()[-1]
        if self._best(selection) is None:
            raise SpectrainError(
                f"training.select is best, which is step {selection.step} of this run, but {self.at(selection.step)} "
                "is not there: was the run trained with select=last? Set training.select=last, or choose another output"
            )
        return selection.step

    def save(self, progress: Progress, save_bundle: Callable[[Path], None]) -> None:
        """Write a checkpoint; it appears under its name only when every process has written its part."""
        final = self.at(progress.step)
        partial = self.folder / f".{final.name}.partial"
        if self.accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        try:
            self.accelerator.save_state(str(partial / "state"))
            self.accelerator.wait_for_everyone()
            with whole(self.module):
                if self.accelerator.is_main_process:
                    save_bundle(partial / "bundle")
                    write_json(partial / PROGRESS_FILE, asdict(progress) | {"run": self.run})
                    shutil.rmtree(final, ignore_errors=True)
                    os.rename(partial, final)
                    self._name_best(progress.selection)
                    self._forget_old(progress.selection)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self.accelerator.wait_for_everyone()

    def _best(self, selection: Selection) -> Path | None:
        if not self.keep_best or selection.step is None or not self.at(selection.step).exists():
            return None
        return self.at(selection.step)

    def _name_best(self, selection: Selection) -> None:
        """Once the checkpoint that it names is there."""
        best, file = self._best(selection), self.folder / BEST_FILE
        if best is None or not self.accelerator.is_main_process:
            return
        named = {"checkpoint": best.name, "step": selection.step, "tokens_per_round": selection.tokens_per_round}
        if not file.exists() or file.read_text(encoding="utf-8") != json.dumps(named, indent=2) + "\n":
            write_json(file, named)

    def _forget_old(self, selection: Selection) -> None:
        for old in self.all()[: -self.keep]:
            if old != self._best(selection):
                gone = self.folder / f".{old.name}.partial"
                os.rename(old, gone)  # one that is half removed must not pass for a checkpoint
                shutil.rmtree(gone)


def complete(folder: Path) -> list[Path]:
    """The whole checkpoints of a folder of them, oldest first (by step number, not by name or time)."""
    return sorted((path.parent for path in folder.glob(f"step-*/{PROGRESS_FILE}")), key=_step)


def check_run(folder: Path, run: Mapping[str, Any], unknown: Collection[str] = ()) -> None:
    """SpectrainError where the latest checkpoint of ``folder`` is of a run with other settings than ``run``, of which
    nobody can say yet what is ``unknown``."""
    found = complete(folder)
    if not found:
        return
    theirs, ours = (
        {k: v for k, v in one.items() if k not in unknown} for one in (read_progress(found[-1])["run"], run)
    )
    if theirs != ours:
        raise SpectrainError(
            f"checkpoint {found[-1]} belongs to another run, its settings against these: "
            f"{first_difference(theirs, ours, names=RUN)}; choose another output, or delete {folder}"
        )


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def read_progress(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says of its place in the run. SpectrainError, naming it, where that cannot be read."""
    try:
        progress: dict[str, Any] = json.loads((checkpoint / PROGRESS_FILE).read_text(encoding="utf-8"))
        if not progress.keys() >= {"step", "seconds", "run"}:
            raise ValueError(f"its keys are {sorted(progress)}")
        if type(progress["step"]) is not int or not isinstance(progress["seconds"], (int, float)):
            raise ValueError(f"step {progress['step']!r} and seconds {progress['seconds']!r} are no numbers")
        return progress
    except (ValueError, AttributeError) as error:
        raise _damaged(checkpoint, f"{PROGRESS_FILE}: {error}") from error


def _damaged(checkpoint: Path, what: str) -> SpectrainError:
    return SpectrainError(
        f"checkpoint {checkpoint} is damaged ({what}); delete that folder, and the run goes on from the one before it, "
        "or from the start"
    )


class Metrics:
    """A JSON line a step. What a run writes after its last checkpoint is forgotten when it goes on from there."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def append(self, values: dict[str, Any]) -> None:
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """Every whole line; what follows the last newline was cut off while writing."""
        if not self.file.exists():
            return []
        return [json.loads(line) for line in self.file.read_text(encoding="utf-8").split("\n")[:-1]]

    def last(self) -> dict[str, Any]:
        """What is known of the latest step. SpectrainError where nothing is."""
        rows = self.read()
        if not rows:
            raise SpectrainError(
                f"{self.file} is missing or empty; put it back, or choose another output and train anew"
            )
        return rows[-1]

    def forget_after(self, step: int) -> None:
        kept = [values for values in self.read() if values["step"] <= step]
        with atomic_file(self.file) as partial:
            partial.write_text("".join(json.dumps(values) + "\n" for values in kept), encoding="utf-8")
