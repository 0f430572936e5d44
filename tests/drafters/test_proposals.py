"""What every family promises while it decodes; a family added to the registry is tested here by itself.

Shapes: B requests, N proposed nodes, M = N + 1 rows of q, V vocabulary.
"""

from __future__ import annotations

from functools import cache as once
from typing import Any

import pytest
import torch
from families import FAMILY_NAMES
from torch import Tensor

from spectrain.drafters.base import Proposal
from spectrain.drafters.growth import GrowingDrafter
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler
from spectrain.shapes import ABSENT, Chain, DynamicTree, Shape, StaticTree, check_shape

PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (2, 1), (2, 2), (0, 1, 0), (2, 2, 0))
SHAPES: dict[str, Shape] = {
    "one": Chain(1),
    "chain": Chain(4),
    "distinct": StaticTree(PATHS),
    "independent": StaticTree(PATHS, "independent"),
    "chosen": StaticTree(PATHS, "chosen"),
    "dynamic": DynamicTree(3, 3, 8),
    "deep": DynamicTree(4, 2, 5),
    "bush": DynamicTree(1, 4, 3),
}
SAMPLERS = [Sampler(), Sampler(1.0), Sampler(0.7, top_k=5, top_p=0.9), Sampler(1.5, top_k=1)]
# Repetitions, so that those who look text up find something; requests of unlike length, one of them very short.
TEXTS = [[3, 1, 4, 1, 5, 9, 3, 1, 4, 1, 5, 9, 3, 1], [7, 2, 7, 2, 8, 7, 2], [6, 6]]
LATER = [[4, 1, 5, 3, 1, 4], [8, 7, 2, 8, 1, 8], [6, 5, 6, 6, 5, 1]]
WHOLE = [text + later for text, later in zip(TEXTS, LATER, strict=True)]


@pytest.fixture(scope="module")
def target(tiny_target):
    """With rows of the head that no token has."""
    return tiny_target("llama", layers=8, padding=4)


@pytest.fixture(scope="module")
def made(tools, target):
    return once(lambda family: tools.ready(family, target))


@pytest.fixture
def drafter(any_family, made, target):
    drafter = made(any_family)
    target.tap(drafter.tap_layers)
    return drafter


def drawn_uniforms(rows: int, nodes: int, seed: int = 0) -> Tensor:
    return torch.rand(rows, nodes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def shape_for(drafter: Any, name: str) -> Shape:
    """A shape by name; where a family cannot fill it, it says so, and the test has nothing to ask."""
    try:
        check_shape(SHAPES[name], deepest=drafter.deepest, columns=drafter.columns, trees=drafter.trees, name="it")
    except SpectrainError:
        assert not drafter.trees or drafter.deepest is not None or drafter.columns is not None
        pytest.skip("this family does not fill this shape")
    return SHAPES[name]


def proposed(drafter: Any, state: Any, sampler: Sampler, shape: Shape, limits: list[int], seed: int = 0,
             rows: Any = None) -> Proposal:  # fmt: skip
    """``rows``: which of the three requests' uniforms these are."""
    uniforms_BN = drawn_uniforms(3, shape.nodes, seed)[rows if rows is not None else range(len(limits))]
    return drafter.propose(state, sampler, shape, limits, uniforms_BN)


def parents_of(proposal: Proposal, row: int) -> list[int]:
    if proposal.parents_BN is None:
        return list(range(-1, proposal.tokens_BN.shape[1] - 1))
    return proposal.parents_BN[row].tolist()


def counted(proposal: Proposal, row: int, limit: int | None = None) -> list[int]:
    """Nodes of a request that are there, no deeper than its limit."""
    parents, depths, found = parents_of(proposal, row), {-1: 0}, []
    for node in range(len(parents) if proposal.counts is None else proposal.counts[row]):
        if parents[node] != ABSENT:
            depths[node] = depths[parents[node]] + 1
            if limit is None or depths[node] <= limit:
                found.append(node)
    return found


def depth_of(parents: list[int], node: int) -> int:
    return 0 if node < 0 else 1 + depth_of(parents, parents[node])


def law_after(proposal: Proposal, row: int, parent: int) -> Tensor | None:
    """The law that the children of a node were drawn from."""
    if proposal.q is None:
        return None
    return proposal.q[row, parent + 1]  # of a chain row n is token n's, whose parent is n - 1


def part_of(proposal: Proposal, row: int, limit: int) -> list[tuple[Any, ...]]:
    """All that counts of one request: its nodes in order, each with its parent's place among them and its law."""
    nodes, parents = counted(proposal, row, limit), parents_of(proposal, row)
    place = {-1: -1, **{node: i for i, node in enumerate(nodes)}}
    return [
        (int(proposal.tokens_BN[row, node]), place[parents[node]], law_after(proposal, row, parents[node]))
        for node in nodes
    ]


def same_part(got: list[tuple[Any, ...]], want: list[tuple[Any, ...]]) -> None:
    assert [part[:2] for part in got] == [part[:2] for part in want]
    for (*_, one), (*_, other) in zip(got, want, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=Sampler.describe)
@pytest.mark.parametrize("name", SHAPES)
def test_a_proposal_is_well_formed(drafter, target, tools, name, sampler):
    shape = shape_for(drafter, name)
    proposal = proposed(drafter, tools.observed(drafter, target, TEXTS), sampler, shape, [9, 9, 9])
    B, N = proposal.tokens_BN.shape
    assert B == 3
    assert shape.nodes >= N
    assert proposal.tokens_BN.dtype == torch.long
    assert (proposal.parents_BN is None) == (isinstance(shape, Chain) or not N)
    assert proposal.counts is None or all(0 <= count <= N for count in proposal.counts)
    for row in range(B):
        parents, nodes = parents_of(proposal, row), counted(proposal, row)
        assert all(ABSENT <= parent < node for node, parent in enumerate(parents)), "a parent comes after its child"
        assert all(parents[node] in (-1, *nodes) for node in nodes), "a child of a node that is not there"
        depths = [depth_of(parents, node) for node in nodes]
        assert depths == sorted(depths), "not level by level"
        assert max(depths, default=0) <= shape.depth
        assert all(0 <= int(proposal.tokens_BN[row, node]) < target.tokenizer_size for node in nodes)
        if getattr(shape, "children", None) != "independent" or proposal.q is None:
            children = [(parents[node], int(proposal.tokens_BN[row, node])) for node in nodes]
            assert len(set(children)) == len(children), "a token twice among siblings"


def says_that_it_chose(drafter: Any, state: Any, sampler: Sampler, shape: Shape) -> None:
    """Tokens without a law are verified as point masses: that is exact only where no uniform picks them."""
    limits = [shape.depth] * 3
    first = proposed(drafter, state, sampler, shape, limits)
    for seed in range(1, 6):
        again = proposed(drafter, state, sampler, shape, limits, seed)
        assert torch.equal(again.tokens_BN, first.tokens_BN), (
            "it gives no q, which says that its tokens were chosen, but they change with the uniforms: state the law"
        )


@pytest.mark.parametrize("sampler", SAMPLERS, ids=Sampler.describe)
@pytest.mark.parametrize("name", SHAPES)
def test_there_is_a_law_exactly_where_tokens_were_drawn(drafter, target, tools, name, sampler):
    shape = shape_for(drafter, name)
    proposal = proposed(drafter, tools.observed(drafter, target, TEXTS), sampler, shape, [9, 9, 9])
    chosen = sampler.greedy or isinstance(shape, DynamicTree) or getattr(shape, "children", "") == "chosen"
    if chosen:
        assert proposal.q is None, "tokens were to be chosen here, and a law of tokens that were chosen is none"
        return
    if proposal.q is None:
        assert not isinstance(drafter, GrowingDrafter), "it draws its tokens, so its proposal has to state the law q"
        says_that_it_chose(drafter, tools.observed(drafter, target, TEXTS), sampler, shape)
        return
    assert proposal.q.shape == (3, proposal.tokens_BN.shape[1] + (not isinstance(shape, Chain)), target.vocab_size)
    for row in range(3):
        for node in counted(proposal, row):
            law_V = law_after(proposal, row, parents_of(proposal, row)[node])
            assert law_V is not None
            assert (law_V >= 0).all()
            assert float(law_V.double().sum()) == pytest.approx(1, abs=1e-6), "q is no law: it does not add up to 1"
            assert law_V[proposal.tokens_BN[row, node]] > 0, "a token that its law does not have"
            assert not law_V[target.tokenizer_size :].any(), "an id that does not exist"
            if sampler.top_k:
                assert (law_V > 0).sum() <= sampler.top_k


@pytest.mark.parametrize("name", ["distinct", "independent"])
def test_where_nothing_is_left_to_draw_a_node_is_absent(drafter, target, tools, name):
    """Of a law of one token a second child cannot differ, and what would hang from it is not there either."""
    shape = shape_for(drafter, name)
    proposal = proposed(drafter, tools.observed(drafter, target, TEXTS), Sampler(1.0, top_k=1), shape, [9, 9, 9])
    assert isinstance(shape, StaticTree)
    for row in range(3):
        if proposal.q is None:  # nothing is drawn
            break
        there = [shape.paths[node] for node in counted(proposal, row)]
        if name == "independent":
            assert there == list(shape.paths)
            assert len({int(proposal.tokens_BN[row, node]) for node in range(3)}) == 1
        else:
            assert there == [path for path in shape.paths if not any(path)]


@pytest.mark.parametrize("sampler", [SAMPLERS[0], SAMPLERS[1]], ids=Sampler.describe)
@pytest.mark.parametrize("name", SHAPES)
def test_a_request_does_not_hear_of_its_companions(drafter, target, tools, name, sampler):
    """Nor of how far they may go: each has limits of its own."""
    shape = shape_for(drafter, name)
    for limits in ([9, 9, 9], [2, 4, 1], [0, 1, 3]):
        together = proposed(drafter, tools.observed(drafter, target, TEXTS), sampler, shape, limits)
        for row, limit in enumerate(limits):
            if limit:
                state = tools.observed(drafter, target, [TEXTS[row]])
                alone = proposed(drafter, state, sampler, shape, [limit], rows=[row])
                same_part(part_of(together, row, limit), part_of(alone, 0, limit))


@pytest.mark.parametrize("sampler", [SAMPLERS[0], SAMPLERS[1]], ids=Sampler.describe)
@pytest.mark.parametrize("name", SHAPES)
def test_nothing_is_deeper_than_the_furthest_limit(drafter, target, tools, name, sampler):
    shape = shape_for(drafter, name)
    for furthest in (1, 2, 3):
        state = tools.observed(drafter, target, TEXTS)
        proposal = proposed(drafter, state, sampler, shape, [0, furthest, 1])
        for row in range(3):
            parents = parents_of(proposal, row)
            deepest = max((depth_of(parents, node) for node in counted(proposal, row)), default=0)
            assert deepest <= furthest, f"a node at depth {deepest}, but no request needs more than {furthest}: limits"


@pytest.mark.parametrize("name", ["one", "chain", "distinct", "chosen"])
def test_what_may_go_further_begins_alike(drafter, target, tools, name):
    """A limit cuts what is given in advance; a dynamic tree spends its nodes elsewhere."""
    shape = shape_for(drafter, name)
    whole = proposed(drafter, tools.observed(drafter, target, TEXTS), Sampler(1.0), shape, [9, 9, 9])
    for limit in (1, 2, 3):
        part = proposed(drafter, tools.observed(drafter, target, TEXTS), Sampler(1.0), shape, [limit] * 3)
        for row in range(3):
            if not isinstance(drafter, GrowingDrafter) and not isinstance(shape, Chain):
                continue  # who looks text up has room for other paths then
            same_part(part_of(part, row, limit), part_of(whole, row, limit))


@pytest.mark.parametrize("name", SHAPES)
def test_proposing_twice_gives_the_same_and_leaves_nothing_behind(drafter, target, tools, name):
    shape = shape_for(drafter, name)
    state = tools.observed(drafter, target, TEXTS)
    first = proposed(drafter, state, Sampler(1.0), shape, [9, 9, 9])
    other = drafter.propose(state, Sampler(2.0), Chain(2), [2, 2, 2], drawn_uniforms(3, 2, seed=7))
    assert other.tokens_BN.shape[0] == 3
    again = proposed(drafter, state, Sampler(1.0), shape, [9, 9, 9])
    for row in range(3):
        same_part(part_of(again, row, 9), part_of(first, row, 9))


def rounds_told(drafter: Any, target: Any, tools: Any, cuts: list[list[int]], between: list[Shape]) -> Any:
    """A state after rounds that committed up to each cut of every request, with something proposed before each."""
    state = drafter.start([text[0] for text in WHOLE])
    starts = [1] * 3
    for number, stops in enumerate([*cuts, [len(text) for text in WHOLE]]):
        drafter.observe(state, tools.told(target, WHOLE, starts, stops))
        starts = stops
        if number < len(cuts):
            shape = between[number % len(between)]
            proposed(drafter, state, SAMPLERS[number % 3], shape, [9, 9, 9], seed=number)
    return state


@pytest.mark.parametrize(
    "cuts",
    [
        [[14, 7, 2]],
        [[14, 7, 2], [15, 9, 3], [18, 10, 4]],
        [[2, 2, 2], [9, 3, 3], [10, 4, 4], [13, 8, 5], [19, 12, 7]],
        [[5 + i, 3 + i, 2 + i] for i in range(6)],
    ],
    ids=["one", "few", "ragged", "single"],
)
def test_any_rounds_leave_the_state_of_a_fresh_drafter(drafter, target, tools, cuts):
    """Case C22: whatever was drafted, accepted or rejected between, of whatever shape."""
    between = [
        s for n, s in SHAPES.items() if n in ("chain", "distinct", "dynamic") and (drafter.trees or n == "chain")
    ]
    state = rounds_told(drafter, target, tools, cuts, between)
    fresh = tools.observed(drafter, target, WHOLE)
    for shape in between:
        for sampler in SAMPLERS[:2]:
            got = proposed(drafter, state, sampler, shape, [9, 9, 9], seed=5)
            want = proposed(drafter, fresh, sampler, shape, [9, 9, 9], seed=5)
            for row in range(3):
                same_part(part_of(got, row, 9), part_of(want, row, 9))
    assert drafter.memory(state) == drafter.memory(fresh)


@pytest.mark.parametrize("sampler", SAMPLERS[:2], ids=Sampler.describe)
@pytest.mark.parametrize("taken", [1, 2, 3])
def test_a_draft_that_was_accepted_is_as_good_as_one_that_was_not(drafter, target, tools, sampler, taken):
    """The tokens that were committed may be those that were drafted, last or before that: they are told again, with the
    target's states."""

    def two_drafts() -> tuple[Any, list[Proposal]]:
        state = tools.observed(drafter, target, TEXTS)
        return state, [proposed(drafter, state, sampler, Chain(3), [9, 9, 9], seed) for seed in (0, 1)]

    for number in (0, 1):
        state, drafts = two_drafts()
        draft = drafts[number]
        counts = draft.counts or [draft.tokens_BN.shape[1]] * 3
        kept = [draft.tokens_BN[row, : min(taken, counts[row])].tolist() for row in range(3)]
        whole = [[*text, *tokens, 11] for text, tokens in zip(TEXTS, kept, strict=True)]
        drafter.observe(state, tools.told(target, whole, [len(t) for t in TEXTS], [len(w) for w in whole]))
        got = proposed(drafter, state, sampler, Chain(3), [9, 9, 9], seed=3)
        want = proposed(drafter, tools.observed(drafter, target, whole), sampler, Chain(3), [9, 9, 9], seed=3)
        for row in range(3):
            same_part(part_of(got, row, 9), part_of(want, row, 9))


@pytest.mark.parametrize("rows", [[0], [1], [2], [0, 2], [2, 1]])
@pytest.mark.parametrize("name", ["chain", "distinct", "dynamic"])
def test_those_who_stay_go_on_as_before(drafter, target, tools, rows, name):
    """Requests end between a proposal and what is told of it."""
    shape = shape_for(drafter, name)
    state = tools.observed(drafter, target, TEXTS)
    proposed(drafter, state, Sampler(1.0), shape, [9, 9, 9])
    drafter.select(state, rows)
    texts = [WHOLE[row][: len(TEXTS[row]) + 2 + row] for row in rows]
    drafter.observe(state, tools.told(target, texts, [len(TEXTS[row]) for row in rows], [len(text) for text in texts]))
    limits = [9] * len(rows)
    got = proposed(drafter, state, Sampler(1.0), shape, limits, seed=2)
    want = proposed(drafter, tools.observed(drafter, target, texts), Sampler(1.0), shape, limits, seed=2)
    assert len(got.tokens_BN) == len(rows)
    for row in range(len(rows)):
        same_part(part_of(got, row, 9), part_of(want, row, 9))


@pytest.mark.parametrize("sampler", SAMPLERS[:2], ids=Sampler.describe)
def test_what_was_committed_changes_what_is_proposed(drafter, target, tools, sampler):
    """Whatever a family reads of it. Else a state that stays as it began would pass for one that is kept right."""
    state = tools.observed(drafter, target, TEXTS)
    first = proposed(drafter, state, sampler, Chain(3), [3, 3, 3])
    drafter.observe(state, tools.told(target, WHOLE, [len(text) for text in TEXTS], [len(text) for text in WHOLE]))
    later = proposed(drafter, state, sampler, Chain(3), [3, 3, 3])
    same = [
        [part[:2] for part in part_of(first, row, 3)] == [part[:2] for part in part_of(later, row, 3)]
        for row in range(3)
    ]
    assert not all(same), "it proposes the same after another text: observe() does not take what was committed"


def test_a_state_has_its_memory_counted(drafter, target, tools):
    state = tools.observed(drafter, target, TEXTS)
    held = drafter.memory(state)
    assert isinstance(held, int)
    assert held >= 0
    drafter.select(state, [2])
    assert drafter.memory(state) <= held


# --- the law that is reported is the law that is drawn from ---------------------------------------------------------

GRID = 240


@pytest.fixture(params=FAMILY_NAMES.values(), ids=FAMILY_NAMES.keys())
def drawing(request, made, target, tools):
    """A drafter that draws, as its q says, and a state of as many copies of one request as the grid has points."""
    drafter = made(request.param)
    target.tap(drafter.tap_layers)
    return drafter, copies_for(drafter, target, tools)


def copies_for(drafter: Any, target: Any, tools: Any) -> Any:
    state = tools.observed(drafter, target, TEXTS[:1])
    drafter.select(state, [0] * GRID)
    proposal = drafter.propose(state, Sampler(1.0), Chain(1), [1] * GRID, drawn_uniforms(GRID, 1))
    if proposal.q is None:
        pytest.skip("this family chooses its tokens")
    return state


def grid_over(shape: Shape, node: int, seed: int) -> Tensor:
    """One draw of all uniforms for every copy, but of ``node`` the midpoints of an even grid."""
    uniforms_BN = drawn_uniforms(1, shape.nodes, seed).repeat(GRID, 1)
    uniforms_BN[:, node] = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    return uniforms_BN


def frequencies(proposal: Proposal, node: int, size: int) -> Tensor:
    return torch.bincount(proposal.tokens_BN[:, node], minlength=size) / GRID


def as_often(proposal: Proposal, node: int, law_V: Tensor) -> None:
    """Over the grid every token comes up as often as its law says, but for the ends of its interval."""
    assert (law_V > 0.02).sum() >= 2, "a point mass would show nothing"
    found_V = frequencies(proposal, node, len(law_V))
    worst = int((found_V - law_V).abs().argmax())
    assert abs(float(found_V[worst] - law_V[worst])) <= 1 / GRID + 1e-6, (
        f"q is not the law that tokens were drawn from: of node {node}, token {worst} came up with "
        f"{float(found_V[worst]):.3f}, q says {float(law_V[worst]):.3f}"
    )


def warm(drafter: Any, state: Any, **truncated: Any) -> Sampler:
    """A sampler at which a random drafter of this family is undecided along a whole path."""
    for temperature in (1.0, 3.0, 10.0, 30.0, 100.0):
        sampler = Sampler(temperature, **truncated)
        q_BMV = drafter.propose(state, sampler, Chain(3), [3] * GRID, drawn_uniforms(GRID, 3)).q
        if ((q_BMV > 0.03).sum(-1) >= 3).all():
            return sampler
    if not isinstance(drafter, GrowingDrafter) and (q_BMV.amax(-1) == 1).all():
        pytest.skip("this family states point masses")
    raise AssertionError("this drafter is nowhere undecided: nothing would show that q is what it draws from")


@pytest.mark.parametrize("truncated", [{}, {"top_k": 5, "top_p": 0.9}], ids=["whole", "truncated"])
def test_a_chains_law_is_the_law_that_is_sampled(drawing, truncated):
    drafter, state = drawing
    sampler = warm(drafter, state, **truncated)
    for node in range(3):
        proposal = drafter.propose(state, sampler, Chain(3), [3] * GRID, grid_over(Chain(3), node, seed=node))
        law_V = proposal.q[0, node]
        assert torch.allclose(proposal.q[:, node], law_V, atol=1e-6)
        as_often(proposal, node, law_V)


def drawn_tree(drafter: Any, children: Any = "distinct") -> StaticTree:
    if not drafter.trees:
        pytest.skip("this family proposes no trees")
    return StaticTree(PATHS, children)


@pytest.mark.parametrize("children", ["independent", "distinct"])
def test_a_trees_laws_are_the_laws_that_are_sampled(drawing, children):
    """Of a child drawn without replacement: the law without its elder siblings, renormalised."""
    drafter, state = drawing
    shape, sampler = drawn_tree(drafter, children), warm(*drawing)
    for node, parent in enumerate(shape.parents):
        proposal = drafter.propose(state, sampler, shape, [9] * GRID, grid_over(shape, node, seed=node))
        law_V = proposal.q[0, parent + 1].double().clone()
        assert torch.allclose(proposal.q[:, parent + 1].double(), law_V, atol=1e-6)
        if children == "distinct":
            elder = [n for n in range(node) if shape.parents[n] == parent]
            assert not (proposal.tokens_BN[:, elder] == proposal.tokens_BN[:, [node]]).any()
            law_V[proposal.tokens_BN[0, elder]] = 0
            law_V /= law_V.sum()
        as_often(proposal, node, law_V)


def test_a_node_depends_on_its_own_uniform_and_its_ancestors_and_elders(drawing):
    """So what a request draws does not change when another node's branch does."""
    drafter, state = drawing
    shape, sampler = drawn_tree(drafter), warm(*drawing)
    for node, path in enumerate(shape.paths):
        proposal = drafter.propose(state, sampler, shape, [9] * GRID, grid_over(shape, node, seed=3))
        for other, place in enumerate(shape.paths):
            hears = place[: len(path)] == path or (
                len(place) >= len(path) and place[: len(path) - 1] == path[:-1] and place[len(path) - 1] > path[-1]
            )
            if not hears:
                assert len(set(proposal.tokens_BN[:, other].tolist())) == 1, (path, place)
