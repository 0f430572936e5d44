"""What must hold of batches and of the cost model: of contenders and batch sizes that were measured, once each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spectrain.errors import SpectrainError
from spectrain.evaluation.contradictions import CONTRADICTS, at_most, known, named_once, same
from spectrain.evaluation.leaves import ON, PLAIN

Block = Mapping[str, Any]
Blocks = Mapping[str, Block]


def check_load(load: Block, samplers: Mapping[str, Blocks]) -> None:
    """``samplers``: of each the contenders by name."""
    contenders = samplers.get(load["sampler"])
    if contenders is None:
        known("load.sampler", load["sampler"], samplers)
    named_once(map(str, load["batches"]), "load.batches")
    named_once((f"{row['contender']} at batch {row['batch']}" for row in load["rows"]), "load.rows")
    for name in ("rows", "drafting", "crossovers"):
        for number, row in enumerate(load[name]):
            known(f"load.{name}[{number}].contender", row["contender"], contenders or ())
    for name in ("rows", "drafting", "verification", "lines", "by_batch"):
        for number, row in enumerate(load[name]):
            known(f"load.{name}[{number}].batch", row["batch"], load["batches"])
    measured: dict[str, dict[int, Block]] = {row["contender"]: {} for row in load["rows"]}
    for number, row in enumerate(load["rows"]):
        _load_row(row, f"load.rows[{number}]")
        measured[row["contender"]][row["batch"]] = row
    for name, rows in measured.items():
        same(f"load.rows of {name} have batches that", sorted(rows), sorted(load["batches"]), "the measurement has")
    known("load.rows, of which some are plain decoding,", PLAIN, measured)
    for number, verdict in enumerate(load["by_batch"]):
        here, on = f"load.by_batch[{number}]", verdict["decision"] == ON
        known(f"{here}.contender", verdict["contender"], measured if on else [None])
        if on and not (verdict["adjusted"] and (verdict["adjusted"]["low"] or 0) > 1):
            raise SpectrainError(f"{here}.decision is {ON!r}, but its adjusted interval is not above 1: {CONTRADICTS}")
    largest = {row["contender"]: row["largest_paying_batch"] for row in load["crossovers"]}
    same("load.largest_paying_batch", load["largest_paying_batch"], largest, "the crossovers have")
    for number, (name, batch) in enumerate(largest.items()):
        paying = max((size for size, row in measured.get(name, {}).items() if row["pays"]), default=None)
        same(f"load.crossovers[{number}].largest_paying_batch", batch, paying, "the rows that pay have")


def _load_row(row: Block, path: str) -> None:
    drafts = row["contender"] != PLAIN
    same(f"{path}.speedup (whether it is there)", row["speedup"] is not None, drafts, "what drafts has one:")
    at_most(f"{path}.identical", row["identical"] or 0, row["answers"], "answers are")
    if row["pays"] and not (row["speedup"] and (row["speedup"]["low"] or 0) > 1):
        raise SpectrainError(f"{path}.pays is true, but its speedup is not above 1: {CONTRADICTS}")
    for running in row["rounds_by_running"]:
        whole(running, f"{path}.rounds_by_running")


def check_cost_model(document: Block, samplers: Mapping[str, Blocks]) -> None:
    """``samplers``: of each the contenders by name."""
    model, load = document["cost_model"], document["load"]
    named_once((f"{row['contender']} ({row['sampler']})" for row in model["chains"]), "cost_model.chains")
    for number, chain in enumerate(model["chains"]):
        _chain(chain, samplers, load, f"cost_model.chains[{number}]")
    if model["goodput"] is not None and load is None:
        raise SpectrainError(f"cost_model.goodput is there, but load is null: {CONTRADICTS}")
    for number, rate in enumerate(model["goodput"] or ()):
        here = f"cost_model.goodput[{number}]"
        names = named_once((state["contender"] for state in rate["contenders"]), f"{here}.contenders")
        same(f"{here}.contenders", sorted(names), sorted({row["contender"] for row in load["rows"]}), "load.rows have")
        known(f"{here}.best.contender", rate["best"]["contender"], names)
        for place, state in enumerate(rate["contenders"]):
            for key in ("running", "tokens_per_second", "latency_ms_per_token"):
                same(f"{here}.contenders[{place}].{key} (whether it is null)", state[key] is None, state["saturated"],
                     "saturated is")  # fmt: skip


def _chain(chain: Block, samplers: Mapping[str, Blocks], load: Block | None, path: str) -> None:
    known(f"{path}.sampler", chain["sampler"], samplers)
    contenders = samplers[chain["sampler"]]
    known(f"{path}.contender", chain["contender"], [n for n, c in contenders.items() if c["k"] and not c["lossy"]])
    contender = contenders[chain["contender"]]
    for key in ("drafter", "k", "verification"):
        same(f"{path}.{key}", chain[key], contender[key], "the contender has")
    pooled, cost = contender["pooled"], contender["pooled"]["cost"]
    same(
        f"{path}.tokens_per_round", chain["tokens_per_round"], pooled["tokens_per_round"]["value"], "the contender has"
    )
    same(f"{path}.measured", chain["measured"], pooled["speedup"]["decode"], "the contender has")
    for key, name in (("c", "draft_cost_per_token"), ("v", "verify_cost_per_round"), ("o", "overhead_cost_per_round"),
                      ("predicted", "predicted_speedup"), ("relative_difference",) * 2):  # fmt: skip
        same(f"{path}.{key}", chain[key], cost[name], f"its {name} is")
    for k in chain["v_by_k"]:
        whole(k, f"{path}.v_by_k")
    known(f"{path}.v_by_k", "0", chain["v_by_k"])  # plain decoding's
    best = {str(row["batch"]): row["best_k"] for row in chain["by_batch"]}
    same(f"{path}.best_k_by_batch", chain["best_k_by_batch"], best, "by_batch has")
    plain = [row["batch"] for row in (load or {"drafting": ()})["drafting"] if row["contender"] == PLAIN]
    for number, row in enumerate(chain["by_batch"]):
        here = f"{path}.by_batch[{number}]"
        known(f"{here}.batch", row["batch"], plain)
        difference = row["predicted"] / row["measured"]["value"] - 1 if row["measured"]["value"] else None
        same(f"{here}.relative_difference", row["relative_difference"], difference, "predicted and measured come to")


def whole(key: str, path: str) -> None:
    if not key.isdecimal():
        raise SpectrainError(f"{path} has the key {key!r}, expected whole numbers: {CONTRADICTS}")
