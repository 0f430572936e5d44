"""What happened in each round of a generation, and how long each part took."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

import torch

Clip = Literal["eos", "budget"]


@dataclass(frozen=True)
class Round:
    """One draft and one verification. ``committed`` counts the tokens kept, with repair or bonus.

    ``clipped`` says why a round kept fewer tokens than were accepted plus one, or was asked for fewer draft tokens than
    usual: the answer ended, or the budget did.
    """

    proposed: int
    accepted: int
    committed: int
    clipped: Clip | None = None


@dataclass
class Generation:
    """Generated ``tokens`` (the first one comes from the prefill), the rounds, and device seconds by phase."""

    tokens: list[int] = field(default_factory=list)
    finished: Clip = "budget"
    rounds: list[Round] = field(default_factory=list)
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    total_s: float = 0.0

    @property
    def overhead_s(self) -> float:
        """Time outside the models: sampling, verification arithmetic, bookkeeping."""
        return max(0.0, self.total_s - self.prefill_s - self.draft_s - self.verify_s)


class Clock:
    """Seconds between marks, with the device's queue drained at each, so that work is charged where it arose."""

    def __init__(self, device: torch.device) -> None:
        self._asynchronous = device.type != "cpu"
        self.started = self.last = self._now()

    def _now(self) -> float:
        if self._asynchronous:
            torch.accelerator.synchronize()
        return time.perf_counter()

    def lap(self) -> float:
        """Seconds since the previous lap (or the start)."""
        before, self.last = self.last, self._now()
        return self.last - before

    def total(self) -> float:
        """Seconds since the start."""
        return self._now() - self.started
