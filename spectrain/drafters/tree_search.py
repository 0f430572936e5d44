"""Static trees for a drafter, from how often its likeliest tokens are the target's.

``accuracy[d][r]`` is the probability that the token of rank r in the drafter's law at depth d is the one that the
target takes there, so the product along a path is the probability that all of the path is accepted, if depths succeed
independently (2401.10774). They do so only roughly: the sum over a tree ranks trees; what one brings is measured.

Shapes: B batch, T positions, N supervised positions of a depth, R ranks, K depths, S samplers.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from spectrain.drafters.base import DepthOutput, TrainableDrafter
from spectrain.drafters.scoring import laws_by_chunk
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler
from spectrain.heads import OutputHead
from spectrain.shapes import StaticTree
from spectrain.target import FeatureBatch

Accuracy = Sequence[Sequence[float]]


@torch.no_grad()
def rank_accuracy(drafter: TrainableDrafter, batches: Iterable[FeatureBatch], head: OutputHead, sampler: Sampler, *,
                  ranks: int = 10, depths: int | None = None, chunk: int = 256) -> list[list[float]]:  # fmt: skip
    """For every depth of the training forward, the mean target probability of the drafter's token of each rank.

    The target's law is that of ``sampler`` through its ``head`` (a jointly trained target's, where the drafter has
    one); at T=0 the means are how often each rank was right.
    A depth with no supervised position in ``batches`` has zeros. ``ranks`` is cut to the columns of the drafter's head.
    """
    ((accuracy,), _) = rank_accuracies(drafter, batches, head, [sampler], ranks=ranks, depths=depths, chunk=chunk)
    return accuracy


@torch.no_grad()
def rank_accuracies(drafter: TrainableDrafter, batches: Iterable[FeatureBatch], head: OutputHead,
                    samplers: Sequence[Sampler], *, ranks: int = 10, depths: int | None = None,
                    chunk: int = 256) -> tuple[list[list[list[float]]], list[int]]:  # fmt: skip
    """``rank_accuracy`` under each of several samplers, of one forward; and the supervised positions of every depth."""
    sums: list[Tensor] = []
    counts: list[Tensor] = []
    for batch in batches:
        output = drafter(batch, depths)
        held = output.held_to(batch)
        found = [_depth_sums(held, d, head, output.columns_D, samplers, ranks, chunk) for d in output.depths]
        sums.append(torch.stack(found, 1).cpu())
        counts.append(torch.tensor([int(depth.mask_BT.sum()) for depth in output.depths]))
    if not sums:
        raise SpectrainError("there are no rows to measure the drafter's tokens on; give held-out rows")
    sum_SKR, count_K = torch.stack(sums).sum(0), torch.stack(counts).sum(0)
    return (sum_SKR / count_K.clamp(min=1)[:, None]).tolist(), count_K.tolist()


def _depth_sums(batch: FeatureBatch, depth: DepthOutput, head: OutputHead, columns_D: Tensor | None,
                samplers: Sequence[Sampler], ranks: int, chunk: int) -> Tensor:  # fmt: skip
    ranks = min(ranks, len(depth.head_DH))
    sum_SR = torch.zeros(len(samplers), ranks, dtype=torch.float64, device=depth.hidden_BTH.device)
    for _, laws in laws_by_chunk(batch, depth, head, chunk):
        token_CR = laws.z_ND.topk(ranks, dim=-1).indices
        if columns_D is not None:
            token_CR = columns_D[token_CR]
        for sum_R, sampler in zip(sum_SR, samplers, strict=True):
            sum_R += sampler.probabilities(laws.log_p_ND).gather(-1, token_CR).sum(0)
    return sum_SR


def best_tree(accuracy: Accuracy, nodes: int) -> StaticTree:
    """The tree of at most ``nodes`` nodes with the most expected accepted tokens; its children are chosen by rank.

    Greedy: always take the likeliest path whose parent and elder sibling are in the tree. That is optimal, because no
    path is likelier than these two. For the siblings it is made so: where a rank was right more often than the one
    before it, which more positions would mend, both count with their mean. Paths that are never right are left out.

    Raises SpectrainError for a number of nodes below 1, for what is no probability, and when nothing is ever right.
    """
    if type(nodes) is not int or nodes < 1:
        raise SpectrainError(f"nodes of the tree: found {nodes!r}, expected a whole number of at least 1")
    _check(accuracy)
    falling = [_falling(ranks) for ranks in accuracy]
    paths: list[tuple[int, ...]] = []
    # Among equals the shorter path comes first, then the lower ranks.
    reachable: list[tuple[float, int, tuple[int, ...]]] = []
    following: tuple[tuple[int, ...], ...] = ((0,),)
    while len(paths) < nodes:
        for path in following:
            if len(path) <= len(falling) and path[-1] < len(falling[len(path) - 1]) and _accepted(falling, path):
                heapq.heappush(reachable, (-_accepted(falling, path), len(path), path))
        if not reachable:
            break
        path = heapq.heappop(reachable)[-1]
        paths.append(path)
        following = ((*path[:-1], path[-1] + 1), (*path, 0))
    if not paths:
        raise SpectrainError("no tree: the drafter's tokens of the first depth are never the target's; train it first")
    return StaticTree(tuple(paths), children="chosen")


def expected_accepted(tree: StaticTree, accuracy: Accuracy) -> float:
    """Draft tokens that a round accepts of this tree if depths succeed independently: to rank trees, not to report."""
    for path in tree.paths:
        if len(path) > len(accuracy) or path[-1] >= len(accuracy[len(path) - 1]):
            raise SpectrainError(f"tree path {list(path)}: there is no accuracy of its last rank at depth {len(path)}")
    return sum(_accepted(accuracy, path) for path in tree.paths)


def _accepted(accuracy: Accuracy, path: Sequence[int]) -> float:
    return math.prod(accuracy[depth][rank] for depth, rank in enumerate(path))


def _check(accuracy: Accuracy) -> None:
    for depth, ranks in enumerate(accuracy):
        for rank, value in enumerate(ranks):
            if not 0 <= value <= 1:
                raise SpectrainError(f"accuracy at depth {depth + 1}, rank {rank}: found {value!r}, expected 0 to 1")


def _falling(ranks: Sequence[float]) -> list[float]:
    """The nearest values that never rise: neighbours that do are pooled into their mean."""
    pools: list[tuple[float, int]] = []  # sum and length
    for value in ranks:
        total, length = value, 1
        while pools and pools[-1][0] * length < total * pools[-1][1]:
            before = pools.pop()
            total, length = total + before[0], length + before[1]
        pools.append((total, length))
    return [total / length for total, length in pools for _ in range(length)]
