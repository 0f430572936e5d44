"""Whether it pays, and whether the output is still the target's: the two questions behind the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spectrain.evaluation.answers import Answers
from spectrain.evaluation.changes import would_change
from spectrain.evaluation.decisions import Choice, Rival, decide, fewest
from spectrain.evaluation.faults import not_exact
from spectrain.evaluation.kinds import measured_kinds

Block = dict[str, Any]

# Largest gap between the logits of two tokens that rounding alone may swap when a block of tokens is
# computed at once instead of one by one. Beyond it, the decoder has changed the target's output.
NEAR_TIE = {"float64": 1e-8, "float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}
UNIT_DECODED = "conversations with more than one token"


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


def verdict_block(
    candidates: Sequence[tuple[Block, Block | None]],
    inexact: Mapping[str, str],
    speedup_at: Callable[[str, float], Block],
    load: Mapping[str, Any] | None = None,
    comparisons: int = 0,
    kinds: int = 1,
) -> Block:
    """On when the interval of the best contender's decode speedup lies above 1, otherwise off, and why.

    Args:
        candidates: (contender block, its numbers for the conversations in question), without plain; the numbers None
            where every answer ended with its first token.
        inexact: contenders of any sampler whose output was found not to be the target's, and how (see ``faults``);
            where there is one, nothing is on.
        speedup_at: name and confidence → the interval of its decode speedup at that confidence.
        load: the document's ``load``, where these contenders were measured in batches with the same sampler.
        comparisons: how many were measured to choose among, where these are only some of them.
        kinds: on how many kinds of conversation the choice is made, where this is one of them.

    Returns:
        ``decision``, ``contender`` and ``k`` (null and 0 when off; ``k`` is null for a tree), ``reason``, ``best``
        (what is on or, when nothing is, the fastest; null without one), ``comparisons`` and ``adjusted`` (how many
        there were to choose among, on all kinds together, and the interval of the best at the confidence that this asks
        for), ``up_to_batch`` (see the function), ``would_change`` (see ``changes``) and ``conversations_needed`` (a
        rough number, when only more conversations could decide). Lossy contenders are no candidates.
    """
    lawful = [(contender, numbers) for contender, numbers in candidates if not contender["lossy"]]
    if inexact:
        return _off(not_exact(inexact), "output that is the target's own")
    if not lawful:
        reason = "every contender is lossy" if candidates else "no drafter of this target was measured"
        return _off(reason, "a drafter whose rule keeps the target's law")
    choice = Choice(max(comparisons, len(lawful)), kinds)
    rivals = {contender["contender"]: (contender, numbers) for contender, numbers in lawful if numbers is not None}
    if len(rivals) < len(lawful):
        return _off(choice.too_few(0, UNIT_DECODED), "answers of more than one token")
    # An answer that prefill ends says nothing of decoding, however many of them there are.
    count = min(numbers["decoded"] for _, numbers in rivals.values())
    everything = next(iter(rivals.values()))[1]["conversations"]
    unit = "conversations" if count == everything else UNIT_DECODED
    pairs = [_rival(*pair, speedup_at) for pair in rivals.values()]
    decided = decide(pairs, count, unit, choice.contenders, choice.kinds)
    contender, numbers = rivals[decided.rival.name]
    best = _best(contender, numbers)
    needed = None if decided.needed is None else math.ceil(decided.needed * everything / count)
    found = {
        "decision": decided.decision,
        "contender": best["contender"] if decided.on else None,
        "k": best["k"] if decided.on else 0,
        "reason": decided.reason,
        "best": best,
        "comparisons": choice.looks,
        "adjusted": decided.adjusted,
        "up_to_batch": up_to_batch(load, best["contender"]) if load and decided.on else None,
        "conversations_needed": needed,
    }
    return {**found, "would_change": would_change(found, numbers, load)}


def _off(reason: str, change: str) -> Block:
    """A verdict that is about no contender."""
    return {
        "decision": "off",
        "contender": None,
        "k": 0,
        "reason": reason,
        "best": None,
        "comparisons": 0,
        "adjusted": None,
        "up_to_batch": None,
        "would_change": change,
        "conversations_needed": None,
    }


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


def judged(plain: Mapping[str, Any], contenders: int) -> int:
    """On how many kinds a verdict may be on, so that each is another look: they have as many conversations as choosing
    among so many contenders needs at least, and are not all that the kind above them has. Never fewer than one.

    ``plain``: the block of plain decoding, which decodes what the others do.
    """
    found, least = measured_kinds(plain), fewest(contenders)

    def whole(kind: str) -> bool:
        above = found.get(kind.rpartition("/")[0])
        return above is not None and above["conversations"] == found[kind]["conversations"]

    return max(1, sum(numbers["decoded"] >= least and not whole(kind) for kind, numbers in found.items()))


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
