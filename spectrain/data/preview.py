"""Rows as they are trained on, for the terminal: what is supervised stands out."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TextIO

from spectrain.data.conversations import Conversation, EncodedRow

SHOWN_TOKENS = 400  # of a long row: its end, which is an answer
GREEN, RESET = "\x1b[1;32m", "\x1b[0m"


def colours(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal that may be coloured (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def chosen(rows: Sequence[EncodedRow], chats: Iterable[Conversation], count: int = 4) -> list[tuple[EncodedRow, str]]:
    """Rows that differ in shape, and what each is shown for: one with tools, one of several turns, the longest; then
    the first of kinds that are not among them; then further rows from the front."""
    by_id = {chat.id: chat for chat in chats}
    picked: list[tuple[EncodedRow, str]] = []

    def add(why: str, candidates: Iterable[EncodedRow]) -> None:
        new = (row for row in candidates if all(row is not other for other, _ in picked))
        picked.extend((row, why) for row in itertools.islice(new, 1))

    def of(test: Callable[[Conversation], bool]) -> Iterator[EncodedRow]:
        return (row for row in rows if row.conversation in by_id and test(by_id[row.conversation]))

    add("with tools", of(lambda chat: bool(chat.tools)))
    add("several turns", of(lambda chat: sum(message.role == "user" for message in chat.messages) > 1))
    add("the longest", [max(rows, key=lambda row: len(row.ids))] if rows else [])
    first: dict[str, EncodedRow] = {}
    for row in rows:
        first.setdefault(row.kind, row)
    shown = {row.kind for row, _ in picked}
    for kind in (kind for kind in first if kind not in shown):
        add("the first of its kind", [first[kind]])
    for _ in range(count):
        add("from the front", rows)
    return picked[:count]


def render_row(row: EncodedRow, tokenizer: Any, colour: bool, why: str) -> str:
    """The row's text, its supervised tokens in green or in ``[[ ]]``, under a line that says ``why`` it is shown."""
    start = max(0, len(row.ids) - SHOWN_TOKENS)
    before, after = (GREEN, RESET) if colour else ("[[", "]]")
    parts = [f"… {start} tokens before\n"] if start else []
    for asked, text in _segments(row.ids[start:], row.mask[start:], tokenizer):
        parts.append(f"{before}{text}{after}" if asked else text)
    return f"--- {row.conversation} ({row.kind}), {len(row.ids)} tokens, {why}\n{''.join(parts)}"


def _segments(ids: Sequence[int], mask: Sequence[int], tokenizer: Any) -> Iterator[tuple[bool, str]]:
    for asked, group in itertools.groupby(zip(ids, mask, strict=True), key=lambda pair: bool(pair[1])):
        tokens = [token for token, _ in group]
        text = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        # Text of the traffic must not steer the terminal.
        yield asked, "".join(c if c.isprintable() or c == "\n" else "·" for c in text)
