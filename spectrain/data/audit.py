"""What would be trained on, in numbers: rows, lengths, duplicates, where answers come from, what a vocabulary covers.

The numbers hold no text of the traffic: ids of conversations and the places of rows at most.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spectrain.data.conversations import Conversation, EncodedRow, content_digest
from spectrain.data.dropped import Dropped
from spectrain.data.split import LeakReport
from spectrain.data.template import ChatTemplate
from spectrain.files import json_digest

NEAR_LIMIT = 0.9  # of max_length: rows from here on are near it
PAIRS = 20  # of near-duplicates that are listed


@dataclass(frozen=True)
class Side:
    """One side of the split; ``made``: whether its answers are the target's."""

    chats: Sequence[Conversation]
    rows: Sequence[EncodedRow]
    dropped: Dropped
    made: bool = False


def describe(sides: Mapping[str, Side], tokenizer: Any, max_length: int, leaks: LeakReport,
             draft_ids: frozenset[int] | None) -> dict[str, Any]:  # fmt: skip
    """The audit as JSON. ``draft_ids``: what a drafter with a smaller vocabulary could name, None for all."""
    template = ChatTemplate(tokenizer)
    return {
        "template": {"name": template.name, "digest": json_digest(tokenizer.chat_template),
                     "kwargs": template.settings},
        "max_length": max_length,
        "sides": {name: _side(side, tokenizer, max_length, draft_ids) for name, side in sides.items()},
        "leaks": list(leaks.leaks),
        "near_duplicates": {
            "threshold": leaks.threshold,
            "count": len(leaks.near_duplicates),
            "pairs": [str(pair) for pair in leaks.near_duplicates[:PAIRS]],
        },
        "draft_vocabulary": None if draft_ids is None else len(draft_ids),
    }  # fmt: skip


def _side(side: Side, tokenizer: Any, max_length: int, draft_ids: frozenset[int] | None) -> dict[str, Any]:
    tokens, answer = sum(len(row.ids) for row in side.rows), sum(sum(row.mask) for row in side.rows)
    said = [content_digest(chat.messages, chat.tools) for chat in side.chats]
    return {
        "conversations": len(side.chats),
        "rows": len(side.rows),
        **side.dropped.describe(),
        "tokens": tokens,
        "answer_tokens": answer,
        "supervised_share": answer / tokens if tokens else 0.0,
        "lengths": _lengths([len(row.ids) for row in side.rows]),
        "near_max_length": sum(len(row.ids) >= NEAR_LIMIT * max_length for row in side.rows),
        "duplicates": len(said) - len(set(said)),
        "answers": {"by_target": side.made, **_origins(side.chats)},
        "with": _contents(side, tokenizer),
        "kinds": _kinds(side, draft_ids),
        "coverage": _coverage(side.rows, draft_ids),
    }


def _lengths(lengths: Sequence[int]) -> dict[str, int] | None:
    """Tokens of the row in the middle, of the one that 95% do not exceed, and of the longest."""
    if not lengths:
        return None
    middle, high = np.percentile(lengths, [50, 95], method="higher")
    return {"p50": int(middle), "p95": int(high), "max": max(lengths)}


def _origins(chats: Iterable[Conversation]) -> dict[str, int]:
    """Chats by where their last answer comes from; those cut short are counted apart as well."""
    found = Counter({"given": 0, "sampled_ids": 0, "retokenized": 0, "none": 0, "truncated": 0})
    for chat in chats:
        answered = any(message.role == "assistant" for message in chat.messages)
        sampled = "retokenized" if chat.retokenized else "sampled_ids"
        found[sampled if chat.answer_ids is not None else "given" if answered else "none"] += 1
        found["truncated"] += chat.finished is False
    return dict(found)


def _contents(side: Side, tokenizer: Any) -> dict[str, int]:
    """How many chats have more than text in turns, and how many traces the template left out of what is trained."""
    rows: defaultdict[str, list[EncodedRow]] = defaultdict(list)
    for row in side.rows:
        rows[row.conversation].append(row)

    def having(test: Callable[[Conversation], bool]) -> int:
        return sum(map(test, side.chats))

    return {
        "several_answers": having(lambda chat: sum(m.role == "assistant" for m in chat.messages) > 1),
        "tools": having(lambda chat: bool(chat.tools)),
        "tool_calls": having(lambda chat: any("tool_calls" in m.extra for m in chat.messages)),
        "reasoning": having(lambda chat: any("reasoning_content" in m.extra for m in chat.messages)),
        "split": having(lambda chat: chat.answer_ids is None and any(row.turn is not None for row in rows[chat.id])),
        "reasoning_left_out": having(lambda chat: _loses_reasoning(chat, rows[chat.id], tokenizer)),
    }


def _loses_reasoning(chat: Conversation, rows: Sequence[EncodedRow], tokenizer: Any) -> bool:
    traces = [m.extra["reasoning_content"].strip() for m in chat.messages if "reasoning_content" in m.extra]
    if not traces or not rows or chat.answer_ids is not None:
        return False
    text = "".join(tokenizer.decode(row.ids, skip_special_tokens=False) for row in rows)
    return any(trace not in text for trace in traces)


def _kinds(side: Side, draft_ids: frozenset[int] | None) -> dict[str, dict[str, Any]]:
    by_kind: defaultdict[str, list[EncodedRow]] = defaultdict(list)
    for row in side.rows:
        by_kind[row.kind].append(row)
    return {
        kind: {
            "rows": len(rows),
            "answer_tokens": sum(sum(row.mask) for row in rows),
            "coverage": _coverage(rows, draft_ids),
        }
        for kind, rows in sorted(by_kind.items())
    }


def _coverage(rows: Iterable[EncodedRow], draft_ids: frozenset[int] | None) -> float | None:
    """Share of the answers' tokens that the drafter could name. The target gives it that much probability on average,
    and min(p, q) is 0 elsewhere: no acceptance probability exceeds it."""
    if draft_ids is None:
        return None
    answers = covered = 0
    for row in rows:
        named = [token in draft_ids for token, asked in zip(row.ids, row.mask, strict=True) if asked]
        answers, covered = answers + len(named), covered + sum(named)
    return covered / answers if answers else None
