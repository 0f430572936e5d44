"""What a document holds below its objects and lists, by key: a name means the same wherever it stands.

Each is a piece of JSON Schema. Whether it may be null is said by the shape, for that goes by the place.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from spectrain.errors import SpectrainError

# Names among them that those who write documents share with those who read them alone.
PLAIN = "plain"  # plain decoding, as a contender
EVERYTHING = "everything"  # the total of all kinds in tables by kind
LOSSY = "LOSSY"  # in the name of every contender whose output has another law than the target's
ON, OFF = "on", "off"  # the decisions of a verdict

Leaf = Mapping[str, Any]
SIGNED: Leaf = {"type": "number"}  # a difference
AMOUNT: Leaf = {"type": "number", "minimum": 0}
SHARE: Leaf = {"type": "number", "minimum": 0, "maximum": 1.001}  # sums of float32 laws come to a little more than 1
COUNT: Leaf = {"type": "integer", "minimum": 0}
SIZE: Leaf = {"type": "integer", "minimum": 1}
TEXT: Leaf = {"type": "string"}
FLAG: Leaf = {"type": "boolean"}
DECISION: Leaf = {"type": "string", "enum": [ON, OFF]}

LEAVES: dict[str, Leaf] = {
    **dict.fromkeys(("relative_difference", "unaccounted", "floor_s", "seconds_per_row"), SIGNED),
    **dict.fromkeys(("rate", "share", "alpha", "break_even_alpha", "ece", "mean_confidence", "hit_rate"), SHARE),
    **dict.fromkeys(("confidence", "adjusted_confidence", "p_value", "adjusted_p_value", "detectable"), SHARE),
    **dict.fromkeys(("value", "low", "high", "mean", "speedup", "half_width", "statistic", "temperature"), AMOUNT),
    **dict.fromkeys(("logit_gap", "near_tie_gap", "largest_residual", "single", "from_larger_k", "by_batch"), AMOUNT),
    **dict.fromkeys(("prefill", "draft", "verify", "overhead", "total", "capacity", "request_rate"), AMOUNT),
    **dict.fromkeys(("c", "v", "o", "v_by_k", "predicted", "break_even_c", "plain_step_ms"), AMOUNT),
    **dict.fromkeys(("draft_cost_per_token", "draft_cost_per_round", "verify_cost_per_round"), AMOUNT),
    **dict.fromkeys(("overhead_cost_per_round", "proposed_per_round", "nodes_per_round", "rows"), AMOUNT),
    **dict.fromkeys(("break_even_tokens_per_round", "predicted_speedup", "measured_speedup"), AMOUNT),
    **dict.fromkeys(("draft_s", "verify_s", "overhead_s", "round_s", "seconds", "training_seconds"), AMOUNT),
    **dict.fromkeys(("token_p50", "token_p95", "prefill_p50", "prefill_p95", "prefill_s_per_request"), AMOUNT),
    **dict.fromkeys(("running", "running_in_decode", "rounds_by_running", "latency_ms_per_token", "asked"), AMOUNT),
    **dict.fromkeys(("tokens_per_round", "tokens_per_second", "decode_tokens_per_second", "answer_tokens"), AMOUNT),
    **dict.fromkeys(("prompt_tokens", "training_answer_tokens", "accepted"), AMOUNT),
    **dict.fromkeys(("conversations", "rounds", "clipped_rounds", "positions", "proposed", "resamples"), COUNT),
    **dict.fromkeys(("proposed_draft_tokens", "accepted_draft_tokens", "eos", "budget", "stop", "seed"), COUNT),
    **dict.fromkeys(("compared", "equal", "near_ties", "unexplained", "comparisons", "rank", "k", "best_k"), COUNT),
    **dict.fromkeys(("target_bytes", "drafter_bytes", "cache_bytes", "state_bytes", "context"), COUNT),
    **dict.fromkeys(("position", "tokens", "new_tokens", "count", "histogram", "bins", "depth", "nodes"), COUNT),
    **dict.fromkeys(("answers", "decoded", "identical", "points", "repeats", "max_new_tokens", "threads"), COUNT),
    **dict.fromkeys(("conversations_for", "conversations_needed", "best_k_by_batch", "context_tokens"), COUNT),
    **dict.fromkeys(("batch", "batches", "groups", "up_to_batch", "largest_paying_batch"), SIZE),
    **dict.fromkeys(("schema", "name", "digest", "dtype", "method", "contender", "drafter", "kind", "label"), TEXT),
    **dict.fromkeys(("reason", "verification", "why", "source", "would_change", "conversation", "baseline"), TEXT),
    **dict.fromkeys(("kinds", "sampler", "sentence", "type", "versions", "rule", "original"), TEXT),
    **dict.fromkeys(("lossy", "agrees", "tied", "pays", "saturated", "chose_the_step"), FLAG),
    "decision": DECISION,
}


def check_leaf(key: str, value: Any, path: str, *, nullable: bool = False) -> None:
    """Raise ``SpectrainError`` when ``value``, at ``path``, is not what the leaf ``key`` holds."""
    leaf = LEAVES[key]
    if not (nullable and value is None) and not _fits(leaf, value):
        raise SpectrainError(f"{path} is {value!r}, expected {described(leaf)}{' or null' if nullable else ''}")


def described(leaf: Leaf) -> str:
    """In words what a leaf holds."""
    if "enum" in leaf:
        return " or ".join(map(repr, leaf["enum"]))
    bounds = [f"{word} {leaf[key]}" for key, word in (("minimum", "at least"), ("maximum", "at most")) if key in leaf]
    return f"{leaf['type']}{' of ' if bounds else ''}{' and '.join(bounds)}"


def no_number(constant: str) -> None:
    """What Python's reader of JSON takes besides JSON: NaN and Infinity."""
    raise ValueError(f"it holds {constant}, which is no number")


def finite(value: float) -> bool:
    """Also whether a whole number is small enough to calculate with."""
    return abs(value) <= sys.float_info.max


def _fits(leaf: Leaf, value: Any) -> bool:
    """As JSON Schema has it: 2.0 is an integer, true is no number."""
    kind = leaf["type"]
    if kind == "string":
        return isinstance(value, str) and value in leaf.get("enum", (value,))
    if kind == "boolean" or isinstance(value, bool):
        return kind == "boolean" and isinstance(value, bool)
    if not isinstance(value, int | float) or not finite(value):
        return False
    whole = kind == "number" or isinstance(value, int) or value.is_integer()
    return whole and leaf.get("minimum", value) <= value <= leaf.get("maximum", value)
