"""Static trees that each drafter gets from its own measured ranks: asked for by their size alone.

A contender has one for every sampler; what it was is in the shape that its samples record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, PlainSerializer

from spectrain.drafters import Drafter
from spectrain.drafters.ranks import measured_tree, read_ranks
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler
from spectrain.shapes import DynamicTree, StaticTree

NO_RANKS = "it has no bundle, so its ranks are not measured"


@dataclass(frozen=True)
class MeasuredTree:
    """The best tree of at most ``nodes`` nodes for whoever fills it, by the ``ranks.json`` of its bundle."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    nodes: Annotated[int, Field(alias="measured")]

    def __post_init__(self) -> None:
        if type(self.nodes) is not int or not 1 <= self.nodes <= 1024:
            raise SpectrainError(f"nodes of a measured tree: found {self.nodes!r}, expected a whole number, 1 to 1024")

    def describe(self) -> str:
        return f"tree {self.nodes} nodes (measured)"


WRITTEN = PlainSerializer(lambda tree: {"measured": tree.nodes}, return_type=dict)
"""As it is asked for: with its own key, for nodes alone are a dynamic tree's."""


@dataclass(frozen=True)
class Resolved:
    """What measured trees are for each drafter that has measured ranks: name → sampler → nodes → tree."""

    trees: Mapping[str, Mapping[Sampler, Mapping[int, StaticTree]]]
    without: Mapping[str, str] = field(default_factory=dict)
    """Why a drafter with a bundle has none, by its name."""

    def at(self, name: str, sampler: Sampler, tree: MeasuredTree) -> StaticTree:
        return self.trees[name][sampler][tree.nodes]

    def identity(self) -> dict[str, Any]:
        """Every tree as JSON: ranks that are measured again must not go on with the samples of other trees."""
        return {
            name: {
                sampler.describe(): {str(nodes): [list(path) for path in tree.paths] for nodes, tree in trees.items()}
                for sampler, trees in by_sampler.items()
            }
            for name, by_sampler in self.trees.items()
        }


NONE = Resolved({})


def resolve(asked: Sequence[Any], drafters: Mapping[str, Drafter], folders: Mapping[str, Path],
            samplers: Sequence[Sampler]) -> Resolved:  # fmt: skip
    """The trees of every drafter that fills trees and has a bundle, in ``folders`` by its name.

    One whose ranks give no tree is left out where another's do. SpectrainError where none do, and for a bundle without
    ranks.
    """
    sizes = [tree.nodes for tree in asked if isinstance(tree, MeasuredTree)]
    if not sizes:
        return NONE
    found, without = {}, {}
    for name, folder in folders.items():
        if drafters[name].trees:
            ranks = read_ranks(folder)
            try:
                found[name] = {s: {nodes: measured_tree(ranks, s, nodes) for nodes in sizes} for s in samplers}
            except SpectrainError as error:  # the drafter is never right
                without[name] = str(error)
    if without and not found:
        raise SpectrainError(next(iter(without.values())))
    return Resolved(found, without)


def filled(tree: StaticTree | DynamicTree | MeasuredTree) -> StaticTree | DynamicTree:
    """The least that a drafter must fill to fill this tree: of a measured one a single node."""
    return StaticTree(((0,),)) if isinstance(tree, MeasuredTree) else tree
