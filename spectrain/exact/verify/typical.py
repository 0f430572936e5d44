"""LOSSY: typical acceptance (Medusa, arXiv 2401.10774). Its output law is not p; use it for comparison only.

A proposed token is accepted when the target finds it plausible, p(x) > min(ε, δ exp(-H(p))), however likely it
was to be proposed: what the drafter likes is emitted too often. Only for one-hot p (greedy decoding) is the
output the target's.

Shapes: B batch, K proposed tokens, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from spectrain.exact.sampler import draw


@dataclass(frozen=True)
class LossyVerdict:
    """Kept apart from the exact verdicts, so that none of it passes for one of them."""

    accepted: Tensor  # int64 [B]: how many of the proposed tokens are kept
    token: Tensor  # int64 [B]: the token after them, drawn from p


def accept_typical_lossy(
    p_BKV: Tensor,
    tokens_BK: Tensor,
    uniforms_B: Tensor,
    lengths_B: Tensor | None = None,
    *,
    epsilon: float = 0.09,
    delta: float = 0.3,
) -> LossyVerdict:
    """LOSSY. Keep the longest prefix of plausible tokens and draw one more from p; nothing is validated.

    p [B, K+1, V]: row i is the target's law of the token after i proposals. tokens [B, K]. uniforms [B] in [0, 1)
    draw the last token; acceptance is not random. lengths [B]: how many tokens of a row were proposed.
    The defaults are those of the authors' code.
    """
    B, K = tokens_BK.shape
    column_K = torch.arange(K, device=tokens_BK.device)
    real_BK = torch.ones_like(tokens_BK, dtype=torch.bool) if lengths_B is None else column_K < lengths_B[:, None]
    chosen = torch.where(real_BK, tokens_BK.long(), 0).unsqueeze(-1)
    law_BKV = p_BKV[:, :K].double()
    entropy_BK = -torch.xlogy(law_BKV, law_BKV).sum(-1)
    threshold_BK = (delta * torch.exp(-entropy_BK)).clamp(max=epsilon)
    plausible_BK = (law_BKV.gather(-1, chosen).squeeze(-1) > threshold_BK) & real_BK
    accepted_B = plausible_BK.long().cumprod(-1).sum(-1)
    rows_B = torch.arange(B, device=tokens_BK.device)
    return LossyVerdict(accepted_B, draw(p_BKV[rows_B, accepted_B], uniforms_B))
