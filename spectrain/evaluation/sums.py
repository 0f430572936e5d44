"""What must hold among the numbers of one contender: what can be computed from the rest has to be what it comes to.

A rule is a place and what stands there by the other numbers of the same block; another kind of fault is another rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spectrain.evaluation.contradictions import above_zero, at_most, same

Numbers = Mapping[str, Any]

COUNTS = ("conversations", "rounds", "clipped_rounds", "tokens", "new_tokens", "proposed_draft_tokens",
          "accepted_draft_tokens")  # fmt: skip
PARTS = ("prefill", "draft", "verify", "overhead")


def _full(n: Numbers) -> int:
    return int(n["rounds"] - n["clipped_rounds"])


def _decode_s(n: Numbers) -> float:
    return float(n["seconds"]["total"] - n["seconds"]["prefill"])


def _mean(n: Numbers) -> float | None:
    histogram = n["accepted_prefix"]["histogram"]
    return sum(i * count for i, count in enumerate(histogram)) / _full(n) if _full(n) else None


def _unaccounted(n: Numbers) -> float:
    return float(max(n["seconds"]["total"] - sum(n["seconds"][part] for part in PARTS), 0.0))


RULES: Mapping[str, Callable[[Numbers], Any]] = {
    "clipped_rounds": lambda n: sum(n["clipped"].values()),
    "tokens_per_round.value": lambda n: n["tokens"] / n["rounds"],
    "accepted_prefix.mean": _mean,
    "accepted_prefix.interval.value": _mean,
    "tokens_per_full_round.value": lambda n: (
        1 + (_mean(n) or 0)
    ),  # each full round commits what it accepts and one more
    "seconds.unaccounted": _unaccounted,
    "tokens_per_second.value": lambda n: n["new_tokens"] / n["seconds"]["total"],
    "decode_tokens_per_second.value": lambda n: n["tokens"] / _decode_s(n),
    "accepted_draft_tokens_per_second.value": lambda n: n["accepted_draft_tokens"] / n["seconds"]["total"],
    "cost.break_even_tokens_per_round": lambda n: sum(
        n["cost"][f"{part}_cost_per_round"] for part in ("draft", "verify", "overhead")
    ),
    "cost.predicted_speedup": lambda n: n["tokens_per_round"]["value"] / n["cost"]["break_even_tokens_per_round"],
    "cost.measured_speedup": lambda n: n["speedup"]["decode"]["value"],
    "cost.relative_difference": lambda n: n["cost"]["predicted_speedup"] / n["cost"]["measured_speedup"] - 1,
}
LIMITS: Mapping[str, Callable[[Numbers], float]] = {
    "decoded": lambda n: n["conversations"],  # the others' answers end with prefill
    "clipped_rounds": lambda n: n["rounds"],
    "rounds": lambda n: n["tokens"],  # each commits one at least
    "tokens": lambda n: n["new_tokens"] - n["conversations"],  # the first token of an answer comes from prefill
    "accepted_draft_tokens": lambda n: n["proposed_draft_tokens"],
    "latency_ms.token_p50": lambda n: n["latency_ms"]["token_p95"],
    "latency_ms.prefill_p50": lambda n: n["latency_ms"]["prefill_p95"],
}
POSITIVE: Mapping[str, Callable[[Numbers], float]] = {
    "conversations": lambda n: n["conversations"],
    "rounds": lambda n: n["rounds"],
    "seconds.total": lambda n: n["seconds"]["total"],
    "seconds.prefill, taken from the total,": _decode_s,
    "speedup.decode.value": lambda n: n["speedup"]["decode"]["value"] if n["speedup"] else 1,
    "cost.break_even_tokens_per_round": lambda n: n["cost"]["break_even_tokens_per_round"] if n["cost"] else 1,
}


def check_numbers(numbers: Numbers, path: str, depth: int) -> None:
    """A contender's numbers on some conversations; its drafts are up to ``depth`` tokens deep."""
    for place, value in POSITIVE.items():
        above_zero(f"{path}.{place}", value(numbers))
    for place, limit in LIMITS.items():
        holder, _, key = place.rpartition(".")
        if (found := _at(numbers, holder).get(key)) is not None:
            at_most(f"{path}.{place}", found, limit(numbers), "the numbers beside it allow")
    _check_positions(numbers, path, depth)
    for place, expected in RULES.items():
        holder, _, key = place.rpartition(".")
        block = _at(numbers, holder)
        if block is not None:
            same(f"{path}.{place}", block[key], expected(numbers), "the numbers beside it come to")


def _at(numbers: Numbers, place: str) -> Any:
    """What stands at a place; None where it, or something that it lies in, is null."""
    found: Any = numbers
    for key in filter(None, place.split(".")):
        found = found and found[key]
    return found


def _check_positions(numbers: Numbers, path: str, depth: int) -> None:
    """Each position's counts are those of the histogram of accepted prefixes, which holds every full round."""
    prefix, full = numbers["accepted_prefix"], _full(numbers)
    histogram = prefix["histogram"]
    same(f"{path}.accepted_prefix.histogram", sum(histogram), full, "rounds that were not clipped are")
    lists = {
        "accepted_prefix.histogram": (histogram, depth + 1),
        "accepted_prefix.shares": (prefix["shares"], depth + 1),
    }
    lists |= {name: (numbers[name], depth) for name in ("marginal_survival", "conditional_acceptance")}
    for name, (rows, length) in lists.items():
        same(f"{path}.{name} has a length that", len(rows), length, "by the depth of the drafts is")
    for i, (row, count) in enumerate(zip(prefix["shares"], histogram, strict=True)):
        here = f"{path}.accepted_prefix.shares[{i}]"
        same(f"{here}.accepted", row["accepted"], i, "its place is")
        same(f"{here}.share", row["share"], count / full if full else None, "the histogram gives")
    survival, conditional = numbers["marginal_survival"], numbers["conditional_acceptance"]
    for i, (reached, tested) in enumerate(zip(survival, conditional, strict=True)):
        counts = (sum(histogram[i + 1 :]), "the histogram gives")
        for name, row, of in (("marginal_survival", reached, "rounds"), ("conditional_acceptance", tested, "proposed")):
            here = f"{path}.{name}[{i}]"
            same(f"{here}.position", row["position"], i + 1, "its place is")
            same(f"{here}.accepted", row["accepted"], *counts)
            at_most(f"{here}.accepted", row["accepted"], row[of], f"{of} are")
            rate = row["accepted"] / row[of] if row[of] else None
            same(f"{here}.rate", row["rate"], rate, "the counts beside it give")
        same(f"{path}.marginal_survival[{i}].rounds", reached["rounds"], full, "rounds that were not clipped are")
        at_most(f"{path}.conditional_acceptance[{i}].proposed", tested["proposed"], full, "full rounds are")


# --- parts and the whole ------------------------------------------------------------------------------------------


def check_parts(contender: Mapping[str, Any], path: str, *, kinds_of_one: bool = False) -> None:
    """Kinds and bands add up to the whole, and plain decoding commits a token a round.

    ``kinds_of_one``: whether every conversation is known to have one kind; only then do conversations add up. Where a
    kind has no figures, the others come to the whole at most.
    """
    pooled = contender["pooled"]
    tops = [numbers for kind, numbers in contender["by_kind"].items() if "/" not in kind]
    told = [numbers for numbers in tops if numbers is not None]
    whole = len(told) == len(tops)
    for count in COUNTS if kinds_of_one or not whole else COUNTS[1:]:
        _check_part(f"{path}.pooled.{count}", pooled[count], sum(n[count] for n in told), whole)
    if whole:
        most = sum(numbers["conversations"] for numbers in told)
        at_most(f"{path}.pooled.conversations", pooled["conversations"], most, "its kinds come to")
    for part in (*PARTS, "total"):
        found = math.fsum(numbers["seconds"][part] for numbers in told)
        _check_part(f"{path}.pooled.seconds.{part}", pooled["seconds"][part], found, whole)
    for family, bands in contender["by_band"].items():
        if bands:
            here = f"{path}.by_band.{family}"
            same(f"{path}.pooled.rounds", pooled["rounds"], sum(b["rounds"] for b in bands), f"those of {here} come to")
            tokens = _weighted(bands)
            same(f"{path}.pooled.tokens", pooled["tokens"], tokens, f"those of {here} come to")
    if contender["shape"] is None:
        same(f"{path}.pooled.tokens", pooled["tokens"], pooled["rounds"], "steps of plain decoding are")


def _check_part(path: str, pooled: float, found: float, whole: bool) -> None:
    if whole:
        same(path, pooled, found, "its kinds come to")
    else:
        at_most(f"{path}, what its kinds come to,", found, pooled, "all of them are")


def _weighted(bands: Sequence[Mapping[str, Any]]) -> float:
    return math.fsum(band["rounds"] * band["tokens_per_round"]["value"] for band in bands)


def check_beside(numbers: Numbers, baseline: Numbers, path: str) -> None:
    """Speedups are ratios to plain decoding of the same conversations, which has as many of them."""
    same(f"{path}.conversations", numbers["conversations"], baseline["conversations"], "plain decoding answered")
    if numbers["speedup"] is None:
        return
    for part, rate in (("decode", "decode_tokens_per_second"), ("total", "tokens_per_second")):
        ratio = numbers[rate]["value"] / baseline[rate]["value"]
        same(f"{path}.speedup.{part}.value", numbers["speedup"][part]["value"], ratio, "the rates come to")
