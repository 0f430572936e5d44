"""What was measured under load, summed up: rates by batch size, up to which batch it pays, what rounds consist of.

Intervals resample whole batches. Rates hold everything from the prompts to the last token, prefill included, as a
server's do; ``decode_speedup`` leaves the prefill out, and is what the cost model predicts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from spectrain.errors import SpectrainError
from spectrain.evaluation.decisions import FEWEST_CONVERSATIONS, Rival, decide, resamples_at
from spectrain.evaluation.leaves import PLAIN
from spectrain.evaluation.wording import interval, number
from spectrain.evaluation.workbench import table
from spectrain.intervals import ratio_of_ratios_interval
from spectrain.measures import pooled_rate

Samples = Sequence[dict[str, Any]]
PARTS = ("draft_s", "verify_s", "overhead_s")
EARLIER = "batches were measured by an earlier version; delete load.jsonl and measure again"


def summarise_load(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Raw lines of ``load.measure_load``, by batch size → the numbers.

    Returns:
        ``batches``, ``context_tokens``; ``verification``: median seconds of forwards by batch, context and k, and v,
        their ratio to a plain step behind as much context; ``lines``: the
        straight lines nearest to them;
        ``drafting``: what rounds consist of; ``rows``: rates of every contender by batch; ``crossovers`` and
        ``largest_paying_batch`` by contender; ``by_batch``: the verdict at each batch size.
    """
    verification = [row for line in lines for row in _verification(line)]
    samples = [sample for line in lines for sample in line["samples"]]
    rates = summarise(samples)
    return {
        "batches": [line["batch"] for line in lines],
        "context_tokens": sorted({row["context"] for row in verification}),
        "verification": verification,
        "lines": _lines(verification),
        "drafting": [row for line in lines for row in _drafting(line)],
        **rates,
        "largest_paying_batch": {c["contender"]: c["largest_paying_batch"] for c in rates["crossovers"]},
        "by_batch": [_verdict(line["samples"]) for line in lines],
    }


# --- rounds -------------------------------------------------------------------------------------------------------


def _verification(line: dict[str, Any]) -> list[dict[str, Any]]:
    taken = {(cost["context"], cost["rows"]): median(cost["seconds"]) for cost in line["verification"]}
    return [
        {"batch": line["batch"], "context": context, "k": rows - 1, "rows": rows, "seconds": seconds,
         "v": seconds / taken[context, 1]}
        for (context, rows), seconds in taken.items()
    ]  # fmt: skip


def _lines(verification: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """seconds = floor + slope · rows, the least squares of relative errors, for each batch and context: how much of a
    step is waiting for the weights, and how much each token costs. ``largest_residual`` says how straight it is."""
    found = []
    for batch, context in dict.fromkeys((row["batch"], row["context"]) for row in verification):
        points = [(r["rows"], r["seconds"]) for r in verification if (r["batch"], r["context"]) == (batch, context)]
        if len(points) < 2:
            continue
        weights = [1 / seconds**2 for _, seconds in points]
        total = sum(weights)
        x, y = (sum(w * point[i] for w, point in zip(weights, points, strict=True)) / total for i in (0, 1))
        covariance = sum(w * (p - x) * (s - y) for w, (p, s) in zip(weights, points, strict=True))
        slope = covariance / sum(w * (p - x) ** 2 for w, (p, _) in zip(weights, points, strict=True))
        floor = y - slope * x
        worst = max(abs(floor + slope * p - s) / s for p, s in points)
        found.append({"batch": batch, "context": context, "points": len(points), "floor_s": floor,
                      "seconds_per_row": slope, "largest_residual": worst})  # fmt: skip
    return found


def _drafting(line: dict[str, Any]) -> list[dict[str, Any]]:
    """Means over rounds of each contender: seconds of the parts, tokens proposed by a request, tokens of a request in
    the forward. Rounds of as many requests are summed together, above 16 those of within about a tenth as many: what a
    step takes may jump from one size to the next, as kernels have sizes that they like."""
    found: dict[tuple[str, int], Counter[str]] = {}
    for part in line["parts"]:
        if "running" not in part:
            raise SpectrainError(EARLIER)
        total = found.setdefault((part["contender"], _alike(part["running"])), Counter())
        total.update({name: part[name] for name in ("rounds", "proposed", "rows", *PARTS)})
        total["requests"] += part["running"] * part["rounds"]
    return [
        {
            "contender": name,
            "batch": line["batch"],
            "rounds": total["rounds"],
            "running": total["requests"] / total["rounds"],
            "proposed_per_round": total["proposed"] / total["requests"],
            **{part: total[part] / total["rounds"] for part in ("rows", *PARTS)},
        }
        for (name, _), total in sorted(found.items())
    ]


def _alike(running: int) -> int:
    return running if running <= 16 else 17 + int(math.log(running / 16, 1.1))


# --- rates --------------------------------------------------------------------------------------------------------


def summarise(samples: Samples) -> dict[str, Any]:
    """``rows``, one for every contender and batch size, and ``crossovers``, one a drafter and draft length."""
    names = list(dict.fromkeys(sample["contender"] for sample in samples))
    rows = [
        _row(*(_of(samples, who, batch) for who in (name, PLAIN)))
        for name in names
        for batch in sorted({sample["batch"] for sample in samples})
    ]
    crossovers = [crossover([row for row in rows if row["contender"] == name]) for name in names if name != PLAIN]
    return {"rows": rows, "crossovers": crossovers}


def _of(samples: Samples, name: str, batch: int) -> list[dict[str, Any]]:
    own = [s for s in samples if (s["contender"], s["batch"]) == (name, batch)]
    return sorted(own, key=lambda sample: sample["group"])


def _compare(own: Samples, plain: Samples, above: str, below: str, confidence: float = 0.95) -> dict[str, float]:
    sums = [[sample[part] for sample in side] for side in (own, plain) for part in (above, below)]
    resamples = resamples_at(confidence)
    return asdict(ratio_of_ratios_interval(*sums, confidence=confidence, resamples=resamples))


def _row(own: Samples, plain: Samples) -> dict[str, Any]:
    first, drafts = own[0], own[0]["contender"] != PLAIN
    sums = {part: sum(sample[part] for sample in own) for part in ("rounds", "steps", "committed", "decode_s")}
    speedup = _compare(own, plain, "tokens", "seconds") if drafts else None
    return {
        **{name: first[name] for name in ("contender", "drafter", "k", "batch")},
        "groups": len(own),
        "tokens_per_second": pooled_rate([s["tokens"] for s in own], [s["seconds"] for s in own], "tokens/s"),
        "decode_tokens_per_second": sums["committed"] / sums["decode_s"],
        "tokens_per_round": sums["committed"] / sums["rounds"] if sums["rounds"] else None,
        "round_s": sums["decode_s"] / sums["steps"] if sums["steps"] else None,
        "answer_tokens": sum(sample["tokens"] for sample in own) / (len(own) * first["batch"]),
        "prefill_s_per_request": sum(s["prefill_s"] for s in own) / (len(own) * first["batch"]),
        "running": sum(sample["running"] for sample in own) / len(own),
        "rounds_by_running": _by_running(own),
        "running_in_decode": sums["rounds"] / sums["steps"] if sums["steps"] else None,
        "identical": None if first["identical"] is None else sum(sample["identical"] for sample in own),
        "answers": len(own) * first["batch"],
        "speedup": speedup,
        "decode_speedup": _compare(own, plain, "committed", "decode_s") if drafts and sums["committed"] else None,
        "pays": speedup is not None and len(own) >= FEWEST_CONVERSATIONS and speedup["low"] > 1,
    }


def _by_running(samples: Samples) -> dict[str, float]:
    """How many rounds so many requests shared: those that have ended leave the batch."""
    found: dict[str, float] = {}
    for sample in samples:
        if "rounds_by_running" not in sample:
            raise SpectrainError(EARLIER)
        for running, rounds in sample["rounds_by_running"]:
            found[str(running)] = found.get(str(running), 0) + rounds
    return dict(sorted(found.items(), key=lambda item: int(item[0])))


def _verdict(samples: Samples) -> dict[str, Any]:
    """Which contender, if any, is worth turning on at this batch size."""
    batch, plain = samples[0]["batch"], _of(samples, PLAIN, samples[0]["batch"])
    rivals = []
    for name in dict.fromkeys(s["contender"] for s in samples if s["contender"] != PLAIN):
        own = _of(samples, name, batch)
        rivals.append(
            Rival(
                name,
                _compare(own, plain, "tokens", "seconds"),
                lambda confidence, own=own: _compare(own, plain, "tokens", "seconds", confidence),  # type: ignore[misc]
            )
        )
    if not rivals:
        return {"batch": batch, "decision": "off", "contender": None, "k": 0, "reason": "no drafter was measured",
                "speedup": None, "adjusted": None, "comparisons": 0}  # fmt: skip
    decided = decide(rivals, len(plain), "batches")
    k = next(s["k"] for s in samples if s["contender"] == decided.rival.name)
    return {
        "batch": batch,
        "decision": decided.decision,
        "contender": decided.rival.name if decided.on else None,
        "k": k if decided.on else 0,
        "reason": decided.reason,
        "speedup": decided.rival.speedup,
        "adjusted": decided.adjusted,
        "comparisons": len(rivals),
    }


def crossover(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The largest batch of a contender whose speedup has an interval above 1 (None: it has none), and a sentence."""
    paying = [row for row in rows if row["pays"]]
    last = max(paying, key=lambda row: row["batch"], default=None)
    return {
        **{name: rows[0][name] for name in ("contender", "drafter", "k")},
        "largest_paying_batch": last["batch"] if last else None,
        "sentence": _sentence(rows, last),
    }


def _sentence(rows: Sequence[dict[str, Any]], last: dict[str, Any] | None) -> str:
    name = rows[0]["contender"]
    if (groups := rows[0]["groups"]) < FEWEST_CONVERSATIONS:
        return f"{name}: {groups} batches of each size are too few to tell, at least {FEWEST_CONVERSATIONS} are needed."
    if last is None:
        best = max(rows, key=lambda row: row["speedup"]["value"])
        return f"{name} pays at no batch measured; at best {interval(best['speedup'])} times as fast, {_at(best)}."
    beyond = [row for row in rows if row["batch"] > last["batch"]]
    below = [row for row in rows if row["batch"] < last["batch"] and not row["pays"]]
    ending = f"; {_at(beyond[0])} it no longer does ({interval(beyond[0]['speedup'])})" if beyond else ""
    ending += f"; unclear {', '.join(map(_at, below))}" if below else ""
    limit = "up to" if beyond else "at every batch measured, up to"
    return f"{name} pays {limit} batch {last['batch']} ({interval(last['speedup'])} times as fast){ending}."


def _at(row: dict[str, Any]) -> str:
    return f"at batch {row['batch']}"


def render(document: dict[str, Any]) -> str:
    """The document as two Markdown tables and the crossovers as sentences."""
    batches = sorted({row["batch"] for row in document["rows"]})
    costs, rows = document["verification"], document["rows"]
    lengths = sorted({cost["k"] for cost in costs})

    def v(k: int) -> list[str]:
        own = {cost["batch"]: cost for cost in costs if cost["k"] == k}
        first = "plain step, ms" if k == 0 else f"v at k={k}"
        return [first, *(number(own[b]["seconds"] * 1e3, 1) if k == 0 else number(own[b]["v"]) for b in batches)]

    def speed(name: str) -> list[str]:
        own = {row["batch"]: row for row in rows if row["contender"] == name}
        cells = [number(own[b]["tokens_per_second"], 1) for b in batches]
        return [name, *(c + (f" {own[b]['speedup']['value']:.2f}×" if own[b]["speedup"] else "")
                        for c, b in zip(cells, batches, strict=True))]  # fmt: skip

    heads = [f"batch {batch}" for batch in batches]
    names = list(dict.fromkeys(row["contender"] for row in rows))
    parts = [table(["verification", *heads], [v(k) for k in lengths]),
             table(["tokens/s", *heads], [speed(name) for name in names])]  # fmt: skip
    return "\n\n".join([*parts, "\n".join(entry["sentence"] for entry in document["crossovers"])])
