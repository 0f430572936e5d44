"""Acceptance by depth on the rows that are trained on, from the laws that a step's loss has in hand.

Scores cost another forward; this costs a softmax of logits that are there. It is of the drafter as it trains (with its
noise, before the step) and on rows that it has learnt: what held-out rows say is what counts.

Shapes: X places of a batch, N supervised positions of all depths, C of a chunk, K depths, D columns of the head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from spectrain.drafters.positions import Positions
from spectrain.drafters.scoring import DepthScores
from spectrain.head_loss import RowsLoss
from spectrain.heads import soft_capped
from spectrain.losses import Laws
from spectrain.target import FeatureBatch


class Tally:
    """Adds up the micro-batches of a step. α is left out where the law that is learnt is not the target's whole one."""

    def __init__(self) -> None:
        self.scores, self.whole = DepthScores(), True

    @contextmanager
    def of(self, held: FeatureBatch, rows: Positions, columns_D: Tensor | None, depths: int, *,
           whole: bool) -> Iterator[Callable[[RowsLoss], RowsLoss]]:  # fmt: skip
        """Yields what makes a loss of chunks one that is watched; their positions count when the block ends."""
        device, places = rows.start_N.device, held.ids_BT.numel()
        alpha_K = torch.zeros(depths, device=device)
        there_XK = torch.zeros(places, depths, dtype=torch.bool, device=device)
        there_XK[rows.start_N, rows.depth_N] = True
        right_XK, greedy_N = torch.zeros_like(there_XK), held.greedy_BT.flatten()[rows.place_N]

        @torch.no_grad()
        def see(z_CD: Tensor, log_p_CD: Tensor, chunk: slice) -> None:
            best_C = z_CD.argmax(-1)  # a soft cap keeps the order
            best_C = best_C if columns_D is None else columns_D[best_C]
            right_XK[rows.start_N[chunk], rows.depth_N[chunk]] = best_C == greedy_N[chunk]
            if whole:
                alpha_K.index_add_(0, rows.depth_N[chunk], Laws(soft_capped(z_CD, rows.cap), log_p_CD).acceptance)

        def watch(loss: RowsLoss) -> RowsLoss:
            def watched(z_CD: Tensor, log_p_CD: Tensor, chunk: slice) -> Tensor:
                see(z_CD, log_p_CD, chunk)
                return loss(z_CD, log_p_CD, chunk)

            return watched

        yield watch
        self.whole &= whole
        self.scores = self.scores + _scores(alpha_K, there_XK, right_XK)

    def describe(self, scores: DepthScores) -> dict[str, Any]:
        """As plain numbers by depth: α at T=1 (None where it is not known) and conditional greedy acceptance."""
        return {
            "alpha": scores.mean_alpha() if self.whole else None,
            "conditional": scores.conditional(),
            "positions": scores.positions,
        }


def _scores(alpha_K: Tensor, there_XK: Tensor, right_XK: Tensor) -> DepthScores:
    alive_XK = (right_XK | ~there_XK).cumprod(-1).bool()  # no depth so far was wrong
    before_XK = torch.cat([torch.ones_like(alive_XK[:, :1]), alive_XK[:, :-1]], dim=1) & there_XK.cumprod(-1).bool()
    counted_4K = torch.stack([t.sum(0) for t in (there_XK, right_XK, before_XK & right_XK, before_XK)])
    positions, greedy, survived, reached = counted_4K.tolist()
    return DepthScores(positions, alpha_K.tolist(), greedy, survived, reached, started=positions[0])
