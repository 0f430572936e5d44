"""Features computed on the spot are those of the store, and cost nothing until they are asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from spectrain.data.feature_rows import LiveFeatures
from spectrain.data.features import extract_features, store_key
from spectrain.errors import SpectrainError
from spectrain.target import Target

TAPS = (1, 4, 6)


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target("llama", dtype=torch.float32)


@pytest.fixture(scope="module")
def rows(make_rows, target):
    """Ascending lengths: the order that a shard holds them in."""
    return sorted(make_rows(target, 9), key=lambda row: len(row.ids))


def both(folder, rows, target, dtype="float32", top_k=None):
    key = store_key(rows, target, "digest", TAPS, dtype, top_k)
    return extract_features(folder, rows, target, key, progress=False), LiveFeatures(rows, target, key)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("top_k", [None, 5])
def test_a_batch_that_was_one_forward_of_the_store_is_bit_equal(tmp_path, target, rows, dtype, top_k):
    store, live = both(tmp_path, rows, target, dtype, top_k)
    target.tap((0,))  # what others read from the target in between makes no difference
    stored, computed = (source.batch(range(len(rows))) for source in (store, live))
    assert (stored.top_ids_BTK is None) == (top_k is None)
    for name, want in vars(stored).items():
        got = getattr(computed, name)
        assert (got is None) == (want is None)
        if want is not None:
            assert got.dtype == want.dtype, name
            assert torch.equal(got, want), name
            assert not got.is_inference()


@pytest.mark.parametrize("numbers", [[3, 0, 7], [5], [8, 7, 6, 5]])
def test_other_batches_differ_by_rounding(tmp_path, target, rows, numbers):
    store, live = both(tmp_path, rows, target, top_k=5)
    for name, want in vars(store.batch(numbers)).items():
        got = getattr(live.batch(numbers), name)
        if want.is_floating_point():
            assert (got - want).norm() <= 1e-4 * want.norm(), name
        else:
            assert torch.equal(got, want), name


def test_lengths_and_answers_need_no_forward(tmp_path, target, rows, monkeypatch):
    store, live = both(tmp_path, rows, target)
    monkeypatch.setattr(Target, "forward", None)
    assert len(live) == len(store) == len(rows)
    for row in range(len(rows)):
        assert live.length(row) == store.length(row)
        assert torch.equal(live.answer(row), store.answer(row))


def test_the_key_says_that_nothing_is_stored(tmp_path, target, rows):
    store, live = both(tmp_path, rows, target)
    assert live.key == {**store.key, "features": "live"}


def test_a_row_longer_than_the_context_is_refused_by_name(target, rows):
    long = replace(rows[0], ids=[1] * 129, mask=[1] * 129)
    with pytest.raises(SpectrainError, match=r"has 129 tokens, the target's context is 128"):
        LiveFeatures([long], target, store_key([long], target, "digest", TAPS, "float32"))


@pytest.mark.parametrize(("value", "dtype"), [(torch.nan, "float32"), (torch.inf, "bfloat16")])
@pytest.mark.parametrize("where", ["hidden_BTH", "taps_BTF"])
def test_features_that_are_no_numbers_are_an_error_that_names_the_chats(
    tmp_path, target, rows, monkeypatch, value, dtype, where
):
    real, bad = target.forward, rows[2].ids

    def broken(ids_BT):
        features = real(ids_BT)
        for row, ids in enumerate(ids_BT.tolist()):
            if ids[: len(bad)] == bad:
                getattr(features, where)[row, len(bad) - 1, 0] = value
        return features

    key = store_key(rows, target, "digest", TAPS, dtype)
    monkeypatch.setattr(target, "forward", broken)
    message = rf"not finite for conversation '{rows[2].conversation}': .*target\.dtype float32; try"
    with pytest.raises(SpectrainError, match=message):
        extract_features(tmp_path, rows, target, key, progress=False)
    assert not list(tmp_path.glob("*.safetensors"))
    with pytest.raises(SpectrainError, match=message):
        LiveFeatures(rows, target, key).batch([1, 2, 3])


def test_rows_know_their_chats(tmp_path, target, rows):
    for kept in (
        *both(tmp_path, rows, target),
        extract_features(tmp_path, rows, target, both(tmp_path, rows, target)[0].key),
    ):
        assert [kept.conversation(i) for i in range(len(rows))] == [row.conversation for row in rows]
