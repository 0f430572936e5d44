"""What the benchmarks share: prompts, a stopwatch that waits for the device, and what they ran on."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from spectrain.data.conversations import Conversation
from spectrain.decoding.trace import Clock
from spectrain.evaluation.acceptance import choose, prompt_ids
from spectrain.manifest import MANIFEST_FILE
from spectrain.target import Target

LIBRARIES = ("spectrain", "torch", "transformers")


@dataclass(frozen=True)
class Prompt:
    """A chat up to where the target answers."""

    id: str
    kind: str
    ids: list[int]


def prompts_of(target: Target, conversations: Sequence[Conversation], count: int | None, max_new_tokens: int,
               seed: int) -> list[Prompt]:  # fmt: skip
    """``count`` prompts spread over the kinds (None: all); one that leaves no room for the answer is an error."""
    chosen = choose(conversations, count, seed)
    return [Prompt(chat.id, chat.kind, prompt_ids(target, chat, max_new_tokens)) for chat in chosen]


class Stopwatch:
    """Seconds of a block of code, with the device's queue empty at both ends."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.seconds = device, 0.0

    def __enter__(self) -> Stopwatch:
        self._clock = Clock(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = self._clock.lap()


def machine(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Device, threads, dtype, versions, and how busy the machine was with other work (load average, one minute)."""
    return {
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "versions": {name: version(name) for name in LIBRARIES},
    }


def shown_name(target: str) -> str:
    """A target's name for documents: a local path says where the model lay on this machine, not what it is. Of one that
    lies in a bundle, the run and the bundle tell it from others."""
    path = Path(target)
    if not path.exists():
        return target
    return str(Path(*path.resolve().parts[-3:])) if (path.parent / MANIFEST_FILE).is_file() else path.name


def device_name(device: torch.device) -> str:
    """The processor's own name, as far as it tells."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are numbers, aligned right."""
    cells = [list(heads), *map(list, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(heads))]
    lines = ["| " + " | ".join(_aligned(row, widths)) + " |" for row in cells]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([lines[0], "| " + " | ".join(rule) + " |", *lines[1:]])


def _aligned(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
