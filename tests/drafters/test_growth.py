"""Grown from a table of laws: chains and drawn trees have the enumerated law, dynamic trees hold the best nodes.

Shapes: B requests, W nodes of a level, N nodes, M = N + 1 rows of q, D columns of the head, V vocabulary.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import paths_of
from torch import Tensor

from spectrain.drafters.base import Committed, DrafterConfig, Proposal
from spectrain.drafters.growth import GrowingDrafter
from spectrain.exact.sampler import Sampler
from spectrain.shapes import ABSENT, Chain, DynamicTree, StaticTree

Path = tuple[int, ...]
Weights = Sequence[int]
Law = Callable[[int, Path], Weights]
FIXED = settings(deadline=None, derandomize=True)


@dataclass
class TableState:
    """Which requests there are, and the paths of the level that was run last."""

    requests: list[int]
    level: list[list[Path]] = field(default_factory=list)


class Table(GrowingDrafter):
    """Says after every path of its own tokens what a table says; the first token of a request is its row there.

    ``widths`` are the numbers of nodes that the calls of the latest proposal ran.
    """

    config = DrafterConfig(type="table")

    def __init__(self, law: Law, size: int, columns: Sequence[int] | None = None, dtype: Any = torch.float64) -> None:
        self.law, self.size, self.dtype = law, size, dtype
        self.ids = None if columns is None else torch.tensor(columns)

    def start(self, first: Sequence[int]) -> TableState:
        return TableState(list(first))

    def observe(self, state: TableState, committed: Committed) -> None: ...

    def select(self, state: TableState, rows: Sequence[int]) -> None:
        state.requests = [state.requests[row] for row in rows]

    def vocabulary(self) -> tuple[int, Tensor | None]:
        return self.size, self.ids

    def root(self, state: TableState) -> Tensor:
        state.level, self.widths = [[()] for _ in state.requests], list[int]()
        return self._logits(state)

    def extend(self, state: TableState, tokens_BW: Tensor, parents_BW: Tensor) -> Tensor:
        state.level = [
            [(*level[parent], token) for token, parent in zip(tokens, parents, strict=True)]
            for level, tokens, parents in zip(state.level, tokens_BW.tolist(), parents_BW.tolist(), strict=True)
        ]
        self.widths.append(tokens_BW.shape[1])
        return self._logits(state)

    def _logits(self, state: TableState) -> Tensor:
        rows = [[self.law(r, path) for path in level] for r, level in zip(state.requests, state.level, strict=True)]
        return torch.tensor(rows, dtype=torch.float64).log().to(self.dtype)


def table(seed: int, kinds: Sequence[Weights]) -> Law:
    """After every path one of these, for good."""
    return lambda request, path: kinds[random.Random(f"{seed} {request} {path}").randrange(len(kinds))]


def propose(drafter: Table, shape: Any, *, requests: Sequence[int] = (0,), sampler: Sampler | None = None,
            limits: Sequence[int] | None = None, uniforms_BN: Tensor | None = None) -> Proposal:  # fmt: skip
    B = len(requests)
    uniforms_BN = torch.zeros(B, shape.nodes, dtype=torch.float64) if uniforms_BN is None else uniforms_BN
    return drafter.propose(drafter.start(requests), sampler or Sampler(1.0), shape, limits or [99] * B, uniforms_BN)


# --- chains and drawn trees: by enumeration -------------------------------------------------------------------------

KINDS: list[Weights] = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 0), (0, 0, 4)]
GRID = 12  # every law of these weights, whatever was drawn before, has multiples of a twelfth
HEADS: dict[str, dict[str, Any]] = {
    "whole": {"size": 3},
    "padded": {"size": 5},
    "reduced": {"size": 6, "columns": (1, 2, 4)},
}
TREES = [
    ((0,), (1,)),
    ((0,), (1,), (2,)),
    ((0,), (0, 0), (0, 1)),
    ((0,), (1,), (1, 0)),
    ((0,), (1,), (0, 0), (1, 0)),
    ((0,), (1,), (0, 0), (0, 1)),
]


def every_draw(nodes: int, grid: int = GRID) -> Tensor:
    """All points of an even grid of uniforms, each as likely."""
    places = (torch.arange(grid, dtype=torch.float64) + 0.5) / grid
    return torch.cartesian_prod(*[places] * nodes).view(-1, nodes)


def enumerated(law: Law, parents: Sequence[int], kind: str, ids: Sequence[int]) -> dict[tuple[Any, ...], Fraction]:
    """The probability of every draw of all nodes, in Fractions: one by one, None where nothing is there."""
    found: dict[tuple[Any, ...], Fraction] = {(): Fraction(1)}
    for node, parent in enumerate(parents):
        grown: dict[tuple[Any, ...], Fraction] = {}
        for draws, p in found.items():
            path = [draws[n] for n in paths_of(parents)[node][:-1]]
            if None in path:
                grown[(*draws, None)] = p
                continue
            weights = dict(zip(ids, law(0, tuple(path)), strict=True))
            if kind == "distinct":
                for elder in range(node):
                    if parents[elder] == parent:
                        weights.pop(draws[elder], None)
            total = sum(weights.values())
            if not total:
                grown[(*draws, None)] = p
            for token, weight in weights.items():
                if weight:
                    grown[(*draws, token)] = p * Fraction(weight, total)
        found = grown
    return found


def counted(proposal: Proposal) -> dict[tuple[Any, ...], Fraction]:
    tokens = proposal.tokens_BN.tolist()
    parents = [[0] * len(tokens[0])] * len(tokens) if proposal.parents_BN is None else proposal.parents_BN.tolist()
    draws = Counter(
        tuple(None if parent == ABSENT else token for token, parent in zip(row, above, strict=True))
        for row, above in zip(tokens, parents, strict=True)
    )
    return {draw: Fraction(count, len(tokens)) for draw, count in draws.items()}


def check_laws(proposal: Proposal, drafter: Table, law: Law, parents: Sequence[int], ids: Sequence[int]) -> None:
    """The row of q at which a node's children were drawn is the table's, over the target's vocabulary."""
    chain = proposal.parents_BN is None
    _, at = torch.unique(proposal.tokens_BN, dim=0, return_inverse=True)
    for row in {int(number): row for row, number in enumerate(at.tolist())}.values():
        tokens = proposal.tokens_BN[row].tolist()
        for parent in sorted(set(parents)):
            path = [] if parent < 0 else paths_of(parents)[parent]
            if any(proposal.parents_BN is not None and proposal.parents_BN[row, n] == ABSENT for n in path):
                continue
            want_V = torch.zeros(drafter.size, dtype=torch.float64)
            weights = law(0, tuple(tokens[n] for n in path))
            want_V[list(ids)] = torch.tensor(weights, dtype=torch.float64) / sum(weights)
            got_V = proposal.q[row, parent + 1]  # type: ignore[index]
            torch.testing.assert_close(got_V, want_V, rtol=0, atol=1e-12)
    rows = len(parents) + (not chain)
    assert proposal.q is not None
    assert proposal.q.shape == (len(proposal.tokens_BN), rows, drafter.size)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("seed", range(4))
def test_a_chain_has_the_enumerated_law(head, seed):
    law = table(seed, KINDS)
    drafter = Table(law, **HEADS[head])
    uniforms_BN = every_draw(3)
    proposal = propose(drafter, Chain(3), requests=[0] * len(uniforms_BN), uniforms_BN=uniforms_BN)
    ids = HEADS[head].get("columns", range(3))
    assert proposal.parents_BN is None
    assert counted(proposal) == enumerated(law, (-1, 0, 1), "independent", ids)
    check_laws(proposal, drafter, law, (-1, 0, 1), ids)


@pytest.mark.parametrize(
    ("paths", "head"), [(paths, head) for paths in TREES for head in HEADS if len(paths) < 4 or head == "reduced"]
)
@pytest.mark.parametrize("kind", ["distinct", "independent"])
def test_a_drawn_tree_has_the_enumerated_law(paths, head, kind):
    """Without replacement: of the law without what its elder siblings took. With replacement: of the law itself."""
    law = table(len(paths), KINDS)
    drafter, shape = Table(law, **HEADS[head]), StaticTree(paths, kind)
    uniforms_BN = every_draw(len(paths), GRID if kind == "distinct" else 4)
    proposal = propose(drafter, shape, requests=[0] * len(uniforms_BN), uniforms_BN=uniforms_BN)
    ids = HEADS[head].get("columns", range(3))
    assert counted(proposal) == enumerated(law, shape.parents, kind, ids)
    check_laws(proposal, drafter, law, shape.parents, ids)
    there_BN = proposal.parents_BN != ABSENT
    assert torch.equal(proposal.parents_BN[there_BN], torch.tensor(shape.parents).expand_as(there_BN)[there_BN])


def test_the_enumeration_would_show_a_law_that_is_not_renormalised():
    """What makes the tests above ones: merged draws with replacement have another law."""
    law = table(0, [(2, 1, 1)])
    distinct = enumerated(law, (-1, -1), "distinct", range(3))
    assert distinct[0, 1] == Fraction(1, 2) * Fraction(1, 2)
    assert distinct[1, 0] == Fraction(1, 4) * Fraction(2, 3)
    assert enumerated(law, (-1, -1), "independent", range(3))[0, 0] == Fraction(1, 4)
    assert distinct != enumerated(law, (-1, -1), "independent", range(3))


@st.composite
def small_trees(draw):
    children: dict[Path, int] = {(): 0}
    for _ in range(draw(st.integers(1, 3))):
        parent = draw(st.sampled_from(sorted(children)))
        children[(*parent, children[parent])] = 0
        children[parent] += 1
    return tuple(path for path in children if path)


@settings(FIXED, max_examples=25)
@given(paths=small_trees(), kind=st.sampled_from(["distinct", "independent"]), seed=st.integers(0, 999))
def test_any_tree_over_any_table_has_the_enumerated_law(paths, kind, seed):
    law, shape = table(seed, KINDS), StaticTree(paths, kind)
    uniforms_BN = every_draw(len(paths), GRID if kind == "distinct" else 4)
    proposal = propose(Table(law, 3), shape, requests=[0] * len(uniforms_BN), uniforms_BN=uniforms_BN)
    assert counted(proposal) == enumerated(law, shape.parents, kind, range(3))


def test_a_sampler_that_leaves_one_token_leaves_one_child():
    """Siblings of which no token is left are absent, and so is what would hang from them."""
    shape = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)))
    proposal = propose(Table(table(1, [(4, 3, 1), (1, 3, 4)]), 3), shape, sampler=Sampler(1.0, top_k=1))
    assert proposal.parents_BN.tolist() == [[-1, ABSENT, 0, ABSENT, ABSENT, ABSENT]]
    two = propose(Table(table(1, [(4, 3, 1), (1, 3, 4)]), 3), shape, sampler=Sampler(1.0, top_k=2))
    assert two.parents_BN.tolist() == [[-1, -1, 0, 0, 1, 1]]


def test_the_law_is_the_samplers():
    """Tokens and q come after temperature, top-k and top-p."""
    law = table(0, [(8, 4, 2, 1)])
    sampler = Sampler(2.0, top_k=3, top_p=0.9)
    want_V = sampler.probabilities(torch.tensor([8.0, 4.0, 2.0, 1.0], dtype=torch.float64).log())
    for shape in (Chain(1), StaticTree(((0,), (1,)))):
        assert torch.equal(propose(Table(law, 4), shape, sampler=sampler).q[0, 0], want_V)


# --- what is chosen -------------------------------------------------------------------------------------------------


def ranked(law: Law, path: Path, ids: Sequence[int]) -> list[int]:
    """Ids by falling probability; the tables below have no ties."""
    weights = law(0, path)
    return [ids[column] for column in sorted(range(len(ids)), key=lambda column: -weights[column])]


CLEAR: list[Weights] = list(itertools.permutations((8, 5, 2, 1)))


@pytest.mark.parametrize("columns", [None, (0, 3, 4, 7)])
def test_a_greedy_chain_takes_the_likeliest_token_every_time(columns):
    law = table(3, CLEAR)
    proposal = propose(Table(law, 8 if columns else 4, columns), Chain(4), sampler=Sampler())
    path: Path = ()
    for token in proposal.tokens_BN[0].tolist():
        assert token == ranked(law, path, columns or range(4))[0]
        path = (*path, token)
    assert proposal.q is None


@pytest.mark.parametrize("columns", [None, (0, 3, 4, 7)])
@pytest.mark.parametrize(
    ("kind", "sampler"), [("chosen", Sampler(1.0)), ("distinct", Sampler()), ("chosen", Sampler())]
)
def test_chosen_children_are_the_likeliest_in_their_order(columns, kind, sampler):
    paths = ((0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (2, 1), (2, 2), (2, 3), (0, 1, 0), (2, 3, 0))
    law, shape = table(5, CLEAR), StaticTree(paths, kind)
    proposal = propose(Table(law, 8 if columns else 4, columns), shape, sampler=sampler)
    assert proposal.q is None
    assert proposal.parents_BN.tolist() == [list(shape.parents)]
    taken: dict[Path, Path] = {(): ()}
    for path, token in zip(shape.paths, proposal.tokens_BN[0].tolist(), strict=True):
        above = taken[path[:-1]]
        assert token == ranked(law, above, columns or range(4))[path[-1]]
        taken[path] = (*above, token)


def test_only_nodes_with_children_are_run_and_a_level_at_once():
    paths = ((0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 1, 0))
    drafter = Table(table(0, CLEAR), 4)
    for limit, widths in ((1, []), (2, [2]), (3, [2, 1]), (9, [2, 1])):
        proposal = propose(drafter, StaticTree(paths), limits=[limit])
        assert drafter.widths == widths
        assert proposal.tokens_BN.shape[1] == sum(len(path) <= limit for path in paths)
    propose(drafter, Chain(4), limits=[3])
    assert drafter.widths == [1, 1]
    propose(drafter, DynamicTree(4, 3, 9), limits=[3])
    assert drafter.widths == [3, 3]


# --- dynamic trees --------------------------------------------------------------------------------------------------


def distinct_weights(seed: int, columns: int) -> Law:
    """Random laws in which no two products are the same."""

    def law(request: int, path: Path) -> Weights:
        return random.Random(f"{seed} {request} {path}").sample(range(1, 5000), columns)

    return law


def confidence(law: Law, request: int, path: Path, ids: Sequence[int]) -> Fraction:
    value = Fraction(1)
    for depth, token in enumerate(path):
        weights = law(request, path[:depth])
        value *= Fraction(weights[ids.index(token)], sum(weights))
    return value


def grown_by_hand(law: Law, request: int, shape: DynamicTree, depth: int, ids: Sequence[int]) -> set[Path]:
    """EAGLE-2 (2406.16858) in words: extend the best of a level, keep the best of all."""
    pool: list[Path] = []
    extended: list[Path] = [()]

    def worth(path: Path) -> Fraction:
        return confidence(law, request, path, ids)

    for _ in range(depth):
        children = [
            child for path in extended for child in sorted(((*path, i) for i in ids), key=worth)[-shape.top_k :]
        ]
        pool += children
        extended = sorted(children, key=worth)[-shape.top_k :]
    return set(sorted(pool, key=worth)[-shape.nodes :])


def paths_in(proposal: Proposal, row: int, limit: int | None = None) -> list[Path]:
    tokens, parents = proposal.tokens_BN[row].tolist(), proposal.parents_BN[row].tolist()
    found = [tuple(tokens[n] for n in path) for path in paths_of(parents)]
    return [path for path in found if limit is None or len(path) <= limit]


@st.composite
def dynamic_trees(draw, columns):
    depth, top_k = draw(st.integers(1, 4)), draw(st.integers(1, columns))
    most = top_k + (depth - 1) * top_k**2
    return DynamicTree(depth, top_k, draw(st.integers(1, most)))


@settings(FIXED, max_examples=60)
@given(shape=dynamic_trees(4), seed=st.integers(0, 9999), reduced=st.booleans())
def test_a_dynamic_tree_is_the_one_grown_by_hand(shape, seed, reduced):
    ids = (0, 3, 4, 7) if reduced else (0, 1, 2, 3)
    law = distinct_weights(seed, 4)
    proposal = propose(Table(law, 8 if reduced else 4, ids if reduced else None), shape, requests=[0, 1, 2])
    assert proposal.q is None
    for row in range(3):
        found = paths_in(proposal, row)
        assert [len(path) for path in found] == sorted(len(path) for path in found)
        assert len(found) == len(set(found)) == shape.nodes
        assert set(found) == grown_by_hand(law, row, shape, shape.depth, ids)


@settings(FIXED, max_examples=40)
@given(seed=st.integers(0, 9999), depth=st.integers(1, 4), nodes=st.integers(1, 4), data=st.data())
def test_few_nodes_are_the_best_of_all_there_could_be(seed, depth, nodes, data):
    """With no more nodes than are extended, no better path can have been cut off: a search through all of them."""
    law, top_k = distinct_weights(seed, 4), data.draw(st.integers(nodes, 4))
    proposal = propose(Table(law, 4), DynamicTree(depth, top_k, nodes))
    every = [path for length in range(1, depth + 1) for path in itertools.product(range(4), repeat=length)]
    best = sorted(every, key=lambda path: -confidence(law, 0, path, range(4)))[:nodes]
    assert set(paths_in(proposal, 0)) == set(best)


@settings(FIXED, max_examples=40)
@given(shape=dynamic_trees(3), seed=st.integers(0, 9999), limits=st.lists(st.integers(1, 4), min_size=3, max_size=3))
def test_no_node_is_spent_beyond_a_requests_limit(shape, seed, limits):
    """What counts of a request is the tree that it would get alone, of that depth."""
    law = distinct_weights(seed, 3)
    proposal = propose(Table(law, 3), shape, requests=[0, 1, 2], limits=limits)
    for row, limit in enumerate(limits):
        depth = min(shape.depth, limit)
        assert set(paths_in(proposal, row, depth)) == grown_by_hand(law, row, shape, depth, (0, 1, 2))


@settings(FIXED, max_examples=60)
@given(shape=dynamic_trees(3), seed=st.integers(0, 9999))
def test_among_equals_no_node_comes_without_its_parent(shape, seed):
    """Certain, impossible and equally likely tokens: a child is as confident as its parent, or as hopeless."""
    law = table(seed, [(1, 0, 0), (1, 1, 0), (0, 1, 0), (1, 1, 1)])
    proposal = propose(Table(law, 3), shape)
    parents = proposal.parents_BN[0].tolist()
    assert all(-1 <= parent < node for node, parent in enumerate(parents))
    found = paths_in(proposal, 0)
    assert len(set(found)) == len(found) == shape.nodes
    assert all(path[:-1] in ((), *found) for path in found)


def test_a_certain_path_is_kept_from_its_beginning():
    law = table(0, [(1, 0, 0)])
    for nodes in range(1, 5):
        found = paths_in(propose(Table(law, 3), DynamicTree(4, 2, nodes)), 0)
        assert found == [(0,) * length for length in range(1, nodes + 1)]


def worth_in(dtype: torch.dtype, logits: Callable[[Path], Tensor], path: Path) -> float:
    """The log of a path's confidence with every step rounded to ``dtype``."""
    total = torch.zeros((), dtype=dtype)
    for depth, token in enumerate(path):
        total = total + logits(path[:depth]).to(dtype).log_softmax(-1)[token]
    return float(total)


def near_logits(seed: int) -> Callable[[Path], Tensor]:
    """Of every path four numbers that bfloat16 holds exactly."""

    def logits(path: Path) -> Tensor:
        generator = torch.Generator().manual_seed(seed * 100 + sum((n + 1) * 5**i for i, n in enumerate(path)))
        return (torch.randn(4, generator=generator) * 0.05).bfloat16().double()

    return logits


def best_of(worth: dict[Path, float], count: int) -> list[Path]:
    return sorted(worth, key=lambda path: -worth[path])[:count]


def test_confidence_is_summed_in_float32():
    """Logits of a drafter in bfloat16, close together. Summed in bfloat16 many paths would tie, and others be kept."""
    shape, every = DynamicTree(2, 4, 10), [path for n in (1, 2) for path in itertools.product(range(4), repeat=n)]
    worse = 0
    for seed in range(20):
        logits = near_logits(seed)
        drafter = Table(lambda _, path, z=logits: z(path).exp().tolist(), 4, dtype=torch.bfloat16)
        exact = {path: worth_in(torch.float64, logits, path) for path in every}
        rough = {path: worth_in(torch.bfloat16, logits, path) for path in every}
        best = sum(exact[path] for path in best_of(exact, 10))
        assert sum(exact[path] for path in paths_in(propose(drafter, shape), 0)) == pytest.approx(best, abs=1e-6)
        worse += sum(exact[path] for path in best_of(rough, 10)) < best - 1e-4
    assert worse > 5


def test_a_path_that_is_all_but_certain_goes_before_the_siblings_of_its_root():
    def law(_request: int, path: Path) -> Weights:
        return (9990, 5, 5) if path else (300, 290, 410)

    for nodes, want in ((3, [(2,), (2, 0), (2, 0, 0)]), (5, [(2,), (0,), (2, 0), (0, 0), (2, 0, 0)])):
        for dtype in (torch.float32, torch.bfloat16):
            assert paths_in(propose(Table(law, 3, dtype=dtype), DynamicTree(3, 3, nodes)), 0) == want


# --- one law for a level --------------------------------------------------------------------------------------------


LOPSIDED = ((0,), (1,), (2,), (0, 0), (2, 0), (2, 1), (2, 2), (2, 1, 0), (2, 2, 0))


class Shared(Table):
    """Knows that its laws do not depend on the path, and says each once."""

    def _logits(self, state: TableState) -> Tensor:
        return super()._logits(state)[:, :1]


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(1.0)], ids=Sampler.describe)
@pytest.mark.parametrize(
    "shape", [Chain(3), DynamicTree(3, 3, 9), *(StaticTree(LOPSIDED, k) for k in ("distinct", "independent", "chosen"))]
)
def test_a_law_that_all_nodes_of_a_level_share_may_be_said_once(shape, sampler):
    laws = distinct_weights(3, 4)

    def law(request: int, path: Path) -> Weights:
        return laws(request, (0,) * len(path))

    uniforms_BN = torch.rand(3, shape.nodes, generator=torch.Generator().manual_seed(0)).double()
    one, all_ = (
        propose(kind(law, 4), shape, requests=[0, 1, 2], sampler=sampler, uniforms_BN=uniforms_BN)
        for kind in (Shared, Table)
    )
    assert torch.equal(one.tokens_BN, all_.tokens_BN)
    for got, want in ((one.parents_BN, all_.parents_BN), (one.q, all_.q)):
        assert (got is None) == (want is None)
        assert got is None or torch.equal(got, want)


# --- companions -----------------------------------------------------------------------------------------------------


@settings(FIXED, max_examples=30)
@given(seed=st.integers(0, 999), data=st.data())
def test_a_request_gets_what_it_gets_alone(seed, data):
    """Whatever the shape, to the bit: its laws, its uniforms and its limit are its own."""
    shape = data.draw(st.sampled_from([Chain(3), StaticTree(TREES[4]), StaticTree(TREES[5], "independent"),
                                       StaticTree(TREES[5], "chosen"), DynamicTree(3, 2, 6)]))  # fmt: skip
    limits = data.draw(st.lists(st.integers(0, 4), min_size=2, max_size=4).filter(any))
    drafter = Table(distinct_weights(seed, 3), 3)
    uniforms_BN = torch.rand(len(limits), shape.nodes, generator=torch.Generator().manual_seed(seed)).double()
    rows = range(len(limits))
    whole = propose(drafter, shape, requests=list(rows), limits=limits, uniforms_BN=uniforms_BN)
    for row, limit in enumerate(limits):
        if not limit:
            continue
        alone = propose(drafter, shape, requests=[row], limits=[limit], uniforms_BN=uniforms_BN[[row]])
        count = alone.tokens_BN.shape[1]
        assert torch.equal(whole.tokens_BN[row, :count], alone.tokens_BN[0])
        if alone.parents_BN is not None:
            assert torch.equal(whole.parents_BN[row, :count], alone.parents_BN[0])
        if alone.q is not None:
            read = list(range(count)) if alone.parents_BN is None else [1 + p for p in alone.parents_BN[0].tolist()]
            rows_of_q = [number for number in read if number > ABSENT + 1]  # laws of leaves are not read
            assert torch.equal(whole.q[row, rows_of_q], alone.q[0, rows_of_q])
