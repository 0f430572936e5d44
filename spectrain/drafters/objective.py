"""What training minimises: the loss of every draft depth against the target's law, summed over supervised positions.

Shapes: B batch, T positions, N supervised positions of all depths, C of a chunk, H hidden, D columns of the head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from spectrain.drafters.base import DepthOutput, TrainableDrafter
from spectrain.drafters.scoring import teacher_law
from spectrain.heads import OutputHead, soft_capped
from spectrain.losses import LOSSES, PositionLoss, RowsLoss, head_loss
from spectrain.target import FeatureBatch

LossName = Literal[
    "forward_kl", "reverse_kl", "jensen_shannon", "total_variation", "negative_log_acceptance", "lk_hybrid"
]  # fmt: skip


class LossConfig(BaseModel):
    """Which per-position loss, what else counts beside it, and how much later depths count."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: LossName = "forward_kl"
    weight: float = Field(1.0, ge=0, description="weight of that loss")
    regression: float = Field(
        1.0, ge=0, description="weight of the distance to the target's features, where a drafter predicts them"
    )
    decay: float = Field(0.8, gt=0, le=1, description="weight of draft depth d is decay^d")


class DrafterLoss(nn.Module):
    """A drafter and its loss as one module, so that whatever wraps it for many devices sees the whole computation."""

    def __init__(self, drafter: TrainableDrafter, head: OutputHead, config: LossConfig) -> None:
        super().__init__()
        # The target's head is no module: it is not ours to train, move or save.
        self.drafter, self.head, self.loss, self.config = drafter, head, LOSSES[config.name], config

    def forward(self, batch: FeatureBatch, weights: Sequence[float]) -> Tensor:
        """Sum over depths of ``weights[d]`` times the loss summed over the depth's supervised positions.

        The loss of a position is the configured one, and the regression where the drafter predicts features.
        """
        output = self.drafter(batch)
        head = self.head.columns(output.columns_D)
        total = batch.hidden_BTH.new_zeros((), dtype=torch.float32)
        for head_DH in {id(depth.head_DH): depth.head_DH for depth in output.depths}.values():
            pairs = zip(output.depths, weights, strict=True)
            rows = [(d, w * self.config.weight) for d, w in pairs if d.head_DH is head_DH]
            hidden_NH, weight_N, law = _gather(batch, rows, head)
            total = total + head_loss(hidden_NH, head_DH, law, _weighted(self.loss, weight_N, rows[0][0].cap))
        for depth, weight in zip(output.depths, weights, strict=True):
            if depth.predicts_features:
                total = total + weight * self.config.regression * _regression(batch, depth)
        return total


def _regression(batch: FeatureBatch, depth: DepthOutput) -> Tensor:
    """Smooth L1 distance to the target's features, the mean of a position's values, summed over positions (2401.15077).

    In float32 also under autocast.
    """
    row_N, at_N = depth.mask_BT.nonzero(as_tuple=True)
    wanted_NH = batch.hidden_BTH[row_N, at_N + depth.shift - 1].float()
    found_NH = depth.hidden_BTH[row_N, at_N, : wanted_NH.shape[1]].float()
    return nn.functional.smooth_l1_loss(found_NH, wanted_NH, reduction="none").mean(-1).sum()


def _weighted(loss: PositionLoss, weight_N: Tensor, cap: float | None) -> RowsLoss:
    return lambda z_CD, log_p_CD, rows: loss(soft_capped(z_CD, cap), log_p_CD) * weight_N[rows]


def _gather(
    batch: FeatureBatch, rows: list[tuple[DepthOutput, float]], head: OutputHead
) -> tuple[Tensor, Tensor, Callable[[slice], Tensor]]:
    """Supervised positions of several depths, by the token they predict, so that depths share teacher rows."""
    T = batch.ids_BT.shape[1]
    hidden, weights, places = [], [], []
    for depth, weight in rows:
        row_N, at_N = depth.mask_BT.nonzero(as_tuple=True)
        hidden.append(depth.hidden_BTH[row_N, at_N])
        places.append(row_N * T + at_N + depth.shift - 1)
        weights.append(torch.full((len(row_N),), weight, device=row_N.device))
    place_N = torch.cat(places)
    order_N = place_N.argsort()
    return torch.cat(hidden)[order_N], torch.cat(weights)[order_N], teacher_law(batch, head, place_N[order_N])
