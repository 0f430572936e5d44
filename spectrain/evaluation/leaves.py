"""Types of what a document holds below its objects and lists, by key: a name means the same wherever it stands."""

from __future__ import annotations

from typing import Any

from spectrain.errors import SpectrainError

NUMBER, COUNT, TEXT, FLAG = ("number", "null"), ("integer", "null"), ("string", "null"), ("boolean",)
LEAVES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("value", "low", "high", "rate", "share", "alpha", "mean", "speedup", "relative_difference"), NUMBER
    ),
    **dict.fromkeys(("confidence", "adjusted_confidence", "ece", "mean_confidence", "hit_rate", "half_width"), NUMBER),
    **dict.fromkeys(("statistic", "p_value", "adjusted_p_value", "detectable", "temperature", "logit_gap"), NUMBER),
    **dict.fromkeys(("prefill", "draft", "verify", "overhead", "unaccounted", "total"), NUMBER),
    **dict.fromkeys(("conversations", "rounds", "clipped_rounds", "positions", "proposed", "resamples"), COUNT),
    **dict.fromkeys(("compared", "equal", "near_ties", "unexplained", "comparisons", "rank", "k", "best_k"), COUNT),
    **dict.fromkeys(("target_bytes", "drafter_bytes", "cache_bytes", "state_bytes", "up_to_batch"), COUNT),
    **dict.fromkeys(("schema", "name", "digest", "dtype", "method", "contender", "drafter", "kind", "label"), TEXT),
    **dict.fromkeys(("decision", "reason", "verification", "why", "source", "would_change", "conversation"), TEXT),
    **dict.fromkeys(("lossy", "agrees", "tied", "pays"), FLAG),
}


def check_leaf(key: str, value: Any, path: str) -> None:
    """Raise ``SpectrainError`` when the value of ``key``, at ``path``, has another type than that key has."""
    expected = LEAVES.get(key)
    if expected is not None and not any(_is(kind, value) for kind in expected):
        raise SpectrainError(f"{path} is {value!r}, expected {' or '.join(expected)}")


def _is(kind: str, value: Any) -> bool:
    """As JSON Schema tells them apart: 2.0 is an integer, true is no number."""
    if kind == "null":
        return value is None
    if kind == "string":
        return isinstance(value, str)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return kind == "boolean" and isinstance(value, bool)
    return kind == "number" or (kind == "integer" and float(value).is_integer())
