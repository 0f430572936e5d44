"""Figures of the document, each a ratio of sums by conversation with its interval; all of a block in one bootstrap.

Suffix C: one entry a conversation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from spectrain.intervals import ratio_intervals

STATISTICS: dict[str, Any] = {"confidence": 0.95, "resamples": 2000, "seed": 0}

# A share of rounds has an interval when at least so many rounds were counted on either side: with fewer, no interval
# holds the truth as often as it says (tests/evaluation/test_ground_truth.py).
FEWEST_EVENTS = 5

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Figure:
    """Σ top ÷ Σ bottom; over the same of a base, if there is one. ``share``: the top counts some of the bottom."""

    top_C: Floats
    bottom_C: Floats
    base: tuple[Floats, Floats] | None = None
    share: bool = False

    @property
    def defined(self) -> bool:
        return bool(self.bottom_C.sum() > 0) and (self.base is None or bool(self.base[0].sum() > 0))

    @property
    def bounded(self) -> bool:
        """Whether there is enough of it for an interval."""
        counted = min(self.top_C.sum(), (self.bottom_C - self.top_C).sum()) if self.share else FEWEST_EVENTS
        return self.defined and int((self.bottom_C > 0).sum()) >= 2 and bool(counted >= FEWEST_EVENTS)


def measured(figures: Mapping[str, Figure]) -> dict[str, dict[str, float | None] | None]:
    """``value``, ``low`` and ``high`` of each; None where the figure is not defined, ``low`` and ``high`` None where it
    has no interval: of one conversation, or of a share with fewer than ``FEWEST_EVENTS`` on a side."""
    found: dict[str, dict[str, float | None] | None] = dict.fromkeys(figures)
    for paired in (False, True):
        names = [n for n, figure in figures.items() if figure.defined and (figure.base is not None) is paired]
        if names:
            found |= _together(names, [figures[name] for name in names])
    return found


def _together(names: list[str], figures: list[Figure]) -> dict[str, dict[str, float | None] | None]:
    values = {name: _value(figure) for name, figure in zip(names, figures, strict=True)}
    bounded = [(name, figure) for name, figure in zip(names, figures, strict=True) if figure.bounded]
    rows: dict[str, dict[str, float | None] | None] = {
        name: {"value": value, "low": None, "high": None} for name, value in values.items()
    }
    if bounded:
        parts = [(f.top_C, f.bottom_C, *(f.base or ())) for _, f in bounded]
        intervals = ratio_intervals(*(np.stack(side) for side in zip(*parts, strict=True)), **STATISTICS)
        for (name, _), low, high in zip(bounded, intervals.low.tolist(), intervals.high.tolist(), strict=True):
            rows[name] = {"value": values[name], "low": low, "high": high}
    return rows


def _value(figure: Figure) -> float:
    value = figure.top_C.sum() / figure.bottom_C.sum()
    return float(value if figure.base is None else value / (figure.base[0].sum() / figure.base[1].sum()))


def one(figure: Figure) -> dict[str, float | None]:
    """A single figure that is defined."""
    found = measured({"": figure})[""]
    assert found is not None
    return found
