"""Types of what a document holds below its objects and lists, by key: a name means the same wherever it stands."""

from __future__ import annotations

from typing import Any

from spectrain.errors import SpectrainError

# Names among them that those who write documents share with those who read them alone.
PLAIN = "plain"  # plain decoding, as a contender
EVERYTHING = "everything"  # the total of all kinds in tables by kind
LOSSY = "LOSSY"  # in the name of every contender whose output has another law than the target's

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
    **dict.fromkeys(("lossy", "agrees", "tied", "pays", "saturated", "chose_the_step"), FLAG),
    **dict.fromkeys(("c", "v", "o", "v_by_k", "predicted", "break_even_alpha", "break_even_c", "single"), NUMBER),
    **dict.fromkeys(("draft_cost_per_token", "draft_cost_per_round", "verify_cost_per_round"), NUMBER),
    **dict.fromkeys(("overhead_cost_per_round", "proposed_per_round", "nodes_per_round", "rows", "accepted"), NUMBER),
    **dict.fromkeys(("break_even_tokens_per_round", "predicted_speedup", "measured_speedup"), NUMBER),
    **dict.fromkeys(("draft_s", "verify_s", "overhead_s", "floor_s", "round_s", "seconds", "seconds_per_row"), NUMBER),
    **dict.fromkeys(("token_p50", "token_p95", "prefill_p50", "prefill_p95", "prefill_s_per_request"), NUMBER),
    **dict.fromkeys(
        ("running", "running_in_decode", "rounds_by_running", "request_rate", "capacity", "latency_ms_per_token"),
        NUMBER,
    ),
    **dict.fromkeys(("tokens_per_round", "tokens_per_second", "decode_tokens_per_second", "answer_tokens"), NUMBER),
    **dict.fromkeys(("prompt_tokens", "largest_residual", "by_batch", "near_tie_gap"), NUMBER),
    **dict.fromkeys(("position", "tokens", "new_tokens", "count", "histogram", "bins", "depth", "nodes"), COUNT),
    **dict.fromkeys(("eos", "budget", "stop", "batch", "batches", "context", "context_tokens", "groups"), COUNT),
    **dict.fromkeys(("answers", "identical", "points", "repeats", "max_new_tokens", "threads", "seed"), COUNT),
    **dict.fromkeys(("conversations_for", "conversations_needed", "best_k_by_batch", "largest_paying_batch"), COUNT),
    **dict.fromkeys(("kinds", "sampler", "sentence", "type", "versions"), TEXT),
}


def check_leaf(key: str, value: Any, path: str) -> None:
    """Raise ``SpectrainError`` when the value of ``key``, at ``path``, has another type than that key has."""
    expected = LEAVES.get(key)
    if expected is not None and not any(_is(kind, value) for kind in expected):
        raise SpectrainError(f"{path} is {value!r}, expected {' or '.join(expected)}")


def no_number(constant: str) -> None:
    """What Python's reader of JSON takes besides JSON: NaN and Infinity."""
    raise ValueError(f"it holds {constant}, which is no number")


def _is(kind: str, value: Any) -> bool:
    """As JSON Schema tells them apart: 2.0 is an integer, true is no number."""
    if kind == "null":
        return value is None
    if kind == "string":
        return isinstance(value, str)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return kind == "boolean" and isinstance(value, bool)
    return kind == "number" or (kind == "integer" and float(value).is_integer())
