"""The numbers of one contender on one group of conversations: acceptance, time, speedup.

All rates are sums over sums; all intervals resample whole conversations, the same ones for every figure of a block.
Suffix C: one entry a conversation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from spectrain.errors import SpectrainError
from spectrain.evaluation.answers import PARTS, Clusters
from spectrain.evaluation.costs import cost_block
from spectrain.evaluation.decisions import FEWEST_CONVERSATIONS
from spectrain.evaluation.figures import Figure, measured
from spectrain.evaluation.samples import CLIPS

# A round holds a full target forward, so it cannot take less time than a plain step: speedup ≤ τ. Clocks
# drift by a few per cent between two measurements of the same thing; more than this is a fault.
ROUND_FASTER_THAN_STEP = 1.05
HALF_WIDTHS = (0.1, 0.05, 0.02)  # of tokens per round, that the advice is about

Found = Mapping[str, Any]


def number_block(contender: str, kind: str | None, own: Clusters, plain: Clusters,
                 memory: Mapping[str, int | None]) -> dict[str, Any]:  # fmt: skip
    """Everything the document says about ``contender`` on conversations of ``kind`` (``None`` = all kinds).

    Args:
        own: the contender's answers to these conversations.
        plain: answers to the same conversations by plain decoding of the same target.
        memory: ``target_bytes`` and ``drafter_bytes`` of weights, None where unknown.

    Raises:
        SpectrainError: no rounds, or numbers that contradict one another: survival and tokens per round, or a speedup
            above τ.
    """
    name = repr(contender) + (f" on kind {kind!r}" if kind is not None else "")
    if not own.total("rounds") or not plain.total("rounds"):
        raise SpectrainError(
            f"contender {name}: not one round was measured, every answer ended with its first token; "
            "allow more new tokens or leave these conversations out"
        )
    drafts = own.first.shape is not None
    rates = _rates(own)
    found: Found = measured(_acceptance(own) | rates | (_speedups(own, plain) if drafts else {}))
    seconds = _seconds(own)
    block = {
        "conversations": len(own),
        "decoded": (decoded := int((own.sums("rounds") > 0).sum())),  # those whose answers go on after prefill
        **_counted(own, found),
        "seconds": seconds,
        "shares": {part: value / seconds["total"] for part, value in seconds.items() if part != "total"},
        **{key: found[key] for key in rates},
        "latency_ms": _latency(own),
        "memory": {**memory, "cache_bytes": own.most("cache_bytes"), "state_bytes": own.most("state_bytes")},
        "advice": {"tokens_per_round": advice(found["tokens_per_round"], len(own))},
        "speedup": None,
        "cost": None,
    }
    _check_sum(name, block)
    if drafts:
        block["speedup"] = {"decode": found["decode"], "total": found["with prefill"]}
        _check_speedup(name, decoded, found)
        block["cost"] = cost_block(block, own, plain_step_s=plain.total("decode") / plain.total("committed"))
    return block


# --- figures ------------------------------------------------------------------------------------------------------


def _acceptance(own: Clusters) -> dict[str, Figure]:
    """Acceptance by position (of a tree, by depth) comes from full (unclipped) rounds alone: a round that EOS or the
    budget has cut says nothing about what would have been accepted behind the cut."""
    full_C, reached_CK, tested_CK = own.sums("full"), own.sums("reached"), own.sums("tested")
    accepted_C = reached_CK.sum(1)
    figures = {
        "tokens_per_round": Figure(own.sums("committed"), own.sums("rounds")),
        "tokens_per_full_round": Figure(own.sums("full_tokens"), full_C),
        "accepted_prefix": Figure(accepted_C, full_C),
    }
    least_CK = np.concatenate([full_C[:, None], reached_CK], 1)
    ended_CK = least_CK - np.concatenate([reached_CK, np.zeros((len(own), 1))], 1)
    figures |= {f"prefix {i}": Figure(ended_C, full_C, share=True) for i, ended_C in enumerate(ended_CK.T)}
    for i, (reached_C, tested_C) in enumerate(zip(reached_CK.T, tested_CK.T, strict=True), start=1):
        figures[f"survival {i}"] = Figure(reached_C, full_C, share=True)
        figures[f"conditional {i}"] = Figure(reached_C, tested_C, share=True)
    if own.first.depth and own.recorded("visited"):
        visited_CX = own.sums("visited")
        places = enumerate(zip(visited_CX[:, ::2].T, visited_CX[:, 1::2].T, strict=True), start=1)
        figures |= {f"visited {i}": Figure(alpha_C, count_C) for i, (alpha_C, count_C) in places}
    return figures


def _rates(own: Clusters) -> dict[str, Figure]:
    new_C, total_C = own.sums("new_tokens"), own.sums("total")
    energy = (own.sums("energy"), new_C) if own.recorded("energy") else (np.zeros(len(own)),) * 2
    return {
        "tokens_per_second": Figure(new_C, total_C),
        "decode_tokens_per_second": Figure(own.sums("committed"), own.sums("decode")),
        "accepted_draft_tokens_per_second": Figure(own.sums("kept"), total_C),
        "energy_j_per_token": Figure(*energy),
    }


def _speedups(own: Clusters, plain: Clusters) -> dict[str, Figure]:
    """Rates of committed tokens, contender ÷ plain: decoding alone, and from the prompt to the last token; and how many
    rounds take as long as a step of plain decoding."""
    return {
        "decode": decode_speedup(own, plain),
        "with prefill": rate_ratio(own, plain),
        "steps": Figure(own.sums("rounds"), own.sums("decode"), (plain.sums("rounds"), plain.sums("decode"))),
    }


def decode_speedup(own: Clusters, plain: Clusters) -> Figure:
    """Committed tokens per decoding second of ``own`` ÷ those of plain decoding."""
    return Figure(own.sums("committed"), own.sums("decode"), (plain.sums("committed"), plain.sums("decode")))


def rate_ratio(own: Clusters, other: Clusters) -> Figure:
    """Tokens per device-second of ``own`` ÷ those of ``other``, on the same conversations, resampled together."""
    return Figure(own.sums("new_tokens"), own.sums("total"), (other.sums("new_tokens"), other.sums("total")))


# --- parts of the block -------------------------------------------------------------------------------------------


def _counted(own: Clusters, found: Found) -> dict[str, Any]:
    full = int(own.total("full"))
    reached, tested = (own.sums(name).sum(0).astype(int).tolist() for name in ("reached", "tested"))
    histogram = [more - fewer for more, fewer in zip([full, *reached], [*reached, 0], strict=True)]
    clipped = {clip: int(own.total(clip)) for clip in CLIPS}
    places = range(1, len(reached) + 1)
    prefix = found["accepted_prefix"]
    return {
        "rounds": int(own.total("rounds")),
        "clipped_rounds": sum(clipped.values()),
        "clipped": clipped,
        "tokens": int(own.total("committed")),
        "new_tokens": int(own.total("new_tokens")),
        "proposed_draft_tokens": int(own.total("nodes")),
        "accepted_draft_tokens": int(own.total("kept")),
        "tokens_per_round": found["tokens_per_round"],
        "tokens_per_full_round": found["tokens_per_full_round"],
        "accepted_prefix": {
            "mean": prefix and prefix["value"],
            "interval": prefix,
            "histogram": histogram,
            "shares": [{"accepted": i, **_named(found[f"prefix {i}"], "share")} for i in range(len(histogram))],
        },
        "marginal_survival": [
            {"position": i, **_named(found[f"survival {i}"]), "accepted": reached[i - 1], "rounds": full}
            for i in places
        ],
        "conditional_acceptance": [
            {"position": i, **_named(found[f"conditional {i}"]), "accepted": reached[i - 1], "proposed": tested[i - 1]}
            for i in places
        ],
        "visited_alpha": _visited(own, found),
    }


def _named(figure: Found | None, name: str = "rate") -> dict[str, float | None]:
    """An interval whose value has another name; nulls where the figure is not defined."""
    return dict(zip((name, "low", "high"), figure.values() if figure else (None,) * 3, strict=True))


def _visited(own: Clusters, found: Found) -> list[dict[str, Any]] | None:
    """α = Σ min(p, q) at the states that decoding really visited, where it was recorded."""
    if "visited 1" not in found:
        return None
    counts = own.sums("visited").sum(0)[1::2].astype(int).tolist()
    return [
        {"position": i, **_named(found[f"visited {i}"], "value"), "positions": count}
        for i, count in enumerate(counts, start=1)
    ]


def _seconds(own: Clusters) -> dict[str, float]:
    """Summed seconds by part, and ``total``; ``unaccounted`` is what the total holds beyond the parts."""
    seconds = {part: own.total(part) for part in PARTS}
    total = seconds.pop("total")
    return {**seconds, "unaccounted": max(total - sum(seconds.values()), 0.0), "total": total}


def _latency(own: Clusters) -> dict[str, float | None]:
    """Percentiles over answers, in milliseconds; ``token`` is decode time ÷ tokens after the first."""
    prefill_N, tokens_N = own.each("prefill"), own.each("committed")
    decode_N = (own.each("total") - prefill_N)[tokens_N > 0]
    return {
        f"{name}_p{percentile}": float(np.percentile(1e3 * values_N, percentile))
        for name, values_N in (("token", decode_N / tokens_N[tokens_N > 0]), ("prefill", prefill_N))
        for percentile in (50, 95)
    }


def advice(interval: Found, conversations: int) -> dict[str, Any]:
    """How many conversations like these would narrow an interval to given half widths: it shrinks as 1/√n."""
    if interval["low"] is None:
        return {"half_width": None, "conversations_for": {str(wanted): None for wanted in HALF_WIDTHS}}
    half = (interval["high"] - interval["low"]) / 2
    exact = {wanted: conversations * (half / wanted) ** 2 for wanted in HALF_WIDTHS}
    needed = {str(wanted): max(2, math.ceil(round(count, 6))) for wanted, count in exact.items()}
    return {"half_width": half, "conversations_for": needed}


# --- what cannot be -----------------------------------------------------------------------------------------------


def _check_sum(name: str, block: Found) -> None:
    """Σ marginal survival + 1 = tokens per round, an identity of full rounds."""
    if block["tokens_per_full_round"] is None:
        return
    per_round, expected = (
        block["tokens_per_full_round"]["value"],
        1 + sum(r["rate"] for r in block["marginal_survival"]),
    )
    if not math.isclose(per_round, expected, abs_tol=1e-9):
        raise SpectrainError(
            f"contender {name}: Σ marginal survival + 1 = {expected:.6f}, but unclipped rounds commit {per_round:.6f} "
            "tokens each; the decoder loses or invents tokens, or does not mark clipped rounds"
        )


def _check_speedup(name: str, conversations: int, found: Found) -> None:
    """A round that takes less time than a step of plain decoding, beyond its interval: then the speedup exceeds tokens
    per round, which no drafter can do. The intervals of very few conversations are too narrow to say so."""
    steps = found["steps"]
    if conversations >= FEWEST_CONVERSATIONS and (steps["low"] or 0) > ROUND_FASTER_THAN_STEP:
        raise SpectrainError(
            f"contender {name}: a decode speedup of {found['decode']['value']:.3f} exceeds "
            f"{found['tokens_per_round']['value']:.3f} tokens per round: its rounds would be {steps['value']:.3f} "
            f"(at least {steps['low']:.3f}) times as fast as plain steps, and each holds one; plain decoding was "
            "slowed, or some of the contender's time is lost"
        )
