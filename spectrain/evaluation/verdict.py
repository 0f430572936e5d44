"""Whether it pays, and whether the output is still the target's: the two questions behind the numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from spectrain.evaluation.answers import Answers

# With n conversations that are all faster, chance alone does this with probability 2^-n: below 6 that
# exceeds the 2.5% each side of a 95% interval, however narrow the bootstrap, which knows no other, makes it.
FEWEST_CONVERSATIONS = 6

# Largest gap between the logits of two tokens that rounding alone may swap when a block of tokens is
# computed at once instead of one by one. Beyond it, the decoder has changed the target's output.
NEAR_TIE = {"float64": 1e-8, "float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}


def near_tie_gap(dtype: str) -> float:
    """The largest gap of logits that rounding in ``dtype`` explains; float32's for a dtype that is not listed."""
    return NEAR_TIE.get(dtype.removeprefix("torch."), NEAR_TIE["float32"])


def exactness_block(answers: Answers, dtype: str) -> dict[str, Any]:
    """Greedy outputs beside plain decoding's, token by token.

    Returns:
        ``compared``, ``equal``, ``near_ties`` (first difference within ``near_tie_gap`` logits, as rounding
        in ``dtype`` explains), ``unexplained`` (the rest), and every first difference: position and gap. Of a ``lossy``
        contender nothing else is expected than that outputs differ: its ``unexplained`` are no fault.
    """
    limit, differences = near_tie_gap(dtype), answers.differences
    near = [d for d in differences if d["logit_gap"] is not None and abs(d["logit_gap"]) <= limit]
    return {
        "contender": answers.name,
        "lossy": answers.first.lossy,
        "compared": answers.compared,
        "equal": answers.compared - len(differences),
        "near_ties": len(near),
        "unexplained": len(differences) - len(near),
        "near_tie_gap": limit,
        "differences": differences,
    }


def verdict_block(candidates: Sequence[tuple[dict[str, Any], dict[str, Any]]], inexact: set[str]) -> dict[str, Any]:
    """On when the interval of the best contender's decode speedup lies above 1, otherwise off, and why.

    Args:
        candidates: (contender block, its numbers for the conversations in question), without plain.
        inexact: names of contenders whose greedy output differs from plain decoding's by more than
            rounding; they are never on.

    Returns:
        ``decision``, ``contender`` and ``k`` (null and 0 when off; ``k`` is null for a tree), ``reason``, ``best`` (the
        fastest exact contender whatever the decision, null without one) and ``conversations_needed`` (a rough
        number, when only more conversations could decide). Lossy contenders are no candidates.
    """
    lawful = [pair for pair in candidates if not pair[0]["lossy"]]
    exact = [pair for pair in lawful if pair[0]["contender"] not in inexact]
    if not exact:
        named = ", ".join(pair[0]["contender"] for pair in lawful)
        reason = "every contender is lossy" if candidates else "no drafter was measured"
        return _off(f"not exact: {named} changes the greedy output" if lawful else reason, None)
    contender, numbers = max(exact, key=lambda pair: pair[1]["speedup"]["decode"]["value"])
    best = {
        "contender": contender["contender"],
        "drafter": contender["drafter"],
        "k": contender["k"],
        "depth": contender["depth"],
        "nodes": contender["nodes"],
        "verification": contender["verification"],
        "conversations": numbers["conversations"],
        "tokens_per_round": numbers["tokens_per_round"],
        "decode_speedup": numbers["speedup"]["decode"],
        "total_speedup": numbers["speedup"]["total"],
    }
    speedup, count = best["decode_speedup"], numbers["conversations"]
    if count < FEWEST_CONVERSATIONS:
        return _off(f"too few conversations: {count}, at least {FEWEST_CONVERSATIONS} are needed", best)
    if speedup["low"] > 1:
        return {
            "decision": "on",
            "contender": best["contender"],
            "k": best["k"],
            "reason": "the interval lies above 1",
            "best": best,
            "conversations_needed": None,
        }
    if speedup["high"] < 1:
        return _off("slower than plain decoding", best)
    needed = conversations_needed(speedup, count)
    rough = f"; roughly {needed} conversations would settle a gain of this size" if needed else ""
    return _off(f"the interval includes 1{rough}", best, needed)


def conversations_needed(speedup: dict[str, float], conversations: int) -> int | None:
    """Conversations at which the interval, narrowing as 1/√n, would leave 1 out if the speedup stays.

    ``None`` when the speedup is not above 1 (more conversations cannot turn it on), or is so close to 1 that
    the number would mean nothing (beyond 100 times as many).
    """
    if speedup["value"] <= 1:
        return None
    factor = (math.log(speedup["value"] / speedup["low"]) / math.log(speedup["value"])) ** 2
    return math.ceil(conversations * factor) if factor <= 100 else None


def _off(reason: str, best: dict[str, Any] | None, needed: int | None = None) -> dict[str, Any]:
    return {
        "decision": "off",
        "contender": None,
        "k": 0,
        "reason": reason,
        "best": best,
        "conversations_needed": needed,
    }
