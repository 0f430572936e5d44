"""Whether it pays, and whether the output is still the target's: the two questions behind the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spectrain.evaluation.answers import Answers
from spectrain.evaluation.changes import would_change
from spectrain.evaluation.decisions import Rival, decide

Block = dict[str, Any]

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


def departures(exactness: Sequence[Block], distribution: Sequence[Block] | None) -> dict[str, str]:
    """Contenders whose output is not the target's though their rule keeps its law, and how it differs: found greedily,
    beyond rounding (``exactness_block``), or in what was sampled (``distribution_block``)."""
    greedy = {e["contender"]: "changes the greedy output" for e in exactness if e["unexplained"] and not e["lossy"]}
    differ = [test["contender"] for test in distribution or () if not test["agrees"] and not test["lossy"]]
    return greedy | dict.fromkeys(differ, "samples from another law than the target's")


def verdict_block(
    candidates: Sequence[tuple[Block, Block]],
    inexact: Mapping[str, str],
    speedup_at: Callable[[str, float], Block],
    load: Mapping[str, Any] | None = None,
    comparisons: int = 0,
) -> Block:
    """On when the interval of the best contender's decode speedup lies above 1, otherwise off, and why.

    Args:
        candidates: (contender block, its numbers for the conversations in question), without plain.
        inexact: contenders whose output was found not to be the target's, and how (see ``departures``); they
            are never on.
        speedup_at: name and confidence → the interval of its decode speedup at that confidence.
        load: the document's ``load``, where these contenders were measured in batches with the same sampler.
        comparisons: how many were measured to choose among, where these are only some of them.

    Returns:
        ``decision``, ``contender`` and ``k`` (null and 0 when off; ``k`` is null for a tree), ``reason``, ``best``
        (what is on or, when nothing is, the fastest exact contender; null without one), ``comparisons`` and
        ``adjusted`` (how many there were to choose among, and the interval of the best at the confidence that this asks
        for), ``up_to_batch`` (see the function), ``would_change`` (see ``changes``) and ``conversations_needed`` (a
        rough number, when only more conversations could decide). Lossy contenders are no candidates.
    """
    lawful = [pair for pair in candidates if not pair[0]["lossy"]]
    names = [contender["contender"] for contender, _ in lawful]
    exact = {pair[0]["contender"]: pair for pair in lawful if pair[0]["contender"] not in inexact}
    if not exact:
        reason = "every contender is lossy" if candidates else "no drafter of this target was measured"
        change = "output that is the target's own" if lawful else "a drafter whose rule keeps the target's law"
        return {
            "decision": "off",
            "contender": None,
            "k": 0,
            "reason": f"not exact: {_departed({name: inexact[name] for name in names})}" if lawful else reason,
            "best": None,
            "comparisons": 0,
            "adjusted": None,
            "up_to_batch": None,
            "would_change": change,
            "conversations_needed": None,
        }
    # An answer that prefill ends says nothing of decoding, however many of them there are.
    count = min(numbers["decoded"] for _, numbers in exact.values())
    everything = next(iter(exact.values()))[1]["conversations"]
    unit = "conversations" if count == everything else "conversations with more than one token"
    comparisons = max(comparisons, len(exact))
    decided = decide([_rival(*pair, speedup_at) for pair in exact.values()], count, unit, comparisons)
    contender, numbers = exact[decided.rival.name]
    best = _best(contender, numbers)
    needed = None if decided.needed is None else math.ceil(decided.needed * everything / count)
    found = {
        "decision": decided.decision,
        "contender": best["contender"] if decided.on else None,
        "k": best["k"] if decided.on else 0,
        "reason": decided.reason,
        "best": best,
        "comparisons": comparisons,
        "adjusted": decided.adjusted,
        "up_to_batch": up_to_batch(load, best["contender"]) if load and decided.on else None,
        "conversations_needed": needed,
    }
    return {**found, "would_change": would_change(found, numbers, load)}


def _departed(inexact: Mapping[str, str]) -> str:
    """All of them, by how they differ."""
    ways = dict.fromkeys(inexact.values())
    return "; ".join(f"{', '.join(name for name in inexact if inexact[name] == way)} ({way})" for way in ways)


def _rival(contender: Block, numbers: Block, speedup_at: Callable[[str, float], Block]) -> Rival:
    name = contender["contender"]
    return Rival(name, numbers["speedup"]["decode"], lambda confidence: speedup_at(name, confidence))


def _best(contender: Block, numbers: Block) -> Block:
    return {
        **{name: contender[name] for name in ("contender", "drafter", "k", "depth", "nodes", "verification")},
        "conversations": numbers["conversations"],
        "tokens_per_round": numbers["tokens_per_round"],
        "decode_speedup": numbers["speedup"]["decode"],
        "total_speedup": numbers["speedup"]["total"],
    }


def up_to_batch(load: Mapping[str, Any], contender: str) -> int | None:
    """The largest batch at which a contender was measured to pay, without one below at which it is certainly slower.

    1 when no batch pays: the verdict itself is about single requests. None when it was not measured in batches.
    """
    rows = sorted((row for row in load["rows"] if row["contender"] == contender), key=lambda row: row["batch"])
    largest = 1
    for row in rows:
        if row["speedup"]["high"] < 1:
            break
        largest = row["batch"] if row["pays"] else largest
    return largest if rows else None
