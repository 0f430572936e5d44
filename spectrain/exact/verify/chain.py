"""Token-wise verification of a chain of proposed tokens (arXiv 2211.17192, 2302.01318).

Proposal i is accepted with probability min(1, p(x)/q(x)); the first rejection is repaired from norm((p - q)+)
and ends the round; when all are accepted a bonus token comes from p. The output law is exactly p, whatever q,
as long as q is the law that the tokens were really drawn from: after the drafter's own sampler, and a point
mass for tokens that were chosen rather than drawn (argmax, prompt lookup).

Shapes: B batch, K proposed tokens, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from spectrain.exact.sampler import draw


@dataclass(frozen=True)
class ChainVerdict:
    accepted: Tensor  # int64 [B]: how many of the proposed tokens are kept
    token: Tensor  # int64 [B]: the token after them: the repair, or the bonus when nothing was rejected


def verify_chain(
    p_BKV: Tensor,
    q_BKV: Tensor | None,
    tokens_BK: Tensor,
    uniforms_BK: Tensor,
    lengths_B: Tensor | None = None,
) -> ChainVerdict:
    """Verify one round. The hot kernel: nothing is validated, modified, or brought to the host.

    p [B, K+1, V]: row i is the target's law of the token after i proposals. q [B, K, V]: the law that token i
    was drawn from; None for point masses. tokens [B, K]. uniforms [B, K+1] in [0, 1), float64 if possible:
    column i decides token i, column K draws the repair or the bonus. lengths [B]: how many tokens of a row
    were proposed (the rest is padding and never matches; any id may stand there). K = 0 draws the next token
    from p.

    Sums need not be 1 (float32 softmax rows miss it by up to 1e-5): the output law then lies within |Σp - Σq|
    / max(Σp, Σq) of p/Σp in total variation. Where rounding alone rejects a token, so that no residual is
    left, the repair is drawn from p.
    """
    B, K = tokens_BK.shape
    if K == 0:
        return ChainVerdict(
            torch.zeros_like(uniforms_BK[:, 0], dtype=torch.int64), draw(p_BKV[:, 0], uniforms_BK[:, 0])
        )
    tokens_BK = tokens_BK.long()
    proposed_BK = torch.ones_like(tokens_BK, dtype=torch.bool)
    if lengths_B is not None:
        proposed_BK = torch.arange(K, device=tokens_BK.device) < lengths_B[:, None]
        tokens_BK = torch.where(proposed_BK, tokens_BK, 0)
    accepted_BK = proposed_BK & _accepts(p_BKV, q_BKV, tokens_BK, uniforms_BK)
    accepted_B = accepted_BK.long().cumprod(-1).sum(-1)
    rejected_B = accepted_B < proposed_BK.sum(-1)

    rows_B = torch.arange(B, device=tokens_BK.device)
    at_B = accepted_B.clamp(max=K - 1)  # where nothing was rejected the residual is computed but not used
    p_BV = p_BKV[rows_B, accepted_B]
    if q_BKV is None:
        residual_BV = p_BV.scatter(-1, tokens_BK.gather(-1, at_B[:, None]), 0.0)
    else:
        residual_BV = (p_BV - q_BKV[rows_B, at_B]).clamp(min=0)
    repaired_B = rejected_B & (residual_BV.amax(-1) > 0)
    weights_BV = torch.where(repaired_B[:, None], residual_BV, p_BV)
    return ChainVerdict(accepted_B, draw(weights_BV, uniforms_BK[:, K]))


def _accepts(p_BKV: Tensor, q_BKV: Tensor | None, tokens_BK: Tensor, uniforms_BK: Tensor) -> Tensor:
    """u q(x) < p(x), which is u < p(x)/q(x) without a division; strict, for p(x) = 0 must reject u = 0."""
    chosen = tokens_BK.unsqueeze(-1)
    threshold_BK = uniforms_BK[:, : tokens_BK.shape[1]].double()
    if q_BKV is not None:
        threshold_BK = threshold_BK * q_BKV.gather(-1, chosen).squeeze(-1).double()
    return threshold_BK < p_BKV[:, :-1].gather(-1, chosen).squeeze(-1).double()


def acceptance_probability(p_V: Tensor, q_V: Tensor) -> Tensor:
    """α = Σ_j min(p_j, q_j) = 1 - TV(p, q), [...] from laws [..., V] (full vocabulary). Differentiable."""
    return torch.minimum(p_V, q_V).sum(-1)
