"""Answers by the target that is loaded here, in batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from spectrain.data.conversations import Conversation
from spectrain.decoding import generate_batch
from spectrain.decoding.requests import stream_seed
from spectrain.regenerate.answers import Row, answer_row
from spectrain.regenerate.config import RegenerateConfig
from spectrain.target import Target


def answer_locally(target: Target, todo: Sequence[Conversation], prompts: Mapping[str, list[int]],
                   config: RegenerateConfig, keep: Callable[[list[Row]], None]) -> None:  # fmt: skip
    """Answer conversations of like length together, and hand each batch of rows to ``keep``."""
    todo = sorted(todo, key=lambda c: (len(prompts[c.id]), c.id))
    for start in range(0, len(todo), config.batch_size):
        keep(_answer(target, todo[start : start + config.batch_size], prompts, config))


def _answer(target: Target, batch: Sequence[Conversation], prompts: Mapping[str, list[int]],
            config: RegenerateConfig) -> list[Row]:  # fmt: skip
    seeds = [stream_seed(config.seed, conversation.id) for conversation in batch]
    ids = [prompts[conversation.id] for conversation in batch]
    generations = generate_batch(
        target, None, ids, sampler=config.sampler, max_new_tokens=config.max_new_tokens, seeds=seeds
    )
    rows = []
    for conversation, prompt, generation in zip(batch, ids, generations, strict=True):
        text = target.tokenizer.decode(generation.tokens, skip_special_tokens=True)
        message = {"role": "assistant", "content": text}
        rows.append(answer_row(conversation, message, prompt, generation.tokens, generation.finished))
    return rows
