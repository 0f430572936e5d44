"""A loss of logits that are never all there: the head applied in chunks, with its gradients.

Shapes: N supervised positions, C of a chunk, H hidden, D columns of the drafter's head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

RowsLoss = Callable[[Tensor, Tensor, slice], Tensor]
"""Loss of logits and a law that also knows which rows it was given (to weigh them)."""

CHUNK = 256  # positions whose logits are held at once, at most
# Bytes: what is larger malloc maps anew every time, and clearing its pages takes as long as a pass.
CPU_BLOCK = 32 << 20


def chunk_size(columns: int, device: torch.device) -> int:
    """Positions whose logits [C, columns] are best held at once."""
    return CHUNK if device.type != "cpu" else min(CHUNK, max(32, CPU_BLOCK // (4 * columns)))


class _HeadLoss(torch.autograd.Function):
    """Sum of a position loss through linear heads, chunk by chunk, gradients taken in the forward pass.

    Neither logits nor their gradients ever exist for more than one chunk, so memory does not grow with N x D.
    """

    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, head_N: Tensor | None, teacher: Callable[[slice], Tensor], loss: RowsLoss,
                chunks: Sequence[slice], dtype: torch.dtype, *heads_DH: Tensor) -> Tensor:  # fmt: skip
        total = torch.zeros((), dtype=torch.float32, device=hidden_NH.device)
        grad_hidden_NH = torch.empty_like(hidden_NH)
        needed = ctx.needs_input_grad[-len(heads_DH) :]  # a borrowed head is frozen
        grads_DH = [torch.zeros_like(head) if need else None for head, need in zip(heads_DH, needed, strict=True)]
        weights_DH = [head.detach().to(dtype) for head in heads_DH]
        for rows in chunks:
            hidden_CH = hidden_NH[rows].detach().to(dtype)
            of_head = _of_head(head_N, rows, len(heads_DH))
            z_CD = _product(hidden_CH, [weight_DH.T for weight_DH in weights_DH], of_head).float().requires_grad_()
            with torch.enable_grad():
                value = loss(z_CD, teacher(rows), rows).sum()
            (grad_CD,) = torch.autograd.grad(value, z_CD)
            total += value.detach()
            grad_CD = grad_CD.to(dtype)
            grad_hidden_NH[rows] = _product(grad_CD, weights_DH, of_head).to(grad_hidden_NH.dtype)
            for grad_DH, at in zip(grads_DH, of_head, strict=True):
                if grad_DH is not None:
                    _add_product(grad_DH, grad_CD[at].T, hidden_CH[at])
        ctx.save_for_backward(grad_hidden_NH, *grads_DH)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden_NH, *grads_DH = ctx.saved_tensors
        scale = grad_outputs[0]
        scaled = (None if grad_DH is None else grad_DH * scale for grad_DH in grads_DH)
        return grad_hidden_NH * scale, None, None, None, None, None, *scaled


def _add_product(sum_DH: Tensor, left_DC: Tensor, right_CH: Tensor) -> None:
    """Add a product to ``sum_DH``: where the dtypes allow it without another tensor as large as the head."""
    if sum_DH.dtype == left_DC.dtype:
        sum_DH.addmm_(left_DC, right_CH)
    else:
        sum_DH += (left_DC @ right_CH).to(sum_DH.dtype)


def _of_head(head_N: Tensor | None, rows: slice, heads: int) -> list[Any]:
    """Which rows of a chunk go through each head."""
    if head_N is None or heads == 1:
        return [slice(None)]
    return [(head_N[rows] == head).nonzero()[:, 0] for head in range(heads)]


def _product(left_CX: Tensor, rights_XY: Sequence[Tensor], of_head: Sequence[Any]) -> Tensor:
    """Each row times the matrix of its head."""
    if len(rights_XY) == 1:
        return left_CX @ rights_XY[0]
    product_CY = left_CX.new_empty(len(left_CX), rights_XY[0].shape[1])
    for right_XY, at in zip(rights_XY, of_head, strict=True):
        product_CY[at] = left_CX[at] @ right_XY
    return product_CY


def head_loss(hidden_NH: Tensor, heads_DH: Sequence[Tensor], teacher: Callable[[slice], Tensor], loss: RowsLoss, *,
              head_N: Tensor | None = None, chunks: Sequence[slice] | int | None = None) -> Tensor:  # fmt: skip
    """Scalar sum over N of ``loss(hidden @ head.T, teacher(rows), rows)``; differentiable in hidden and heads.

    ``head_N`` numbers each row's head where there are several. ``teacher(rows)`` gives the target's log-probabilities
    ``log_p_ND`` of a slice of rows, computed when asked for. ``chunks`` are slices that cover the rows, or their size
    (None: ``chunk_size``).
    Under autocast the matrix products run in its dtype, everything else in float32.
    """
    kind = hidden_NH.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else heads_DH[0].dtype
    if chunks is None:
        chunks = chunk_size(len(heads_DH[0]), hidden_NH.device)
    if isinstance(chunks, int):
        chunks = [slice(start, start + chunks) for start in range(0, len(hidden_NH), chunks)]
    with torch.autocast(kind, enabled=False):
        total: Tensor = _HeadLoss.apply(hidden_NH, head_N, teacher, loss, chunks, dtype, *heads_DH)
    return total
