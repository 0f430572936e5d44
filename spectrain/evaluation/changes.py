"""What would change a verdict, in words with the numbers that they come from.

A verdict that is off for its costs names the acceptance and the draft cost at which a round breaks even; one that is
off for want of data how much more; one that is on what would turn it off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spectrain.evaluation.costs import break_even
from spectrain.evaluation.wording import number, plural

UNMEASURED = "larger batches, which were not measured"


def would_change(verdict: Mapping[str, Any], numbers: Mapping[str, Any], load: Mapping[str, Any] | None) -> str:
    """What would turn the verdict round.

    Args:
        verdict: ``decision``, ``best``, ``up_to_batch`` and ``conversations_needed``.
        numbers: the best contender's, with ``cost`` and ``tokens_per_round``.
        load: the document's, where the contender was measured in batches with the same sampler.
    """
    best, on = verdict["best"], verdict["decision"] == "on"
    edges = _edges(best["k"], numbers, on)
    if on:
        beyond = _batches(best["contender"], verdict["up_to_batch"], load)
        return "; ".join([" or ".join(edges), beyond]) if edges else beyond
    parts = []
    if verdict["conversations_needed"] is not None:
        more = verdict["conversations_needed"] - best["conversations"]
        parts.append(f"about {plural(max(more, 1), 'more conversation')}")
    elif edges:
        parts.append(" or ".join(edges))
    if not parts:
        cost = number(numbers["cost"]["break_even_tokens_per_round"])
        parts.append(f"cheaper rounds: they cost {cost} plain steps, which no acceptance at this length is worth")
    return "; ".join([*parts, *_paying(best["contender"], load)])


def _paying(contender: str, load: Mapping[str, Any] | None) -> list[str]:
    """Larger batches that are on, each with whom it is on for. Batches of 1 are what the verdict itself is about."""
    rows = [row for row in (load or {"by_batch": ()})["by_batch"] if row["decision"] == "on" and row["batch"] > 1]
    batches: dict[str, list[str]] = {}
    for row in rows:
        batches.setdefault(row["contender"], []).append(str(row["batch"]))
    return [
        f"batches of {', '.join(sizes)}, where {'it' if name == contender else name} was measured to pay"
        for name, sizes in batches.items()
    ]


def _edges(k: int | None, numbers: Mapping[str, Any], on: bool) -> list[str]:
    """The acceptance and the draft cost at which rounds break even, told from the side where the verdict stands."""
    cost, tokens = numbers["cost"], numbers["tokens_per_round"]["value"]
    beyond, within = ("below", "above") if on else ("above", "below")
    if k is None:
        needed, spare = number(cost["break_even_tokens_per_round"]), tokens - _rest(cost)
        edges = [f"tokens per round {beyond} {needed} (now {number(tokens)})"]
        now, unit = cost["draft_cost_per_round"], "steps a round"
    else:
        found = break_even(cost, k, tokens)
        edges = []
        if found["alpha"] is not None and found["alpha_now"] is not None:
            edges = [f"α {beyond} {number(found['alpha'])} at k={k} (now as if {number(found['alpha_now'])})"]
        spare, now, unit = found["draft_cost"], cost["draft_cost_per_token"], "steps a token"
    if spare is not None and spare > 0 and now is not None:
        edges.append(f"a draft cost {within} {number(spare, 3)} {unit} (now {number(now, 3)})")
    return edges


def _rest(cost: Mapping[str, Any]) -> float:
    return float(cost["verify_cost_per_round"] + cost["overhead_cost_per_round"])


def _batches(contender: str, up_to: int | None, load: Mapping[str, Any] | None) -> str:
    """What larger batches do to a contender that is on."""
    if load is None or up_to is None:
        return UNMEASURED
    rows = sorted((row for row in load["rows"] if row["contender"] == contender), key=lambda row: row["batch"])
    beyond = [row for row in rows if row["batch"] > up_to]
    if not beyond:
        return f"no batch that was measured, up to {rows[-1]['batch']}"
    row = beyond[0]
    word = "is slower" if row["speedup"]["high"] < 1 else "is not measured to pay"
    return f"batches of {row['batch']}, where it {word} ({number(row['speedup']['value'])}×)"
