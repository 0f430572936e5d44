"""Teacher-forced scores, in the raw samples of answers → rows of the document: what the target says of every position.

Shapes: C conversations, D draft depths.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spectrain.drafters.scoring import DepthScores
from spectrain.evaluation.figures import Figure, measured
from spectrain.evaluation.leaves import EVERYTHING
from spectrain.evaluation.samples import is_of, kind_and_parents
from spectrain.exact.sampler import Sampler


@dataclass
class _Scores:
    """One drafter on one sampler's answers: totals by kind, and what intervals need of each conversation."""

    totals: dict[str, DepthScores] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    sums: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    """Σ α and positions by depth, of each conversation."""

    def add(self, sample: Mapping[str, Any]) -> None:
        scores = DepthScores.recorded(sample["teacher_forced"])
        for kind in dict.fromkeys((EVERYTHING, *kind_and_parents(sample["kind"]))):
            self.totals[kind] = self.totals.get(kind, DepthScores()) + scores
        name, found = sample["conversation"], list(zip(scores.alpha, scores.positions, strict=True))
        self.kinds[name] = sample["kind"]
        before = self.sums.get(name, [(0.0, 0)] * len(found))
        self.sums[name] = [(a + b, n + m) for (a, n), (b, m) in zip(before, found, strict=True)]

    def rows(self) -> Iterator[dict[str, Any]]:
        """A row a kind and depth that has positions; intervals resample the conversations."""
        for kind, total in self.totals.items():
            names = sorted(name for name in self.sums if kind == EVERYTHING or is_of(self.kinds[name], kind))
            table_CD2 = np.array([self.sums[name] for name in names], dtype=np.float64)
            figures = {str(d): Figure(table_CD2[:, d, 0], table_CD2[:, d, 1]) for d in range(table_CD2.shape[1])}
            for depth, interval in measured(figures).items():
                if interval is not None:
                    yield {
                        "temperature": 1.0,  # α compares the laws at T=1, whatever the prefixes were sampled with
                        "kind": kind,
                        "depth": int(depth),
                        "alpha": interval["value"],
                        "interval": interval,
                        "greedy_conditional": total.conditional()[int(depth)],
                        "positions": total.positions[int(depth)],
                        "conversations": int((table_CD2[:, int(depth), 1] > 0).sum()),
                    }


class TeacherForced:
    """Scores of raw samples, one after another; the rows of the document are made of them."""

    def __init__(self) -> None:
        self._scores: dict[tuple[str, str], _Scores] = {}

    def add(self, sample: Mapping[str, Any]) -> None:
        """Count a raw sample, where it has scores."""
        if sample.get("teacher_forced") is not None:
            place = sample["drafter"], json.dumps(sample["sampler"])
            self._scores.setdefault(place, _Scores()).add(sample)

    def rows(self) -> list[dict[str, Any]]:
        """Acceptance probability at T=1 and conditional greedy acceptance by drafter, prefixes' sampler, kind and
        depth."""
        return [
            {"drafter": drafter, "prefixes": Sampler(**json.loads(sampler)).describe(), **row}
            for (drafter, sampler), found in self._scores.items()
            for row in found.rows()
        ]
