"""What one conversation shows: every contender decodes its prompt, interleaved, and raw samples are kept.

One JSON object a (conversation, sampler, contender); the document and the report are made from these alone. That of a
drafter's longest chain also holds its teacher-forced scores on the answer plain decoding gave: what the target itself
says of every position.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from spectrain.data.batches import live_batch
from spectrain.data.conversations import Conversation, EncodedRow, render_prompt
from spectrain.data.dropped import RowError
from spectrain.decoding import Generation, generate, generate_plain
from spectrain.decoding.requests import check_request
from spectrain.drafters import TrainableDrafter
from spectrain.drafters.scoring import score_batch
from spectrain.errors import SpectrainError
from spectrain.evaluation.contenders import AcceptanceConfig, Contender
from spectrain.evaluation.law_test import placed
from spectrain.evaluation.visited import Watch
from spectrain.exact.sampler import Sampler
from spectrain.target import Target


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


def prompt_ids(target: Target, conversation: Conversation, max_new_tokens: int) -> list[int]:
    """Ids of a chat up to where the target answers; one that leaves no room for the answer is an error naming it."""
    ids = render_prompt(conversation, target.tokenizer)
    try:
        check_request(target, ids, max_new_tokens)
    except SpectrainError as error:
        raise RowError("no_room", f"conversation {conversation.id!r}: {error}") from error
    return ids


def conversation_samples(target: Target, entries: Sequence[Contender], conversation: Conversation, prompt: list[int],
                         config: AcceptanceConfig, limit: int | None = None) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Samples of one conversation, contenders in an order drawn anew for each sampler and seed."""
    for sampler in config.samplers:
        here = [entry.at(sampler) for entry in entries]
        for index in range(config.answers(sampler)):
            name = f"{config.seed}/{conversation.id}" + (f"/{index}" if index else "")
            seed = random.Random(name).getrandbits(48)
            for sample in _answers(target, here, conversation, prompt, sampler, seed, limit or config.max_new_tokens):
                yield {**sample, "seed_index": index}


def _answers(target: Target, here: Sequence[Contender], conversation: Conversation, prompt: list[int], sampler: Sampler,
             seed: int, budget: int) -> Iterator[dict[str, Any]]:  # fmt: skip
    """One answer of every contender."""
    order = list(here)
    random.Random(f"{seed}/{sampler.describe()}").shuffle(order)
    runs, seen = {}, {}
    arguments: dict[str, Any] = {"sampler": sampler, "max_new_tokens": budget, "seed": seed}
    for entry in order:
        own = entry.target or target
        watch = Watch(own.device, sampler, entry.k)
        if entry.verification is None:
            own.tap(())
            runs[entry.name] = generate_plain(own, prompt, **arguments)
        else:
            runs[entry.name] = generate(own, entry.drafter, prompt, shape=entry.shape, observer=watch.observer,
                                        verification=entry.verification, **arguments)  # fmt: skip
        seen[entry.name] = watch.end()
    for entry in here:
        own = entry.target or target
        sample = _sample(own, conversation, prompt, sampler, seed, entry, runs) | seen[entry.name]
        if entry is _longest(here, entry.family) and isinstance(entry.drafter, TrainableDrafter):
            sample["teacher_forced"] = _teacher_forced(own, conversation, prompt, sampler, entry, runs[entry.baseline])
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
    return asdict(score_batch(entry.drafter, batch, target.head, entry.k))


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
        "cache_bytes": run.cache_bytes,
        "pit": (
            None if sampler.greedy else placed(target, sampler, prompt, run.tokens, name=conversation.id, seed=seed)
        ),
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
