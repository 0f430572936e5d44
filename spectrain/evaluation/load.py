"""Speculation under load: what a verification costs at each batch size, and what speculation yields there.

A target step that decodes few requests waits for its weights, so verifying k + 1 tokens costs little more than one;
the more requests share a step, the nearer it comes to k + 1 times as much. Forwards are timed by themselves, rounds by
their parts, and answers as a whole, all in turn, for a machine is not equally fast all the time. Raw numbers are kept
in ``load.jsonl``, a line for each batch size; an interrupted measurement goes on with the next size, and sizes may be
added later.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from spectrain.attention import context as context_of
from spectrain.data.conversations import Conversation
from spectrain.decoding import Decoding, Generation, Round
from spectrain.errors import SpectrainError
from spectrain.evaluation.begun import go_on, lines_by
from spectrain.evaluation.contenders import AcceptanceConfig, Contender
from spectrain.evaluation.forwards import Forwards
from spectrain.evaluation.leaves import PLAIN
from spectrain.evaluation.load_config import LoadConfig
from spectrain.evaluation.load_summary import summarise_load
from spectrain.evaluation.workbench import Prompt, Stopwatch, prompts_of
from spectrain.exact.sampler import Sampler
from spectrain.files import json_digest
from spectrain.target import Target

WARM_UP = 4  # tokens of every contender at every batch size that are thrown away
TIMED_GROUPS = 4  # further batches of every size whose rounds are timed part by part; they count for the parts alone
LOAD_FILE, LOAD_KEY = "load.jsonl", "load.json"
CLOCKED = ("threads",)  # what matters to the clock alone


@dataclass(frozen=True)
class Load:
    """What is decoded, and how: contenders (plain decoding first), prompts to draw batches from, settings."""

    entries: Sequence[Contender]
    prompts: Sequence[Prompt]
    config: LoadConfig
    max_new_tokens: int
    seed: int
    sampler: Sampler = field(default_factory=Sampler)

    def rows(self) -> list[int]:
        """Tokens of a request in one forward: a plain step, and every verification that a contender asks for."""
        shapes = [entry.at(self.sampler).shape for entry in self.entries]
        return sorted({1, *(shape.nodes + 1 for shape in shapes if shape is not None)})

    def cached(self, size: int) -> dict[int, list[int]]:
        """Cached tokens of each request of a batch, by the context asked for; unless one is, what the measured prompts
        have half-way through an answer: on average, and spread over the batch as their lengths are."""
        if self.config.context:
            return {context: [context] * size for context in sorted(set(self.config.context))}
        lengths = sorted(len(prompt.ids) for prompt in self.prompts)
        spread = [lengths[int((i + 0.5) / size * len(lengths))] for i in range(size)]
        half = self.max_new_tokens // 2
        return {round(sum(lengths) / len(lengths) + self.max_new_tokens / 2): [length + half for length in spread]}


def load_block(target: Target, entries: Sequence[Contender], conversations: Sequence[Conversation],
               config: AcceptanceConfig, folder: Path, identity: dict[str, Any], *,
               progress: bool = True) -> dict[str, Any]:  # fmt: skip
    """The document's ``load``: plain decoding of the target and every contender that keeps its law, with the first
    sampler, on batches drawn from the chats that are measured. A target of a drafter's own would be another server."""
    load = _load_of(target, entries, conversations, config)
    prompt_tokens = sum(len(prompt.ids) for prompt in load.prompts) / len(load.prompts)
    lines = measure_load(target, load, folder, identity, progress=progress)
    return {
        "sampler": load.sampler.describe(),
        "groups": load.config.groups,
        "repeats": load.config.repeats,
        "max_new_tokens": config.max_new_tokens,
        "prompt_tokens": prompt_tokens,
        **summarise_load(lines),
    }


def check_load(target: Target, entries: Sequence[Contender], conversations: Sequence[Conversation],
               config: AcceptanceConfig, folder: Path, identity: dict[str, Any]) -> None:  # fmt: skip
    """Refuse what could not be measured under load, which comes last: before anything else is measured."""
    if config.load is not None:
        load = _load_of(target, entries, conversations, config)
        check_context(target, load)
        if (folder / LOAD_FILE).exists():
            _resume(folder, _key(target, load, identity), config.load.batch)


def _load_of(target: Target, entries: Sequence[Contender], conversations: Sequence[Conversation],
             config: AcceptanceConfig) -> Load:  # fmt: skip
    assert config.load is not None
    prompts = prompts_of(target, conversations, config.conversations, config.max_new_tokens, config.seed)
    lawful = [entry for entry in entries if entry.baseline == PLAIN and not entry.lossy]
    return Load(lawful, prompts, config.load, config.max_new_tokens, config.seed, config.samplers[0])


def measure_load(target: Target, load: Load, folder: Path, identity: dict[str, Any], *,
                 progress: bool = True) -> list[dict[str, Any]]:  # fmt: skip
    """A line for every batch size asked for, smallest first, also kept in ``folder/load.jsonl``.

    ``identity`` names what is measured; a folder begun with another, or other settings, is an error.
    """
    check_context(target, load)
    sizes = sorted(set(load.config.batch))
    lines = _resume(folder, _key(target, load, identity), sizes)
    for size in sizes:
        if size not in lines:
            lines[size] = measure_batch(target, load, size, progress=progress)
            with (folder / LOAD_FILE).open("a", encoding="utf-8") as out:
                out.write(json.dumps(lines[size]) + "\n")
                out.flush()
                os.fsync(out.fileno())
    return [lines[size] for size in sizes]


def _key(target: Target, load: Load, identity: dict[str, Any]) -> dict[str, Any]:
    """Everything that the numbers depend on."""
    return {
        "load": load.config.model_dump(mode="json", exclude={"batch", "request_rates"}),
        "contenders": [{**e.at(load.sampler).described(), "name": e.name} for e in load.entries],
        "prompts": json_digest([[prompt.id, prompt.ids] for prompt in load.prompts]),
        "sampler": load.sampler.describe(),
        "max_new_tokens": load.max_new_tokens,
        "seed": load.seed,
        "dtype": str(target.dtype),
        "threads": torch.get_num_threads(),
        **identity,
    }


def measure_batch(target: Target, load: Load, size: int, *, progress: bool = True) -> dict[str, Any]:
    """Raw numbers of one batch size: ``verification`` forwards, ``parts`` of rounds, and decoded ``samples``."""
    rng = random.Random(f"{load.seed}/{size}")
    groups = rng.sample([None] * TIMED_GROUPS + list(range(load.config.groups)), k=TIMED_GROUPS + load.config.groups)
    parts: list[dict[str, Any]] = []
    samples: list[dict[str, Any]] = []
    forwards = Forwards(target, load.rows(), load.cached(size), load.seed)
    with tqdm(total=len(groups) * len(load.entries), desc=f"batch {size}", unit="run", disable=not progress) as bar:
        for entry in load.entries:
            _decode(target, load, entry, _draw(rng, load.prompts, size), limit=WARM_UP)
        for done, group in enumerate(groups, 1):
            chosen, found = _draw(rng, load.prompts, size), {}
            for entry in rng.sample(list(load.entries), len(load.entries)):
                bar.set_postfix_str(entry.name)
                found[entry.name] = _decode(target, load, entry, chosen, timed=group is None)
                bar.update()
            for entry in load.entries:
                if group is None:
                    parts += _parts(entry, found[entry.name])
                else:
                    samples.append(_sample(load, entry, size, group, chosen, found))
            forwards.time(load.config.repeats * done // len(groups))
    return {"batch": size, "verification": forwards.found(), "parts": parts, "samples": samples}


# --- what it yields -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Decoded:
    """One answer to every prompt of a batch, and the seconds before and after the first token."""

    runs: list[Generation]
    prefill_s: float
    decode_s: float


def _draw(rng: random.Random, prompts: Sequence[Prompt], size: int) -> list[Prompt]:
    """Different prompts while there are enough; all of them, and some again, for a larger batch."""
    again = [rng.choice(list(prompts)) for _ in range(size - len(prompts))]
    return rng.sample(list(prompts), min(size, len(prompts))) + again


def _decode(target: Target, load: Load, entry: Contender, prompts: Sequence[Prompt], *, limit: int | None = None,
            timed: bool = False) -> _Decoded:  # fmt: skip
    budget = min(limit or load.max_new_tokens, load.max_new_tokens)
    with Stopwatch(target.device) as first:
        decoding = Decoding(target, entry.drafter, [prompt.ids for prompt in prompts], seeds=range(len(prompts)),
                            shape=entry.at(load.sampler).shape, verification=entry.verification or "token",
                            sampler=load.sampler, max_new_tokens=budget, timed=timed)  # fmt: skip
        rounds = iter(decoding)
        next(rounds)  # the prefill
    with Stopwatch(target.device) as rest:
        for _ in rounds:
            pass
    return _Decoded(decoding.results, first.seconds, rest.seconds)


def _parts(entry: Contender, found: _Decoded) -> list[dict[str, Any]]:
    """Sums over the rounds that as many requests shared: ``running``, how many; ``rounds``, seconds by part,
    ``proposed`` tokens, and ``rows``, the tokens a request in the forward, which the longest proposal decides."""
    longest = max(len(run.rounds) for run in found.runs)
    rounds = [[run.rounds[i] for run in found.runs if len(run.rounds) > i] for i in range(longest)]
    by_running: dict[int, list[list[Round]]] = {}
    for together in rounds:
        by_running.setdefault(len(together), []).append(together)
    return [{"contender": entry.name, "running": running, **_summed(own)} for running, own in by_running.items()]


def _summed(rounds: Sequence[Sequence[Round]]) -> dict[str, Any]:
    shared = [together[0] for together in rounds]  # a batch shares its seconds
    draft, verify = (sum(getattr(r, part) for r in shared) for part in ("draft_s", "verify_s"))
    return {
        "rounds": len(rounds),
        "proposed": sum(r.proposed for together in rounds for r in together),
        "rows": sum(1 + max(r.nodes for r in together) for together in rounds),
        "draft_s": draft,
        "verify_s": verify,
        "overhead_s": sum(r.total_s for r in shared) - draft - verify,
    }


def _sample(load: Load, entry: Contender, size: int, group: int, prompts: Sequence[Prompt],
            found: dict[str, _Decoded]) -> dict[str, Any]:  # fmt: skip
    runs, plain = found[entry.name].runs, found[PLAIN].runs
    rounds = [len(run.rounds) for run in runs]
    same = sum(run.tokens == other.tokens for run, other in zip(runs, plain, strict=True))
    return {
        "contender": entry.name,
        "drafter": entry.family,
        "k": entry.k,
        "batch": size,
        "group": group,
        "prompts": [prompt.id for prompt in prompts],
        "tokens": sum(len(run.tokens) for run in runs),
        "seconds": found[entry.name].prefill_s + found[entry.name].decode_s,
        "prefill_s": found[entry.name].prefill_s,
        "decode_s": found[entry.name].decode_s,
        "rounds": sum(rounds),
        "steps": max(rounds),
        "rounds_by_running": _by_running(rounds),
        "committed": sum(r.committed for run in runs for r in run.rounds),
        # Requests that have ended leave the batch: how many there were in a round, on average.
        "running": (sum(rounds) + size) / (max(rounds) + 1),
        "identical": same if load.sampler.greedy else None,
    }


def _by_running(rounds: Sequence[int]) -> list[list[int]]:
    """[requests, rounds]: how many rounds so many requests shared, from how many rounds each took part in."""
    together = Counter(sum(count > i for count in rounds) for i in range(max(rounds)))
    return [list(pair) for pair in sorted(together.items())]


# --- going on -----------------------------------------------------------------------------------------------------


def check_context(target: Target, load: Load) -> None:
    """Refuse cached tokens that leave no room in the target's context for a verification."""
    asked, room = max(load.config.context, default=0), context_of(target.config)
    longest = asked + max(load.rows())
    if room is not None and longest > room:
        raise SpectrainError(
            f"--context {asked}: with {max(load.rows())} tokens to verify that is {longest}, but "
            f"the target has a context of {room} tokens; lower --context"
        )


def _resume(folder: Path, key: dict[str, Any], sizes: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Lines by batch size of an earlier measurement with the same key."""
    file = folder / LOAD_FILE
    lines: dict[int, dict[str, Any]] = {}

    def read() -> bool:
        lines.update(lines_by(file, lambda line: line["batch"]))
        return all(size in lines for size in sizes)

    go_on(folder / LOAD_KEY, key, fresh=not file.exists(), clocked=CLOCKED, read=read, lines=file, remove=file)
    file.touch()
    return lines
