"""Tokens per round so far, with an interval that narrows: shown while measuring goes on, and what may end it early."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FEWEST = 24  # conversations; with fewer an interval may be narrow by chance
RULE = "the widest 95% half-width of tokens per round, of all contenders and samplers, after at least 24 conversations"
SIDE = 1.96  # standard errors on each side of a 95% interval


@dataclass
class RunningRatio:
    """Σ above ÷ Σ below over conversations, and the half-width of its interval (delta method), from five sums."""

    count: int = 0
    above: float = 0.0
    below: float = 0.0
    squares: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def add(self, above: float, below: float) -> None:
        """Count one conversation."""
        self.count, self.above, self.below = self.count + 1, self.above + above, self.below + below
        products = (above * above, above * below, below * below)
        self.squares = tuple(a + b for a, b in zip(self.squares, products, strict=True))  # type: ignore[assignment]

    @property
    def value(self) -> float:
        return self.above / self.below if self.below else math.nan

    @property
    def half_width(self) -> float:
        """Infinite while one conversation, or none with a round, is all there is."""
        if self.count < 2 or not self.below:
            return math.inf
        ratio, (above2, cross, below2) = self.value, self.squares
        spread = max(0.0, above2 - 2 * ratio * cross + ratio * ratio * below2)
        return SIDE * math.sqrt(spread * self.count / (self.count - 1)) / self.below


@dataclass
class Running:
    """Tokens per round of every drafting contender under every sampler, conversation by conversation.

    ``stop_at``: measuring has told enough once every half-width is at most this, after ``FEWEST`` conversations or
    more; ``enough`` then is how many it took. The conversations come in one order, whoever measures them, so that
    where it ends does not depend on the number of processes.
    """

    stop_at: float | None = None
    conversations: int = 0
    enough: int | None = None
    ratios: dict[tuple[str, str], RunningRatio] = field(default_factory=dict)

    def add(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Count the samples of one conversation; none when it is enough."""
        if self.enough is not None:
            return
        sums: dict[tuple[str, str], list[float]] = {}
        for sample in samples:
            if sample["shape"]:
                place = json.dumps(sample["sampler"], sort_keys=True), sample["contender"]
                total = sums.setdefault(place, [0, 0])
                total[0] += sum(r[2] for r in sample["rounds"])
                total[1] += len(sample["rounds"])
        for place, (committed, rounds) in sums.items():
            self.ratios.setdefault(place, RunningRatio()).add(committed, rounds)
        self.conversations += 1
        if self.stop_at is not None and self.conversations >= FEWEST and self.widest <= self.stop_at:
            self.enough = self.conversations

    @property
    def widest(self) -> float:
        """The largest half-width of all."""
        return max((ratio.half_width for ratio in self.ratios.values()), default=math.inf)

    def rule(self) -> dict[str, Any] | None:
        """By what measuring ended early, if it did."""
        if self.enough is None:
            return None
        return {"rule": RULE, "asked": self.stop_at, "half_width": self.widest}

    def shown(self) -> dict[str, str]:
        """For the progress bar: the contenders under the first sampler."""
        first = next(iter(self.ratios), ("", ""))[0]
        return {
            name: _text(ratio) for (sampler, name), ratio in self.ratios.items() if sampler == first and ratio.below
        }


def _text(ratio: RunningRatio) -> str:
    width = "" if math.isinf(ratio.half_width) else f" ± {ratio.half_width:.2f}"
    return f"τ {ratio.value:.2f}{width}"
