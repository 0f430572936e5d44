"""What must hold between the parts of a contender's numbers; where it does not, the document is not written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spectrain.errors import SpectrainError

COUNTS = ("conversations", "rounds", "clipped_rounds", "tokens", "new_tokens", "proposed_draft_tokens",
          "accepted_draft_tokens")  # fmt: skip
TOLERANCE = 1e-9  # relative: sums of the same numbers in another order


def check_contender(block: Mapping[str, Any], kinds_of_one: bool = True) -> None:
    """Raise ``SpectrainError`` unless kinds and bands add up to the whole, and plain decoding commits a token a round.

    ``kinds_of_one``: whether every conversation has one kind; only then do conversations add up.
    """
    name, pooled = block["contender"], block["pooled"]
    tops = [numbers for kind, numbers in block["by_kind"].items() if "/" not in kind]
    for count in COUNTS if kinds_of_one else COUNTS[1:]:
        _same(f"{name}: {count} of the kinds", sum(n[count] for n in tops), pooled[count])
    for part, seconds in pooled["seconds"].items():
        if part != "unaccounted":  # the one that is cut off at 0
            _same(f"{name}: {part} seconds of the kinds", sum(n["seconds"][part] for n in tops), seconds)
    _weighted(f"{name}: tokens per round", tops, pooled, "tokens_per_round", lambda n: n["rounds"])
    _weighted(f"{name}: tokens per second", tops, pooled, "tokens_per_second", lambda n: n["seconds"]["total"])
    full = [n for n in tops if n["tokens_per_full_round"] is not None]
    if pooled["tokens_per_full_round"] is not None:
        _weighted(f"{name}: tokens per full round", full, pooled, "tokens_per_full_round", _full_rounds)
    for family, bands in block["by_band"].items():
        if bands:
            _same(f"{name}: rounds of the bands by {family}", sum(b["rounds"] for b in bands), pooled["rounds"])
            tokens = sum(b["rounds"] * b["tokens_per_round"]["value"] for b in bands)
            _same(f"{name}: tokens of the bands by {family}", tokens, pooled["tokens"])
    if block["shape"] is None:
        _same(f"{name}: tokens of a step of plain decoding", pooled["tokens_per_round"]["value"], 1.0)


def _full_rounds(numbers: Mapping[str, Any]) -> int:
    return sum(numbers["accepted_prefix"]["histogram"])


def _weighted(what: str, parts: Sequence[Mapping[str, Any]], whole: Mapping[str, Any], key: str, weight: Any) -> None:
    """A pooled rate is the mean of the parts' rates, weighted by what they are rates of."""
    weights = [weight(part) for part in parts]
    mean = _mean((part[key]["value"] for part in parts), weights)
    _same(f"{what} of the kinds, weighted", mean, whole[key]["value"])


def _mean(values: Iterable[float], weights: Sequence[float]) -> float:
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)


def _same(what: str, found: float, expected: float) -> None:
    if not math.isclose(found, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
        raise SpectrainError(f"contender {what} come to {found!r}, but the whole has {expected!r}; something is lost")
