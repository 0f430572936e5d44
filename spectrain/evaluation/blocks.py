"""The numbers of one contender on one group of conversations: acceptance, time, speedup.

Suffix C: one entry a conversation. All rates are sums over sums; all intervals resample whole conversations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from spectrain.errors import SpectrainError
from spectrain.evaluation.costs import cost_block
from spectrain.evaluation.decisions import FEWEST_CONVERSATIONS, resamples_at
from spectrain.evaluation.samples import Sample, seconds_of
from spectrain.measures import RoundCounts, pooled_rate, ratio_interval, ratio_of_ratios_interval

STATISTICS: dict[str, Any] = {"confidence": 0.95, "resamples": 2000, "seed": 0}

# A round holds a full target forward, so it cannot take less time than a plain step: speedup ≤ τ. Clocks
# drift by a few per cent between two measurements of the same thing; more than this is a fault.
ROUND_FASTER_THAN_STEP = 1.05


def number_block(contender: str, kind: str | None, own: Sequence[Sample], plain: Sequence[Sample]) -> dict[str, Any]:
    """Everything the document says about ``contender`` on conversations of ``kind`` (``None`` = all kinds).

    Args:
        own: the contender's samples of these conversations.
        plain: samples of the same conversations by plain decoding of the same target.

    Raises:
        SpectrainError: no rounds, unclipped rounds that commit other than accepted + 1 tokens, or a speedup
            above τ.
    """
    name = repr(contender) + (f" on kind {kind!r}" if kind is not None else "")
    clusters, baseline = _clusters(own), _clusters(plain)
    if not any(s.rounds for s in own) or not any(s.rounds for s in plain):
        raise SpectrainError(
            f"contender {name}: not one round was measured, every answer ended with its first token; "
            "allow more new tokens or leave these conversations out"
        )
    seconds = seconds_of(own)
    block = {
        "conversations": len(clusters),
        **_acceptance(name, clusters, own[0].depth),
        "seconds": seconds,
        "shares": {part: value / seconds["total"] for part, value in seconds.items() if part != "total"},
        "tokens_per_second": _rate(clusters, _new_tokens, _total),
        "decode_tokens_per_second": _rate(clusters, _committed, _decode),
        "accepted_draft_tokens_per_second": _rate(clusters, _accepted_and_committed, _total),
        "latency_ms": _latency(own),
        "speedup": None,
        "cost": None,
    }
    if own[0].shape is not None:
        block["speedup"] = _speedup(name, clusters, baseline)
        block["cost"] = cost_block(block, own, plain_step_s=sum(map(_decode, plain)) / sum(map(_committed, plain)))
    return block


# What is summed over a conversation's samples.


def _rounds(sample: Sample) -> float:
    return len(sample.rounds)


def _committed(sample: Sample) -> float:
    return sample.new_tokens - 1  # the first token is prefill's


def _new_tokens(sample: Sample) -> float:
    return sample.new_tokens


def _accepted_and_committed(sample: Sample) -> float:
    """Accepted draft tokens that reached the answer: those behind a clip are thrown away."""
    return sum(min(accepted, committed) for _, accepted, committed, _, _ in sample.rounds)


def _nodes(sample: Sample) -> float:
    return sum(nodes for _, _, _, _, nodes in sample.rounds)


def _decode(sample: Sample) -> float:
    return sample.decode_s


def _total(sample: Sample) -> float:
    return sample.total_s


Measure = Callable[[Sample], float]
Clusters = list[list[Sample]]


def _clusters(samples: Sequence[Sample]) -> Clusters:
    """Samples by conversation, in the order of the conversations' names: the same for every contender."""
    by_conversation: dict[str, list[Sample]] = {}
    for sample in samples:
        by_conversation.setdefault(sample.conversation, []).append(sample)
    return [by_conversation[name] for name in sorted(by_conversation)]


def _sums(clusters: Clusters, measure: Measure) -> list[float]:
    return [float(sum(map(measure, cluster))) for cluster in clusters]


def _rate(clusters: Clusters, above: Measure, below: Measure) -> dict[str, float | None]:
    above_C, below_C = _sums(clusters, above), _sums(clusters, below)
    if len(clusters) < 2:
        return _single(pooled_rate(above_C, below_C))
    return asdict(ratio_interval(above_C, below_C, **STATISTICS))


def _single(value: float) -> dict[str, float | None]:
    """One conversation has a value but says nothing about others."""
    return {"value": value, "low": None, "high": None}


def _acceptance(name: str, clusters: Clusters, depth: int) -> dict[str, Any]:
    """Counts of rounds. Acceptance by position (of a tree, by depth) comes from full (unclipped) rounds alone: a round
    that EOS or the budget has cut says nothing about what would have been accepted behind the cut."""
    try:
        counts = RoundCounts.from_rounds(r[:4] for cluster in clusters for s in cluster for r in s.rounds)
    except SpectrainError as error:
        raise SpectrainError(f"contender {name}: {error}") from error
    full = counts.whole
    survival = _survival(full, depth)
    _check_sum(name, full, survival)
    histogram = full.accepted_histogram if full.rounds else []
    return {
        "rounds": counts.rounds,
        "clipped_rounds": counts.clipped_rounds,
        "tokens": counts.committed_tokens,
        "new_tokens": int(sum(_sums(clusters, _new_tokens))),
        "proposed_draft_tokens": int(sum(_sums(clusters, _nodes))),
        "accepted_draft_tokens": counts.accepted_tokens,
        "tokens_per_round": _rate(clusters, _committed, _rounds),
        "tokens_per_full_round": full.tokens_per_round if full.rounds else None,
        "accepted_prefix": {
            "mean": sum(i * n for i, n in enumerate(histogram)) / full.rounds if full.rounds else None,
            "histogram": histogram + [0] * (depth + 1 - len(histogram)),
        },
        "marginal_survival": survival,
        "conditional_acceptance": _conditional(full, depth),
    }


def _survival(full: RoundCounts, depth: int) -> list[dict[str, Any]]:
    rows = []
    for position in range(1, depth + 1):
        accepted = sum(times for (_, length, _, _), times in full.seen.items() if length >= position)
        rate = accepted / full.rounds if full.rounds else None
        rows.append({"position": position, "rate": rate, "accepted": accepted, "rounds": full.rounds})
    return rows


def _conditional(full: RoundCounts, depth: int) -> list[dict[str, Any]]:
    rates = full.conditional + [None] * depth
    rows = []
    for position, rate in enumerate(rates[:depth], start=1):
        tested = [
            (accepted, times)
            for (proposed, accepted, _, _), times in full.seen.items()
            if proposed >= position and accepted >= position - 1
        ]
        rows.append(
            {
                "position": position,
                "rate": rate,
                "accepted": sum(times for accepted, times in tested if accepted >= position),
                "proposed": sum(times for _, times in tested),
            }
        )
    return rows


def _check_sum(name: str, full: RoundCounts, survival: Sequence[dict[str, Any]]) -> None:
    """Σ marginal survival + 1 = tokens per round, an identity of full rounds."""
    if not full.rounds:
        return
    expected = 1 + sum(row["rate"] for row in survival)
    if not math.isclose(full.tokens_per_round, expected, abs_tol=1e-9):
        raise SpectrainError(
            f"contender {name}: Σ marginal survival + 1 = {expected:.6f}, but unclipped rounds commit "
            f"{full.tokens_per_round:.6f} tokens each; the decoder loses or invents tokens, or does not mark "
            "clipped rounds"
        )


def _latency(samples: Sequence[Sample]) -> dict[str, float | None]:
    """Percentiles over answers, in milliseconds; ``token`` is decode time ÷ tokens after the first."""
    token = [1e3 * s.decode_s / _committed(s) for s in samples if s.rounds]
    prefill = [1e3 * s.prefill_s for s in samples]
    return {
        f"{name}_p{percentile}": float(np.percentile(values, percentile))
        for name, values in (("token", token), ("prefill", prefill))
        for percentile in (50, 95)
    }


def _speedup(name: str, clusters: Clusters, plain: Clusters) -> dict[str, Any]:
    """Rates of committed tokens, contender ÷ plain: decoding alone, and from the prompt to the last token.

    Raises ``SpectrainError`` when a round takes less time than a step of plain decoding, beyond its interval:
    then the speedup exceeds tokens per round, which no drafter can do. The intervals of very few
    conversations are too narrow to say so.
    """
    steps = _compare(clusters, plain, _rounds, _decode)
    if len(clusters) >= FEWEST_CONVERSATIONS and steps["low"] > ROUND_FASTER_THAN_STEP:
        decode = _compare(clusters, plain, _committed, _decode)["value"]
        tokens = _rate(clusters, _committed, _rounds)["value"]
        raise SpectrainError(
            f"contender {name}: a decode speedup of {decode:.3f} exceeds {tokens:.3f} tokens per round: "
            f"its rounds would be {steps['value']:.3f} (at least {steps['low']:.3f}) times as fast as plain "
            "steps, and each holds one; plain decoding was slowed, or some of the contender's time is lost"
        )
    return {
        "decode": _compare(clusters, plain, _committed, _decode),
        "total": _compare(clusters, plain, _new_tokens, _total),
    }


def decode_speedup(own: Sequence[Sample], plain: Sequence[Sample], confidence: float) -> dict[str, Any]:
    """The interval of ``speedup.decode`` at another confidence."""
    return _compare(_clusters(own), _clusters(plain), _committed, _decode, confidence)


def rate_ratio(own: Sequence[Sample], other: Sequence[Sample]) -> dict[str, Any]:
    """Tokens per device-second of ``own`` ÷ those of ``other``, on the same conversations, resampled together."""
    return _compare(_clusters(own), _clusters(other), _new_tokens, _total)


def _compare(own: Clusters, plain: Clusters, above: Measure, below: Measure,
             confidence: float | None = None) -> dict[str, Any]:  # fmt: skip
    columns = [_sums(side, measure) for side in (own, plain) for measure in (above, below)]
    if len(own) < 2:
        return _single(pooled_rate(columns[0], columns[1]) / pooled_rate(columns[2], columns[3]))
    wanted = {} if confidence is None else {"confidence": confidence, "resamples": resamples_at(confidence)}
    return asdict(ratio_of_ratios_interval(*columns, **STATISTICS | wanted))
