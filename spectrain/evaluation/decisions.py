"""When a contender is turned on: the fastest whose interval lies above 1, at a confidence that allows for the choice.

The fastest of several is chosen after the fact, which flatters it. With m contenders to choose among, each is held to
an interval of confidence 1 - 0.05/m (Bonferroni), so that the chance of turning on one that does not pay stays what it
is with a single one. All that one measurement says is held to the same m, of one drafter as of all together: then what
is said of a drafter and what is said of all cannot differ in which k to take, and holds together. A verdict on a kind
of conversation is one of as many as there are kinds, and each of them is another look: m contenders on n kinds are m·n.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Interval = dict[str, Any]

CONFIDENCE = 0.95
RESAMPLES = 2000
BEYOND = 20  # resamples that should lie beyond each end of an interval, so that it is not decided by two or three


@dataclass(frozen=True)
class Rival:
    """A contender, its speedup with its own interval, and the interval at another confidence."""

    name: str
    speedup: Interval
    at_confidence: Callable[[float], Interval]


@dataclass(frozen=True)
class Decided:
    """Who is turned on or, where nobody is, the fastest; ``needed``: how many conversations (or batches) could turn it
    on, where only more of them could."""

    decision: Literal["on", "off"]
    rival: Rival
    adjusted: Interval | None
    reason: str
    needed: int | None = None

    @property
    def on(self) -> bool:
        return self.decision == "on"


def adjusted_confidence(comparisons: int) -> float:
    """The confidence of each of so many intervals, at which all hold together with ``CONFIDENCE`` or more."""
    return 1 - (1 - CONFIDENCE) / max(comparisons, 1)


def resamples_at(confidence: float) -> int:
    """As many as leave ``BEYOND`` beyond each end; never fewer than usual."""
    return max(RESAMPLES, math.ceil(2 * BEYOND / (1 - confidence) - 1e-6))


def fewest(comparisons: int = 1) -> int:
    """Conversations below which nothing is turned on.

    With n that are all faster, chance alone does this with probability 2^-n: below 6 that exceeds the 2.5% each side of
    a 95% interval, however narrow the bootstrap, which knows no other, makes it; and with more comparisons, later.
    """
    return math.ceil(math.log2(2 / (1 - adjusted_confidence(comparisons))))


FEWEST_CONVERSATIONS = fewest()


@dataclass(frozen=True)
class Choice:
    """So many contenders, on each of so many kinds of conversation."""

    contenders: int
    kinds: int = 1

    @property
    def looks(self) -> int:
        return self.contenders * self.kinds

    def __str__(self) -> str:
        if self.kinds == 1:
            return str(self.contenders)
        return f"{self.contenders} on each of {self.kinds} kinds" if self.contenders > 1 else f"{self.kinds} kinds"

    def too_few(self, count: int, unit: str) -> str:
        """Why nothing is turned on over so few."""
        least = fewest(self.looks)
        among = f" to choose among {self}" if least > FEWEST_CONVERSATIONS else ""
        return f"too few {unit}: {count}, at least {least} are needed{among}"


def decide(rivals: Sequence[Rival], count: int, unit: str = "conversations", comparisons: int | None = None,
           kinds: int = 1) -> Decided:  # fmt: skip
    """Turn on the fastest whose adjusted interval lies above 1, if any.

    Args:
        rivals: at least one.
        count: conversations (or whatever ``unit`` is) that the intervals resample.
        comparisons: how many were measured to choose among, where these are only some of them.
        kinds: on how many kinds of conversation the choice is made, of which this is one.
    """
    ranked = sorted(rivals, key=lambda rival: rival.speedup["value"], reverse=True)
    choice = Choice(max(comparisons or 0, len(ranked)), kinds)
    m, first = choice.looks, ranked[0]
    if count < fewest(m):
        needed = fewest(m) if first.speedup["value"] > 1 else None
        return Decided("off", first, None, choice.too_few(count, unit), needed)
    if any(rival.speedup["low"] is None for rival in ranked):
        return Decided("off", first, None, f"too few {unit} with more than one token to have an interval")
    confidence = adjusted_confidence(m)
    for rival in ranked:
        if rival.speedup["low"] > 1:  # the adjusted interval is wider
            adjusted = _adjusted(rival, m)
            if adjusted["low"] > 1:
                return Decided("on", rival, adjusted, f"the interval lies above 1{_chosen(rival, ranked, choice)}")
    adjusted = _adjusted(first, m)
    if first.speedup["high"] < 1:
        return Decided("off", first, adjusted, "slower than plain decoding")
    needed = conversations_needed(adjusted, count)
    rough = f"; roughly {needed} {unit} would settle a gain of this size" if needed else ""
    reason = f"the interval includes 1{rough}"
    if first.speedup["low"] > 1:
        reason = f"the interval lies above 1, but not at {confidence:.1%}, which choosing among {choice} asks for"
        reason += rough
    return Decided("off", first, adjusted, reason, needed)


def _adjusted(rival: Rival, m: int) -> Interval:
    return rival.speedup if m == 1 else rival.at_confidence(adjusted_confidence(m))


def _chosen(rival: Rival, ranked: Sequence[Rival], choice: Choice) -> str:
    if choice.looks == 1:
        return ""
    faster = "" if rival is ranked[0] else f"; {ranked[0].name} was faster here, but not for certain"
    return f", also at {adjusted_confidence(choice.looks):.1%}, for it was chosen among {choice}{faster}"


def conversations_needed(speedup: Interval, count: int) -> int | None:
    """Conversations at which the interval, narrowing as 1/√n, would leave 1 out if the speedup stays.

    ``None`` when the speedup is not above 1 (more conversations cannot turn it on), or is so close to 1 that
    the number would mean nothing (beyond 100 times as many).
    """
    if speedup["value"] <= 1:
        return None
    factor = (math.log(speedup["value"] / speedup["low"]) / math.log(speedup["value"])) ** 2
    return math.ceil(count * factor) if factor <= 100 else None
