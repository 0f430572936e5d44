"""Speculation under load: what a verification costs at each batch size, and up to which batch it still pays.

A target step that decodes few requests waits for its weights, so verifying k + 1 tokens costs little more than one;
the more requests share a step, the nearer it comes to k + 1 times as much. Both are measured here, and the crossover.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from spectrain.decoding import Generation, generate_batch
from spectrain.evaluation.contenders import Contender
from spectrain.evaluation.samples import PLAIN
from spectrain.evaluation.verdict import FEWEST_CONVERSATIONS
from spectrain.evaluation.wording import interval, number
from spectrain.evaluation.workbench import Prompt, Stopwatch, table
from spectrain.exact.sampler import Sampler
from spectrain.intervals import ratio_of_ratios_interval
from spectrain.measures import pooled_rate
from spectrain.target import Target

WARM_UP = 4  # tokens of every contender at every batch size that are thrown away


# --- what a verification costs ------------------------------------------------------------------------------------


@torch.inference_mode()
def verification_costs(target: Target, batches: Sequence[int], lengths: Sequence[int], context: int, repeats: int,
                       seed: int, *, progress: bool = True) -> list[dict[str, Any]]:  # fmt: skip
    """For every batch size and draft length the median seconds of a verification forward, head included, behind
    ``context`` cached tokens; and v, their ratio to a plain step of the same batch. Forwards take turns."""
    found = []
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    for batch in tqdm(sorted(set(batches)), desc="verify", unit="batch", disable=not progress):
        cache = target.new_cache()
        target.forward(_ids(target, 1, context, generator), cache=cache)
        cache.select([0] * batch)
        seconds: dict[int, list[float]] = {rows: [] for rows in [1, *(k + 1 for k in sorted(set(lengths)))]}
        for repeat in range(repeats + 1):
            for rows in rng.sample(list(seconds), len(seconds)):
                ids_BT = _ids(target, batch, rows, generator)
                with Stopwatch(target.device) as watch:
                    target.logits(target.forward(ids_BT, cache=cache).hidden_BTH)
                cache.rollback(context)
                if repeat:  # the first is the warm-up
                    seconds[rows].append(watch.seconds)
        step = median(seconds[1])
        for rows, taken in seconds.items():
            found.append({"batch": batch, "k": rows - 1, "rows": rows, "seconds": median(taken),
                          "v": median(taken) / step})  # fmt: skip
    return found


def _ids(target: Target, batch: int, count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(target.tokenizer_size, (batch, count), generator=generator).to(target.device)


# --- what it yields -----------------------------------------------------------------------------------------------


def measure(target: Target, entries: Sequence[Contender], prompts: Sequence[Prompt], batches: Sequence[int],
            groups: int, max_new_tokens: int, seed: int, *, progress: bool = True) -> list[dict[str, Any]]:  # fmt: skip
    """Samples of ``groups`` batches of every size, drawn from the prompts; contenders take turns on each."""
    samples, rng = [], random.Random(seed)
    sizes = sorted(set(batches))
    with tqdm(total=len(sizes) * groups * len(entries), desc="decode", unit="batch", disable=not progress) as bar:
        for size in sizes:
            for entry in entries:
                _decode(target, entry, _draw(rng, prompts, size), min(WARM_UP, max_new_tokens))
            for group in range(groups):
                chosen, found = _draw(rng, prompts, size), {}
                for entry in rng.sample(list(entries), len(entries)):
                    bar.set_postfix_str(f"{entry.name}, batch {size}")
                    with Stopwatch(target.device) as watch:
                        runs = _decode(target, entry, chosen, max_new_tokens)
                    found[entry.name] = runs, watch.seconds
                    bar.update()
                plain = [run.tokens for run in found[PLAIN][0]]
                for entry in entries:
                    runs, seconds = found[entry.name]
                    same = sum(run.tokens == tokens for run, tokens in zip(runs, plain, strict=True))
                    samples.append({**_sample(entry, size, group, chosen, runs, seconds), "identical": same})
    return samples


def _draw(rng: random.Random, prompts: Sequence[Prompt], size: int) -> list[Prompt]:
    """Different prompts while there are enough; all of them, and some again, for a larger batch."""
    again = [rng.choice(list(prompts)) for _ in range(size - len(prompts))]
    return rng.sample(list(prompts), min(size, len(prompts))) + again


def _decode(target: Target, entry: Contender, prompts: Sequence[Prompt], max_new_tokens: int) -> list[Generation]:
    settings: dict[str, Any] = {"sampler": Sampler(), "max_new_tokens": max_new_tokens, "timed": False}
    return generate_batch(target, entry.drafter, [prompt.ids for prompt in prompts], seeds=range(len(prompts)),
                          shape=entry.shape, **settings)  # fmt: skip


def _sample(entry: Contender, size: int, group: int, prompts: Sequence[Prompt], runs: Sequence[Generation],
            seconds: float) -> dict[str, Any]:  # fmt: skip
    rounds = [len(run.rounds) for run in runs]
    return {
        "contender": entry.name,
        "drafter": entry.family,
        "k": entry.k,
        "batch": size,
        "group": group,
        "prompts": [prompt.id for prompt in prompts],
        "tokens": sum(len(run.tokens) for run in runs),
        "seconds": seconds,
        "rounds": sum(rounds),
        "committed": sum(r.committed for run in runs for r in run.rounds),
        # Requests that have ended leave the batch: how many there were in a round, on average.
        "running": (sum(rounds) + size) / (max(rounds) + 1),
    }


def summarise(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """``rows``, one for every contender and batch size, and ``crossovers``, one a drafter and draft length."""
    names = list(dict.fromkeys(sample["contender"] for sample in samples))
    rows = [
        _row([s for s in samples if s["contender"] == name and s["batch"] == batch],
             [s for s in samples if s["contender"] == PLAIN and s["batch"] == batch])
        for name in names
        for batch in sorted({sample["batch"] for sample in samples})
    ]  # fmt: skip
    crossovers = [crossover([row for row in rows if row["contender"] == name]) for name in names if name != PLAIN]
    return {"rows": rows, "crossovers": crossovers}


def _row(own: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]]) -> dict[str, Any]:
    first = own[0]
    own, plain = (sorted(side, key=lambda sample: sample["group"]) for side in (own, plain))
    sums = [[sample[part] for sample in side] for side in (own, plain) for part in ("tokens", "seconds")]
    rounds = sum(sample["rounds"] for sample in own)
    speedup = asdict(ratio_of_ratios_interval(*sums)) if first["k"] else None
    return {
        **{name: first[name] for name in ("contender", "drafter", "k", "batch")},
        "groups": len(own),
        "tokens_per_second": pooled_rate(sums[0], sums[1], "tokens/s"),
        "tokens_per_round": sum(sample["committed"] for sample in own) / rounds if rounds else None,
        "running": sum(sample["running"] for sample in own) / len(own),
        "identical": sum(sample["identical"] for sample in own),
        "answers": len(own) * first["batch"],
        "speedup": speedup,
        "pays": speedup is not None and len(own) >= FEWEST_CONVERSATIONS and speedup["low"] > 1,
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
