"""The measurement: every contender decodes the same held-out prompts, interleaved, and raw samples are kept.

One JSON line a (conversation, sampler, contender); the document and the report are made from these lines alone. Beside
them, also a line each, the drafter's teacher-forced scores on the answers plain decoding gave: what the target itself
says of every position. A run that was interrupted goes on with the next conversation.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from spectrain.data.batches import live_batch
from spectrain.data.conversations import Conversation, EncodedRow, render_prompt
from spectrain.data.split import conversations_digest
from spectrain.decoding import Generation, generate, generate_plain
from spectrain.decoding.requests import check_request
from spectrain.drafters import Drafter, TrainableDrafter
from spectrain.drafters.scoring import score_batch
from spectrain.errors import SpectrainError
from spectrain.evaluation.contenders import AcceptanceConfig, Contender, contenders
from spectrain.evaluation.measured_trees import NONE, Resolved
from spectrain.exact.sampler import Sampler
from spectrain.files import atomic_file, json_digest, whole_lines, write_json
from spectrain.identity import first_difference
from spectrain.target import Target

DRIFT_FILE = "drift.jsonl"  # beside the samples (see evaluation/drift.py), and as old as they are


def choose(conversations: Sequence[Conversation], count: int | None, seed: int) -> list[Conversation]:
    """``count`` conversations drawn evenly over the kinds (all when None), always the same ones for a seed."""
    if count is None or count >= len(conversations):
        return list(conversations)
    by_kind: dict[str, list[Conversation]] = {}
    for conversation in sorted(conversations, key=lambda c: c.id):
        by_kind.setdefault(conversation.kind, []).append(conversation)
    for members in by_kind.values():
        random.Random(seed).shuffle(members)
    turns = [c for turn in range(len(conversations)) for members in by_kind.values() for c in members[turn : turn + 1]]
    chosen = {c.id for c in turns[:count]}
    return [c for c in conversations if c.id in chosen]


def measure(target: Target, drafters: dict[str, Drafter], conversations: Sequence[Conversation],
            config: AcceptanceConfig, output: Path, identity: dict[str, Any], *, measured: Resolved = NONE,
            targets: Mapping[str, Target] | None = None, progress: bool = True) -> list[dict[str, Any]]:  # fmt: skip
    """Raw samples of every contender on every conversation, also kept in ``output/samples.jsonl``.

    ``identity`` names what is measured (digests of target and bundle): a folder begun with another is an error.
    ``targets`` has the targets of drafters that were trained with one: they decode with it.
    """
    entries = contenders(drafters, config.k, config.trees, config.verification, leave_out=True, measured=measured,
                         targets=targets)  # fmt: skip
    chosen = choose(conversations, config.conversations, config.seed)
    prompts = {c.id: prompt_ids(target, c, config.max_new_tokens) for c in chosen}
    key = {
        "config": config.model_dump(mode="json", exclude={"load"}),
        "traffic": conversations_digest(chosen),
        "prompt_ids": json_digest(prompts),  # the template's and the tokenizer's part in them
        "eos_ids": list(target.eos_ids),
        "dtype": str(target.dtype),
        "threads": torch.get_num_threads(),
        "count": len(chosen),
        **identity,
    }
    samples, file = _resume(output, key, len(entries) * sum(map(config.answers, config.samplers)))
    done = {sample["conversation"] for sample in samples}
    bar = tqdm(chosen, desc="evaluate", unit="chat", disable=not progress)
    warm = False
    with file.open("a", encoding="utf-8") as out:
        for conversation in bar:
            if conversation.id in done:
                continue
            prompt = prompts[conversation.id]
            if not warm:  # first calls allocate and tune; they are run and thrown away
                list(_conversation(target, entries, conversation, prompt, config, limit=min(8, config.max_new_tokens)))
                warm = True
            fresh = list(_conversation(target, entries, conversation, prompt, config))
            scores = [s for sample in fresh if (s := sample.pop("teacher_forced", None))]
            with (output / "teacher_forced.jsonl").open("a", encoding="utf-8") as beside:
                beside.write("".join(json.dumps(score) + "\n" for score in scores))
            # One write a conversation: after an interruption it is there whole or measured again.
            out.write("".join(json.dumps(sample) + "\n" for sample in fresh))
            out.flush()
            os.fsync(out.fileno())
            samples += fresh
            bar.set_postfix(_running(samples))
    return samples


def prompt_ids(target: Target, conversation: Conversation, max_new_tokens: int) -> list[int]:
    """Ids of a chat up to where the target answers; one that leaves no room for the answer is an error naming it."""
    ids = render_prompt(conversation, target.tokenizer)
    try:
        check_request(target, ids, max_new_tokens)
    except SpectrainError as error:
        raise SpectrainError(f"conversation {conversation.id!r}: {error}") from error
    return ids


def _conversation(target: Target, entries: Sequence[Contender], conversation: Conversation, prompt: list[int],
                  config: AcceptanceConfig, limit: int | None = None) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Samples of one conversation, contenders in an order drawn anew for each sampler and seed."""
    for sampler in config.samplers:
        for index in range(config.answers(sampler)):
            name = f"{config.seed}/{conversation.id}" + (f"/{index}" if index else "")
            seed = random.Random(name).getrandbits(48)
            here = [entry.at(sampler) for entry in entries]
            yield from _answers(target, here, conversation, prompt, sampler, (index, seed),
                                limit or config.max_new_tokens)  # fmt: skip


def _answers(target: Target, here: Sequence[Contender], conversation: Conversation, prompt: list[int], sampler: Sampler,
             numbered: tuple[int, int], budget: int) -> Iterator[dict[str, Any]]:  # fmt: skip
    """One answer of every contender; ``numbered``: which of the seeds it is, and the seed."""
    index, seed = numbered
    order = list(here)
    random.Random(f"{seed}/{sampler.describe()}").shuffle(order)
    runs = {}
    arguments: dict[str, Any] = {"sampler": sampler, "max_new_tokens": budget, "seed": seed}
    for entry in order:
        own = entry.target or target
        if entry.verification is None:
            own.tap(())
            runs[entry.name] = generate_plain(own, prompt, **arguments)
        else:
            runs[entry.name] = generate(own, entry.drafter, prompt, shape=entry.shape,
                                        verification=entry.verification, **arguments)  # fmt: skip
    for entry in here:
        own = entry.target or target
        sample = {**_sample(own, conversation, prompt, sampler, seed, entry, runs), "seed_index": index}
        if entry is _longest(here, entry.family) and isinstance(entry.drafter, TrainableDrafter):
            scores = _teacher_forced(own, conversation, prompt, sampler, entry, runs[entry.baseline])
            sample["teacher_forced"] = {**scores, "seed_index": index}
        yield sample


def _longest(entries: Sequence[Contender], family: str) -> Contender | None:
    """The chain of a drafter that its teacher-forced scores go as deep as, under the first of its rules."""
    chains = [entry for entry in entries if entry.family == family and entry.k]
    return max(chains, key=lambda entry: entry.k or 0, default=None)


def _teacher_forced(target: Target, conversation: Conversation, prompt: list[int], sampler: Sampler, entry: Contender,
                    plain: Generation) -> dict[str, Any]:  # fmt: skip
    """Scores of a drafter at every position of the answer that plain decoding gave."""
    assert isinstance(entry.drafter, TrainableDrafter)
    assert entry.k is not None
    mask = [0] * len(prompt) + [1] * len(plain.tokens)
    target.tap(entry.drafter.tap_layers)
    batch = live_batch(target, [EncodedRow(conversation.id, conversation.kind, prompt + plain.tokens, mask)])
    scores = score_batch(entry.drafter, batch, target.head, entry.k)
    where = {"conversation": conversation.id, "kind": conversation.kind, "drafter": entry.family}
    return {**where, "sampler": asdict(sampler), **asdict(scores)}


def _sample(target: Target, conversation: Conversation, prompt: list[int], sampler: Sampler, seed: int,
            entry: Contender, runs: dict[str, Generation]) -> dict[str, Any]:  # fmt: skip
    run, plain = runs[entry.name], runs[entry.baseline]
    equal = run.tokens == plain.tokens if sampler.greedy else None
    return {
        "conversation": conversation.id,
        "kind": conversation.kind,
        **entry.described(),
        "temperature": sampler.temperature,
        "sampler": asdict(sampler),
        "seed": seed,
        "turn": 1 + sum(message.role == "assistant" for message in conversation.prompt),
        "prompt_tokens": len(prompt),
        "new_tokens": len(run.tokens),
        "finished": run.finished,
        "rounds": [[r.proposed, r.accepted, r.committed, r.clipped, r.nodes] for r in run.rounds],
        "prefill_s": run.prefill_s,
        "draft_s": run.draft_s,
        "verify_s": run.verify_s,
        "overhead_s": run.overhead_s,
        "total_s": run.total_s,
        "state_bytes": run.state_bytes,
        "equal_to_plain": equal,
        "first_difference": output_difference(target, prompt, run.tokens, plain.tokens) if equal is False else None,
    }


@torch.inference_mode()
def output_difference(target: Target, prompt: list[int], tokens: list[int], plain: list[int]) -> dict[str, Any]:
    """Where two greedy outputs part, and by how much the target's logits of the two tokens differ there."""
    at = next(
        (i for i, (a, b) in enumerate(zip(tokens, plain, strict=False)) if a != b),
        min(len(tokens), len(plain)),
    )
    if at >= min(len(tokens), len(plain)):
        return {"position": at, "logit_gap": None}
    ids = torch.tensor([[*prompt, *plain[:at]]], device=target.device)
    logits = target.logits(target.forward(ids).hidden_BTH[0, -1]).double()
    return {"position": at, "logit_gap": float((logits[plain[at]] - logits[tokens[at]]).abs())}


def _running(samples: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Tokens per round so far of the first sampler's drafters, for the progress bar."""
    totals: dict[str, list[int]] = {}
    for sample in samples:
        if sample["shape"] and sample["sampler"] == samples[0]["sampler"]:
            total = totals.setdefault(sample["contender"], [0, 0])
            total[0] += sum(r[2] for r in sample["rounds"])
            total[1] += len(sample["rounds"])
    return {name: f"τ {tokens / rounds:.2f}" for name, (tokens, rounds) in totals.items() if rounds}


def _resume(output: Path, key: dict[str, Any], size: int) -> tuple[list[dict[str, Any]], Path]:
    """Samples of an interrupted run with the same key, and the file to append to."""
    output.mkdir(parents=True, exist_ok=True)
    file, sidecar, beside = output / "samples.jsonl", output / "samples.json", output / "teacher_forced.jsonl"
    if not file.exists():
        for stale in (beside, output / DRIFT_FILE):
            stale.unlink(missing_ok=True)
        write_json(sidecar, key)
        file.touch()
        return [], file
    found = json.loads(sidecar.read_text(encoding="utf-8")) if sidecar.exists() else {}
    key = json.loads(json.dumps(key))
    if {**found, "threads": key["threads"]} == key and len(whole_lines(file)) == size * key["count"]:
        key = found  # finished: nothing more is timed, so this process's threads do not matter
    if found != key:
        raise SpectrainError(
            f"{file} was measured with other settings, its own against these: {first_difference(found, key)}; "
            f"choose another output, or delete {output}"
        )
    if beside.exists():
        whole_lines(beside)  # so that the next line does not join one that was cut off
    samples = [json.loads(line) for line in whole_lines(file)]
    return _complete(samples, size, file), file


def _complete(samples: list[dict[str, Any]], size: int, file: Path) -> list[dict[str, Any]]:
    """Drop the conversation that was cut off while its ``size`` samples were being written."""
    count = Counter(sample["conversation"] for sample in samples)
    kept = [sample for sample in samples if count[sample["conversation"]] == size]
    if len(kept) < len(samples):
        with atomic_file(file) as partial:
            partial.write_text("".join(json.dumps(sample) + "\n" for sample in kept), encoding="utf-8")
    return kept
