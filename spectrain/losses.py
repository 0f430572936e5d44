"""Training losses: per-position functions in a registry, mixtures of them, and the head applied in chunks.

Shapes: N supervised positions, C of a chunk, H hidden, D columns of the drafter's head (the draft vocabulary, or all of
V), S starts of a chunk, K depths.

Every function takes both laws on the same columns: the drafter's, from its logits ``z_ND``, and the target's
full-vocabulary log-probabilities ``log_p_ND`` (whose mass may be below one when the columns are a reduced vocabulary).
It returns a loss ``_N``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from spectrain.exact.verify.chain import acceptance_probability


class Laws:
    """The drafter's law ``q`` and the target's ``p`` (both [N, D]); what several losses need is computed once."""

    def __init__(self, z_ND: Tensor, log_p_ND: Tensor) -> None:
        self.z_ND, self.log_p_ND = z_ND, log_p_ND

    @cached_property
    def log_q(self) -> Tensor:
        return torch.log_softmax(self.z_ND, dim=-1)

    @cached_property
    def q(self) -> Tensor:
        return self.log_q.exp()

    @cached_property
    def p(self) -> Tensor:
        return self.log_p_ND.exp()

    @cached_property
    def acceptance(self) -> Tensor:
        """Acceptance probability sum_j min(p_j, q_j) at temperature 1, over the full vocabulary (2211.17192)."""
        return acceptance_probability(self.p, self.q)


LossName = Literal[
    "forward_kl", "reverse_kl", "jensen_shannon", "total_variation", "negative_log_acceptance", "lk_hybrid"
]  # fmt: skip
PositionLoss = Callable[[Laws], Tensor]
RowsLoss = Callable[[Tensor, Tensor, slice], Tensor]
"""Loss of logits and a law that also knows which rows it was given (to weigh them)."""


class _CrossEntropy(torch.autograd.Function):
    """-sum_j p_j log q_j by row, with its gradient sum(p) q - p written out.

    Through autograd the same takes twice the passes over [N, D], which at a full vocabulary cost as much as a product
    with the head.
    """

    @staticmethod
    def forward(ctx: Any, z_ND: Tensor, p_ND: Tensor) -> Tensor:
        normaliser_N, mass_N = z_ND.logsumexp(-1), p_ND.sum(-1)
        ctx.save_for_backward(z_ND, p_ND, normaliser_N, mass_N)
        product_N: Tensor = torch.linalg.vecdot(p_ND, z_ND)
        return mass_N * normaliser_N - product_N

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        z_ND, p_ND, normaliser_N, mass_N = ctx.saved_tensors
        (grad_N,) = grad_outputs
        grad_ND = (z_ND - normaliser_N[:, None]).exp_().mul_((mass_N * grad_N)[:, None])
        return grad_ND.addcmul_(p_ND, -grad_N[:, None]), None


def forward_kl(laws: Laws) -> Tensor:
    """Cross-entropy to the target's law, -sum_j p_j log q_j: KL(p || q) up to p's entropy (DistillSpec, 2310.08461).

    Mass outside the columns weighs nothing: a position the drafter can hardly cover hardly pulls.
    """
    loss_N: Tensor = _CrossEntropy.apply(laws.z_ND, laws.p.to(laws.z_ND.dtype))
    return loss_N


def total_variation(laws: Laws) -> Tensor:
    """1 - acceptance probability, which is TV(p, q) over the full vocabulary (2310.08461); flat where q is tiny."""
    return 1.0 - laws.acceptance


def reverse_kl(laws: Laws) -> Tensor:
    """KL(q || p), sum_j q_j (log q_j - log p_j): keeps to what the target likes best (2306.08543)."""
    # A finite floor: q on a token that the target never takes must cost much, not make a NaN.
    return (laws.q * (laws.log_q - laws.log_p_ND.clamp(min=LOWEST_LOG))).sum(-1)


def jensen_shannon(laws: Laws) -> Tensor:
    """(KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2, over the full vocabulary; at most log 2 (2306.13649)."""
    p_ND, q_ND = laws.p, laws.q
    log_m_ND = ((p_ND + q_ND) / 2).clamp(min=math.exp(LOWEST_LOG)).log()
    kl_p_N = (p_ND * (laws.log_p_ND.clamp(min=LOWEST_LOG) - log_m_ND)).sum(-1)
    kl_q_N = (q_ND * (laws.log_q.clamp(min=LOWEST_LOG) - log_m_ND)).sum(-1)
    outside_N = (1 - p_ND.sum(-1)).clamp(min=0)  # mass that no column covers: there m is p / 2
    return (kl_p_N + kl_q_N + outside_N * math.log(2)) / 2


def negative_log_acceptance(laws: Laws) -> Tensor:
    """-log of the acceptance probability (LK, 2602.23881): total variation's aim, with a gradient that does not vanish
    where the laws hardly meet."""
    return -laws.acceptance.clamp(min=math.exp(LOWEST_LOG)).log()


def lk_hybrid(laws: Laws) -> Tensor:
    """KL where drafts are bad, total variation where they are good (LK, 2602.23881): the share of KL is exp(-3 α), not
    differentiated."""
    share_N = torch.exp(-3 * laws.acceptance.detach())
    return share_N * forward_kl(laws) + (1 - share_N) * (1 - laws.acceptance)


LOWEST_LOG = -80.0  # e^-80 is still a float32

LOSSES: dict[LossName, PositionLoss] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jensen_shannon": jensen_shannon,
    "total_variation": total_variation,
    "negative_log_acceptance": negative_log_acceptance,
    "lk_hybrid": lk_hybrid,
}


def mixture(terms: Mapping[LossName, float]) -> PositionLoss:
    """The sum of the named losses, each times its weight; those of weight zero are not computed."""
    parts = [(LOSSES[name], weight) for name, weight in terms.items() if weight]

    def loss(laws: Laws) -> Tensor:
        return torch.stack([weight * part(laws) for part, weight in parts]).sum(0)

    return loss


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


def pace_weights(acceptance_SK: Tensor, there_SK: Tensor, smoothing: float) -> Tensor:
    """What each depth counts at each start, in place of decay^d (D-PACE, 2605.18810), not differentiated.

    With s = (1 - smoothing) a + smoothing and a the acceptance probability of a depth: w_d = sum_{m >= d} prod_{i <= m}
    s_i, over the depths that are there (``there_SK``). Without smoothing, a sum of w_d times -log a_d has the gradient
    of minus the expected accepted length, sum_m prod_{i <= m} a_i. The paper takes the confidence in the data's token
    for a; with ``teacher: answers`` it is that.
    """
    s_SK = ((1 - smoothing) * acceptance_SK.detach() + smoothing).masked_fill(~there_SK, 1.0)
    reached_SK = s_SK.cumprod(-1) * there_SK
    return reached_SK.flip(-1).cumsum(-1).flip(-1) * there_SK


CHUNK = 256  # positions whose logits are held at once, at most
CPU_BLOCK = (
    32 << 20
)  # bytes; what is larger malloc maps anew every time, and clearing its pages takes as long as a pass


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
