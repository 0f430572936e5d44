"""Which rule decides a round: token by token, block by block, or (lossy, and called so) by plausibility.

Shapes: B batch, N proposed nodes, M = N + 1 rows, V vocabulary.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from spectrain.drafters.base import Proposal
from spectrain.errors import SpectrainError
from spectrain.exact.verify.block import verify_block
from spectrain.exact.verify.chain import verify_chain
from spectrain.exact.verify.tree import verify_tree
from spectrain.exact.verify.typical import accept_typical_lossy
from spectrain.shapes import Chain, Shape, StaticTree

Verification = Literal["token", "block", "typical_lossy"]
"""token: 2211.17192, on trees 2305.09781 and 2402.14160. block: 2403.10444, chains only. typical_lossy: 2401.10774,
chains only, does NOT keep the target's law."""


def is_lossy(verification: str) -> bool:
    return verification.endswith("_lossy")


def check_verification(verification: str, shape: Shape) -> None:
    """Refuse an unknown rule, and a rule for chains on a tree."""
    known = get_args(Verification)
    if verification not in known:
        raise SpectrainError(f"verification {verification!r} is unknown; expected one of {', '.join(known)}")
    if verification != "token" and not isinstance(shape, Chain):
        raise SpectrainError(f"verification {verification!r} is for chains, not for a {shape.describe()}; use 'token'")


def verify(verification: Verification, shape: Shape, p_BMV: Tensor, proposal: Proposal, uniforms_BU: Tensor,
           counts_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Kept nodes [B, N] (in order, then -1), how many [B], and the token after them [B].

    ``uniforms_BU`` has a column for every node that the shape could have and one more. Each node has its own and the
    pending token the last, so what a request draws does not depend on how much its companions were proposed.
    """
    tokens_BN = proposal.tokens_BN
    N = tokens_BN.shape[1]
    uniforms_BM = torch.cat([uniforms_BU[:, :N], uniforms_BU[:, -1:]], 1)
    if proposal.parents_BN is None:
        if verification == "typical_lossy":
            lossy = accept_typical_lossy(p_BMV, tokens_BN, uniforms_BM[:, -1], counts_B)
            accepted_B, token_B = lossy.accepted, lossy.token
        else:
            rule = verify_block if verification == "block" else verify_chain
            verdict = rule(p_BMV, proposal.q, tokens_BN, uniforms_BM, counts_B)
            accepted_B, token_B = verdict.accepted, verdict.token
        node_N = torch.arange(N, device=tokens_BN.device)
        return torch.where(node_N < accepted_B[:, None], node_N, -1), accepted_B, token_B
    chosen = proposal.q is None
    if not chosen and getattr(shape, "children", "chosen") == "chosen":
        raise SpectrainError(
            f"a {shape.describe()} of chosen nodes came with a law q; expected none: a tree that was ranked by "
            "confidence is exact only as point masses"
        )
    steps = shape.steps(drawn=not chosen) if isinstance(shape, StaticTree) else shape.depth
    if chosen:  # column m draws the token after row m
        uniforms_BM = uniforms_BM.roll(1, dims=1)
    distinct = isinstance(shape, StaticTree) and shape.children == "distinct"
    found = verify_tree(p_BMV, proposal.q, tokens_BN, proposal.parents_BN, uniforms_BM, counts_B,
                        replacement=not distinct, steps=steps)  # fmt: skip
    return found.path, found.accepted, found.token
