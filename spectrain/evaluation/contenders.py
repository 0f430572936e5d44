"""What is measured: the settings, and the contenders they make: plain decoding, and every drafter with every draft it
is asked for under every rule that fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator

from spectrain.decoding.verification import Verification, is_lossy
from spectrain.drafters import Drafter
from spectrain.errors import SpectrainError
from spectrain.evaluation.leaves import LOSSY, PLAIN
from spectrain.evaluation.load_config import LoadConfig
from spectrain.evaluation.measured_trees import NO_RANKS, NONE, WRITTEN, MeasuredTree, Resolved
from spectrain.exact.sampler import Sampler
from spectrain.settings import LONGEST
from spectrain.shapes import Chain, DynamicTree, Shape, StaticTree, check_shape
from spectrain.target import Target

TREE_KINDS = ("static", "dynamic", "measured_tree")


def _kind_of_tree(value: Any) -> str | None:
    """Told by the keys alone: a mistake in one kind of tree must not be reported as one in the other."""
    if isinstance(value, StaticTree | DynamicTree):
        return "static" if isinstance(value, StaticTree) else "dynamic"
    if isinstance(value, MeasuredTree):
        return "measured_tree"
    keys = set(value) if isinstance(value, Mapping) else set()
    if keys & {"paths", "children"}:
        return "static"
    if "measured" in keys:
        return "measured_tree"
    return "dynamic" if keys & {"depth", "top_k", "nodes"} else None


Tree = Annotated[
    Annotated[StaticTree, Tag("static")] | Annotated[DynamicTree, Tag("dynamic")],
    Discriminator(
        _kind_of_tree,
        custom_error_type="tree",
        custom_error_message="expected a tree: {paths: [[0], [1], [0, 0]]}, or {depth: 5, top_k: 4, nodes: 16}",
    ),
]


def _no_tree_twice(trees: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(trees)) < len(trees):
        raise ValueError(f"the same tree twice: {', '.join(tree.describe() for tree in trees)}")
    return trees


Trees = Annotated[tuple[Tree, ...], AfterValidator(_no_tree_twice)]
AskedTree = Annotated[
    Annotated[StaticTree, Tag("static")]
    | Annotated[DynamicTree, Tag("dynamic")]
    | Annotated[MeasuredTree, Tag("measured_tree"), WRITTEN],
    Discriminator(
        _kind_of_tree,
        custom_error_type="tree",
        custom_error_message="expected a tree: {paths: [[0], [1], [0, 0]]}, or {depth: 5, top_k: 4, nodes: 16}, or "
        "{measured: 16}",
    ),
]
AskedTrees = Annotated[tuple[AskedTree, ...], AfterValidator(_no_tree_twice)]
AnyTree = StaticTree | DynamicTree | MeasuredTree
Length = Annotated[int, Field(ge=1, le=LONGEST)]


class AcceptanceConfig(BaseModel):
    """What is measured: drafts, samplers, how many held-out chats, how long the answers.

    Chains are measured under every rule of ``verification``, trees under the one there is for them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    k: tuple[Length, ...] = Field((3, 5), min_length=1, description="draft tokens a round; each is a contender")
    trees: AskedTrees = Field((), description="contenders for every drafter that fills trees")
    verification: tuple[Verification, ...] = Field(("token",), min_length=1)
    samplers: tuple[Sampler, ...] = Field((Sampler(),), min_length=1)
    conversations: int | None = Field(None, ge=1, description="held-out chats, spread over the kinds; default all")
    max_new_tokens: int = Field(128, ge=2)
    seed: int = 0
    stop_at: float | None = Field(None, gt=0, description="end once tokens per round is known to ± this; default never")
    load: LoadConfig | None = Field(None, description="batches of requests too, and which request rates")
    seeds: int = Field(2, ge=1, description="answers to every chat at temperatures above 0; greedily there is one")

    def answers(self, sampler: Sampler) -> int:
        """How often every chat is answered with a sampler."""
        return 1 if sampler.greedy else self.seeds

    @field_validator("samplers")
    @classmethod
    def _no_sampler_twice(cls, samplers: tuple[Sampler, ...]) -> tuple[Sampler, ...]:
        if len(set(samplers)) < len(samplers):  # its samples could not be told apart
            raise ValueError(f"the same sampler twice: {', '.join(s.describe() for s in samplers)}")
        return samplers


@dataclass(frozen=True)
class Contender:
    """A drafter, the shape of its drafts and the rule that judges them; plain decoding has none of them.

    ``target`` is the one that was trained with the drafter, where there is such; ``baseline`` names the plain decoding
    of the same target.
    """

    name: str
    family: str
    shape: Shape | None = None
    verification: Verification | None = None
    drafter: Drafter | None = None
    target: Target | None = None
    baseline: str = PLAIN
    by_sampler: Mapping[Sampler, Shape] = field(default_factory=dict)
    """Its shape under each sampler, where they differ; ``shape`` is then the first's."""

    def at(self, sampler: Sampler) -> Contender:
        """What it is under this sampler."""
        return replace(self, shape=self.by_sampler.get(sampler, self.shape))

    @property
    def k(self) -> int | None:
        """Draft length: 0 for plain decoding, None for a tree."""
        if self.shape is None:
            return 0
        return self.shape.length if isinstance(self.shape, Chain) else None

    @property
    def lossy(self) -> bool:
        return self.verification is not None and is_lossy(self.verification)

    def described(self) -> dict[str, Any]:
        """What a raw sample says of its contender."""
        return {
            "contender": self.name,
            "drafter": self.family,
            "k": self.k,
            "shape": _shape_record(self.shape),
            "verification": self.verification,
            "lossy": self.lossy,
            **({} if self.baseline == PLAIN else {"baseline": self.baseline}),
        }


def _shape_record(shape: Shape | None) -> dict[str, Any] | None:
    if shape is None:
        return None
    if isinstance(shape, Chain):
        return {"type": "chain", "depth": shape.depth, "nodes": shape.nodes}
    size = {"depth": shape.depth, "nodes": shape.nodes}
    if isinstance(shape, StaticTree):
        paths = [list(path) for path in shape.paths]  # as it comes back from JSON
        return {"type": "static tree", **size, "paths": paths, "children": shape.children}
    return {"type": "dynamic tree", **size, "top_k": shape.top_k}


@dataclass(frozen=True)
class LeftOut:
    """A draft that a drafter cannot fill, and why."""

    drafter: str
    draft: str
    reason: str

    def __str__(self) -> str:
        return f"{self.drafter} {self.draft} is left out: {self.reason}"


def contenders(drafters: dict[str, Drafter], lengths: Sequence[int],
               trees: Sequence[AnyTree] = (), rules: Sequence[Verification] = ("token",), *,
               leave_out: bool = False, measured: Resolved = NONE,
               targets: Mapping[str, Target] | None = None) -> list[Contender]:  # fmt: skip
    """Plain decoding; every drafter at every length under every rule; every tree where a drafter fills trees.

    With ``leave_out`` a drafter takes no part where it cannot fill a draft that another can (see ``unfillable``).
    ``measured`` are the trees that were asked for by their size, for every drafter that has some. ``targets`` has the
    targets that were trained with a drafter, by its name; plain decoding of each is a contender.

    Raises SpectrainError for a draft that a drafter cannot fill, or for trees when no drafter fills any; with
    ``leave_out`` for a draft that no drafter fills, or for a drafter that fills none.
    """
    if trees and not any(drafter.trees for drafter in drafters.values()):
        found = ", ".join(drafters) or "no drafter"
        raise SpectrainError(f"{trees[0].describe()}: found {found}, expected a drafter that fills trees; leave it out")
    by_size = next((tree for tree in trees if isinstance(tree, MeasuredTree)), None)
    if by_size and not measured.trees:
        raise SpectrainError(f"{by_size.describe()}: found no bundle whose drafter fills trees, which it needs")
    entries = [Contender(PLAIN, PLAIN)]
    for name, drafter in drafters.items():
        own = (targets or {}).get(name)
        baseline = PLAIN if own is None else f"{PLAIN} ({name})"
        if own is not None:
            entries.append(Contender(baseline, baseline, target=own, baseline=baseline))
        base = Contender(name, name, drafter=drafter, target=own, baseline=baseline)
        entries += [_chain(base, k, rule) for k in sorted(set(lengths)) for rule in dict.fromkeys(rules)]
        entries += _trees(base, trees, measured) if drafter.trees else []
    return _fillable(entries, leave_out=leave_out)


def _chain(base: Contender, k: int, rule: Verification) -> Contender:
    shape = Chain(k)
    name = " ".join(filter(None, (base.name, shape.describe(), _rule_name(rule))))
    return replace(base, name=name, shape=shape, verification=rule)


def _trees(base: Contender, trees: Sequence[AnyTree], measured: Resolved) -> list[Contender]:
    """One for every tree; none for a tree by its size where the drafter was measured to have none."""
    found = []
    for label, tree in zip(tree_names(trees), trees, strict=True):
        shapes: dict[Sampler, Shape] = {}
        shape: Shape | None = None if isinstance(tree, MeasuredTree) else tree
        if isinstance(tree, MeasuredTree):
            shapes = {s: measured.at(base.family, s, tree) for s in measured.trees.get(base.family, ())}
            shape = next(iter(shapes.values()), None)
        if shape is not None:
            name = f"{base.name} {label}"
            found.append(replace(base, name=name, shape=shape, verification="token", by_sampler=shapes))
    return found


def _fillable(entries: Sequence[Contender], *, leave_out: bool) -> list[Contender]:
    """Those whose drafter can fill their draft; see ``contenders`` for when another is an error."""
    refused = {entry.name: reason for entry in entries if (reason := _refusal(entry))}  # before anything is decoded
    asked, filled = ([e for e in entries if e.drafter and (e.name in refused) is side] for side in (True, False))
    for entry in asked:
        shared = any(other.shape == entry.shape for other in filled)
        if not (leave_out and shared and any(other.family == entry.family for other in filled)):
            raise SpectrainError(refused[entry.name])
    return [entry for entry in entries if entry.name not in refused]


def unfillable(drafters: dict[str, Drafter], lengths: Sequence[int],
               trees: Sequence[AnyTree] = (), measured: Resolved = NONE) -> list[LeftOut]:  # fmt: skip
    """What ``contenders`` leaves out, once for all rules."""
    shapes: list[tuple[str, Shape]] = [(Chain(k).describe(), Chain(k)) for k in sorted(set(lengths))]
    shapes += zip(tree_names(trees), trees, strict=True)  # type: ignore[arg-type]
    entries = [Contender(label, name, shape, None, d) for name, d in drafters.items() for label, shape in shapes]
    return [
        LeftOut(entry.family, entry.name, reason)
        for entry in entries
        if (reason := _no_ranks(entry, measured) if isinstance(entry.shape, MeasuredTree) else _refusal(entry))
    ]


def _no_ranks(entry: Contender, measured: Resolved) -> str | None:
    """Why the drafter has no measured tree."""
    if entry.family in measured.trees:
        return None
    if entry.family in measured.without:
        return measured.without[entry.family]
    fills = entry.drafter is not None and entry.drafter.trees
    return NO_RANKS if fills else f"{entry.family} proposes chains, no trees"


def _refusal(entry: Contender) -> str | None:
    """Why the drafter cannot fill the shape."""
    if entry.drafter is None or entry.shape is None:
        return None
    try:
        for shape in entry.by_sampler.values() or (entry.shape,):
            check_shape(shape, deepest=entry.drafter.deepest, columns=entry.drafter.columns,
                        trees=entry.drafter.trees, name=entry.family)  # fmt: skip
    except SpectrainError as error:
        return str(error)
    return None


def _rule_name(rule: Verification) -> str:
    """What a contender's name says of its rule; a lossy one cannot be overlooked."""
    if is_lossy(rule):
        return f"{LOSSY} {rule.removesuffix('_lossy')}"
    return "" if rule == "token" else rule


def tree_names(trees: Sequence[AnyTree]) -> list[str]:
    """A name for each: its count of nodes; more about it where others have as many, and a number where that is the
    same too."""
    short = [tree.describe() for tree in trees]
    full = [f"{name} {_details(tree)}" for name, tree in zip(short, trees, strict=True)]
    names = []
    for i in range(len(trees)):
        name = short[i] if short.count(short[i]) == 1 else full[i]
        if full.count(name) > 1:
            name = f"{name} #{1 + full[:i].count(name)}"
        names.append(name)
    return names


def _details(tree: AnyTree) -> str:
    if isinstance(tree, MeasuredTree):
        return ""  # its name is its size, and there is one of each
    if isinstance(tree, DynamicTree):
        return f"(depth {tree.depth}, top {tree.top_k})"
    return f"(depth {tree.depth}, {tree.children})"
