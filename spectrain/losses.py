"""Training losses: per-position functions in a registry, mixtures of them, and which positions count how much.

Shapes: B batch, T positions, N supervised positions, D columns of the drafter's head (the draft vocabulary, or all of
V), S starts of a chunk, K depths.

Every function takes both laws on the same columns: the drafter's, from its logits ``z_ND``, and the target's
full-vocabulary log-probabilities ``log_p_ND`` (whose mass may be below one when the columns are a reduced vocabulary).
It returns a loss ``_N`` that is smallest where q is p (zero or not: a cross-entropy is not), with gradients that are
finite also where p or q is 0 in floating point: there ``log_q`` is a number, a root or logarithm of ``q`` has no slope.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
