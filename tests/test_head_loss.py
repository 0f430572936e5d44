"""A loss through the head: gradients against plain autograd, and nothing of size N x D."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spectrain.head_loss import head_loss
from spectrain.losses import LOSSES, Laws, forward_kl

N, H, D, V = 23, 6, 11, 17


def problem(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    hidden, head = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((N, H), (D, H)))
    log_p = (2 * torch.randn(N, V, generator=generator, dtype=torch.float64)).log_softmax(-1)[:, :D]
    weight = torch.rand(N, generator=generator, dtype=torch.float64)
    return hidden.to(dtype).requires_grad_(), head.to(dtype).requires_grad_(), log_p.to(dtype), weight.to(dtype)


@pytest.mark.parametrize("chunk", [1, 5, N - 1, N, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", sorted(LOSSES))
def test_equals_autograd_over_all_logits(name, dtype, chunk):
    loss = LOSSES[name]
    hidden, head, log_p, weight = problem(torch.float64)
    want = (loss(Laws(hidden @ head.T, log_p)) * weight).sum() * 3.0
    want_grads = torch.autograd.grad(want, (hidden, head))

    hidden, head, log_p, weight = problem(dtype)
    got = 3.0 * head_loss(
        hidden, [head], lambda rows: log_p[rows], lambda z, p, rows: loss(Laws(z, p)) * weight[rows], chunks=chunk
    )
    got.backward()
    # Logits are float32 inside, whatever the parameters are.
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    for parameter, expected in zip((hidden, head), want_grads, strict=True):
        assert parameter.grad.dtype == dtype
        torch.testing.assert_close(parameter.grad.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunks", [1, 5, [slice(0, 2), slice(2, 20), slice(20, N)]])
def test_rows_of_several_heads_in_one_pass(chunks):
    """Chunks without a row of some head included; one of the heads is frozen."""
    hidden, first, log_p, weight = problem(torch.float32)
    heads = [first, (first + 1).detach(), (-first).detach().requires_grad_()]
    head_N = torch.randint(3, (N,), generator=torch.Generator().manual_seed(4))
    z = torch.stack([hidden[n] @ heads[head].T for n, head in enumerate(head_N.tolist())])
    trained = (hidden, heads[0], heads[2])
    want = torch.autograd.grad((forward_kl(Laws(z, log_p)) * weight).sum(), trained)
    value = head_loss(
        hidden, heads, lambda rows: log_p[rows], lambda z, p, rows: forward_kl(Laws(z, p)) * weight[rows],
        head_N=head_N, chunks=chunks,
    )  # fmt: skip
    torch.testing.assert_close(value, (forward_kl(Laws(z, log_p)) * weight).sum())
    for got, expected in zip(torch.autograd.grad(value, trained), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_a_frozen_head_gets_no_gradient_and_changes_no_other():
    hidden, head, log_p, _ = problem()
    gradients = []
    for weight in (head, head.detach()):
        value = head_loss(
            hidden, [weight], lambda rows: log_p[rows], lambda z, p, rows: forward_kl(Laws(z, p)), chunks=5
        )
        gradients.append(torch.autograd.grad(value, hidden)[0])
    assert torch.equal(*gradients)
    assert head.grad is None


def test_no_position_at_all_gives_zero_loss_and_zero_gradients():
    hidden, head = torch.zeros(0, H, requires_grad=True), torch.randn(D, H, requires_grad=True)
    value = head_loss(hidden, [head], lambda rows: torch.zeros(0, D), lambda z, p, rows: forward_kl(Laws(z, p)))
    value.backward()
    assert value.item() == 0.0
    assert torch.equal(head.grad, torch.zeros(D, H))
    assert hidden.grad.shape == (0, H)


def test_under_autocast_only_the_products_are_in_bfloat16():
    hidden, head, log_p, _ = problem(torch.float32)
    seen = []

    def loss(z: Tensor, p: Tensor, rows: slice) -> Tensor:
        seen.append((z.dtype, torch.is_autocast_enabled("cpu")))
        return forward_kl(Laws(z, p))

    with torch.autocast("cpu", torch.bfloat16):
        value = head_loss(hidden, [head], lambda rows: log_p[rows], loss)
    value.backward()
    z = (hidden.detach().bfloat16() @ head.detach().bfloat16().T).float()
    torch.testing.assert_close(value.detach(), forward_kl(Laws(z, log_p)).sum())
    assert seen == [(torch.float32, False)]
    assert hidden.grad.dtype == head.grad.dtype == torch.float32


class Largest(TorchDispatchMode):
    """Remembers the most elements that any tensor made under it had."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


def test_nothing_as_large_as_all_logits_ever_exists():
    rows, width, columns, chunk = 400, 8, 300, 16
    hidden, head = torch.randn(rows, width, requires_grad=True), torch.randn(columns, width, requires_grad=True)
    teacher = torch.randn(columns, width)

    def law(part: slice) -> Tensor:
        return (hidden.detach()[part] @ teacher.T).log_softmax(-1)

    with Largest() as plain:
        forward_kl(Laws(hidden @ head.T, law(slice(None)))).sum().backward()
    assert plain.elements == rows * columns
    with Largest() as chunked:
        head_loss(hidden, [head], law, lambda z, p, part: forward_kl(Laws(z, p)), chunks=chunk).backward()
    assert chunked.elements == max(chunk * columns, rows * width)
