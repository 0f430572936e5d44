"""Output heads: the same product whichever way it is computed, and what is padding or capped."""

from __future__ import annotations

import pytest
import torch

from spectrain import heads
from spectrain.heads import OutputHead, head_product


@pytest.mark.parametrize("shape", [(1, 8), (8,), (2, 1, 8), (2, 3, 8), (8, 8), (9, 8), (3, 0, 8)])
@pytest.mark.parametrize("tall", [1, 10**6])
def test_the_product_is_linears(monkeypatch, shape, tall):
    monkeypatch.setattr(heads, "TALL", tall)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(shape, generator=generator), torch.randn(40, 8, generator=generator)
    want = torch.nn.functional.linear(hidden, weight)
    got = head_product(hidden, weight)
    assert got.shape == want.shape
    assert got.is_contiguous()
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_are_left_to_linear(monkeypatch, dtype):
    monkeypatch.setattr(heads, "TALL", 1)
    hidden, weight = torch.ones(2, 8, dtype=dtype), torch.ones(40, 8, dtype=dtype)
    assert torch.equal(head_product(hidden, weight), torch.nn.functional.linear(hidden, weight))


@pytest.mark.parametrize("rows", [1, 5, 12])
def test_bias_cap_and_padding(monkeypatch, rows):
    monkeypatch.setattr(heads, "TALL", 1)
    generator = torch.Generator().manual_seed(rows)
    hidden, weight, bias = (torch.randn(s, generator=generator) for s in ((rows, 8), (10, 8), (10,)))
    logits = OutputHead(weight, bias, 3.0, 7).logits(hidden)
    want = torch.tanh((hidden @ weight.T + bias) / 3.0) * 3.0
    torch.testing.assert_close(logits[:, :7], want[:, :7])
    assert (logits[:, 7:] == -torch.inf).all()
