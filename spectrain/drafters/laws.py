"""The law that a drafter learns: the target's whole, its stored likeliest tokens, or the answers' own tokens.

Shapes: B batch, T positions, X = B x T places, N places that are asked, C of a slice, U different ones of it, K listed
tokens, D columns of the drafter's head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from spectrain.drafters.scoring import teacher_law
from spectrain.heads import OutputHead
from spectrain.target import FeatureBatch

Law = Callable[[slice], Tensor]
Teacher = Literal["target", "answers"]


def learnt_law(batch: FeatureBatch, head: OutputHead, columns_D: Tensor | None, place_N: Tensor,
               teacher: Teacher = "target") -> Law:  # fmt: skip
    """Log-probabilities [C, D] of the token after each place, by slice of places.

    ``place_N`` counts positions through the batch (row x T + position); ``head`` is the target's, cut to ``columns_D``.
    "answers": all mass is on the row's own token, which is sequence-level distillation (1606.07947). "target": the
    target's law; where the batch lists its likeliest tokens it is cut to them, without a product with the head, and the
    mass of the others weighs nothing, like that outside a reduced vocabulary.
    """
    width = len(head.weight_VH)
    if teacher == "answers":
        token_X1 = _following(batch)[:, None]
        return _listed(token_X1, torch.zeros(token_X1.shape, device=token_X1.device), columns_D, width, place_N)
    if batch.top_ids_BTK is not None and batch.top_log_p_BTK is not None:
        return _listed(batch.top_ids_BTK.flatten(0, 1), batch.top_log_p_BTK.flatten(0, 1), columns_D, width, place_N)
    return teacher_law(batch, head, place_N)


def is_whole(batch: FeatureBatch, teacher: Teacher) -> bool:
    """Whether ``learnt_law`` is the target's, with nothing cut off."""
    return teacher == "target" and (batch.top_ids_BTK is None or batch.top_log_p_BTK is None)


def answer_is_there(batch: FeatureBatch, columns_D: Tensor | None, place_N: Tensor) -> Tensor:
    """Bool [N]: the row's own token after each place is one of the columns."""
    if columns_D is None:
        return torch.ones_like(place_N, dtype=torch.bool)
    return torch.isin(_following(batch)[place_N], columns_D)


def _following(batch: FeatureBatch) -> Tensor:
    """The token after each place; the batch's very last place has none and is never asked."""
    return batch.ids_BT.flatten().roll(-1)


def _listed(ids_XK: Tensor, log_p_XK: Tensor, columns_D: Tensor | None, width: int, place_N: Tensor) -> Law:
    """The law that has the listed tokens only."""

    def log_p(rows: slice) -> Tensor:
        place_U, back_C = place_N[rows].unique(return_inverse=True)
        column_UK, listed_UK = ids_XK[place_U].long(), log_p_XK[place_U]
        law_UD = listed_UK.new_full((len(place_U), width), -torch.inf)
        if columns_D is None:
            law_UD.scatter_(1, column_UK, listed_UK)
        else:
            at_UK = torch.searchsorted(columns_D, column_UK).clamp(max=width - 1)
            row_M, slot_M = (columns_D[at_UK] == column_UK).nonzero(as_tuple=True)
            law_UD[row_M, at_UK[row_M, slot_M]] = listed_UK[row_M, slot_M]
        return law_UD[back_C]

    return log_p
