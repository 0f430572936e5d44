"""Trees as they are written on a command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from spectrain.drafters.ranks import measured_tree, read_ranks
from spectrain.errors import SpectrainError
from spectrain.evaluation.contenders import AnyTree
from spectrain.evaluation.measured_trees import MeasuredTree
from spectrain.exact.sampler import Sampler
from spectrain.shapes import Children, DynamicTree, StaticTree


def static_trees(trees: Sequence[AnyTree], folder: Path | None) -> list[StaticTree | DynamicTree]:
    """Measured trees as they are for one bundle at T=0."""
    found: list[StaticTree | DynamicTree] = []
    for tree in trees:
        if not isinstance(tree, MeasuredTree):
            found.append(tree)
        elif folder is None:
            raise SpectrainError("--tree measured:NODES is made from the ranks of a bundle; give one with --bundle")
        else:
            found.append(measured_tree(read_ranks(folder), Sampler(), tree.nodes))
    return found


def parse_tree(text: str) -> AnyTree:
    """``dynamic:DEPTH,TOP_K,NODES``, ``measured:NODES``, or nodes as paths of ranks, ``0;1;0,0``, after what their
    children are."""
    kind, _, body = text.rpartition(":")
    try:
        rows = tuple(tuple(int(number) for number in row.split(",")) for row in body.split(";"))
    except ValueError:
        rows = ()
    dynamic = kind == "dynamic" and len(rows) == 1 and len(rows[0]) == 3
    by_size = kind == "measured" and len(rows) == 1 and len(rows[0]) == 1
    if not rows or not (dynamic or by_size or kind in ("", *get_args(Children))):
        raise SpectrainError(
            f"--tree {text!r}: expected dynamic:DEPTH,TOP_K,NODES, for instance dynamic:5,4,16, measured:NODES, or "
            "nodes as paths of ranks, for instance '0;1;0,0'"
        )
    try:
        if by_size:
            return MeasuredTree(rows[0][0])
        return DynamicTree(*rows[0]) if dynamic else StaticTree(rows, kind or "distinct")  # type: ignore[arg-type]
    except SpectrainError as error:
        raise SpectrainError(f"--tree {text!r}: {error}") from error
