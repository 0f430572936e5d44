"""A drafter against the target on given rows: acceptance by depth, teacher-forced. Shared by validation and reports.

Shapes: B batch, T positions, N supervised positions of a depth, D columns of the drafter's head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spectrain.drafters.base import DepthOutput, TrainableDrafter
from spectrain.losses import acceptance
from spectrain.target import FeatureBatch


def teacher_law(
    batch: FeatureBatch, head_DH: Tensor, where: tuple[Tensor, Tensor], shift: int
) -> Callable[[slice], Tensor]:
    """The target's log-probabilities of the token each position predicts, on the drafter's columns, by slice of rows.

    ``where`` are row and position of the N supervised positions; ``head_DH`` the target head's rows for those columns.
    """
    row_N, at_N = where[0], where[1] + shift - 1

    def log_p(rows: slice) -> Tensor:
        hidden_CH = batch.hidden_BTH[row_N[rows], at_N[rows]].to(head_DH.dtype)
        return (hidden_CH @ head_DH.T).float() - batch.log_normaliser_BT[row_N[rows], at_N[rows], None]

    return log_p


@dataclass
class DepthScores:
    """Sums over supervised positions for each depth, and how often every depth up to it was right in a row.

    ``survived[d]`` counts positions whose first d+1 greedy draft tokens all equal the target's, among the
    ``started`` positions that have a depth 0; the answer's end counts as the end of the prefix.
    """

    positions: list[int] = field(default_factory=list)
    alpha: list[float] = field(default_factory=list)
    greedy: list[int] = field(default_factory=list)
    survived: list[int] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    started: int = 0

    def __add__(self, other: DepthScores) -> DepthScores:
        if not self.positions:
            return other
        if not other.positions:
            return self
        joined = {
            name: [a + b for a, b in zip(getattr(self, name), getattr(other, name), strict=True)]
            for name in ("positions", "alpha", "greedy", "survived", "reached")
        }
        return DepthScores(**joined, started=self.started + other.started)  # type: ignore[arg-type]

    def mean_alpha(self) -> list[float]:
        """Acceptance probability at T=1 by depth, on the target's own prefixes."""
        return [a / max(1, n) for a, n in zip(self.alpha, self.positions, strict=True)]

    def conditional(self) -> list[float]:
        """Greedy acceptance of depth d among positions that got that far and still had an answer token to predict."""
        return [s / max(1, r) for s, r in zip(self.survived, self.reached, strict=True)]

    def tokens_per_round(self) -> float:
        """1 + expected accepted prefix length at T=0 with as many draft tokens as depths.

        A start whose answer ends within the draft is cut at the end, as a decoder's round would be, so this is built
        from the conditionals of starts that still had a token to predict.
        """
        total, running = 1.0, 1.0
        for share in self.conditional():
            running *= share
            total += running
        return total


@torch.no_grad()
def score_batch(drafter: TrainableDrafter, batch: FeatureBatch, target_head_VH: Tensor, depths: int | None = None,
                chunk: int = 256) -> DepthScores:  # fmt: skip
    """Score every depth of a training forward against the target's full-vocabulary law."""
    output = drafter(batch, depths)
    head_DH = target_head_VH if output.columns_D is None else target_head_VH[output.columns_D]
    scores = DepthScores()
    alive_BT = output.depths[0].mask_BT
    scores.started = int(alive_BT.sum())
    for depth in output.depths:
        alpha, right_BT = _score_depth(batch, depth, head_DH, output.columns_D, chunk)
        scores.positions.append(int(depth.mask_BT.sum()))
        scores.alpha.append(alpha)
        scores.greedy.append(int(right_BT.sum()))
        reached_BT = alive_BT & depth.mask_BT
        alive_BT = reached_BT & right_BT
        scores.reached.append(int(reached_BT.sum()))
        scores.survived.append(int(alive_BT.sum()))
    return scores


def _score_depth(batch: FeatureBatch, depth: DepthOutput, head_DH: Tensor, columns_D: Tensor | None,
                 chunk: int) -> tuple[float, Tensor]:  # fmt: skip
    """Sum of acceptance probabilities at T=1, and where the greedy draft token equals the target's."""
    where = depth.mask_BT.nonzero(as_tuple=True)
    log_p = teacher_law(batch, head_DH, where, depth.shift)
    hidden_NH = depth.hidden_BTH[where]
    alpha, right_BT = torch.zeros((), device=hidden_NH.device), torch.zeros_like(depth.mask_BT)
    for start in range(0, hidden_NH.shape[0], chunk):
        rows = slice(start, start + chunk)
        z_CD = (hidden_NH[rows] @ depth.head_DH.T).float()
        alpha += acceptance(z_CD, log_p(rows)).sum()
        best_C = z_CD.argmax(-1) if columns_D is None else columns_D[z_CD.argmax(-1)]
        row_C, at_C = where[0][rows], where[1][rows]
        right_BT[row_C, at_C] = best_C == batch.greedy_BT[row_C, at_C + depth.shift - 1]
    return float(alpha), right_BT
