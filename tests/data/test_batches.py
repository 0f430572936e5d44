"""Batches: every row once an epoch, within the budget, the same order everywhere; padding says nothing."""

from __future__ import annotations

import random

import pytest
import torch

from spectrain.data.batches import live_batch, padding_share, plan_epoch, some_rows
from spectrain.data.features import extract_features, store_key
from spectrain.errors import SpectrainError

LENGTHS = [random.Random(number).randint(3, 60) for number in range(97)]


@pytest.mark.parametrize("tokens", [60, 61, 128, 1000, 10**6])
def test_every_row_once_and_never_more_padded_tokens_than_asked(tokens):
    for epoch in range(3):
        batches = plan_epoch(LENGTHS, tokens, seed=5, epoch=epoch)
        assert sorted(row for rows in batches for row in rows) == list(range(97))
        assert all(len(rows) * max(LENGTHS[row] for row in rows) <= tokens for rows in batches)
        assert all(batches)


def test_the_order_is_that_of_seed_and_epoch_alone():
    plan = plan_epoch(LENGTHS, 128, seed=5, epoch=1)
    random.seed(99)
    torch.manual_seed(99)
    assert plan_epoch(LENGTHS, 128, seed=5, epoch=1) == plan
    assert plan_epoch(LENGTHS, 128, seed=5, epoch=2) != plan
    assert plan_epoch(LENGTHS, 128, seed=6, epoch=1) != plan
    assert plan_epoch([3, 3, 3, 3, 3, 3], 6, seed=0, epoch=0) == [[0, 5], [1, 4], [3, 2]]  # on every machine


def test_rows_of_like_length_lie_together_but_with_new_companions():
    first, second = (plan_epoch(LENGTHS, 240, seed=0, epoch=epoch) for epoch in (0, 1))
    assert {frozenset(rows) for rows in first} != {frozenset(rows) for rows in second}
    unsorted = [list(range(start, min(97, start + 4))) for start in range(0, 97, 4)]
    assert padding_share(LENGTHS, first) < 0.5 * padding_share(LENGTHS, unsorted)
    # Not sorted by length over the epoch: the model must not see all short rows first.
    widths = [max(LENGTHS[row] for row in rows) for rows in first]
    assert widths != sorted(widths)
    assert widths != sorted(widths, reverse=True)


def test_padding_share():
    assert padding_share([4, 2, 6], [[0, 1], [2]]) == pytest.approx(1 - 12 / 14)
    assert padding_share([5, 5], [[0, 1]]) == 0.0


def test_a_row_that_fits_no_batch_is_an_error_with_its_number():
    with pytest.raises(SpectrainError, match=r"row 2 has 9 tokens, a micro-batch holds 8; .*data\.max_length"):
        plan_epoch([3, 8, 9], 8, seed=0, epoch=0)


def test_rows_are_padded_on_the_right_with_nothing(tmp_path, tiny_target, make_rows, make_store):
    target = tiny_target("llama", dtype=torch.float32)
    rows = make_rows(target, 5)
    store = make_store(tmp_path, target, rows, (1, 4, 6))
    batch = store.batch([3, 0, 4])
    widest = max(len(rows[number].ids) for number in (3, 0, 4))
    assert batch.ids_BT.shape == (3, widest)
    assert batch.taps_BTF.shape == (3, widest, 3 * target.hidden_size)
    names = {"ids": "ids_BT", "answer": "answer_BT", "hidden": "hidden_BTH", "taps": "taps_BTF",
             "log_normaliser": "log_normaliser_BT", "greedy": "greedy_BT"}  # fmt: skip
    for place, number in enumerate((3, 0, 4)):
        length, stored = len(rows[number].ids), store.row(number)
        for name, field in names.items():
            value = getattr(batch, field)[place]
            assert torch.equal(value[:length], stored[name])
            assert not value[length:].any()  # and so no padding is ever supervised
            assert not getattr(batch, field).is_inference()


def test_likeliest_tokens_are_padded_with_nothing_and_absent_where_they_are_not_stored(
    tmp_path, tiny_target, make_rows
):
    target = tiny_target("llama", dtype=torch.float32)
    rows = make_rows(target, 4)
    for k in (3, None):
        key = store_key(rows, target, "digest", (1, 4, 6), "float32", k)
        store = extract_features(tmp_path / str(k), rows, target, key, progress=False)
        batch = store.batch([3, 1])
        if k is None:
            assert batch.top_ids_BTK is None
            assert batch.top_log_p_BTK is None
            continue
        for place, number in enumerate((3, 1)):
            for value, stored in ((batch.top_ids_BTK, "top_ids"), (batch.top_log_p_BTK, "top_log_p")):
                length = len(rows[number].ids)
                assert torch.equal(value[place, :length], store.row(number)[stored])
                assert not value[place, length:].any()
                assert value.shape[2] == 3


def test_features_straight_from_the_target_are_those_of_the_store(tmp_path, tiny_target, make_rows, make_store):
    target = tiny_target("llama", dtype=torch.float32)
    rows = make_rows(target, 3)
    stored = make_store(tmp_path, target, rows, (1, 4, 6)).batch([0, 1, 2])
    live = live_batch(target, rows)
    for field, value in vars(stored).items():
        torch.testing.assert_close(getattr(live, field), value, rtol=1e-5, atol=1e-5)


def test_some_rows_hold_as_many_answer_tokens_as_were_asked_for():
    class Store:
        lengths = (3, 5, 0, 7, 2)

        def __len__(self):
            return len(self.lengths)

        def answer(self, row):
            return torch.tensor([False] * 4 + [True] * self.lengths[row])

    store = Store()
    whole = some_rows(store, 1000)
    assert sorted(whole) == list(range(5))
    few = some_rows(store, 6)
    assert few == whole[: len(few)]
    assert sum(store.lengths[row] for row in few) >= 6 > sum(store.lengths[row] for row in few[:-1])
    assert some_rows(store, 0) == []
    assert some_rows(store, 1000, seed=1) != whole
