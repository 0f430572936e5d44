"""Block verification of a chain of proposed tokens (arXiv 2403.10444): the whole chain is tested at once.

reach_i = min(1, reach_{i-1} p(x_i)/q(x_i)), reach_0 = 1, is how far the first i tokens go towards the target's
law. The longest prefix that passes its test is kept, even if a shorter one failed; the token after it comes from
norm((reach p - q)+), or from p when all are kept. The output law is that of token-wise verification, exactly p,
and the accepted prefix is never shorter on average. Inputs and verdict are those of `chain.verify_chain`, and so
is their validation, `check.check_chain`.

Shapes: B batch, K proposed tokens, V vocabulary.
"""

import torch
from torch import Tensor

from spectrain.exact.sampler import draw
from spectrain.exact.verify.chain import ChainVerdict


def verify_block(
    p_BKV: Tensor,
    q_BKV: Tensor | None,
    tokens_BK: Tensor,
    uniforms_BK: Tensor,
    lengths_B: Tensor | None = None,
) -> ChainVerdict:
    """Verify one round. The hot kernel: nothing is validated, modified, or brought to the host.

    p [B, K+1, V]: row i is the target's law of the token after i proposals. q [B, K, V]: the law that token i
    was drawn from; None for point masses (then block and token-wise verification have the same law).
    tokens [B, K]. uniforms [B, K+1] in [0, 1), float64 if possible: column i tests the first i+1 tokens, column
    K draws the token after the kept ones. lengths [B]: how many tokens of a row were proposed; the rest is
    padding, and any id may stand there.

    Where rounding leaves nothing to repair from, the token is drawn from p.
    """
    B, K = tokens_BK.shape
    tokens_BK = tokens_BK.long()
    if lengths_B is None:
        lengths_B = torch.full_like(uniforms_BK[:, 0], K, dtype=torch.int64)
    column_K = torch.arange(K, device=tokens_BK.device)
    tokens_BK = torch.where(column_K < lengths_B[:, None], tokens_BK, 0)

    reach_BK = _reach(p_BKV, q_BKV, tokens_BK)
    kept_BK = _keeps(p_BKV, q_BKV, tokens_BK, reach_BK, uniforms_BK[:, :K].double(), lengths_B)
    accepted_B = torch.where(kept_BK, column_K + 1, 0).amax(-1) if K else torch.zeros_like(lengths_B)

    rows_B = torch.arange(B, device=tokens_BK.device)
    p_BV = p_BKV[rows_B, accepted_B]
    if K == 0:
        return ChainVerdict(accepted_B, draw(p_BV, uniforms_BK[:, K]))
    at_B = accepted_B.clamp(max=K - 1)  # where all were kept the residual is computed but not used
    reach_B1 = reach_BK.gather(-1, accepted_B[:, None])
    if q_BKV is None:
        excess_BV = p_BV.scatter(-1, tokens_BK.gather(-1, at_B[:, None]), 0.0).double()
    else:
        excess_BV = (reach_B1 * p_BV - q_BKV[rows_B, at_B]).clamp(min=0)
    repaired_B = (accepted_B < lengths_B) & (excess_BV.amax(-1) > 0)
    return ChainVerdict(accepted_B, draw(torch.where(repaired_B[:, None], excess_BV, p_BV), uniforms_BK[:, K]))


def _reach(p_BKV: Tensor, q_BKV: Tensor | None, tokens_BK: Tensor) -> Tensor:
    """reach_0 to reach_K, float64 [B, K+1]. It is nowhere NaN before a row's padding."""
    chosen = tokens_BK.unsqueeze(-1)
    p_BK = p_BKV[:, :-1].gather(-1, chosen).squeeze(-1).double()
    q_BK = torch.ones_like(p_BK) if q_BKV is None else q_BKV.gather(-1, chosen).squeeze(-1).double()
    reaches = [torch.ones_like(p_BKV[:, 0, 0], dtype=torch.float64)]
    for i in range(tokens_BK.shape[1]):
        supplied_B = reaches[-1] * p_BK[:, i]
        reaches.append(torch.where(supplied_B < q_BK[:, i], supplied_B / q_BK[:, i], (supplied_B > 0).double()))
    return torch.stack(reaches, -1)


def _keeps(
    p_BKV: Tensor,
    q_BKV: Tensor | None,
    tokens_BK: Tensor,
    reach_BK: Tensor,
    uniforms_BK: Tensor,
    lengths_B: Tensor,
) -> Tensor:
    """Whether the test of the first i+1 tokens passes, bool [B, K]: its probability is left/(left + 1 - reach).

    left = Σ (reach p - q)+ over the laws of the next token; the last prefix passes with its reach.
    """
    K = tokens_BK.shape[1]
    prefix_K = torch.arange(1, K + 1, device=tokens_BK.device)
    reach_BK = reach_BK[:, 1:]
    if q_BKV is None:
        next_BK = tokens_BK.roll(-1, -1).unsqueeze(-1)  # what rolls into the last column is not used
        left_BK = reach_BK * p_BKV[:, 1:].scatter(-1, next_BK, 0.0).sum(-1, dtype=torch.float64)
    else:
        inner = zip(reach_BK.unbind(1)[:-1], p_BKV.unbind(1)[1:-1], q_BKV.unbind(1)[1:], strict=True)
        # One position at a time: [B, K, V] in float64 is never held.
        sums = [(reach_B[:, None] * p_BV - q_BV).clamp(min=0).sum(-1) for reach_B, p_BV, q_BV in inner]
        left_BK = torch.stack([*sums, torch.zeros_like(lengths_B, dtype=torch.float64)], -1) if K else reach_BK
    # u left + u (1 - reach) < left, without a division; a reach of 1 always passes.
    inside_BK = (uniforms_BK * (left_BK + 1 - reach_BK) < left_BK) | (reach_BK >= 1)
    passes_BK = torch.where(prefix_K == lengths_B[:, None], uniforms_BK < reach_BK, inside_BK)
    return passes_BK & (prefix_K <= lengths_B[:, None])
