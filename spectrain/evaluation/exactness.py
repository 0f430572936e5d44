"""Is greedy speculative output plain decoding's, token by token? Every scheme at every batch size, on one's own target.

The reference is ``generate_plain``: one request, one token a forward. A block of tokens, or a batch, rounds otherwise
than one token by itself; where the target's two best tokens all but tie, rounding alone may swap them. So each first
difference comes with the gap between the two tokens' logits: within the tolerance it is a tie, beyond it a fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator
from tqdm import tqdm

from spectrain.decoding import Generation, generate_batch, generate_plain
from spectrain.drafters import Drafter
from spectrain.evaluation.acceptance import output_difference
from spectrain.evaluation.contenders import Contender, Length, Trees, contenders
from spectrain.evaluation.rehearsed import RehearsedDrafter
from spectrain.evaluation.verdict import near_tie_gap
from spectrain.evaluation.wording import number, plural
from spectrain.evaluation.workbench import Prompt, machine, table
from spectrain.exact.sampler import Sampler
from spectrain.shapes import DynamicTree, StaticTree
from spectrain.target import Target

SCHEMA = "spectrain.exactness/1"
REHEARSED = "rehearsed"
TREES = (
    StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 1, 0))),
    DynamicTree(depth=5, top_k=4, nodes=16),
)
LISTED_TIES = 20


class ExactnessConfig(BaseModel):
    """What is compared: drafts, rules, batch sizes, how many prompts and how long the answers.

    ``tolerance`` is the largest gap of logits that counts as a tie; None: what rounding in the target's dtype explains.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    prompts: int | None = Field(64, ge=1)
    max_new_tokens: int = Field(128, ge=2)
    batch: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = Field((1, 5), min_length=1)
    k: tuple[Length, ...] = Field((5,), min_length=1)
    trees: Trees = TREES
    verification: tuple[Literal["token", "block"], ...] = Field(("token", "block"), min_length=1)
    tolerance: float | None = Field(None, ge=0, allow_inf_nan=False)
    seed: int = 0

    @field_validator("batch")
    @classmethod
    def _every_size_once(cls, batch: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(set(batch)))


def compare(target: Target, drafters: dict[str, Drafter], prompts: Sequence[Prompt], config: ExactnessConfig, *,
            progress: bool = True) -> dict[str, Any]:  # fmt: skip
    """Decode every prompt under every scheme at every batch size; the document of what equals plain decoding.

    A drafter that knows plain decoding's answers always takes part, so that rounds of every length and every branch of
    a tree come up however little ``drafters`` are right.

    Returns:
        ``cells``, one a scheme and batch size: ``compared``, ``equal``, ``ties``, ``faults``, ``tokens_per_round`` and
        the ``differences``; ``faults`` of all; and what it was measured with.

    Raises:
        SpectrainError: a draft that a drafter cannot fill, before anything is decoded.
    """
    rehearsed = RehearsedDrafter(target, config.seed)
    entries = contenders({**drafters, REHEARSED: rehearsed}, config.k, config.trees, config.verification)
    tolerance = near_tie_gap(str(target.dtype)) if config.tolerance is None else config.tolerance
    plain = []
    target.tap(())
    for prompt in tqdm(prompts, desc="plain decoding", unit="prompt", disable=not progress):
        answer = generate_plain(target, prompt.ids, sampler=Sampler(), max_new_tokens=config.max_new_tokens)
        rehearsed.learn(prompt.ids, answer.tokens)
        plain.append(answer.tokens)
    cells = []
    total = len(entries) * len(config.batch) * len(prompts)
    with tqdm(total=total, desc="exactness", unit="prompt", disable=not progress) as bar:
        for entry in entries:
            for size in config.batch:
                bar.set_postfix_str(f"{entry.name}, batch {size}")
                runs = _decode(target, entry, prompts, size, config, bar)
                cells.append(_cell(target, entry, size, prompts, runs, plain, tolerance))
    return {
        "schema": SCHEMA,
        "machine": machine(target.device, target.dtype),
        "attention": target.config._attn_implementation,
        "settings": config.model_dump(mode="json"),
        "prompts": len(prompts),
        "tokens": sum(map(len, plain)),
        "tolerance": tolerance,
        "cells": cells,
        "ties": sum(cell["ties"] for cell in cells),
        "faults": sum(cell["faults"] for cell in cells),
    }


def _decode(target: Target, entry: Contender, prompts: Sequence[Prompt], size: int, config: ExactnessConfig,
            bar: Any) -> list[Generation]:  # fmt: skip
    """Batches as the prompts come, of unequal lengths; the last may be smaller."""
    rule = {} if entry.verification is None else {"verification": entry.verification}
    runs: list[Generation] = []
    for start in range(0, len(prompts), size):
        ids = [prompt.ids for prompt in prompts[start : start + size]]
        runs += generate_batch(target, entry.drafter, ids, seeds=[0] * len(ids), sampler=Sampler(), shape=entry.shape,
                               max_new_tokens=config.max_new_tokens, timed=False, **rule)  # fmt: skip
        bar.update(len(ids))
    return runs


def _cell(target: Target, entry: Contender, size: int, prompts: Sequence[Prompt], runs: Sequence[Generation],
          plain: Sequence[list[int]], tolerance: float) -> dict[str, Any]:  # fmt: skip
    differences = [
        _difference(target, prompt, run.tokens, expected, tolerance)
        for prompt, run, expected in zip(prompts, runs, plain, strict=True)
        if run.tokens != expected
    ]
    ties = sum(found["tie"] for found in differences)
    rounds = [r for run in runs for r in run.rounds]
    return {
        **{("scheme" if key == "contender" else key): value for key, value in entry.described().items()},
        "batch": size,
        "compared": len(runs),
        "equal": len(runs) - len(differences),
        "ties": ties,
        "faults": len(differences) - ties,
        "rounds": len(rounds),
        "tokens_per_round": sum(r.committed for r in rounds) / len(rounds) if rounds else None,
        "differences": differences,
    }


def _difference(target: Target, prompt: Prompt, tokens: list[int], expected: list[int],
                tolerance: float) -> dict[str, Any]:  # fmt: skip
    found = output_difference(target, prompt.ids, tokens, expected)
    at, gap = found["position"], found["logit_gap"]
    return {
        "prompt": prompt.id,
        "position": at,
        "expected": expected[at] if at < len(expected) else None,
        "found": tokens[at] if at < len(tokens) else None,
        "logit_gap": gap,
        "tie": gap is not None and gap <= tolerance,  # an answer that ends elsewhere has no gap, and is no tie
    }


def render(document: dict[str, Any]) -> str:
    """A table of schemes by batch sizes, every fault, the first ties, and the finding in a sentence."""
    cells, sizes = document["cells"], document["settings"]["batch"]
    schemes = dict.fromkeys(cell["scheme"] for cell in cells)
    by_place = {(cell["scheme"], cell["batch"]): cell for cell in cells}
    rows = []
    for scheme in schemes:
        own = [by_place[scheme, size] for size in sizes]
        rows.append([scheme, *map(_shown, own), number(own[0]["tokens_per_round"])])
    heads = ["equal to plain decoding, greedy", *(f"batch {size}" for size in sizes), "tokens per round"]
    listed = [(cell, found) for cell in cells for found in cell["differences"]]
    faults = [_told(cell, found) for cell, found in listed if not found["tie"]]
    ties = [_told(cell, found) for cell, found in listed if found["tie"]]
    more = [f"and {len(ties) - LISTED_TIES} ties more"] if len(ties) > LISTED_TIES else []
    return "\n".join([table(heads, rows), "", *faults, *ties[:LISTED_TIES], *more, _finding(document)])


def _shown(cell: dict[str, Any]) -> str:
    notes = [plural(cell["ties"], "tie")] if cell["ties"] else []
    notes += [plural(cell["faults"], "FAULT")] if cell["faults"] else []
    return f"{cell['equal']}/{cell['compared']}" + (f" ({', '.join(notes)})" if notes else "")


def _told(cell: dict[str, Any], found: dict[str, Any]) -> str:
    """Ids, not text: what is decoded comes from people's chats."""
    kind = "tie" if found["tie"] else "FAULT"
    gap = "one of them has ended" if found["logit_gap"] is None else f"logits {found['logit_gap']:.2g} apart"
    where = f"{cell['scheme']}, batch {cell['batch']}, prompt {found['prompt']!r}, token {found['position']}"
    return f"{kind}: {where}: id {found['found']} instead of {found['expected']}, {gap}"


def _finding(document: dict[str, Any]) -> str:
    what = f"{plural(document['prompts'], 'prompt')}, {plural(document['tokens'], 'token')}"
    kind = f"{document['machine']['dtype']} on {document['machine']['device']}"
    limit = f"within {document['tolerance']:g} logits"
    if document["faults"]:
        return f"NOT EXACT: {plural(document['faults'], 'difference')} beyond a tie ({limit}); {what}, {kind}"
    if document["ties"]:
        return f"exact, up to {plural(document['ties'], 'tie')} of floating point ({limit}); {what}, {kind}"
    return f"exact: all outputs are plain decoding's, token by token; {what}, {kind}"
