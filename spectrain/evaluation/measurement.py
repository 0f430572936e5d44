"""The measurement: the same held-out prompts for every contender, shared by as many processes as there are.

A measurement that was interrupted goes on with the next conversation. One that was asked to may end early.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from spectrain.data.conversations import Conversation
from spectrain.data.split import conversations_digest
from spectrain.distributed import processes
from spectrain.evaluation.acceptance import choose, conversation_samples, prompt_ids
from spectrain.evaluation.begun import go_on
from spectrain.evaluation.contenders import AcceptanceConfig, Contender
from spectrain.evaluation.ledger import Ledger
from spectrain.evaluation.running import Running
from spectrain.evaluation.samples import typed
from spectrain.files import json_digest
from spectrain.target import Target

DRIFT_FILE = "drift.jsonl"  # beside the samples (see evaluation/drift.py), and as old as they are
WARM_UP = 8  # tokens of every contender that are thrown away: first calls allocate and tune
POLL_S = 0.5
CLOCKED = ("threads", "processes")  # they matter to the clock alone


@dataclass(frozen=True)
class Measured:
    """A finished measurement: the samples of the first ``count`` conversations, which is all of them unless it ended
    early; then ``stopped_early`` says by which rule."""

    ledger: Ledger
    count: int
    processes: int
    threads: int
    stopped_early: dict[str, Any] | None = None

    def samples(self) -> Iterator[dict[str, Any]]:
        """Raw samples in the order of the conversations, read from disk one conversation at a time."""
        return self.ledger.lines(self.count)


def measure(target: Target, entries: Sequence[Contender], conversations: Sequence[Conversation],
            config: AcceptanceConfig, output: Path, identity: dict[str, Any], *,
            progress: bool = True) -> Measured:  # fmt: skip
    """Raw samples of every contender on every conversation, in ``output/samples.jsonl``.

    ``entries`` are what ``contenders`` makes of ``config``. ``identity`` names what is measured (digests of target and
    bundle): a folder begun with another is an error. Several processes share the conversations; each returns when all
    are measured, and but for times the samples are those of one process.
    """
    chosen, state, running = in_order(conversations, config), processes(), Running(config.stop_at)
    prompts = {c.id: prompt_ids(target, c, config.max_new_tokens) for c in chosen}
    key = {
        "config": config.model_dump(mode="json", exclude={"load"}),  # batches have lines of their own
        "traffic": conversations_digest(chosen),
        "prompt_ids": json_digest(prompts),  # the template's and the tokenizer's part in them
        "eos_ids": list(target.eos_ids),
        "dtype": str(target.dtype),
        "threads": torch.get_num_threads(),
        "processes": state.num_processes,
        "count": len(chosen),
        **identity,
    }
    samples = len(entries) * sum(map(config.answers, config.samplers))

    def count(raws: Sequence[dict[str, Any]]) -> None:
        for raw in raws:  # also those that were there: nothing is measured beside lines that nobody could read
            typed(raw)
        running.add(raws)

    ledger = Ledger(output, [c.id for c in chosen], samples, rank=state.process_index, observe=count)
    with state.main_process_first():
        key = _open(ledger, key, running)
    mine = [c for c in chosen[state.process_index :: state.num_processes] if c.id not in ledger]
    shown = progress and state.is_main_process
    _measure(target, entries, mine, prompts, config, ledger, running, progress=shown)
    state.wait_for_everyone()
    with state.main_process_first():
        ledger.merge(write=state.is_main_process)
    return Measured(ledger, running.enough or len(chosen), key["processes"], key["threads"], running.rule())


def in_order(conversations: Sequence[Conversation], config: AcceptanceConfig) -> list[Conversation]:
    """What is measured, in order. One that may end early takes them at random: its first part is like the whole."""
    chosen = choose(conversations, config.conversations, config.seed)
    if config.stop_at is None:
        return chosen
    return sorted(chosen, key=lambda c: random.Random(f"{config.seed}/order/{c.id}").random())


def _measure(target: Target, entries: Sequence[Contender], mine: Sequence[Conversation],
             prompts: Mapping[str, list[int]], config: AcceptanceConfig, ledger: Ledger, running: Running, *,
             progress: bool) -> None:  # fmt: skip
    """Measure this process's conversations, then wait for those of the others."""
    total = len(ledger.conversations)
    bar = tqdm(total=total, initial=len(ledger), desc="evaluate", unit="chat", disable=not progress)

    def show() -> None:
        bar.update(len(ledger) - bar.n)
        bar.set_postfix(running.shown())

    with bar:
        for turn, conversation in enumerate(mine):
            if running.enough is not None:
                return
            prompt = prompts[conversation.id]
            if turn == 0:
                limit = min(WARM_UP, config.max_new_tokens)
                list(conversation_samples(target, entries, conversation, prompt, config, limit))
            ledger.append(list(conversation_samples(target, entries, conversation, prompt, config)))
            show()
        while running.enough is None and len(ledger) < total:
            time.sleep(POLL_S)
            ledger.refresh()
            show()


def _open(ledger: Ledger, key: dict[str, Any], running: Running) -> dict[str, Any]:
    """Start or go on; the key that the folder was begun with. One that was begun with another is an error."""

    def read() -> bool:
        ledger.open()
        return running.enough is not None or len(ledger) == key["count"]

    fresh = not ledger.files()
    if fresh:
        (ledger.folder / DRIFT_FILE).unlink(missing_ok=True)
    return go_on(ledger.folder / "samples.json", key, fresh=fresh, clocked=CLOCKED, read=read, lines=ledger.whole,
                 remove=ledger.folder)  # fmt: skip
