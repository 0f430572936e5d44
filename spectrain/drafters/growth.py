"""Chains and trees grown node by node, for every drafter that can say what follows a path of its own tokens.

Shapes: B batch, W nodes of a level that are extended, C children of each, N nodes, D columns of the head, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from spectrain.drafters.base import Drafter, Proposal
from spectrain.exact.sampler import Sampler, draw
from spectrain.shapes import ABSENT, Chain, DynamicTree, Layout, Shape, StaticTree


class GrowingDrafter(Drafter):
    """A drafter that goes on from its own tokens, level by level."""

    trees = True

    @abstractmethod
    def root(self, state: Any) -> Tensor:
        """Logits [B, 1, D] of the token after the pending one."""

    @abstractmethod
    def extend(self, state: Any, tokens_BW: Tensor, parents_BW: Tensor) -> Tensor:
        """Logits [B, W, D] after new nodes with these tokens, one level down; [B, 1, D] if they are the same for all.

        ``parents_BW`` counts among the nodes of the call before (the root at first).
        """

    @abstractmethod
    def vocabulary(self) -> tuple[int, Tensor | None]:
        """Size V of the target's vocabulary, and the target ids [D] of the head's columns (None: all)."""

    def propose(self, state: Any, sampler: Sampler, shape: Shape, limits: Sequence[int],
                uniforms_BN: Tensor) -> Proposal:  # fmt: skip
        depth = min(shape.depth, max(limits))
        with torch.inference_mode():
            if isinstance(shape, Chain):
                return _chain(self, state, sampler, depth, uniforms_BN)
            if isinstance(shape, DynamicTree):
                return _dynamic(self, state, shape, depth, limits)
            return _static(self, state, sampler, shape, depth, uniforms_BN)


def below(layout: Layout | None, parents_BW: Tensor) -> Layout:
    """The layout one level down; at first the root's children, which see nothing but what is committed and each
    itself."""
    if layout is not None:
        return layout.below(parents_BW)
    width = parents_BW.shape[1]
    itself = torch.eye(width, dtype=torch.bool, device=parents_BW.device)
    depth_BX = torch.zeros(1, width, dtype=torch.long, device=parents_BW.device)
    return Layout(depth_BX, itself[None], chain=width == 1)


def _chain(drafter: GrowingDrafter, state: Any, sampler: Sampler, length: int, uniforms_BN: Tensor) -> Proposal:
    tokens: list[Tensor] = []
    laws: list[Tensor] = []
    size, columns_D = drafter.vocabulary()
    logits_B1D = drafter.root(state)
    parents_B1 = torch.zeros_like(uniforms_BN[:, :1], dtype=torch.long)
    for step in range(length):
        if step:
            logits_B1D = drafter.extend(state, tokens[-1][:, None], parents_B1)
        if sampler.greedy:
            column_B = logits_B1D[:, 0].argmax(-1)
        else:
            q_BD = sampler.probabilities(logits_B1D[:, 0])
            column_B = draw(q_BD, uniforms_BN[:, step])
            laws.append(_spread(q_BD, size, columns_D))
        tokens.append(column_B if columns_D is None else columns_D[column_B])
    return Proposal(torch.stack(tokens, 1), q=torch.stack(laws, 1) if laws else None)


def _spread(q_XD: Tensor, size: int, columns_D: Tensor | None) -> Tensor:
    """A law over the head's columns as one over the target's vocabulary [..., V]."""
    if columns_D is None and q_XD.shape[-1] == size:
        return q_XD
    if columns_D is None:
        return torch.nn.functional.pad(q_XD, (0, size - q_XD.shape[-1]))
    return q_XD.new_zeros(*q_XD.shape[:-1], size).index_copy_(-1, columns_D, q_XD)


@dataclass(frozen=True)
class _Level:
    """A level of a static tree: which nodes of the level above are extended, and which children they get."""

    widest: int
    picks_W: Tensor  # the extended nodes, counted among the nodes of their own level
    above_W: Tensor  # their parents, counted among the nodes that were extended before them
    rows_W: Tensor  # their rows in q
    taken_C: Tensor  # the children, counted in [W, widest]
    parents_C: Tensor  # and their parents


@lru_cache(maxsize=64)
def _plan(shape: StaticTree, device: torch.device) -> list[_Level]:
    """The same for every round, so it is on the device already."""
    plan: list[_Level] = []
    starts, extended = [-1, 0], [-1]
    for level in shape.levels:
        widest = max(count for _, count in level)
        taken = [w * widest + child for w, (_, count) in enumerate(level) for child in range(count)]
        parents = [parent for parent, _ in level]
        above = [extended.index(shape.parents[parent]) if parent >= 0 else 0 for parent in parents]
        picks = [parent - starts[-2] for parent in parents]
        rows = [parent + 1 for parent in parents]
        below = [parent for parent, count in level for _ in range(count)]
        listed = {"picks_W": picks, "above_W": above, "rows_W": rows, "taken_C": taken, "parents_C": below}
        plan.append(_Level(widest, **{name: torch.tensor(numbers, device=device) for name, numbers in listed.items()}))
        extended = parents
        starts.append(starts[-1] + len(taken))
    return plan


def _static(
    drafter: GrowingDrafter, state: Any, sampler: Sampler, shape: StaticTree, depth: int, uniforms_BN: Tensor
) -> Proposal:
    """Level by level; the nodes of a level that have children are extended together."""
    size, columns_D = drafter.vocabulary()
    B, chosen = len(uniforms_BN), sampler.greedy or shape.children == "chosen"
    tokens: list[Tensor] = []
    absent: list[Tensor] = []
    laws: list[tuple[Tensor, Tensor]] = []
    start, levels = 0, _plan(shape, uniforms_BN.device)[:depth]
    for level in levels:
        if not tokens:
            logits_BWD = drafter.root(state)
        else:
            logits_BWD = drafter.extend(state, tokens[-1][:, level.picks_W], level.above_W.expand(B, -1))
        if chosen:
            column_BWC = logits_BWD.topk(level.widest, dim=-1).indices.expand(-1, len(level.picks_W), -1)
            missing_BWC = torch.zeros_like(column_BWC, dtype=torch.bool)
        else:
            q_BWD = sampler.probabilities(logits_BWD).expand(-1, len(level.picks_W), -1)
            count, stop = q_BWD.shape[1] * level.widest, start + len(level.taken_C)
            uniforms_BWC = uniforms_BN.new_zeros(B, count)
            uniforms_BWC[:, level.taken_C] = uniforms_BN[:, start:stop]  # each node's own, whatever its siblings
            uniforms_BWC = uniforms_BWC.view(B, -1, level.widest)
            column_BWC, missing_BWC = _draws(q_BWD, uniforms_BWC, distinct=shape.children == "distinct")
            laws.append((level.rows_W, _spread(q_BWD, size, columns_D)))
        column_BC = column_BWC.flatten(1)[:, level.taken_C]
        tokens.append(column_BC if columns_D is None else columns_D[column_BC])
        missing_BC = missing_BWC.flatten(1)[:, level.taken_C]
        if absent:  # what hangs from an absent node is not there either
            missing_BC = missing_BC | absent[-1][:, level.picks_W[level.taken_C // level.widest]]
        absent.append(missing_BC)
        start += len(level.taken_C)
    tokens_BN = torch.cat(tokens, 1)
    parents_N = torch.cat([level.parents_C for level in levels])
    parents_BN = torch.where(torch.cat(absent, 1), ABSENT, parents_N)
    q_BMV = None
    if laws:
        q_BMV = laws[0][1].new_zeros(B, start + 1, size)
        for rows_W, q_BWV in laws:
            q_BMV[:, rows_W] = q_BWV
    return Proposal(tokens_BN, parents_BN, q_BMV)


def _draws(q_BWD: Tensor, uniforms_BWC: Tensor, *, distinct: bool) -> tuple[Tensor, Tensor]:
    """Columns [B, W, C] drawn one after another from each law, and which of them found nothing left to draw."""
    columns, missing = [], []
    left_BWD = q_BWD
    for child in range(uniforms_BWC.shape[-1]):
        missing.append(left_BWD.amax(-1) <= 0)
        columns.append(draw(left_BWD, uniforms_BWC[..., child]))
        if distinct:
            left_BWD = left_BWD.scatter(-1, columns[-1].unsqueeze(-1), 0.0)
    return torch.stack(columns, -1), torch.stack(missing, -1)


@dataclass
class _Pool:
    """All nodes grown so far, level by level: tokens, parents, and the log of their confidence, each [B, grown]."""

    tokens: list[Tensor]
    parents: list[Tensor]
    scores: list[Tensor]


def _dynamic(drafter: GrowingDrafter, state: Any, shape: DynamicTree, depth: int, limits: Sequence[int]) -> Proposal:
    """EAGLE-2 (2406.16858): extend each level's ``top_k`` most confident nodes, keep the ``nodes`` best of all."""
    _, columns_D = drafter.vocabulary()
    pool = _Pool([], [], [])
    k, grown = shape.top_k, 0
    logits_BWD = drafter.root(state)
    B, device = len(logits_BWD), logits_BWD.device
    above_BW = torch.full((B, 1), -1, device=device)  # numbers of the extended nodes in the pool
    limit_B1 = torch.tensor(limits)[:, None].to(device, non_blocking=True)
    score_BW = torch.zeros(B, 1, device=device)  # float32: in bfloat16 a child could tie with its parent
    for level in range(depth):
        best = logits_BWD.float().log_softmax(-1).topk(k, dim=-1)
        score_BC = (score_BW.unsqueeze(-1) + best.values).flatten(1)
        column_BC = best.indices.expand(-1, score_BW.shape[1], -1).flatten(1)
        pool.tokens.append(column_BC if columns_D is None else columns_D[column_BC])
        pool.parents.append(above_BW.repeat_interleave(k, dim=1))
        pool.scores.append(score_BC.masked_fill(limit_B1 <= level, -torch.inf))  # too deep for that request's budget
        if level + 1 < depth:
            at_BW = score_BC.topk(k, dim=-1).indices
            score_BW = score_BC.gather(1, at_BW)
            logits_BWD = drafter.extend(state, pool.tokens[-1].gather(1, at_BW), at_BW // k)
            above_BW = at_BW + grown
        grown += score_BC.shape[1]
    return _kept(pool, min(shape.nodes, grown))


def _kept(pool: _Pool, count: int) -> Proposal:
    """The best nodes, in the order in which they were grown. No node outranks its parent: it is no more confident, and
    where they tie the stable order puts the parent first."""
    scores_BX = torch.cat(pool.scores, 1)
    order_BX = scores_BX.sort(dim=1, descending=True, stable=True).indices
    kept_BN = order_BX[:, :count].sort(dim=1).values
    number_BX = torch.zeros_like(order_BX).scatter(
        1, kept_BN, torch.arange(count, device=kept_BN.device).expand(len(kept_BN), -1)
    )
    parents_BN = torch.cat(pool.parents, 1).gather(1, kept_BN)
    renumbered_BN = number_BX.gather(1, parents_BN.clamp(min=0))
    parents_BN = torch.where(parents_BN < 0, parents_BN, renumbered_BN)
    return Proposal(torch.cat(pool.tokens, 1).gather(1, kept_BN), parents_BN)
