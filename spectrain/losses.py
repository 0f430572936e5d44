"""Training losses: per-position functions in a registry, and the head applied in chunks.

Shapes: N supervised positions, H hidden, D columns of the drafter's head (the draft vocabulary, or all of V).

Every function takes the drafter's logits ``z_ND`` and the target's full-vocabulary log-probabilities on the same
columns ``log_p_ND`` (whose mass may be below one when the columns are a reduced vocabulary) and returns a loss ``_N``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from spectrain.exact.verify.chain import acceptance_probability

PositionLoss = Callable[[Tensor, Tensor], Tensor]
RowsLoss = Callable[[Tensor, Tensor, slice], Tensor]
"""A position loss that also knows which rows it was given (to weigh them)."""


def forward_kl(z_ND: Tensor, log_p_ND: Tensor) -> Tensor:
    """Cross-entropy to the target's law, -sum_j p_j log q_j: KL(p || q) up to p's entropy (DistillSpec, 2310.08461).

    Mass outside the columns weighs nothing: a position the drafter can hardly cover hardly pulls.
    """
    return -(log_p_ND.exp() * torch.log_softmax(z_ND, dim=-1).masked_fill(log_p_ND == -torch.inf, 0.0)).sum(-1)


def total_variation(z_ND: Tensor, log_p_ND: Tensor) -> Tensor:
    """1 - acceptance probability, which is TV(p, q) over the full vocabulary (2310.08461); flat where q is tiny."""
    return 1.0 - acceptance(z_ND, log_p_ND)


def acceptance(z_ND: Tensor, log_p_ND: Tensor) -> Tensor:
    """Acceptance probability sum_j min(p_j, q_j) at temperature 1, over the full vocabulary (2211.17192)."""
    return acceptance_probability(log_p_ND.exp(), torch.softmax(z_ND, dim=-1))


def reverse_kl(z_ND: Tensor, log_p_ND: Tensor) -> Tensor:
    """KL(q || p), sum_j q_j (log q_j - log p_j): keeps to what the target likes best (2306.08543)."""
    log_q_ND = torch.log_softmax(z_ND, dim=-1)
    # A finite floor: q on a token that the target never takes must cost much, not make a NaN.
    return (log_q_ND.exp() * (log_q_ND - log_p_ND.clamp(min=LOWEST_LOG))).sum(-1)


def jensen_shannon(z_ND: Tensor, log_p_ND: Tensor) -> Tensor:
    """(KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2, over the full vocabulary; at most log 2 (2306.13649)."""
    log_q_ND = torch.log_softmax(z_ND, dim=-1)
    p_ND, q_ND = log_p_ND.exp(), log_q_ND.exp()
    log_m_ND = ((p_ND + q_ND) / 2).clamp(min=math.exp(LOWEST_LOG)).log()
    kl_p_N = (p_ND * (log_p_ND.clamp(min=LOWEST_LOG) - log_m_ND)).sum(-1)
    kl_q_N = (q_ND * (log_q_ND.clamp(min=LOWEST_LOG) - log_m_ND)).sum(-1)
    outside_N = (1 - p_ND.sum(-1)).clamp(min=0)  # mass that no column covers: there m is p / 2
    return (kl_p_N + kl_q_N + outside_N * math.log(2)) / 2


def negative_log_acceptance(z_ND: Tensor, log_p_ND: Tensor) -> Tensor:
    """-log of the acceptance probability (LK, 2602.23881): total variation's aim, with a gradient that does not vanish
    where the laws hardly meet."""
    return -acceptance(z_ND, log_p_ND).clamp(min=math.exp(LOWEST_LOG)).log()


def lk_hybrid(z_ND: Tensor, log_p_ND: Tensor) -> Tensor:
    """KL where drafts are bad, total variation where they are good (LK, 2602.23881): the share of KL is exp(-3 α), not
    differentiated."""
    alpha_N = acceptance(z_ND, log_p_ND)
    share_N = torch.exp(-3 * alpha_N.detach())
    return share_N * forward_kl(z_ND, log_p_ND) + (1 - share_N) * (1 - alpha_N)


LOWEST_LOG = -80.0  # e^-80 is still a float32

LOSSES: dict[str, PositionLoss] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jensen_shannon": jensen_shannon,
    "total_variation": total_variation,
    "negative_log_acceptance": negative_log_acceptance,
    "lk_hybrid": lk_hybrid,
}


def supervised(answer_BT: Tensor, shift: int) -> Tensor:
    """Bool [B, T]: position t predicts token t + shift, and tokens t+1 .. t+shift are all answer tokens.

    So the mask moves with the ids and the targets at every depth, and never reaches over the end of an answer.
    """
    mask_BT = torch.ones_like(answer_BT, dtype=torch.bool)
    for ahead in range(1, shift + 1):
        mask_BT &= torch.nn.functional.pad(answer_BT[:, ahead:].bool(), (0, min(ahead, answer_BT.shape[1])))
    return mask_BT


def depth_weights(depths: int, decay: float) -> list[float]:
    """Weight of each draft depth, decay^d."""
    return [decay**depth for depth in range(depths)]


class _HeadLoss(torch.autograd.Function):
    """Sum of a position loss through a linear head, chunk by chunk, gradients taken in the forward pass.

    Neither logits nor their gradients ever exist for more than one chunk, so memory does not grow with N x D.
    """

    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, head_DH: Tensor, teacher: Callable[[slice], Tensor], loss: RowsLoss,
                chunk: int, dtype: torch.dtype) -> Tensor:  # fmt: skip
        total = torch.zeros((), dtype=torch.float32, device=hidden_NH.device)
        grad_hidden_NH = torch.empty_like(hidden_NH)
        grad_head_DH = torch.zeros_like(head_DH) if ctx.needs_input_grad[1] else None  # a borrowed head is frozen
        weight_DH = head_DH.detach().to(dtype)
        for start in range(0, hidden_NH.shape[0], chunk):
            rows = slice(start, start + chunk)
            hidden_CH = hidden_NH[rows].detach().to(dtype)
            z_CD = (hidden_CH @ weight_DH.T).float().requires_grad_()
            with torch.enable_grad():
                value = loss(z_CD, teacher(rows), rows).sum()
            (grad_CD,) = torch.autograd.grad(value, z_CD)
            total += value.detach()
            grad_CD = grad_CD.to(dtype)
            grad_hidden_NH[rows] = (grad_CD @ weight_DH).to(grad_hidden_NH.dtype)
            if grad_head_DH is not None:
                grad_head_DH += (grad_CD.T @ hidden_CH).to(grad_head_DH.dtype)
        ctx.save_for_backward(grad_hidden_NH, grad_head_DH)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden_NH, grad_head_DH = ctx.saved_tensors
        scale = grad_outputs[0]
        return grad_hidden_NH * scale, None if grad_head_DH is None else grad_head_DH * scale, None, None, None, None


def head_loss(hidden_NH: Tensor, head_DH: Tensor, teacher: Callable[[slice], Tensor], loss: RowsLoss, *,
              chunk: int = 256) -> Tensor:  # fmt: skip
    """Scalar sum over N of ``loss(hidden @ head.T, teacher(rows), rows)``; differentiable in hidden and head.

    ``teacher(rows)`` gives the target's log-probabilities ``log_p_ND`` of a slice of rows, computed when asked for.
    Under autocast the two matrix products run in its dtype, everything else in float32.
    """
    kind = hidden_NH.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else head_DH.dtype
    with torch.autocast(kind, enabled=False):
        total: Tensor = _HeadLoss.apply(hidden_NH, head_DH, teacher, loss, chunk, dtype)
    return total
