"""Answers rewritten by the target itself, with the token ids it sampled.

A drafter learns the target's law on prefixes the target visits: its own answers, as ids. Their text would often
re-tokenize into other ids, so the ids are kept and trained on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from tqdm import tqdm

from spectrain.attention import context
from spectrain.data.conversations import Conversation, render_prompt
from spectrain.data.split import conversations_digest
from spectrain.decoding import generate_batch
from spectrain.decoding.requests import stream_seed
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler
from spectrain.files import atomic_file, json_digest, whole_lines
from spectrain.identity import first_difference
from spectrain.target import Target


class RegenerateConfig(BaseModel):
    """How the target answers the prompts that a drafter will be trained on."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    sampler: Sampler = Field(default_factory=Sampler, description="the one you serve with")
    max_new_tokens: int = Field(256, ge=1)
    batch_size: int = Field(48, ge=1)
    seed: int = 0


def regenerate(target: Target, model_digest: str, conversations: Sequence[Conversation], config: RegenerateConfig,
               output: Path, *, progress: bool = True) -> Path:  # fmt: skip
    """Answer the last user turn of every conversation; chats with ids, in order, as JSON-lines at ``output``.

    Interrupted, it goes on where it stopped: finished batches lie in ``output`` + ".partial". A finished or partial
    file made with other prompts, another target or another sampler is an error. Prompts that leave no room for
    an answer in the target's context are an error that names the first.
    """
    prompts = {c.id: render_prompt(c, target.tokenizer) for c in conversations}
    _check_room(target, prompts, config.max_new_tokens)
    header = {
        "prompts": conversations_digest(conversations),
        "prompt_ids": json_digest(prompts),  # the template's and the tokenizer's part in them
        "eos_ids": list(target.eos_ids),
        "model": model_digest,
        "config": config.model_dump(mode="json", exclude={"batch_size"}),
        "dtype": str(target.dtype),
    }
    if output.exists():
        _check_header(output.with_suffix(".json"), header, output)
        return output
    partial = output.with_name(output.name + ".partial")
    done = _read_partial(partial, header)
    todo = sorted((c for c in conversations if c.id not in done), key=lambda c: (len(prompts[c.id]), c.id))
    bar = tqdm(
        total=len(conversations),
        initial=len(done),
        desc="answers by the target",
        unit="chat",
        disable=not progress,
    )
    tokens = 0
    with partial.open("a", encoding="utf-8") as file:
        for start in range(0, len(todo), config.batch_size):
            batch = todo[start : start + config.batch_size]
            for conversation, row in zip(batch, _answer(target, batch, prompts, config), strict=True):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                done[conversation.id] = row
                tokens += len(row["answer_ids"])
            file.flush()
            os.fsync(file.fileno())
            bar.update(len(batch))
            bar.set_postfix(tokens=tokens)
    bar.close()
    with atomic_file(output.with_suffix(".json")) as path:
        path.write_text(json.dumps(header, indent=2) + "\n", encoding="utf-8")
    with atomic_file(output) as path:
        lines = (json.dumps(done[c.id], ensure_ascii=False) + "\n" for c in conversations)
        path.write_text("".join(lines), encoding="utf-8")
    partial.unlink()
    partial.with_suffix(".json").unlink()
    return output


def _answer(target: Target, batch: Sequence[Conversation], prompts: dict[str, list[int]],
            config: RegenerateConfig) -> list[dict[str, Any]]:  # fmt: skip
    seeds = [stream_seed(config.seed, conversation.id) for conversation in batch]
    ids = [prompts[conversation.id] for conversation in batch]
    generations = generate_batch(
        target, None, ids, sampler=config.sampler, max_new_tokens=config.max_new_tokens, seeds=seeds
    )
    rows = []
    for conversation, prompt, generation in zip(batch, ids, generations, strict=True):
        text = target.tokenizer.decode(generation.tokens, skip_special_tokens=True)
        messages = [*(m.turn for m in conversation.prompt), {"role": "assistant", "content": text}]
        row = {**conversation.labels, "messages": messages}
        rows.append(row | {"prompt_ids": prompt, "answer_ids": generation.tokens, "finished": generation.finished})
    return rows


def _check_room(target: Target, prompts: dict[str, list[int]], max_new_tokens: int) -> None:
    limit = context(target.config)
    for name, ids in prompts.items():
        if limit is not None and len(ids) + max_new_tokens > limit:
            raise SpectrainError(
                f"conversation {name!r}: its prompt of {len(ids)} tokens and {max_new_tokens} new ones exceed the "
                f"target's context of {limit}; remove it, or lower regenerate.max_new_tokens"
            )


def _read_partial(partial: Path, header: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Rows of an interrupted run; a line cut off in the middle is dropped from the file."""
    sidecar = partial.with_suffix(".json")
    partial.parent.mkdir(parents=True, exist_ok=True)
    if not partial.exists():
        with atomic_file(sidecar) as path:
            path.write_text(json.dumps(header, indent=2) + "\n", encoding="utf-8")
        partial.touch()
        return {}
    _check_header(sidecar, header, partial)
    rows = [json.loads(line) for line in whole_lines(partial)]
    return {row["id"]: row for row in rows}


def _check_header(path: Path, header: dict[str, Any], answers: Path) -> None:
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if found != header:
        raise SpectrainError(
            f"{answers} was made with other settings, its own against these: {first_difference(found, header)}; "
            f"delete it (and {path.name}) to answer again, or choose another output"
        )
