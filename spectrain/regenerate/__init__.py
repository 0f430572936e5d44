"""Answers rewritten by the target itself, with the token ids it sampled: by the one loaded here, or by a server.

A drafter learns the target's law on prefixes the target visits: its own answers, as ids. Their text would often
re-tokenize into other ids, so the ids are kept and trained on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from spectrain.attention import context
from spectrain.data.conversations import Conversation, render_prompt
from spectrain.data.split import conversations_digest
from spectrain.errors import SpectrainError
from spectrain.files import json_digest
from spectrain.regenerate.answers import AnswerFile, Row, recorded
from spectrain.regenerate.client import FailingError
from spectrain.regenerate.config import RegenerateConfig, ServerConfig
from spectrain.regenerate.empties import FIRST, Empties, is_empty
from spectrain.regenerate.local import answer_locally
from spectrain.regenerate.progress import Progress
from spectrain.regenerate.server import Server
from spectrain.target import Target

__all__ = ["RegenerateConfig", "ServerConfig", "regenerate"]


def regenerate(target: Target, model_digest: str, conversations: Sequence[Conversation], config: RegenerateConfig,
               output: Path, *, progress: bool = True) -> Path:  # fmt: skip
    """Answer the last user turn of every conversation; chats with ids, in order, as JSON-lines at ``output``.

    Interrupted, it goes on where it stopped: finished answers lie in ``output`` + ".partial". A finished or partial
    file made with other prompts, another target or another sampler is an error. Prompts that leave no room for
    an answer in the target's context are an error that names the first. An answer cut at ``max_new_tokens`` is kept,
    says so ("finished": "budget") and ends without an EOS. One whose ids a server did not give is "retokenized"; an EOS
    that ended an answer and that a server left out of its ids is put back. Empty answers are counted; where there is no
    other, or none among the first few, they are an error, and not kept.
    """
    prompts = {c.id: render_prompt(c, target.tokenizer) for c in conversations}
    _check_room(target, prompts, config.max_new_tokens)
    header: dict[str, Any] = {
        "prompts": conversations_digest(conversations),
        "prompt_ids": json_digest(prompts),  # the template's and the tokenizer's part in them
        "eos_ids": list(target.eos_ids),
        "model": model_digest,
        "config": config.model_dump(mode="json", exclude={"batch_size", "server"}),
    }
    server = _server(target, config, recorded(output), conversations)
    header |= {"server": server.record} if server else {"dtype": str(target.dtype)}
    file = AnswerFile(output, header)
    if file.finished:
        return output
    todo = [c for c in conversations if c.id not in file.rows]
    empties = Empties(min(len(todo), FIRST) if not file.rows else 0, todo)
    with file, Progress(len(conversations), len(file.rows), shown=progress) as bar:

        def keep(rows: list[Row]) -> None:
            file.add(sound := empties.held_back(rows))
            bar.add(sound)

        if server is None:
            answer_locally(target, todo, prompts, config, keep)
        else:
            server.answer(todo, prompts, keep, bar.retried)
        file.finish(conversations)
    for note in (*_notes(file.rows.values()), *(server.notes() if server else ())):
        if progress:
            print(note, flush=True)
    return output


def _server(
    target: Target, config: RegenerateConfig, record: Row, conversations: Sequence[Conversation]
) -> Server | None:
    """The server that the recipe names, if it names one, and how it is spoken to."""
    if config.server is None:
        return None
    try:
        return Server(target, config, record.get("server"))
    except FailingError as error:
        raise SpectrainError(
            f"{error}; none of the {len(conversations)} conversations was asked yet, from {conversations[0].named} on, "
            "and nothing was written"
        ) from error


def _notes(rows: Iterable[Row]) -> list[str]:
    """What is to be known about the answers before they are trained on."""
    rows, notes = list(rows), []
    without = sum(row.get("retokenized", False) for row in rows)
    if without:
        notes.append(
            f"{without} of {len(rows)} answers carry no sampled ids; they were tokenized again from their text, which "
            "now and then gives other ids than the target sampled. A server that returns token ids, as vLLM does, "
            "avoids it"
        )
    empty = [row["id"] for row in rows if is_empty(row)]
    if empty:
        notes.append(
            f"{len(empty)} of {len(rows)} answers are empty, the first of conversation {empty[0]!r}: only their end is "
            "trained on"
        )
    return notes


def _check_room(target: Target, prompts: dict[str, list[int]], max_new_tokens: int) -> None:
    limit = context(target.config)
    for name, ids in prompts.items():
        if limit is not None and len(ids) + max_new_tokens > limit:
            raise SpectrainError(
                f"conversation {name!r}: its prompt of {len(ids)} tokens and {max_new_tokens} new ones exceed the "
                f"target's context of {limit}; remove it, or lower regenerate.max_new_tokens"
            )
