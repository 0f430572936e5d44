"""Verification of a tree of proposed tokens: one path from the root is kept, and one token follows it.

The children of a node are tested in the order of their ids; the first that passes is entered. Three kinds:
- chosen (q None): y is drawn from p and the child that equals y is entered; where none does, y is the repair;
- drawn i.i.d., duplicates kept (SpecInfer, arXiv 2305.09781): each child is tested with q against what the ones
  before it left of p, norm((left - q)+); where none passes, the last residual gives the repair;
- drawn without replacement (arXiv 2402.14160, 2402.12374): likewise, with q renormalised over the undrawn tokens.

The output law is exactly p as long as siblings stand in the order in which they were drawn, and whether one is
there does not depend on its own draw or a later one. Trees that were pruned or sorted by confidence must be
verified as chosen.

Shapes: B batch, N tree nodes, M = N + 1 (row 0 is the root, row n + 1 is node n), V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from spectrain.exact.sampler import draw


@dataclass(frozen=True)
class TreeVerdict:
    path: Tensor  # int64 [B, N]: ids of the kept nodes from the root on, then -1
    accepted: Tensor  # int64 [B]: how many nodes are kept
    token: Tensor  # int64 [B]: the token after them: the repair, or the bonus at a leaf


def verify_tree(
    p_BMV: Tensor,
    q_BMV: Tensor | None,
    tokens_BN: Tensor,
    parents_BN: Tensor,
    uniforms_BM: Tensor,
    lengths_B: Tensor | None = None,
    *,
    replacement: bool = True,
    steps: int | None = None,
) -> TreeVerdict:
    """Verify one round. The hot kernel: nothing is validated, modified, or brought to the host.

    p [B, N+1, V]: row 0 is the target's law after the pending token (the root), row n + 1 after node n. q: row
    likewise, the law that the node's children were drawn from (rows of leaves are not read); None for chosen
    children. tokens [B, N]. parents [B, N]: -1 for the root; parents come before their children, siblings in the
    order of their draws. uniforms [B, N+1] in [0, 1), float64 if possible: for chosen children column m draws the
    token after row m; else column n tests node n and column N draws the last token. lengths [B]: how many nodes
    of a row are real (the rest is padding and never entered). replacement: drawn i.i.d., else without
    replacement (then siblings differ). steps: no walk takes more, see `walk_steps`; N when not given.

    Where rounding leaves nothing to repair from, the law before that test goes on.
    """
    N = tokens_BN.shape[1]
    tokens_BN, parent_row_BN = tokens_BN.long(), parents_BN.long() + 1
    if lengths_B is not None:
        present_BN = torch.arange(N, device=tokens_BN.device) < lengths_B[:, None]
        tokens_BN = torch.where(present_BN, tokens_BN, 0)
        parent_row_BN = torch.where(present_BN, parent_row_BN, -1)
    steps = N if steps is None else min(steps, N)
    if q_BMV is None:
        kept_BM, token_B = _follow(p_BMV, tokens_BN, parent_row_BN, uniforms_BM, steps)
    else:
        kept_BM, token_B = _test(p_BMV, q_BMV, tokens_BN, parent_row_BN, uniforms_BM, replacement, steps)
    # Parents have lower ids than their children, so a path in order is its ids in order.
    ids_BN = torch.where(kept_BM[:, 1:], torch.arange(N, device=tokens_BN.device), N).sort(-1).values
    return TreeVerdict(ids_BN.masked_fill(ids_BN == N, -1), kept_BM[:, 1:].sum(-1), token_B)


def _follow(
    p_BMV: Tensor, tokens_BN: Tensor, parent_row_BN: Tensor, uniforms_BM: Tensor, steps: int
) -> tuple[Tensor, Tensor]:
    """Draw from p and enter the first child that equals the draw, level by level."""
    rows_B = torch.arange(len(tokens_BN), device=tokens_BN.device)
    at_B = torch.zeros_like(rows_B)
    kept_BM = torch.zeros_like(uniforms_BM, dtype=torch.bool)
    token_B = draw(p_BMV[rows_B, at_B], uniforms_BM[rows_B, at_B])
    for _ in range(steps):
        match_BN = (parent_row_BN == at_B[:, None]) & (tokens_BN == token_B[:, None])
        at_B = torch.where(match_BN.any(-1), _first(match_BN) + 1, at_B)
        kept_BM = kept_BM.scatter(1, at_B[:, None], True)
        token_B = draw(p_BMV[rows_B, at_B], uniforms_BM[rows_B, at_B])
    return kept_BM, token_B


def _test(
    p_BMV: Tensor,
    q_BMV: Tensor,
    tokens_BN: Tensor,
    parent_row_BN: Tensor,
    uniforms_BM: Tensor,
    replacement: bool,
    steps: int,
) -> tuple[Tensor, Tensor]:
    """Test the waiting children one after another; left_BV and q_BV are the law and the q of the next test."""
    rows_B = torch.arange(len(tokens_BN), device=tokens_BN.device)
    id_N = torch.arange(tokens_BN.shape[1], device=tokens_BN.device)
    at_B, tested_B = torch.zeros_like(rows_B), torch.full_like(rows_B, -1)
    kept_BM = torch.zeros_like(uniforms_BM, dtype=torch.bool)
    left_BV, q_BV = p_BMV[:, 0].double(), q_BMV[:, 0].double()
    for _ in range(steps):
        waiting_BN = (parent_row_BN == at_B[:, None]) & (id_N > tested_B[:, None])
        tests_B, node_B = waiting_BN.any(-1), _first(waiting_BN)
        token_B1 = tokens_BN[rows_B, node_B][:, None]
        threshold_B = uniforms_BM[rows_B, node_B].double() * q_BV.gather(-1, token_B1).squeeze(-1)
        passes_B = threshold_B < left_BV.gather(-1, token_B1).squeeze(-1)  # u < left/q without a division
        entered_B, failed_B = (tests_B & passes_B)[:, None], (tests_B & ~passes_B)[:, None]

        residual_BV = (left_BV - q_BV).clamp(min=0)
        total_B1 = residual_BV.sum(-1, keepdim=True)
        left_BV = torch.where(failed_B & (total_B1 > 0), residual_BV / total_B1, left_BV)
        left_BV = torch.where(entered_B, p_BMV[rows_B, node_B + 1].double(), left_BV)
        if not replacement:
            undrawn_BV = q_BV.scatter(-1, token_B1, 0.0)
            q_BV = torch.where(failed_B, undrawn_BV / undrawn_BV.sum(-1, keepdim=True), q_BV)
        q_BV = torch.where(entered_B, q_BMV[rows_B, node_B + 1].double(), q_BV)
        at_B = torch.where(entered_B.squeeze(-1), node_B + 1, at_B)
        tested_B = torch.where(tests_B, node_B, tested_B)
        kept_BM = kept_BM.scatter(1, at_B[:, None], True)
    return kept_BM, draw(left_BV, uniforms_BM[:, -1])


def _first(mask_BN: Tensor) -> Tensor:
    return mask_BN.view(torch.uint8).argmax(-1)


def walk_steps(parents: list[int], *, drawn: bool) -> int:
    """The most steps that `verify_tree` takes on a tree: of `parents` (-1 for the root, before their children).

    For drawn children every sibling on the way may be tested; for chosen ones it is the depth.
    """
    needed, seen = [0] * (len(parents) + 1), [0] * (len(parents) + 1)
    for node, parent in enumerate(parents):
        seen[parent + 1] += 1
        needed[node + 1] = needed[parent + 1] + (seen[parent + 1] if drawn else 1)
    return max(needed)
