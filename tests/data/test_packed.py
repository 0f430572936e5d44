"""Numbers of rows are kept in little room, and look as if they were not."""

from __future__ import annotations

import pickle
import tracemalloc
from dataclasses import replace

import pytest

from spectrain.data.conversations import Conversation, EncodedRow, Message, parse_conversation
from spectrain.errors import SpectrainError

IDS = [70_000, 5, 2**31 - 1, 0]


def test_a_row_gives_the_lists_it_was_given():
    row = EncodedRow("c", "kind", IDS, [0, 1, 1, 0])
    assert (row.ids, row.mask) == (IDS, [0, 1, 1, 0])
    assert row == EncodedRow("c", "kind", list(IDS), [0, 1, 1, 0])
    assert row != replace(row, mask=[1, 1, 1, 0])
    assert replace(row, ids=[1]).ids == [1]
    assert pickle.loads(pickle.dumps(row)) == row  # rows go between processes
    row.ids.append(7)
    assert row.ids == IDS
    with pytest.raises(TypeError, match="ids"):
        EncodedRow("c", "kind")


def test_a_conversation_has_its_ids_or_none():
    chat = Conversation("c", (Message("user", "hi"),))
    assert (chat.prompt_ids, chat.answer_ids) == (None, None)
    sampled = replace(chat, prompt_ids=tuple(IDS), answer_ids=(1,))
    assert sampled.prompt_ids == tuple(IDS)
    assert sampled == replace(sampled) != chat
    assert hash(sampled) == hash(replace(sampled)) != hash(chat)


def test_ids_that_no_tokenizer_has_are_refused():
    with pytest.raises(SpectrainError, match="expected a list of token ids"):
        parse_conversation({"prompt": "a", "prompt_ids": [2**31]}, "row 1")


def test_a_token_takes_five_bytes():
    tracemalloc.start()
    try:
        rows = [EncodedRow("c", "kind", list(range(1000, 3000)), [1] * 2000) for _ in range(100)]
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 6 * 100 * len(rows[0].ids)
