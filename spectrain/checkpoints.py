"""What a training run leaves behind step by step, and how an interrupted one finds its place again.

A checkpoint is a loadable bundle beside the state needed to go on, whole or not there at all.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from spectrain.errors import SpectrainError
from spectrain.files import atomic_file, write_json
from spectrain.identity import first_difference


class Checkpoints:
    """Folders ``step-000200/`` with ``bundle/`` and ``state/``; the latest ``keep`` stay.

    ``run`` says, in JSON values, what the numbers depend on: a run with another does not go on from here.
    """

    def __init__(self, folder: Path, accelerator: Accelerator, keep: int, run: dict[str, Any]) -> None:
        self.folder, self.accelerator, self.keep, self.run = folder, accelerator, keep, run

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first (by step number, not by name or time)."""
        found = [path for path in self.folder.glob("step-*") if (path / "progress.json").exists()]
        return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))

    def resume(self) -> tuple[int, float]:
        """Load the latest checkpoint; (steps done, seconds spent), or (0, 0.0) when there is none."""
        found = self.all()
        if not found:
            return 0, 0.0
        progress = json.loads((found[-1] / "progress.json").read_text(encoding="utf-8"))
        if progress["run"] != self.run:
            raise SpectrainError(
                f"checkpoint {found[-1]} belongs to another run, its settings against these: "
                f"{first_difference(progress['run'], self.run)}; choose another output, or delete {self.folder}"
            )
        self.accelerator.load_state(str(found[-1] / "state"))
        return progress["step"], progress["seconds"]

    def save(self, step: int, seconds: float, save_bundle: Callable[[Path], None]) -> None:
        """Write a checkpoint; it appears under its name only when every process has written its part."""
        final = self.folder / f"step-{step:06d}"
        partial = self.folder / f".{final.name}.partial"
        if self.accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        try:
            self.accelerator.save_state(str(partial / "state"))
            self.accelerator.wait_for_everyone()
            if self.accelerator.is_main_process:
                save_bundle(partial / "bundle")
                write_json(partial / "progress.json", {"step": step, "seconds": seconds, "run": self.run})
                shutil.rmtree(final, ignore_errors=True)
                os.rename(partial, final)
                for old in self.all()[: -self.keep]:
                    shutil.rmtree(old)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self.accelerator.wait_for_everyone()


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

    def forget_after(self, step: int) -> None:
        kept = [values for values in self.read() if values["step"] <= step]
        with atomic_file(self.file) as partial:
            partial.write_text("".join(json.dumps(values) + "\n" for values in kept), encoding="utf-8")
