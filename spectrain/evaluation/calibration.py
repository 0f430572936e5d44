"""Does a drafter know when it is right, and how much can it say at all? From sums of raw samples.

*Confidence* is the probability that the drafter gives: teacher-forced, its largest one at T=1 at every position of the
target's answers, right where its greedy token is the target's; decoding, that of a token it drew under the sampler,
right where that was accepted. An accepted draft token is not one that the target likes best, so that row says how well
confidence predicts acceptance; only where target and drafter agree do both lie on the diagonal.

The *expected calibration error* (ECE) is Σ over bins of (their share of positions) × |mean confidence - share of right
ones|, in ten equal bins of confidence, over the positions of all conversations together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from spectrain.drafters.scoring import added
from spectrain.evaluation.figures import STATISTICS
from spectrain.evaluation.leaves import EVERYTHING
from spectrain.evaluation.samples import kind_and_parents
from spectrain.exact.sampler import Sampler
from spectrain.intervals import ratio_interval

TEACHER_FORCED = "teacher-forced"


class Calibration:
    """Sums of raw samples, one after another; the rows of the document are made of them."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str, str, int | None], list[list[float]]] = {}
        self._covered: dict[tuple[str, str], dict[str, list[int]]] = {}

    @classmethod
    def of(cls, samples: Iterable[Mapping[str, Any]]) -> Calibration:
        """Of all these samples; none of them is kept."""
        calibration = cls()
        for sample in samples:
            calibration.add(sample)
        return calibration

    def add(self, sample: Mapping[str, Any]) -> None:
        """Count a raw sample: its ``confidence``, and its ``teacher_forced`` scores where it has some."""
        drafter, sampler, forced = sample["drafter"], json.dumps(sample["sampler"]), sample.get("teacher_forced")
        if (bins := sample.get("confidence")) is not None:
            self._add((drafter, sample["contender"], sampler, None), bins)
        if forced is not None:
            for depth, bins in enumerate(forced["confidence"]):
                self._add((drafter, TEACHER_FORCED, sampler, depth), bins)
            for kind in dict.fromkeys((EVERYTHING, *kind_and_parents(sample["kind"]))):
                clusters = self._covered.setdefault((drafter, kind), {})
                before = clusters.get(sample["conversation"], [0, 0])
                clusters[sample["conversation"]] = added(before, forced["in_draft_vocabulary"])

    def _add(self, place: tuple[str, str, str, int | None], bins: list[list[float]]) -> None:
        self._sums[place] = added(self._sums[place], bins) if place in self._sums else bins

    def rows(self) -> list[dict[str, Any]]:
        """By drafter, source (teacher-forced by depth, or a contender) and sampler (teacher-forced: of the prefixes).

        ``positions``, ``ece``, ``mean_confidence``, ``hit_rate``, and ``bins`` with ``low``, ``high``, ``count``,
        ``confidence`` and ``accepted`` (means; None in an empty bin). Rows without a position are left out.
        """
        return [
            {
                "drafter": drafter,
                "source": source,
                "sampler": Sampler(**json.loads(sampler)).describe(),
                "depth": depth,
                **reliability(bins),
            }
            for (drafter, source, sampler, depth), bins in self._sums.items()
            if any(count for _, count, _ in bins)
        ]

    def vocabulary_rows(self) -> list[dict[str, Any]]:
        """The share of the target's greedy tokens that each drafter can say at all, by drafter and kind.

        ``coverage`` has an interval over conversations (low and high None for fewer than two), over prefixes of all
        samplers; ``tokens`` is how many it was measured on.
        """
        return [
            {"drafter": drafter, "kind": kind, "coverage": _interval(list(clusters.values())), "tokens": tokens}
            for (drafter, kind), clusters in self._covered.items()
            if (tokens := sum(of for _, of in clusters.values()))
        ]


def reliability(bins: Sequence[Sequence[float]]) -> dict[str, Any]:
    """A reliability curve and its ECE, from [Σ confidence, count, right ones] of equal bins from 0 to 1."""
    total, count, right = (sum(column) for column in zip(*bins, strict=True))
    return {
        "positions": count,
        "ece": sum(abs(confidence - hits) for confidence, _, hits in bins) / count,
        "mean_confidence": total / count,
        "hit_rate": right / count,
        "bins": [
            {
                "low": i / len(bins),
                "high": (i + 1) / len(bins),
                "count": here,
                "confidence": confidence / here if here else None,
                "accepted": hits / here if here else None,
            }
            for i, (confidence, here, hits) in enumerate(bins)
        ],
    }


def _interval(clusters: Sequence[Sequence[int]]) -> dict[str, float | None]:
    covered_C, of_C = zip(*clusters, strict=True)
    if len(clusters) < 2:
        return {"value": sum(covered_C) / sum(of_C), "low": None, "high": None}
    return asdict(ratio_interval(covered_C, of_C, **STATISTICS))
