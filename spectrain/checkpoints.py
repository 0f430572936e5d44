"""Checkpoints of a training run: a loadable bundle beside the state needed to go on, whole or not there at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from accelerate import Accelerator

from spectrain.files import write_json


class Checkpoints:
    """Folders ``step-000200/`` with ``bundle/`` and ``state/``; the latest ``keep`` stay."""

    def __init__(self, folder: Path, accelerator: Accelerator, keep: int) -> None:
        self.folder, self.accelerator, self.keep = folder, accelerator, keep

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first (by step number, not by name or time)."""
        found = [path for path in self.folder.glob("step-*") if (path / "progress.json").exists()]
        return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))

    def resume(self) -> tuple[int, float]:
        """Load the latest checkpoint; (steps done, seconds spent), or (0, 0.0) when there is none."""
        found = self.all()
        if not found:
            return 0, 0.0
        self.accelerator.load_state(str(found[-1] / "state"))
        progress = json.loads((found[-1] / "progress.json").read_text(encoding="utf-8"))
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
                write_json(partial / "progress.json", {"step": step, "seconds": seconds})
                shutil.rmtree(final, ignore_errors=True)
                os.rename(partial, final)
                for old in self.all()[: -self.keep]:
                    shutil.rmtree(old)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self.accelerator.wait_for_everyone()
