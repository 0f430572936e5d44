"""Shapes of a proposal: a chain, a tree given as paths, or a tree grown by confidence; and who sees whom in a tree.

Shapes: B batch, N proposed nodes, M rows of a forward (of a round N + 1: row 0 is the pending token, row n + 1 is node
n), X columns behind the committed ones, W nodes of a level, C columns of a cache.

Nodes are numbered level by level, so a parent always has a lower number than its children and the nodes up to a depth
are the first so many. A parent of -1 is the pending token; -2 marks a node that was not proposed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from spectrain.errors import SpectrainError
from spectrain.exact.verify.tree import walk_steps

ABSENT = -2  # the parent of a node that was not proposed

Children = Literal["distinct", "independent", "chosen"]


MOST = 4096  # nodes of a proposal: what a round holds grows with it


def _whole(value: object, name: str) -> None:
    if type(value) is not int or not 1 <= value <= MOST:
        raise SpectrainError(f"{name} is {value!r}; expected a whole number from 1 to {MOST}")


@dataclass(frozen=True)
class Chain:
    """``length`` tokens, one after another."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    length: int

    def __post_init__(self) -> None:
        _whole(self.length, "the draft length k")

    @property
    def depth(self) -> int:
        return self.length

    @property
    def nodes(self) -> int:
        return self.length

    @property
    def widest(self) -> int:
        """Most children of a node."""
        return 1

    def describe(self) -> str:
        return f"k={self.length}"


@dataclass(frozen=True)
class StaticTree:
    """A tree given by its nodes: ``(0,)`` is the root's first child, ``(0, 1)`` that one's second child.

    ``children`` says where they come from at T > 0: "distinct" draws them without replacement (2402.14160),
    "independent" with replacement (2305.09781), "chosen" takes the most likely ones. At T = 0 they are chosen.

    Raises SpectrainError, naming the path, for one that is there twice or whose parent or elder sibling is not.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    paths: tuple[tuple[int, ...], ...]
    children: Children = "distinct"

    def __post_init__(self) -> None:
        listed = self.paths if isinstance(self.paths, tuple | list) else ()
        odd = next((path for path in listed if not isinstance(path, tuple | list)), None)
        if odd is not None:
            raise SpectrainError(f"tree path {odd!r}: expected a sequence of ranks; a tree of one node is ((0,),)")
        paths = [tuple(path) for path in listed]
        if len(paths) > MOST:
            raise SpectrainError(f"a static tree has {len(paths)} nodes; expected at most {MOST}")
        if not paths:
            raise SpectrainError("a static tree has no paths; expected at least ((0,),)")
        known = set(paths)
        for path in paths:
            if not path or any(type(rank) is not int or rank < 0 for rank in path):
                raise SpectrainError(f"tree path {list(path)}: expected ranks of 0 or more, the most likely child is 0")
            if len(path) > 1 and path[:-1] not in known:
                raise SpectrainError(f"tree path {list(path)}: its parent {list(path[:-1])} is not in the tree; add it")
            elder = (*path[:-1], path[-1] - 1)
            if path[-1] and elder not in known:
                # Drawn children are tested in the order of their draws, so none of them may be left out.
                raise SpectrainError(f"tree path {list(path)}: its elder sibling {list(elder)} is not in the tree")
        if len(known) < len(paths):
            twice = next(path for path in paths if paths.count(path) > 1)
            raise SpectrainError(f"tree path {list(twice)} is there twice; give every node once")
        if self.children not in ("distinct", "independent", "chosen"):
            raise SpectrainError(f"tree children {self.children!r}: expected distinct, independent or chosen")
        object.__setattr__(self, "paths", tuple(sorted(paths, key=lambda path: (len(path), path))))

    @property
    def depth(self) -> int:
        return len(self.paths[-1])

    @property
    def nodes(self) -> int:
        return len(self.paths)

    @property
    def widest(self) -> int:
        return 1 + max(path[-1] for path in self.paths)

    @cached_property
    def parents(self) -> tuple[int, ...]:
        number = {path: n for n, path in enumerate(self.paths)}
        return tuple(number.get(path[:-1], -1) for path in self.paths)

    @cached_property
    def levels(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """For each depth the nodes that have children (-1: the root), each with how many: ((parent, count), ...)."""
        counts: dict[int, int] = {}
        for parent in self.parents:
            counts[parent] = counts.get(parent, 0) + 1
        by_depth: list[list[tuple[int, ...]]] = [[] for _ in range(self.depth)]
        for parent, count in counts.items():
            by_depth[0 if parent < 0 else len(self.paths[parent])].append((parent, count))
        return tuple(tuple(level) for level in by_depth)

    def steps(self, *, drawn: bool) -> int:
        """The most steps that verification takes."""
        return walk_steps(list(self.parents), drawn=drawn)

    def describe(self) -> str:
        return f"tree of {self.nodes}"


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2's tree (2406.16858): grown ``depth`` levels by the ``top_k`` most confident nodes of each, then cut to
    the ``nodes`` most confident ones. Confidence is the product of the drafter's probabilities along the path.

    Its nodes are chosen, never drawn: a tree that was ranked by confidence is exact only as such.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    depth: int = 5
    top_k: int = 4
    nodes: int = 16

    def __post_init__(self) -> None:
        for name in ("depth", "top_k", "nodes"):
            _whole(getattr(self, name), f"the dynamic tree's {name}")
        grown = self.top_k + (self.depth - 1) * self.top_k**2
        if self.nodes > grown:
            raise SpectrainError(
                f"a dynamic tree of depth {self.depth} and top_k {self.top_k} grows {grown} nodes, fewer than the "
                f"{self.nodes} to keep; lower nodes, or raise depth or top_k"
            )

    @property
    def widest(self) -> int:
        return self.top_k

    def describe(self) -> str:
        return f"dynamic tree of {self.nodes}"


Shape = Chain | StaticTree | DynamicTree


def check_shape(shape: Shape, *, deepest: int | None, columns: int | None, trees: bool, name: str) -> None:
    """Refuse a shape that a drafter cannot fill: deeper than it goes, wider than its head, a tree for a chain-maker."""
    if not trees and not isinstance(shape, Chain):
        raise SpectrainError(f"{name} proposes chains, not a {shape.describe()}; ask it for a draft length k")
    if deepest is not None and shape.depth > deepest:
        what = f"tree path {list(shape.paths[-1])} has" if isinstance(shape, StaticTree) else f"{shape.describe()} has"
        raise SpectrainError(f"{what} depth {shape.depth}, {name} drafts at most {deepest} tokens ahead")
    if columns is not None and shape.widest > columns:
        wide = f"the top_k {shape.widest} of a {shape.describe()}"
        path = next((f"tree path {list(p)}" for p in getattr(shape, "paths", ()) if p[-1] >= columns), wide)
        raise SpectrainError(f"{path} is beyond the {columns} tokens that {name} can propose")


@dataclass(frozen=True)
class Layout:
    """Where the X columns behind the committed ones stand, and what the last M of them, which are being run, see.

    ``depth_BX`` counts from the first position behind the committed ones; ``sees_BMX[b, i, x]``: row i sees column x.
    Either may have a batch of 1, for all. ``chain`` says that every row sees all before it.
    """

    depth_BX: Tensor
    sees_BMX: Tensor
    chain: bool = False

    @property
    def rows(self) -> int:
        return self.sees_BMX.shape[1]

    @property
    def earlier(self) -> int:
        """Columns that were run before."""
        return self.depth_BX.shape[1] - self.rows

    @classmethod
    def row(cls, rows: int, device: torch.device) -> Layout:
        """One after another."""
        sees = torch.ones(rows, rows, dtype=torch.bool, device=device).tril()
        return cls(torch.arange(rows, device=device)[None], sees[None], chain=True)

    @classmethod
    def tree(cls, parents_BN: Tensor, depth: int) -> Layout:
        """The pending token and a tree below it, no deeper than ``depth``; an absent node hangs from the root."""
        B, N = parents_BN.shape
        parent_BM = torch.cat([parents_BN.new_full((B, 1), -1), parents_BN], 1).clamp(min=-1) + 1
        depth_BM = torch.zeros_like(parent_BM)
        at_BM = torch.arange(N + 1, device=parents_BN.device).expand(B, -1)
        sees_BMM = torch.zeros(B, N + 1, N + 1, dtype=torch.bool, device=parents_BN.device)
        for _ in range(depth + 1):
            sees_BMM.scatter_(2, at_BM.unsqueeze(-1), True)
            depth_BM += at_BM > 0
            at_BM = parent_BM.gather(1, at_BM)  # the root is its own parent
        return cls(depth_BM, sees_BMM)

    def below(self, parents_BW: Tensor) -> Layout:
        """One level more: nodes that hang from these of the rows that were run last."""
        B, W = parents_BW.shape
        _, M, X = self.sees_BMX.shape
        index_BWX = parents_BW.unsqueeze(-1).expand(-1, -1, X)
        above_BWX = self.sees_BMX.expand(B, -1, -1).gather(1, index_BWX)
        itself_WW = torch.eye(W, dtype=torch.bool, device=parents_BW.device)
        sees_BWX = torch.cat([above_BWX, itself_WW.expand(B, -1, -1)], -1)
        depth_BX = torch.nn.functional.pad(self.depth_BX, (0, W), value=0)
        depth_BX[:, X:] = self.depth_BX[:, -1:] + 1
        return Layout(depth_BX, sees_BWX, self.chain and M == W == 1)

    def seen(self, lengths_B: Tensor, columns: int) -> Tensor:
        """Which of a cache's columns each row sees, bool [B, M, C]: all ``lengths_B`` committed ones, and its own."""
        B, (M, X) = len(lengths_B), self.sees_BMX.shape[1:]
        sees_BMC = (torch.arange(columns, device=lengths_B.device) < lengths_B[:, None]).unsqueeze(1)
        at_BX = lengths_B[:, None] + torch.arange(X, device=lengths_B.device)
        index_BMX = at_BX.unsqueeze(1).expand(-1, M, -1)
        return sees_BMC.repeat(1, M, 1).scatter_(2, index_BMX, self.sees_BMX.expand(B, -1, -1))
