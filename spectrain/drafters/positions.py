"""The supervised positions of all draft depths in one list, and how it is cut into chunks.

Shapes: N supervised positions of all depths, K depths, S starts, H hidden, D columns of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spectrain.drafters.base import Auxiliary, DepthOutput


@dataclass(frozen=True)
class Positions:
    """Supervised positions of several depths: their states, their start (the place of t), the place whose law they
    learn, their depth, and the number of their head where there are several."""

    hidden_NH: Tensor
    start_N: Tensor
    place_N: Tensor
    depth_N: Tensor
    head_N: Tensor | None
    heads_DH: list[Tensor]
    cap: float | None


def gather(states: Sequence[DepthOutput | Auxiliary], *, by_start: bool) -> Positions:
    """All supervised positions, by the place whose law they learn, so that depths share it, or by start."""
    heads = {id(state.head_DH): state.head_DH for state in states}
    hidden, starts, depths = [], [], []
    for depth, state in enumerate(states):
        row_N, at_N = state.mask_BT.nonzero(as_tuple=True)
        hidden.append(state.hidden_BTH[row_N, at_N])
        starts.append(row_N * state.mask_BT.shape[1] + at_N)
        depths.append(torch.full_like(row_N, depth))
    start_N, depth_N = torch.cat(starts), torch.cat(depths)
    ahead_K = torch.tensor([state.shift - 1 for state in states], device=start_N.device)
    place_N = start_N + ahead_K[depth_N]
    order_N = (start_N if by_start else place_N).argsort(stable=True)
    start_N, place_N, depth_N = start_N[order_N], place_N[order_N], depth_N[order_N]
    head_N = None
    if len(heads) > 1:
        head_K = torch.tensor([list(heads).index(id(state.head_DH)) for state in states], device=start_N.device)
        head_N = head_K[depth_N]
    hidden_NH = torch.cat(hidden)[order_N]
    return Positions(hidden_NH, start_N, place_N, depth_N, head_N, list(heads.values()), states[0].cap)


def whole_starts(start_N: Tensor, depths: int, chunk: int) -> list[slice]:
    """Slices of at most ``chunk`` rows (or one start) with all depths of their starts; rows are sorted by start."""
    _, count_S = start_N.unique_consecutive(return_counts=True)
    each = max(1, chunk // depths)
    stops = [*count_S.cumsum(0)[each - 1 :: each].tolist(), len(start_N)]
    return [slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False) if start < stop]
