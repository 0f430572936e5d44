"""Draft vocabularies: the most frequent answer tokens, ascending, as offsets that are never taken for ids."""

from __future__ import annotations

import pytest
import torch

from spectrain.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from spectrain.drafters.vocabulary import draft_vocabulary, target_ids


def counted(**counts: int) -> torch.Tensor:
    values = torch.zeros(100, dtype=torch.long)
    for name, count in counts.items():
        values[int(name[1:])] = count
    return values


def test_fewer_distinct_tokens_than_columns():
    """20 distinct answer tokens, 32 columns: those 20 and the 12 lowest other ids; 48 next is computed anew."""
    counts = torch.zeros(100, dtype=torch.long)
    seen = list(range(60, 100, 2))
    counts[seen] = torch.arange(1, 21)
    ids = draft_vocabulary(counts, 32, 100)
    assert ids.tolist() == [*range(12), *seen]
    assert draft_vocabulary(counts, 48, 100).tolist() == [*range(28), *seen]
    assert draft_vocabulary(counts, 32, 100).tolist() == ids.tolist()


def test_the_most_frequent_win_and_ties_go_to_the_lowest_id():
    assert draft_vocabulary(counted(t7=5, t3=9, t50=5, t60=5, t9=1), 3, 100).tolist() == [3, 7, 50]
    assert draft_vocabulary(counted(t99=1), 1, 100).tolist() == [99]
    assert draft_vocabulary(counted(), 100, 100).tolist() == list(range(100))


@pytest.mark.parametrize("rows", [90, 100, 128])
def test_no_id_that_the_tokenizer_lacks(rows):
    """Counts may be as long as the padded head, or shorter than the tokenizer."""
    counts = torch.ones(rows, dtype=torch.long)
    counts[-1] = 1000
    ids = draft_vocabulary(counts, 100, 100)
    assert ids.tolist() == list(range(100))
    assert draft_vocabulary(counts, 101, 100).tolist() == ids.tolist()


def test_a_small_tokenizer_gives_all_its_ids(target):
    drafter = Eagle3Drafter.build(Eagle3Config(draft_vocab_size=32000, depths=1), target, torch.ones(32).long())
    assert drafter.columns == drafter.lm_head.out_features == target.tokenizer_size == 24
    assert drafter.vocabulary()[1].tolist() == list(range(24))
    assert drafter.t2d.tolist() == [True] * 24 + [False] * 8


def test_offsets_and_ids():
    ids = torch.tensor([2, 3, 7, 20])
    offsets = ids - torch.arange(4)
    assert offsets.tolist() == [2, 2, 5, 17]
    assert target_ids(offsets).tolist() == ids.tolist()


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target("llama", vocab=24, padding=8, dtype=torch.float32)


def build(target, **settings):
    counts = torch.zeros(32, dtype=torch.long)
    counts[[3, 8, 9, 15, 23]] = 5
    return Eagle3Drafter.build(Eagle3Config(draft_vocab_size=5, depths=1, **settings), target, counts)


def test_a_drafter_keeps_offsets_and_names_ids(target):
    drafter = build(target)
    assert drafter._columns.tolist() == [3, 8, 9, 15, 23]
    assert drafter.d2t.tolist() == [3, 7, 7, 12, 19]
    assert drafter.t2d.shape == (32,)
    assert drafter.t2d.nonzero()[:, 0].tolist() == [3, 8, 9, 15, 23]
    assert {"d2t", "t2d"} <= set(drafter.state_dict())
    assert "_columns" not in drafter.state_dict()


def test_the_heads_rows_are_taken_by_id_not_by_offset(target):
    drafter = build(target, start="target_layer")
    assert torch.equal(drafter.lm_head.weight, target.head_weight[[3, 8, 9, 15, 23]])
    head = target.head.columns(drafter._columns)
    hidden = torch.randn(4, target.hidden_size)
    torch.testing.assert_close(head.logits(hidden), target.head.logits(hidden)[:, [3, 8, 9, 15, 23]])


def test_loaded_weights_bring_their_own_vocabulary(target):
    """Also when the drafter was built for other token counts."""
    source, drafter = build(target), build(target)
    tensors = {name: value.clone() for name, value in source.state_dict().items()}
    tensors["d2t"] = torch.tensor([0, 0, 0, 18, 18])
    tensors["t2d"] = torch.zeros(32, dtype=torch.bool).index_fill_(0, torch.tensor([0, 1, 2, 21, 22]), True)
    drafter.load_weights(tensors)
    assert drafter._columns.tolist() == [0, 1, 2, 21, 22]
    assert torch.equal(drafter.d2t, tensors["d2t"])
    assert torch.equal(drafter.t2d, tensors["t2d"])
    with pytest.raises(RuntimeError, match=r"fc\.weight"):
        drafter.load_weights({name: value for name, value in tensors.items() if name != "fc.weight"})
