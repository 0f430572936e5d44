"""Chats: the formats they come in, and the ids and loss masks the target's chat template makes of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spectrain.data.rows import Row, read_rows
from spectrain.data.template import ChatTemplate
from spectrain.errors import SpectrainError
from spectrain.files import json_digest

ROLES = {"system": "system", "user": "user", "assistant": "assistant", "human": "user", "gpt": "assistant"}


@dataclass(frozen=True)
class Message:
    role: str  # "system", "user" or "assistant"
    content: str

    @property
    def turn(self) -> dict[str, str]:
        """The message as chat templates take it."""
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True)
class Conversation:
    """One chat. A regenerated answer carries the ids the target read and sampled: those are trained on."""

    id: str
    messages: tuple[Message, ...]
    kind: str = "unlabelled"
    template: str | None = None  # of generated traffic: which template, filled with which slots
    slots: Mapping[str, Any] | None = field(default=None, hash=False)
    prompt_ids: tuple[int, ...] | None = None
    answer_ids: tuple[int, ...] | None = None

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The messages before the last answer: all of them when the last turn is the user's."""
        return self.messages[:-1] if self.messages[-1].role == "assistant" else self.messages


@dataclass(frozen=True)
class EncodedRow:
    """``ids`` [T] and ``mask`` [T], 1 on the answers' tokens, end of turn included. Ends with an answer."""

    conversation: str
    kind: str
    ids: list[int]
    mask: list[int]
    turn: int | None = None  # which answer (from 0), or None when the row holds them all


@dataclass(frozen=True)
class Dropped:
    """How many rows were left out, by reason."""

    too_long: int = 0
    nothing_supervised: int = 0

    @property
    def total(self) -> int:
        return self.too_long + self.nothing_supervised

    def __str__(self) -> str:
        return f"{self.too_long} longer than max_length, {self.nothing_supervised} without an answer"


def load_conversations(paths: Path | str | Sequence[Path | str]) -> list[Conversation]:
    """Read chats in file order. A row has ``messages`` (role, content), ``conversations`` (from, value), or
    ``prompt`` (text or messages) with or without ``completion``; of several, the first named here counts.
    Optional: ``id`` (else a digest of the content), ``kind`` or ``category``, ``template`` and ``slots``,
    ``prompt_ids`` and ``answer_ids``. Other keys are ignored. A SpectrainError names the file and line.
    """
    files = [paths] if isinstance(paths, (str, Path)) else list(paths)
    found: dict[str, tuple[str, Conversation]] = {}
    for place, row in itertools.chain.from_iterable(read_rows(file) for file in files):
        conversation = parse_conversation(row, place, taken=found)
        if conversation.id in found:
            raise SpectrainError(
                f"{place}: id {conversation.id!r} was already used at {found[conversation.id][0]}; "
                "give every conversation its own id, or none (then a digest of its content is used)"
            )
        found[conversation.id] = (place, conversation)
    if not found:
        raise SpectrainError(f"no conversations in {', '.join(map(str, files)) or 'an empty list of files'}")
    return [conversation for _, conversation in found.values()]


def parse_conversation(row: Row, place: str, taken: Iterable[str] = ()) -> Conversation:
    """The conversation of one row; ``place`` names the row in errors, ``taken`` holds ids that are in use."""
    row = {key: value for key, value in row.items() if value is not None}  # Parquet fills gaps with null
    sampled = {key: _ids(row[key], f"{place}: {key}") for key in ("prompt_ids", "answer_ids") if key in row}
    if "answer_ids" in sampled and "prompt_ids" not in sampled:
        raise SpectrainError(f"{place}: answer_ids without prompt_ids; give the ids of the prompt as well")
    messages = tuple(_messages(row, place, allow_empty_answer="answer_ids" in sampled))
    _check_turns(messages, place)
    if "answer_ids" in sampled and messages[-1].role != "assistant":
        raise SpectrainError(f"{place}: answer_ids, but the last message is the user's; add the answer's text")
    kind: Any = row.get("kind", row.get("category", "unlabelled"))
    template, slots = row.get("template"), row.get("slots")
    for key, value, wanted in (("kind", kind, str), ("template", template, str), ("slots", slots, dict)):
        if value is not None and not isinstance(value, wanted):
            raise SpectrainError(f"{place}: {key} is {value!r:.60}, expected {wanted.__name__}")
    name = _id(row, place) if "id" in row else _content_id(messages, taken)
    return Conversation(name, messages, kind, template, slots, **sampled)


def _id(row: Row, place: str) -> str:
    if isinstance(row["id"], bool) or not isinstance(row["id"], (str, int)) or row["id"] == "":
        raise SpectrainError(f"{place}: id is {row['id']!r}, expected text or an integer")
    return str(row["id"])


def _content_id(messages: Sequence[Message], taken: Iterable[str]) -> str:
    digest = json_digest([[message.role, message.content] for message in messages])[:16]
    copies = (digest if i == 1 else f"{digest}-{i}" for i in itertools.count(1))
    return next(name for name in copies if name not in taken)


def _ids(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or any(type(i) is not int or i < 0 for i in value):
        raise SpectrainError(f"{where}: expected a list of token ids (integers from 0), at least one")
    return tuple(value)


def _messages(row: Row, place: str, allow_empty_answer: bool) -> Iterable[Message]:
    for number, entry in enumerate(_entries(row, place), start=1):
        where = f"{place}: message {number}"
        if not isinstance(entry, dict):
            raise SpectrainError(f"{where}: found {type(entry).__name__}, expected an object with role and content")
        role = entry.get("role", entry.get("from"))
        if not isinstance(role, str) or role not in ROLES:
            raise SpectrainError(f"{where}: unknown role {role!r}; expected one of {', '.join(ROLES)}")
        if entry.get("tool_calls") or entry.get("function_call"):
            raise SpectrainError(f"{where}: tool calls are not supported; remove the row or write them as text")
        content = _text(entry.get("content", entry.get("value")), f"{where} ({role})")
        if not content.strip() and not (allow_empty_answer and ROLES[role] == "assistant"):
            raise SpectrainError(f"{where} ({role}): empty content; fill it or remove the message")
        yield Message(ROLES[role], content)


def _entries(row: Row, place: str) -> list[Any]:
    for key in ("messages", "conversations"):
        if key in row:
            if not isinstance(row[key], list) or not row[key]:
                raise SpectrainError(f"{place}: {key} is {row[key]!r:.60}, expected a list of at least one message")
            return row[key]
    if "prompt" not in row:
        keys = ", ".join(row) or "no keys"
        raise SpectrainError(f"{place}: found {keys}; expected messages, conversations, or prompt (and completion)")
    parts = [("user", row["prompt"])] + ([("assistant", row["completion"])] if "completion" in row else [])
    return [
        entry
        for role, part in parts
        for entry in (part if isinstance(part, list) else [{"role": role, "content": part}])
    ]


def _text(content: Any, where: str) -> str:
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise SpectrainError(f"{where}: content is {content!r:.60}, expected text")
    if not content.isascii() and any("\ud800" <= c <= "\udfff" for c in content):
        raise SpectrainError(
            f"{where}: content holds half a surrogate pair, which no tokenizer can encode; fix the text"
        )
    return content


def _check_turns(messages: Sequence[Message], place: str) -> None:
    roles = [message.role for message in messages]
    turns = roles[1:] if roles[0] == "system" else roles
    if "user" not in turns:
        raise SpectrainError(f"{place}: no user turn (found {', '.join(roles)}); a conversation needs one")
    expected = [("user", "assistant")[i % 2] for i in range(len(turns))]
    for number, (role, wanted) in enumerate(zip(turns, expected, strict=True), start=1 + len(roles) - len(turns)):
        if role != wanted:
            raise SpectrainError(
                f"{place}: message {number} is of the {role}, expected the {wanted}: an optional system "
                "message, then user and assistant in turn (merge neighbours of one role)"
            )


def render_prompt(messages: Sequence[Message], tokenizer: Any) -> list[int]:
    """Ids a server would feed for ``messages``: the template with its generation prompt."""
    return ChatTemplate(tokenizer).render([message.turn for message in messages], generation_prompt=True)


def from_sampled(conversation: Conversation) -> EncodedRow:
    """The row of a regenerated answer, from the ids the target read and sampled: nothing is re-tokenized."""
    if conversation.prompt_ids is None or conversation.answer_ids is None:
        raise SpectrainError(f"conversation {conversation.id!r} has no sampled ids; regenerate its answer first")
    prompt, answer = list(conversation.prompt_ids), list(conversation.answer_ids)
    turn = sum(message.role == "assistant" for message in conversation.messages) - 1
    return EncodedRow(conversation.id, conversation.kind, prompt + answer, [0] * len(prompt) + [1] * len(answer), turn)


def encode(conversation: Conversation, tokenizer: Any) -> list[EncodedRow]:
    """One row with every answer masked in; or one row an answer, where the template rewrites its history.

    No row when there is no answer. Sampled ids are taken as they are (``from_sampled``). An id that the
    tokenizer does not have, or a template without boundaries, is a SpectrainError.
    """
    return _encode(conversation, ChatTemplate(tokenizer))


def encode_all(
    conversations: Sequence[Conversation], tokenizer: Any, max_length: int | None = None
) -> tuple[list[EncodedRow], Dropped]:
    """Rows to train on. Those of more than ``max_length`` tokens or without an answer are left out and
    counted, never cut. Nothing left is a SpectrainError with the counts.
    """
    template = ChatTemplate(tokenizer)
    rows: list[EncodedRow] = []
    too_long = nothing_supervised = 0
    for conversation in conversations:
        encoded = _encode(conversation, template)
        kept = [row for row in encoded if max_length is None or len(row.ids) <= max_length]
        nothing_supervised += not encoded
        too_long += len(encoded) - len(kept)
        rows += kept
    dropped = Dropped(too_long, nothing_supervised)
    if not rows:
        raise SpectrainError(
            f"nothing to train on: of {len(conversations)} conversations, rows dropped: {dropped} "
            f"(max_length {max_length}); raise max_length, or have the answers generated first"
        )
    return rows, dropped


def _encode(conversation: Conversation, template: ChatTemplate) -> list[EncodedRow]:
    if conversation.answer_ids is not None:
        return [_in_vocabulary(from_sampled(conversation), template)]
    turns = [message.turn for message in conversation.messages]
    answers = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
    spans = [template.span(turns[:i], turns[i]) for i in answers]
    if not spans:
        return []
    whole = spans[-1][0]
    if any(whole[: len(ids)] != ids for ids, _ in spans):
        return [
            EncodedRow(conversation.id, conversation.kind, ids, _mask(len(ids), [(ids, start)]), turn)
            for turn, (ids, start) in enumerate(spans)
        ]
    return [EncodedRow(conversation.id, conversation.kind, whole, _mask(len(whole), spans))]


def _mask(length: int, spans: Sequence[tuple[list[int], int]]) -> list[int]:
    mask = [0] * length
    for ids, start in spans:
        mask[start : len(ids)] = [1] * (len(ids) - start)
    return mask


def _in_vocabulary(row: EncodedRow, template: ChatTemplate) -> EncodedRow:
    size = len(template.tokenizer)
    if max(row.ids) >= size:
        raise SpectrainError(
            f"conversation {row.conversation!r}: sampled id {max(row.ids)}, but its tokenizer "
            f"({template.name}) has {size} ids; regenerate the answers with this target"
        )
    return row
