"""What a server does at a request rate, with and without speculation: a simple queueing estimate from measured batches.

Requests arrive at λ a second, each asking for L tokens behind a prompt, and join the running batch at once. While a
prompt is read nobody decodes, so prefills take the share λ·p of the time. In a steady state as many tokens are made as
are asked for, and by Little's law the batch b is how many arrive while one is answered. Both are the fixed point

    λ · L = T(b) · (1 - λ·p)

with T(b) the measured decode tokens a second with b requests running: linear between the batches measured, and through
the origin below the smallest, where the server rests between requests. Nothing is known beyond the largest batch: where
λ needs more than the most that was measured, it is called saturated. Arrivals that bunch, or answers of unequal length,
make waits longer than this says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from spectrain.evaluation.leaves import PLAIN


def goodput(load: Mapping[str, Any], rates: Sequence[float]) -> list[dict[str, Any]]:
    """For each rate: every contender's steady state, and which is best.

    Returns:
        Rows with ``request_rate``, ``prompt_tokens`` and ``answer_tokens`` (means), ``contenders`` (see ``_state``),
        ``best`` (``contender`` and ``k``; k = 0 is plain decoding, and null is a tree) and a ``sentence``.
    """
    plain = [row for row in load["rows"] if row["contender"] == PLAIN]
    answer = sum(row["answer_tokens"] for row in plain) / len(plain)
    return [_at_rate(load["rows"], rate, load["prompt_tokens"], answer) for rate in rates]


def _at_rate(rows: Sequence[Mapping[str, Any]], rate: float, prompt: float, answer: float) -> dict[str, Any]:
    names = dict.fromkeys(row["contender"] for row in rows)
    states = [_state([row for row in rows if row["contender"] == name], rate, answer) for name in names]
    able = [state for state in states if not state["saturated"]]
    best = min(able, key=lambda s: s["latency_ms_per_token"]) if able else max(states, key=lambda s: s["capacity"])
    return {
        "request_rate": rate,
        "prompt_tokens": prompt,
        "answer_tokens": answer,
        "contenders": states,
        "best": {"contender": best["contender"], "k": best["k"]},
        "sentence": _sentence(rate, states, best),
    }


def _state(rows: Sequence[Mapping[str, Any]], rate: float, answer: float) -> dict[str, Any]:
    """The steady state of one contender.

    Returns:
        ``contender``, ``k``; ``capacity``: the most requests a second that the measured batches could take;
        ``saturated``; and, null when it is: ``running`` requests, ``tokens_per_second``, ``latency_ms_per_token``.
    """
    measured = sorted((r["running_in_decode"], r["decode_tokens_per_second"]) for r in rows if r["running_in_decode"])
    prefill = sum(row["prefill_s_per_request"] for row in rows) / len(rows)
    most = max(speed for _, speed in measured)
    found = {"contender": rows[0]["contender"], "k": rows[0]["k"], "capacity": most / (answer + most * prefill)}
    running = _fixed_point(measured, rate * answer, 1 - rate * prefill)
    demand = rate * answer
    return {
        **found,
        "saturated": running is None,
        "running": running,
        "tokens_per_second": None if running is None else demand,
        "latency_ms_per_token": None if running is None else 1e3 * running / demand,
    }


def _fixed_point(measured: Sequence[tuple[float, float]], demand: float, free: float) -> float | None:
    """The smallest b with T(b) · free = demand; None when no measured batch decodes that much."""
    if free <= 0:
        return None
    wanted = demand / free
    for (low, slow), (high, fast) in pairwise([(0.0, 0.0), *measured]):
        if slow < wanted <= fast:
            return low + (high - low) * (wanted - slow) / (fast - slow)
    return None


def _sentence(rate: float, states: Sequence[dict[str, Any]], best: dict[str, Any]) -> str:
    plain = next(state for state in states if state["contender"] == PLAIN)
    asked = f"At {rate:g} request{'' if rate == 1 else 's'} a second"
    if best["saturated"]:
        return (
            f"{asked} every contender is saturated: the most is {best['capacity']:.3g}, by {best['contender']}, in the "
            "batches that were measured."
        )
    took = f"{best['running']:.1f} requests running, {best['latency_ms_per_token']:.1f} ms a token"
    if best is plain:
        return f"{asked} plain decoding is best: {took}."
    if plain["saturated"]:
        return f"{asked} plain decoding is saturated (at {plain['capacity']:.3g}); {best['contender']} is not: {took}."
    return f"{asked} {best['contender']} is best: {took}; plain decoding has {plain['latency_ms_per_token']:.1f} ms."
