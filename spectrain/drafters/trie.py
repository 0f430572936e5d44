"""Continuations merged where they begin alike: proposals of point masses, for drafters that look text up.

Shapes: B batch, N proposed nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from spectrain.drafters.base import Proposal
from spectrain.shapes import ABSENT, Chain, Shape


def merged(paths: Iterable[Sequence[int]], nodes: int) -> tuple[list[int], list[int]]:
    """Tokens and parents of the tree of these continuations, level by level; equal beginnings are the same nodes.

    At most ``nodes`` of them, taken path by path: the first paths go in whole, the last as far as there is room.
    """
    known: dict[tuple[int, ...], None] = {}
    for path in paths:
        for length in range(1, len(path) + 1):
            if len(known) < nodes:
                known[tuple(path[:length])] = None
    ordered = sorted(known, key=len)
    number = {prefix: node for node, prefix in enumerate(ordered)}
    return [prefix[-1] for prefix in ordered], [number.get(prefix[:-1], -1) for prefix in ordered]


def point_masses(found: Sequence[Sequence[Sequence[int]]], shape: Shape, device: torch.device) -> Proposal:
    """A proposal of every request's continuations, the best first: of a chain the best alone, of a tree as many as
    it has nodes for. None of them may be deeper than the shape."""
    chain = isinstance(shape, Chain)
    rows = [merged(paths[:1] if chain else paths, shape.nodes) for paths in found]
    counts = [len(tokens) for tokens, _ in rows]
    width = max(counts)
    tokens_BN = torch.tensor([[*tokens, *[0] * (width - len(tokens))] for tokens, _ in rows], dtype=torch.long)
    if chain:
        return Proposal(tokens_BN.to(device), counts=counts)
    parents = [[*parents, *[ABSENT] * (width - len(parents))] for _, parents in rows]
    return Proposal(tokens_BN.to(device), torch.tensor(parents, dtype=torch.long).to(device), counts=counts)
