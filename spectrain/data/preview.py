"""Rows as they are trained on, for the terminal: what is supervised stands out."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from spectrain.data.conversations import EncodedRow

SHOWN_TOKENS = 400  # of a long row: its end, which is an answer
GREEN, RESET = "\x1b[1;32m", "\x1b[0m"


def colours(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal that may be coloured (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def chosen(rows: Sequence[EncodedRow], count: int = 3) -> list[EncodedRow]:
    """The first row of each kind, of ``count`` kinds; then further rows from the front."""
    first: dict[str, EncodedRow] = {}
    for row in rows:
        first.setdefault(row.kind, row)
    others = (row for row in rows if first[row.kind] is not row)
    return list(itertools.islice(itertools.chain(first.values(), others), count))


def render_row(row: EncodedRow, tokenizer: Any, colour: bool) -> str:
    """The row's text, its supervised tokens in green or in ``[[ ]]``."""
    start = max(0, len(row.ids) - SHOWN_TOKENS)
    before, after = (GREEN, RESET) if colour else ("[[", "]]")
    parts = [f"… {start} tokens before\n"] if start else []
    for asked, text in _segments(row.ids[start:], row.mask[start:], tokenizer):
        parts.append(f"{before}{text}{after}" if asked else text)
    return f"--- {row.conversation} ({row.kind}), {len(row.ids)} tokens\n{''.join(parts)}"


def _segments(ids: Sequence[int], mask: Sequence[int], tokenizer: Any) -> Iterator[tuple[bool, str]]:
    for asked, group in itertools.groupby(zip(ids, mask, strict=True), key=lambda pair: bool(pair[1])):
        tokens = [token for token, _ in group]
        text = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        # Text of the traffic must not steer the terminal.
        yield asked, "".join(c if c.isprintable() or c == "\n" else "·" for c in text)
