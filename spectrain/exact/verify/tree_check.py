"""What `tree.verify_tree` may be called with. For API edges and tests: every check waits for the device.

Shapes: B batch, N tree nodes, M = N + 1, V vocabulary.
"""

import torch
from torch import Tensor

from spectrain.exact.verify.chain import check_probabilities, expect


def check_tree(
    p_BMV: Tensor,
    q_BMV: Tensor | None,
    tokens_BN: Tensor,
    parents_BN: Tensor,
    uniforms_BM: Tensor,
    lengths_B: Tensor | None = None,
    *,
    replacement: bool = True,
) -> None:
    """Raise SpectrainError unless `verify_tree` may be called with these. Nothing is clipped or repaired."""
    expect(tokens_BN.dim() == 2, f"tokens: found shape {list(tokens_BN.shape)}, expected [B, N]")
    expect(p_BMV.dim() == 3, f"p: found shape {list(p_BMV.shape)}, expected [B, N+1, V]")
    (B, N), V = tokens_BN.shape, p_BMV.shape[-1]
    wanted = {"p": (p_BMV, [B, N + 1, V]), "parents": (parents_BN, [B, N]), "uniforms": (uniforms_BM, [B, N + 1])}
    if q_BMV is not None:
        wanted["q"] = (q_BMV, [B, N + 1, V])
    if lengths_B is not None:
        wanted["lengths"] = (lengths_B, [B])
    for name, (tensor, shape) in wanted.items():
        expect(list(tensor.shape) == shape, f"{name}: found shape {list(tensor.shape)}, expected {shape}")
    inside = ((uniforms_BM >= 0) & (uniforms_BM < 1)).all()
    expect(inside, "uniforms: found a value outside [0, 1), expected draws from torch.rand")
    id_N = torch.arange(N, device=tokens_BN.device)
    real_BN = torch.ones_like(tokens_BN, dtype=torch.bool)
    if lengths_B is not None:
        inside = ((lengths_B >= 0) & (lengths_B <= N)).all()
        expect(inside, f"lengths: found {lengths_B.tolist()}, expected 0..{N}")
        real_BN = id_N < lengths_B[:, None]
    check_probabilities(torch.cat([p_BMV[:, 0], p_BMV[:, 1:][real_BN]]), "p")
    known_BN = (tokens_BN >= 0) & (tokens_BN < V)
    expect((known_BN | ~real_BN).all(), f"tokens: found an id outside 0..{V - 1}, the vocabulary of p")
    ordered_BN = (parents_BN >= -1) & (parents_BN < id_N)
    expect((ordered_BN | ~real_BN).all(), "parents: found one that is no earlier node, expected -1 or a lower id")
    if q_BMV is None:
        return
    parent_row_BN = parents_BN.long().clamp(min=-1, max=N - 1) + 1
    q_BNV = q_BMV.gather(1, parent_row_BN.unsqueeze(-1).expand(B, N, V))
    check_probabilities(q_BNV[real_BN], "q")
    chosen_BN = q_BNV.gather(-1, tokens_BN.long().clamp(0, V - 1).unsqueeze(-1)).squeeze(-1)
    drawn = ((chosen_BN > 0) | ~real_BN).all()
    expect(drawn, "q: found 0 for a proposed token, expected the law that the tokens were really drawn from")
    if not replacement:
        same_BNN = (parents_BN[:, :, None] == parents_BN[:, None]) & (tokens_BN[:, :, None] == tokens_BN[:, None])
        twice = (same_BNN & real_BN[:, :, None] & real_BN[:, None]).triu(1).any()
        expect(~twice, "tokens: found a token twice among siblings, expected them drawn without replacement")
