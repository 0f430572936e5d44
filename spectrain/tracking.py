"""What a training run tells while it goes on: a line a step, an experiment tracker, and a picture at the end.

All of it is numbers and settings. No text of the traffic is ever among them.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from spectrain.checkpoints import Metrics
from spectrain.files import atomic_file

LOSS, SCORE, CHOSEN = "#5b616b", "#0b6b45", "#c00018"


class Tracking:
    """``metrics.jsonl`` in ``folder``, and the tracker that was asked for, if any."""

    def __init__(self, folder: Path, accelerator: Accelerator, tracker: str, settings: Mapping[str, Any]) -> None:
        self.metrics, self.accelerator, self.tracker = Metrics(folder / "metrics.jsonl"), accelerator, tracker
        if tracker != "none":
            options = {"wandb": {"dir": str(folder)}}  # else it writes to wherever the command was started
            accelerator.init_trackers("spectrain", config=flatten(settings), init_kwargs=options)

    def record(self, values: dict[str, Any]) -> None:
        """The numbers of an optimizer step."""
        if self.tracker != "none":
            self.accelerator.log(flatten(values), step=values["step"])
        if self.accelerator.is_main_process:
            self.metrics.append(values)

    def finish(self, picture: Path, chosen: int) -> None:
        """Close the tracker and draw the run; ``chosen`` is the step that the bundle is of."""
        for tracker in self.accelerator.trackers:  # not `end_training`: processes still have to wait for each other
            tracker.finish()
        if self.accelerator.is_main_process:
            draw(self.metrics.read(), chosen, picture)


def peak_memory(device: torch.device) -> int:
    """Bytes that this process held at most so far: of the device's allocator, or resident on a CPU."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested metrics or settings as the flat names that trackers want."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        inner = dict(enumerate(value)) if isinstance(value, list) else value
        flat |= flatten(inner, f"{prefix}{key}/") if isinstance(inner, dict) else {f"{prefix}{key}": value}
    return flat


def draw(steps: Sequence[Mapping[str, Any]], chosen: int, path: Path) -> None:
    """A PNG of the loss of every step, and of tokens per round and conditional acceptance at every validation."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # only when a run ends, and slow to import
    from matplotlib.figure import Figure

    validated = [row for row in steps if "validation" in row]
    figure = Figure(figsize=(7.2, 6.4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    loss, score, depths = figure.subplots(3, 1, sharex=True)
    loss.plot([row["step"] for row in steps], [row["loss"] for row in steps], color=LOSS, linewidth=1)
    loss.set(ylabel="training loss")
    at = [row["step"] for row in validated]
    score.plot(at, [row["validation"]["tokens_per_round"] for row in validated], color=SCORE, marker="o", markersize=3)
    score.set(ylabel="tokens per round\n(held out, T=0)")
    for depth, values in enumerate(zip(*(row["validation"]["conditional"] for row in validated), strict=True)):
        depths.plot(at, values, marker="o", markersize=2, linewidth=1, label=f"{depth + 1}")
    depths.set(ylabel="conditional acceptance\n(held out, T=0)", xlabel="optimizer step")
    depths.legend(title="draft token", fontsize=7, title_fontsize=7, loc="upper left")
    for axes in (loss, score, depths):
        axes.axvline(chosen, color=CHOSEN, linewidth=0.8, linestyle="--")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"Training; the bundle is step {chosen}", x=0.01, ha="left", fontsize=11)
    with atomic_file(path) as partial, partial.open("wb") as file:
        figure.savefig(file, format="png", metadata={"Software": None})
