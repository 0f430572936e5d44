"""What the verification kernels may be called with. For API edges and tests: every check waits for the device.

Shapes: B batch, N proposed tokens of a chain or nodes of a tree, M = N + 1, V vocabulary.
"""

import torch
from torch import Tensor

from spectrain.errors import SpectrainError

SUM_TOLERANCE = 1e-12

Wanted = dict[str, tuple[Tensor, list[int]]]  # by name: a tensor, and the shape that it should have


def check_probabilities(rows: Tensor, name: str) -> None:
    """Raise SpectrainError unless every row [..., V] is finite, not negative and of float64 sum 1 ± 1e-12."""
    if not rows.is_floating_point() or rows.dim() == 0 or rows.shape[-1] == 0:
        raise SpectrainError(f"{name}: found {rows.dtype} {list(rows.shape)}, expected floating-point rows [..., V]")
    if not rows.isfinite().all():
        raise SpectrainError(f"{name}: found a value that is not finite; check the logits that it came from")
    if (rows < 0).any():
        raise SpectrainError(f"{name}: found {rows.min().item()}, expected no negative probability")
    sums = rows.sum(-1, dtype=torch.float64)
    if ((sums - 1).abs() > SUM_TOLERANCE).any():
        worst = sums.flatten()[(sums - 1).abs().argmax()].item()
        raise SpectrainError(
            f"{name}: found a row of sum {worst!r}, expected 1 within {SUM_TOLERANCE:g}; normalise the rows in float64"
        )


def check_chain(
    p_BMV: Tensor,
    q_BNV: Tensor | None,
    tokens_BN: Tensor,
    uniforms_BM: Tensor,
    lengths_B: Tensor | None = None,
) -> None:
    """Raise SpectrainError unless `verify_chain` and `verify_block` may be called with these. Nothing is repaired."""
    B, N, V = _sizes(p_BMV, tokens_BN, "K")
    q: Wanted = {} if q_BNV is None else {"q": (q_BNV, [B, N, V])}
    real_BN = _real({"p": (p_BMV, [B, N + 1, V]), **q}, tokens_BN, uniforms_BM, lengths_B)
    check_probabilities(p_BMV, "p")
    _check_tokens(tokens_BN, real_BN, V)
    if q_BNV is not None:
        _check_drawn(q_BNV, tokens_BN, real_BN)


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
    """Raise SpectrainError unless `verify_tree` may be called with these. Nothing is repaired."""
    B, N, V = _sizes(p_BMV, tokens_BN, "N")
    wanted: Wanted = {"p": (p_BMV, [B, N + 1, V]), "parents": (parents_BN, [B, N])}
    q: Wanted = {} if q_BMV is None else {"q": (q_BMV, [B, N + 1, V])}
    real_BN = _real({**wanted, **q}, tokens_BN, uniforms_BM, lengths_B)
    check_probabilities(torch.cat([p_BMV[:, 0], p_BMV[:, 1:][real_BN]]), "p")
    _check_tokens(tokens_BN, real_BN, V)
    ordered_BN = (parents_BN >= -1) & (parents_BN < torch.arange(N, device=parents_BN.device))
    _expect((ordered_BN | ~real_BN).all(), "parents: found one that is no earlier node, expected -1 or a lower id")
    if q_BMV is None:
        return
    parent_row_BN = parents_BN.long().clamp(min=-1, max=N - 1) + 1
    _check_drawn(q_BMV.gather(1, parent_row_BN.unsqueeze(-1).expand(B, N, V)), tokens_BN, real_BN)
    if not replacement:
        same_BNN = (parents_BN[:, :, None] == parents_BN[:, None]) & (tokens_BN[:, :, None] == tokens_BN[:, None])
        twice = (same_BNN & real_BN[:, :, None] & real_BN[:, None]).triu(1).any()
        _expect(~twice, "tokens: found a token twice among siblings, expected them drawn without replacement")


def _sizes(p_BMV: Tensor, tokens_BN: Tensor, size: str) -> tuple[int, int, int]:
    """B, N and V; messages call the number of proposed tokens ``size``."""
    _expect(tokens_BN.dim() == 2, f"tokens: found shape {list(tokens_BN.shape)}, expected [B, {size}]")
    _expect(p_BMV.dim() == 3, f"p: found shape {list(p_BMV.shape)}, expected [B, {size}+1, V]")
    B, N = tokens_BN.shape
    return B, N, p_BMV.shape[-1]


def _real(wanted: Wanted, tokens_BN: Tensor, uniforms_BM: Tensor, lengths_B: Tensor | None) -> Tensor:
    """Which tokens are no padding, bool [B, N], after shapes, uniforms and lengths were checked."""
    B, N = tokens_BN.shape
    wanted = {**wanted, "uniforms": (uniforms_BM, [B, N + 1])}
    if lengths_B is not None:
        wanted["lengths"] = (lengths_B, [B])
    for name, (tensor, shape) in wanted.items():
        _expect(list(tensor.shape) == shape, f"{name}: found shape {list(tensor.shape)}, expected {shape}")
    inside = ((uniforms_BM >= 0) & (uniforms_BM < 1)).all()
    _expect(inside, "uniforms: found a value outside [0, 1), expected draws from torch.rand")
    if lengths_B is None:
        return torch.ones_like(tokens_BN, dtype=torch.bool)
    inside = ((lengths_B >= 0) & (lengths_B <= N)).all()
    _expect(inside, f"lengths: found {lengths_B.tolist()}, expected 0..{N}")
    return torch.arange(N, device=tokens_BN.device) < lengths_B[:, None]


def _check_tokens(tokens_BN: Tensor, real_BN: Tensor, V: int) -> None:
    known_BN = (tokens_BN >= 0) & (tokens_BN < V)
    _expect((known_BN | ~real_BN).all(), f"tokens: found an id outside 0..{V - 1}, the vocabulary of p")


def _check_drawn(q_BNV: Tensor, tokens_BN: Tensor, real_BN: Tensor) -> None:
    check_probabilities(q_BNV[real_BN], "q")
    chosen_BN = q_BNV.gather(-1, tokens_BN.long().clamp(0, q_BNV.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
    drawn = ((chosen_BN > 0) | ~real_BN).all()
    _expect(drawn, "q: found 0 for a proposed token, expected the law that the tokens were really drawn from")


def _expect(condition: Tensor | bool, message: str) -> None:
    if not condition:
        raise SpectrainError(message)
