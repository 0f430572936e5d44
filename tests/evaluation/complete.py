"""A document with every section filled: what short runs leave out (load, law tests, energy, …) is put in, synthetic.

What a document has already stays as it is.
"""

from __future__ import annotations

import copy
from typing import Any

K_WIDTH = 0.03  # of the intervals made up here


def interval(value: float, width: float = K_WIDTH) -> dict[str, float]:
    return {"value": value, "low": max(value - width, 0.0), "high": value + width}


def complete(document: dict[str, Any]) -> dict[str, Any]:
    """A copy of ``document`` with every key of the schema, and none of its sections null or empty."""
    document = copy.deepcopy(document)
    context = document["context"]
    _fill(context, "processes", 2)
    _fill(context, "stopped_early", {"rule": "half-width of τ", "half_width": 0.04, "asked": 0.05})
    method = "expanded percentile bootstrap of whole conversations (arXiv 1411.5279)"
    for key, value in (("method", method), ("comparisons", 3), ("adjusted_confidence", 1 - 0.05 / 3)):
        _fill(document["statistics"], key, value)
    for row in document["teacher_forced"]:
        _fill(row, "interval", interval(row["alpha"]))
        _fill(row, "conversations", 20)
    for block in document["samplers"]:
        _complete_sampler(block)
    chains = [c for c in document["samplers"][0]["contenders"] if c["k"]]
    drafters = sorted({c["drafter"] for c in chains})
    _fill(document, "calibration", [_calibration(drafter, depth) for drafter in drafters for depth in (0, 1)])
    coverage = [
        {"drafter": d, "kind": "everything", "coverage": interval(0.97, 0.01), "tokens": 4100} for d in drafters
    ]
    _fill(document, "draft_vocabulary", coverage)
    _fill(document, "load", _load(chains, document["samplers"][0]["verdict"]["overall"]))
    document.setdefault("cost_model", {})
    for key, value in _cost_model(document["samplers"]).items():
        _fill(document["cost_model"], key, value)
    return document


def without_sampler(document: dict[str, Any], number: int) -> dict[str, Any]:
    """A copy in which a sampler was not measured: neither do chains of the cost model speak of it."""
    document = copy.deepcopy(document)
    name = document["samplers"].pop(number)["name"]
    model = document["cost_model"]
    model["chains"] = [chain for chain in model["chains"] if chain["sampler"] != name]
    return document


def _fill(holder: dict[str, Any], key: str, value: Any) -> None:
    if holder.get(key) in (None, [], {}):
        holder[key] = value


def _complete_sampler(block: dict[str, Any]) -> None:
    sampled = block["sampler"]["temperature"] > 0
    for contender in block["contenders"]:
        for numbers in (contender["pooled"], *filter(None, contender["by_kind"].values())):
            _complete_numbers(numbers, contender, sampled)
        _fill(contender, "by_band", _bands(contender))
    names = [(c["contender"], c["lossy"]) for c in block["contenders"]]
    block.setdefault("distribution", None)
    if sampled:
        _fill(block, "distribution", [_law_test(name, lossy) for name, lossy in names])
    verdict = block["verdict"]
    for holder in (verdict, *verdict["by_drafter"].values()):
        for found in (holder["overall"], *holder["by_kind"].values()):
            _fill(found, "comparisons", 3)
            found.setdefault("adjusted", found["best"] and found["best"]["decode_speedup"])
            _fill(found, "up_to_batch", 8 if found["decision"] == "on" else None)
            _fill(found, "would_change", "α below 0.52 at k=5, or a draft cost above 0.3 steps")


def _complete_numbers(numbers: dict[str, Any], contender: dict[str, Any], sampled: bool) -> None:
    clipped = numbers["clipped_rounds"]
    _fill(numbers, "clipped", {"eos": clipped, "budget": 0, "stop": 0})
    for key in ("marginal_survival", "conditional_acceptance"):
        for row in numbers[key]:
            known = row["rate"] is not None
            _fill(row, "low", max(row["rate"] - K_WIDTH, 0) if known else None)
            _fill(row, "high", min(row["rate"] + K_WIDTH, 1) if known else None)
    mean = numbers["accepted_prefix"]["mean"]
    _fill(numbers["accepted_prefix"], "interval", None if mean is None else interval(mean))
    counts = numbers["accepted_prefix"]["histogram"]
    shares = [
        {"accepted": i, "share": n / max(sum(counts), 1), "low": None, "high": None} for i, n in enumerate(counts)
    ]
    _fill(numbers["accepted_prefix"], "shares", shares)
    if isinstance(numbers["tokens_per_full_round"], float):
        numbers["tokens_per_full_round"] = interval(numbers["tokens_per_full_round"])
    visited = contender["k"] and sampled
    rows = [
        {"position": i, "positions": 900 // i, **interval(0.7 - 0.05 * i)} for i in range(1, (contender["k"] or 0) + 1)
    ]
    _fill(numbers, "visited_alpha", rows if visited else None)
    memory = {"target_bytes": 538_000_000, "drafter_bytes": 30_000_000 if contender["k"] else 0,
              "cache_bytes": 12_000_000, "state_bytes": 1_000_000 if contender["k"] else None}  # fmt: skip
    _fill(numbers, "memory", memory)
    _fill(numbers, "energy_j_per_token", interval(0.8))
    needed = {"0.1": 12, "0.05": 48, "0.02": 300}
    _fill(numbers, "advice", {"tokens_per_round": {"half_width": 0.05, "conversations_for": needed}})


def _bands(contender: dict[str, Any]) -> dict[str, Any]:
    labels = {"turn": ["1", "2", "3 and later"], "prompt tokens": ["up to 64", "65 to 256"],
              "answer position": ["1 to 32", "33 to 64", "65 and later"]}  # fmt: skip
    drafts = contender["shape"] is not None
    tokens = contender["pooled"]["tokens_per_round"]["value"]

    def band(name: str, label: str, place: int) -> dict[str, Any]:
        speedup = interval(tokens / 1.7 - 0.05 * place) if drafts and name != "answer position" else None
        return {"label": label, "conversations": 18 - 5 * place, "rounds": 400 - 100 * place,
                "tokens_per_round": interval(tokens - 0.1 * place * drafts), "decode_speedup": speedup}  # fmt: skip

    return {name: [band(name, label, i) for i, label in enumerate(found)] for name, found in labels.items()}


def _law_test(name: str, lossy: bool) -> dict[str, Any]:
    bins = [100 + (i % 5) + (40 if lossy and i < 3 else 0) for i in range(20)]
    p = 1e-9 if lossy else 0.62
    return {"contender": name, "lossy": lossy, "tokens": sum(bins), "bins": bins, "statistic": 17.2, "p_value": p,
            "adjusted_p_value": p, "agrees": not lossy, "detectable": 0.021}  # fmt: skip


def _calibration(drafter: str, depth: int) -> dict[str, Any]:
    bins = [{"low": i / 10, "high": (i + 1) / 10, "count": 40 * i, "confidence": i / 10 + 0.06 if i else None,
             "accepted": min(i / 10 + 0.02 * i, 1.0) if i else None} for i in range(10)]  # fmt: skip
    return {"drafter": drafter, "source": "teacher-forced", "sampler": "greedy (T=0)", "depth": depth,
            "positions": 1800,
            "ece": 0.051, "mean_confidence": 0.64, "hit_rate": 0.69, "bins": bins}  # fmt: skip


def _load(chains: list[dict[str, Any]], single: dict[str, Any]) -> dict[str, Any]:
    batches, rows = [1, 2, 4, 8, 16], []
    for number, chain in enumerate([None, *chains]):
        for place, batch in enumerate(batches):
            gain = 1.9 - 0.1 * number - 0.28 * place if chain else 1.0
            rate, paired = 17.0 * batch**0.8 * gain, interval(gain, 0.08) if chain else None
            who = chain or {"contender": "plain", "drafter": "plain", "k": 0}
            rows.append({**{key: who[key] for key in ("contender", "drafter", "k")}, "batch": batch, "groups": 8,
                         "tokens_per_second": rate, "decode_tokens_per_second": 1.1 * rate, "answer_tokens": 60.0,
                         "tokens_per_round": 2.4 if chain else 1.0, "round_s": 0.1, "prefill_s_per_request": 0.02,
                         "running": 0.8 * batch, "running_in_decode": 0.8 * batch, "identical": 8 * batch,
                         "rounds_by_running": {str(batch): 40},
                         "answers": 8 * batch, "speedup": paired, "decode_speedup": paired,
                         "pays": bool(chain) and gain > 1.08})  # fmt: skip
    largest = {c["contender"]: max((row["batch"] for row in rows if row["pays"] and row["contender"] == c["contender"]),
                                   default=None) for c in chains}  # fmt: skip
    crossovers = [{"contender": c["contender"], "drafter": c["drafter"], "k": c["k"],
                   "largest_paying_batch": largest[c["contender"]],
                   "sentence": f"{c['contender']} pays up to batch 4 (1.24 times as fast)."}
                  for c in chains]  # fmt: skip
    costs = [
        {"batch": b, "context": context, "k": k, "rows": k + 1,
         "seconds": 0.06 * b**0.3 * (1 + 0.05 * k * b), "v": 1 + 0.05 * k * b}
        for b in batches for context in (256, 1024) for k in (0, 3, 5)
    ]  # fmt: skip
    verdicts = [{"batch": b, "decision": "on" if b < 8 else "off",
                 "contender": chains[0]["contender"] if b < 8 else None,
                 "k": chains[0]["k"] if b < 8 else 0, "reason": "the interval lies above 1", "comparisons": 3,
                 "speedup": interval(1.5), "adjusted": interval(1.5, 0.05)} for b in batches]  # fmt: skip
    verdicts[0] |= {key: single[key] for key in ("decision", "contender", "k", "reason")}
    return {"sampler": "greedy (T=0)", "groups": 8, "repeats": 5, "max_new_tokens": 64, "prompt_tokens": 80.0,
            "context_tokens": [256, 1024], "batches": batches, "verification": costs, "lines": [], "drafting": [],
            "rows": rows, "crossovers": crossovers, "by_batch": verdicts,
            "largest_paying_batch": largest}  # fmt: skip


def _cost_model(samplers: list[dict[str, Any]]) -> dict[str, Any]:
    costs = {"c": 0.1, "v": 1.5, "o": 0.05, "tokens_per_round": 2.4, "predicted": 1.61, "measured": interval(1.55),
             "relative_difference": 0.039, "unaccounted": 0.01, "break_even_alpha": 0.44, "break_even_c": 0.31,
             "best_k": 3}  # fmt: skip
    chains = [
        {"sampler": block["name"], **{key: c[key] for key in ("contender", "drafter", "k", "verification")}, **costs,
         "alpha": 0.61, "v_by_k": {"3": 1.4, "5": 1.5}, "best_k_by_batch": {"1": 5, "4": 3, "16": 0},
         "by_batch": [{"batch": b, "running": 0.9 * b, **costs} for b in (1, 4, 16)]}
        for block in samplers for c in block["contenders"] if c["k"] and not c["lossy"]
    ]  # fmt: skip
    measured = [c for c in samplers[0]["contenders"] if c["k"]]
    states = [{"contender": name, "k": k, "capacity": 2.5, "saturated": saturated,
               "running": None if saturated else 3.2, "tokens_per_second": None if saturated else 41.0,
               "latency_ms_per_token": None if saturated else 71.0}
              for name, k, saturated in (("plain", 0, True),
                                         *((c["contender"], c["k"], False) for c in measured))]  # fmt: skip
    best = {"contender": states[1]["contender"], "k": states[1]["k"]}
    rate = {"request_rate": 2.0, "prompt_tokens": 80.0, "answer_tokens": 60.0, "contenders": states, "best": best,
            "sentence": f"At 2 requests a second, {best['contender']} is best."}  # fmt: skip
    return {
        "chains": chains,
        "largest_difference": {"single": 0.039, "from_larger_k": 0.061, "by_batch": 0.052},
        "goodput": [rate],
    }
