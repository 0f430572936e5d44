"""What training minimises: the loss of every draft depth against the law that it learns, summed over positions.

Shapes: B batch, T positions, X = B x T places, N supervised positions of all depths, C of a chunk, S starts of a chunk,
K depths, H hidden, D columns of the head.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from torch import Tensor, nn

from spectrain.drafters.base import Auxiliary, DepthOutput, DraftOutput, TrainableDrafter
from spectrain.drafters.laws import Law, Teacher, answer_is_there, is_whole, learnt_law
from spectrain.drafters.positions import Positions, gather, whole_starts
from spectrain.drafters.tally import Tally
from spectrain.errors import SpectrainError
from spectrain.head_loss import RowsLoss, chunk_size, head_loss
from spectrain.heads import OutputHead, soft_capped
from spectrain.losses import (
    LOSSES,
    Laws,
    LossName,
    PositionLoss,
    forward_kl,
    mixture,
    pace_weights,
)
from spectrain.target import FeatureBatch


def _forward_kl_alone() -> dict[LossName, float]:
    return {"forward_kl": 1.0}


class LossConfig(BaseModel):
    """Which per-position losses, what else counts beside them, whose law is learnt, and how much each depth counts."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    terms: dict[LossName, float] = Field(
        default_factory=_forward_kl_alone, description="losses that are added up, each by its weight"
    )
    regression: float = Field(
        1.0, ge=0, description="weight of the distance to the target's features, where a drafter predicts them"
    )
    decay: float = Field(0.8, gt=0, le=1, description="weight of draft depth d is decay^d")
    teacher: Teacher = Field(
        "target", description="learn the target's law, or the answers' own tokens (sequence-level distillation)"
    )
    positions: Literal["decay", "d_pace"] = Field(
        "decay", description="depths count decay^d, or by how far drafts are accepted at each position (D-PACE)"
    )
    smoothing: float = Field(0.5, ge=0, le=1, description="of D-PACE: 1 counts the depths left, 0 the bare acceptance")

    @model_validator(mode="before")
    @classmethod
    def _no_single_loss(cls, values: Any) -> Any:
        old = sorted({"name", "weight"} & set(values)) if isinstance(values, dict) else []
        if old:
            term = f"{values.get('name', 'forward_kl')}: {values.get('weight', 1.0)}"
            raise ValueError(f"found {' and '.join(old)}, expected the losses with their weights: terms: {{{term}}}")
        return values

    @field_validator("terms", mode="before")
    @classmethod
    def _known(cls, terms: Any) -> Any:
        for name in terms if isinstance(terms, dict) else ():
            if name not in LOSSES:
                raise ValueError(f"there is no loss {name!r}; {_hint(str(name))}")
        return terms

    @field_validator("terms")
    @classmethod
    def _some_weight(cls, terms: dict[LossName, float]) -> dict[LossName, float]:
        for name, weight in terms.items():
            if not 0 <= weight < float("inf"):
                raise ValueError(f"found weight {weight} of {name}, expected 0 or more")
        if not any(terms.values()):
            raise ValueError(f"found {terms}, expected at least one loss with a weight above 0")
        return terms

    def check_depths(self, depths: int, drafter: str) -> None:
        """SpectrainError where D-PACE meets a drafter, of this type, that trains a single depth."""
        if self.positions == "d_pace" and depths < 2:
            raise SpectrainError(
                f"loss.positions: found d_pace, but this {drafter} drafter trains one draft depth, and D-PACE weighs "
                "depths against each other; train two or more, or choose positions: decay"
            )


def _hint(name: str) -> str:
    near = [known for known in LOSSES if name.lower() in known] or difflib.get_close_matches(name, LOSSES, n=1)
    if near and name:
        return f"did you mean {' or '.join(map(repr, near))}?"
    return f"there are {', '.join(LOSSES)}"


class DrafterLoss(nn.Module):
    """A drafter and its loss as one module, so that whatever wraps it for many devices sees the whole computation.

    ``chunk`` bounds the positions whose logits are held at once (None: ``chunk_size``). Raises SpectrainError where
    D-PACE meets a drafter with a single depth.
    """

    def __init__(self, drafter: TrainableDrafter, head: OutputHead, config: LossConfig,
                 chunk: int | None = None) -> None:  # fmt: skip
        super().__init__()
        config.check_depths(len(drafter.shifts()), drafter.name)
        # The target's head is no module: it is not ours to train, move or save.
        self.drafter, self.head, self.config, self.chunk = drafter, head, config, chunk
        self.loss = mixture(config.terms)
        self.tally: Tally | None = None  # set for the steps that are to be told of

    def forward(self, batch: FeatureBatch, weights: Sequence[float]) -> Tensor:
        """Sum over depths of ``weights[d]`` times the loss summed over the depth's supervised positions; then over
        auxiliaries, whose weights follow.

        The loss of a position is the configured one, and the regression where the drafter predicts features; with
        D-PACE both count by the position's own weight.
        """
        output = self.drafter(batch)
        count, held = len(output.depths), output.held_to(batch)
        total, pace_XK = self._laws(held, output, weights[:count])
        for number, (depth, weight) in enumerate(zip(output.depths, weights[:count], strict=True)):
            if depth.predicts_features:
                pace_X = None if pace_XK is None else pace_XK[:, number]
                total = total + weight * self.config.regression * _regression(held, depth, pace_X)
        for extra, weight in zip(output.auxiliary, weights[count:], strict=True):
            total = total + self._auxiliary(batch, extra, weight * extra.weight)
        return total

    def _laws(self, held: FeatureBatch, output: DraftOutput, weights: Sequence[float]) -> tuple[Tensor, Tensor | None]:
        """The weighted loss of all depths, and with D-PACE what every position counted."""
        config, columns_D = self.config, output.columns_D
        paced = config.positions == "d_pace"
        rows = gather(output.depths, by_start=paced)
        law = learnt_law(held, self.head.columns(columns_D), columns_D, rows.place_N, config.teacher)
        weight_N = torch.tensor(weights, device=rows.depth_N.device)[rows.depth_N]
        if config.teacher == "answers":  # else some losses would flatten the drafter's law there
            weight_N = weight_N * answer_is_there(held, columns_D, rows.place_N)
        loss, pace_XK, chunks = _weighted(self.loss, weight_N, rows.cap), None, None
        if paced:
            pace_XK = torch.zeros(held.ids_BT.numel(), len(weights), device=weight_N.device)
            loss = _paced(self.loss, weight_N, rows, config.smoothing, pace_XK)
            chunk = self.chunk or chunk_size(len(rows.heads_DH[0]), rows.start_N.device)
            chunks = whole_starts(rows.start_N, len(weights), chunk)
        if self.tally is None:
            return self._summed(rows, law, loss, chunks), pace_XK
        with self.tally.of(held, rows, columns_D, len(weights), whole=is_whole(held, config.teacher)) as watch:
            return self._summed(rows, law, watch(loss), chunks), pace_XK

    def _auxiliary(self, batch: FeatureBatch, extra: Auxiliary, weight: float) -> Tensor:
        rows = gather([extra], by_start=False)
        law = learnt_law(batch, self.head.first(len(extra.head_DH)), None, rows.place_N)
        weight_N = torch.full(rows.place_N.shape, weight, device=rows.place_N.device)
        return self._summed(rows, law, _weighted(forward_kl, weight_N, rows.cap))

    def _summed(self, rows: Positions, law: Law, loss: RowsLoss, chunks: Sequence[slice] | None = None) -> Tensor:
        return head_loss(
            rows.hidden_NH,
            rows.heads_DH,
            law,
            loss,
            head_N=rows.head_N,
            chunks=self.chunk if chunks is None else chunks,
        )


def _regression(held: FeatureBatch, depth: DepthOutput, pace_X: Tensor | None) -> Tensor:
    """Smooth L1 distance to the target's features, the mean of a position's values, summed over positions (2401.15077).

    In float32 also under autocast.
    """
    row_N, at_N = depth.mask_BT.nonzero(as_tuple=True)
    wanted_NH = held.hidden_BTH[row_N, at_N + depth.shift - 1].float()
    found_NH = depth.hidden_BTH[row_N, at_N, : wanted_NH.shape[1]].float()
    distance_N = nn.functional.smooth_l1_loss(found_NH, wanted_NH, reduction="none").mean(-1)
    return (distance_N if pace_X is None else distance_N * pace_X[row_N * depth.mask_BT.shape[1] + at_N]).sum()


def _weighted(loss: PositionLoss, weight_N: Tensor, cap: float | None) -> RowsLoss:
    return lambda z_CD, log_p_CD, rows: loss(Laws(soft_capped(z_CD, cap), log_p_CD)) * weight_N[rows]


def _paced(loss: PositionLoss, weight_N: Tensor, rows: Positions, smoothing: float, pace_XK: Tensor) -> RowsLoss:
    """Weighs each position by D-PACE beside ``weight_N``; chunks must hold whole starts. Fills ``pace_XK``."""

    def weighted(z_CD: Tensor, log_p_CD: Tensor, chunk: slice) -> Tensor:
        laws = Laws(soft_capped(z_CD, rows.cap), log_p_CD)
        start_S, at_C = rows.start_N[chunk].unique(return_inverse=True)
        place = at_C, rows.depth_N[chunk]
        alpha_SK = pace_XK.new_zeros(len(start_S), pace_XK.shape[1])
        alpha_SK[place] = laws.acceptance.detach()
        there_SK = torch.zeros_like(alpha_SK, dtype=torch.bool)
        there_SK[place] = True
        pace_XK[start_S] = pace_SK = pace_weights(alpha_SK, there_SK, smoothing)
        return loss(laws) * weight_N[chunk] * pace_SK[place]

    return weighted
