"""Penalties by hand, and against the definitions that servers use."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from spectrain.errors import SpectrainError
from spectrain.exact.penalties import Penalties


def test_by_hand():
    logits = torch.tensor([2.0, -2.0, 1.0, 0.5])
    prompt = torch.tensor([True, False, False, False])
    answer = torch.tensor([0, 1, 2, 0])
    got = Penalties(2.0, 0.25, 0.5).apply(logits, prompt, answer)
    assert got.tolist() == [1.0, -4.0 - 0.5 - 0.25, 0.5 - 1.0 - 0.25, 0.5]
    assert logits.tolist() == [2.0, -2.0, 1.0, 0.5]


def test_the_defaults_change_nothing():
    logits = torch.randn(5, generator=torch.Generator().manual_seed(0))
    seen = torch.tensor([1, 2, 0, 0, 3])
    assert torch.equal(Penalties().apply(logits, seen > 0, seen), logits)
    assert Penalties().none
    assert not Penalties(presence=0.1).none


def test_minus_infinity_stays():
    logits = torch.tensor([-torch.inf, 1.0])
    assert Penalties(1.5, 0.1, 0.1).apply(logits, torch.tensor([True, True]), torch.tensor([1, 1]))[0] == -torch.inf


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(0, 12), st.floats(0.5, 2.0))
def test_repetition_is_that_of_transformers(ids, split, penalty):
    logits = torch.randn(1, 10, generator=torch.Generator().manual_seed(len(ids)))
    prompt, answer = torch.zeros(10, dtype=torch.bool), torch.zeros(10, dtype=torch.int32)
    prompt[ids[:split]] = True
    for token in ids[split:]:
        answer[token] += 1
    want = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([ids]), logits.clone())
    assert torch.allclose(Penalties(penalty).apply(logits, prompt, answer), want)


@pytest.mark.parametrize("values", [(0.0, 0, 0), (-1.0, 0, 0), (float("inf"), 0, 0), (1.0, float("nan"), 0),
                                    (1.0, 0, float("inf")), (1e-300, 0, 0), (1.0, 1e39, 0), ("a", 0, 0),
                                    (None, 0, 0), (True, 0, 0)])  # fmt: skip
def test_values_out_of_range_are_refused(values):
    with pytest.raises(SpectrainError, match="penalty"):
        Penalties(*values)


def test_the_ends_of_the_ranges_are_allowed():
    for values in ((1000.0, 1000.0, -1000.0), (0.001, -1000.0, 1000.0)):
        assert not Penalties(*values).none
    for values in ((1000.5, 0, 0), (0.00099, 0, 0), (1.0, 1000.5, 0), (1.0, 0, -1000.5)):
        with pytest.raises(SpectrainError, match="penalty"):
            Penalties(*values)


def test_low_precision_is_penalised_in_float32_and_float64_stays():
    answer = torch.tensor([1, 0])
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        got = Penalties(3.0, frequency=0.1).apply(torch.tensor([1.0, 2.0], dtype=dtype), answer < 0, answer)
        assert got.dtype == expected
        assert torch.equal(got, torch.tensor([1 / 3, 2.0], dtype=expected) - 0.1 * answer.to(expected))
