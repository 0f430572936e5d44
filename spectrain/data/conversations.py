"""Chats: the formats they come in, and the ids and loss masks the target's chat template makes of them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spectrain.data.dropped import Dropped, RowError, leaving_out
from spectrain.data.messages import Message, plain_json, read_messages, read_tools
from spectrain.data.packed import FLAGS, IDS, LARGEST_ID, Packed
from spectrain.data.rows import Row, read_rows
from spectrain.data.template import ChatTemplate
from spectrain.errors import SpectrainError
from spectrain.files import json_digest

CUT_SHORT = (False, "budget", "length")  # what ``finished`` says of an answer that ran into its budget


@dataclass(frozen=True)
class Conversation:
    """One chat. A regenerated answer carries the ids the target read and sampled: those are trained on.

    ``tools`` are the JSON schemas that the template shows the model; ``place`` is where the row lies, for messages.
    """

    id: str
    messages: tuple[Message, ...]
    kind: str = "unlabelled"
    template: str | None = None  # of generated traffic: which template, filled with which slots
    slots: Mapping[str, Any] | None = field(default=None, hash=False)
    prompt_ids: Packed[tuple[int, ...] | None] = Packed(IDS, tuple, None)
    answer_ids: Packed[tuple[int, ...] | None] = Packed(IDS, tuple, None)
    tools: tuple[Mapping[str, Any], ...] | None = field(default=None, hash=False)
    retokenized: bool = False  # its ids were made from the answer's text
    finished: bool | None = None  # whether a regenerated answer came to its end
    place: str = field(default="", compare=False)

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The messages before the last answer: all of them when the last turn is not the assistant's."""
        return self.messages[:-1] if self.messages[-1].role == "assistant" else self.messages

    @property
    def labels(self) -> dict[str, Any]:
        """What a row of this chat holds besides its messages, as it is written to files."""
        row: dict[str, Any] = {"id": self.id, "kind": self.kind}
        if self.template is not None:
            row |= {"template": self.template, "slots": dict(self.slots or {})}
        return row | ({"tools": list(self.tools)} if self.tools else {})

    @property
    def named(self) -> str:
        """The chat's id, and where its row lies as far as that is known."""
        return f"{self.id!r} at {self.place}" if self.place else repr(self.id)


@dataclass(frozen=True)
class EncodedRow:
    """``ids`` [T] and ``mask`` [T], 1 on the answers' tokens, end of turn included. Ends with an answer."""

    conversation: str
    kind: str
    ids: Packed[list[int]] = Packed(IDS, list)
    mask: Packed[list[int]] = Packed(FLAGS, list)
    turn: int | None = None  # which answer (from 0), or None when the row holds them all


def load_conversations(paths: Path | str | Sequence[Path | str], dropped: Dropped | None = None) -> list[Conversation]:
    """Read chats in file order. A row has ``messages`` (role, content), ``conversations`` (from, value), or
    ``prompt`` (text or messages) with or without ``completion``; of several, the first named here counts.
    Optional: ``tools``, ``id`` (else a digest of the content), ``kind`` or ``category``, ``template`` and ``slots``,
    ``prompt_ids`` and ``answer_ids``, ``retokenized`` and ``finished``. Other keys are ignored. A SpectrainError
    names the file and line; with ``dropped``, rows that cannot be used are counted there and left out.
    """
    files = [paths] if isinstance(paths, (str, Path)) else list(paths)
    found: dict[str, Conversation] = {}
    for place, row in itertools.chain.from_iterable(read_rows(file, dropped) for file in files):
        with leaving_out(dropped, place):
            conversation = parse_conversation(row, place, taken=found)
            if conversation.id in found:
                raise RowError(
                    "duplicate_id",
                    f"{place}: id {conversation.id!r} was already used at {found[conversation.id].place}; "
                    "give every conversation its own id, or none (then a digest of its content is used)",
                )
            found[conversation.id] = conversation
    if not found:
        left_out = f"; rows dropped: {dropped}\n{dropped.listing()}" if dropped is not None and dropped.total else ""
        raise SpectrainError(f"no conversations in {', '.join(map(str, files)) or 'an empty list of files'}{left_out}")
    return list(found.values())


def parse_conversation(row: Row, place: str, taken: Iterable[str] = ()) -> Conversation:
    """The conversation of one row; ``place`` names the row in errors, ``taken`` holds ids that are in use."""
    row = {key: value for key, value in row.items() if value is not None}  # Parquet fills gaps with null
    sampled = {key: _ids(row[key], f"{place}: {key}") for key in ("prompt_ids", "answer_ids") if key in row}
    if "answer_ids" in sampled and "prompt_ids" not in sampled:
        raise RowError("bad_ids", f"{place}: answer_ids without prompt_ids; give the ids of the prompt as well")
    messages = read_messages(row, place, allow_empty_answer="answer_ids" in sampled)
    if "answer_ids" in sampled and messages[-1].role != "assistant":
        raise RowError(
            "bad_ids", f"{place}: answer_ids, but the last message is the {messages[-1].role}'s; add the answer's text"
        )
    kind: Any = row.get("kind", row.get("category", "unlabelled"))
    template, slots = row.get("template"), row.get("slots")
    for key, value, wanted in (("kind", kind, str), ("template", template, str), ("slots", slots, dict)):
        if value is not None and not isinstance(value, wanted):
            raise RowError("bad_row", f"{place}: {key} is {value!r:.60}, expected {wanted.__name__}")
    tools = (read_tools(row["tools"], place) if "tools" in row else None) or None
    name = _id(row, place) if "id" in row else _content_id(messages, tools, taken)
    finished = row["finished"] not in CUT_SHORT if "finished" in row else None
    conversation = Conversation(name, messages, kind, template, slots, **sampled, tools=tools, finished=finished,
                        retokenized=row.get("retokenized") is True, place=place)  # fmt: skip
    plain_json([conversation.labels, slots], "bad_row", f"{place}: labels")
    return conversation


def _id(row: Row, place: str) -> str:
    if isinstance(row["id"], bool) or not isinstance(row["id"], (str, int)) or row["id"] == "":
        raise RowError("bad_row", f"{place}: id is {row['id']!r}, expected text or an integer")
    return str(row["id"])


def _content_id(messages: Sequence[Message], tools: Any, taken: Iterable[str]) -> str:
    digest = content_digest(messages, tools)[:16]
    copies = (digest if i == 1 else f"{digest}-{i}" for i in itertools.count(1))
    return next(name for name in copies if name not in taken)


def content_digest(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> str:
    """SHA-256 of what is said, in hex. Of plain chats: of their roles and texts alone."""
    said = [[m.role, m.content, *([dict(m.extra)] if m.extra else [])] for m in messages]
    return json_digest([said, list(tools)] if tools else said)


def _ids(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or any(type(i) is not int or not 0 <= i <= LARGEST_ID for i in value):
        raise RowError("bad_ids", f"{where}: expected a list of token ids (integers from 0), at least one")
    return tuple(value)


def render_prompt(chat: Conversation | Sequence[Message], tokenizer: Any) -> list[int]:
    """Ids a server would feed for a chat up to its last answer, or for messages without tools as they are: the
    template with its generation prompt."""
    template = ChatTemplate(tokenizer)
    if not isinstance(chat, Conversation):
        return template.render([message.turn for message in chat], True)
    with _naming(chat):
        return template.render([message.turn for message in chat.prompt], True, chat.tools)


@contextlib.contextmanager
def _naming(chat: Conversation) -> Iterator[None]:
    """A row's error says which row it is."""
    try:
        yield
    except RowError as error:
        raise RowError(error.reason, f"{chat.place or f'conversation {chat.id!r}'}: {error}") from error


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
    conversations: Sequence[Conversation],
    tokenizer: Any,
    max_length: int | None = None,
    *,
    drop_bad: bool = False,
) -> tuple[list[EncodedRow], Dropped]:
    """Rows to train on. Those of more than ``max_length`` tokens or without an answer are left out and
    counted, never cut; with ``drop_bad`` also chats that the template cannot render. Nothing left is a
    SpectrainError with the counts.
    """
    rows, dropped = encode_usable(conversations, tokenizer, max_length, drop_bad=drop_bad)
    if not rows:
        where = f"\n{dropped.listing()}" if dropped.listing() else ""
        raise SpectrainError(
            f"nothing to train on: of {len(conversations)} conversations, rows dropped: {dropped} "
            f"(max_length {max_length}); raise max_length, or have the answers generated first{where}"
        )
    return rows, dropped


def encode_usable(
    conversations: Sequence[Conversation],
    tokenizer: Any,
    max_length: int | None = None,
    *,
    drop_bad: bool = False,
) -> tuple[list[EncodedRow], Dropped]:
    """As ``encode_all``, but there may be no rows at all."""
    template = ChatTemplate(tokenizer)
    rows: list[EncodedRow] = []
    dropped = Dropped()
    for conversation in conversations:
        encoded: list[EncodedRow] | None = None
        with leaving_out(dropped if drop_bad else None, conversation.place):
            encoded = _encode(conversation, template)
        if encoded == []:
            dropped.add("nothing_supervised", conversation.place)
        for row in encoded or ():
            if max_length is None or len(row.ids) <= max_length:
                rows.append(row)
            else:
                dropped.add("too_long", conversation.place)
    return rows, dropped


def _encode(conversation: Conversation, template: ChatTemplate) -> list[EncodedRow]:
    if conversation.answer_ids is not None:
        return [_in_vocabulary(from_sampled(conversation), template)]
    turns = [message.turn for message in conversation.messages]
    answers = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
    with _naming(conversation):
        spans = [template.span(turns[:i], turns[i], conversation.tools) for i in answers]
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
