"""Shapes say what is wrong with them by the path (case C20); layouts say who sees whom in a tree (case C19)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import paths_of
from pydantic import TypeAdapter, ValidationError

from spectrain.errors import SpectrainError
from spectrain.shapes import (
    ABSENT,
    Chain,
    DynamicTree,
    Layout,
    Shape,
    StaticTree,
    check_shape,
)

FIXED = settings(deadline=None, derandomize=True)
CPU = torch.device("cpu")
MIXED = ((1, 0), (0,), (0, 1), (1,), (0, 0), (0, 1, 0), (2,))
"""Given in no order: a root with three children, of which the first two have two and one."""
C19 = (-1, 0, 0, 1, 1, 2)


def refused(paths, match):
    with pytest.raises(SpectrainError, match=match):
        StaticTree(paths)


# --- what is no tree ------------------------------------------------------------------------------------------------


def test_a_path_deeper_than_the_drafter_goes_is_refused_by_name():
    """Three heads and a path of four; where several are too deep, one of them."""
    tree = StaticTree(((0,), (0, 0), (0, 1), (0, 1, 0), (0, 1, 0, 0)))
    with pytest.raises(SpectrainError, match=r"tree path \[0, 1, 0, 0\] has depth 4, three heads drafts at most 3"):
        check_shape(tree, deepest=3, columns=None, trees=True, name="three heads")
    check_shape(tree, deepest=4, columns=None, trees=True, name="four heads")
    for shape, what in ((Chain(4), "k=4"), (DynamicTree(4, 2, 3), "dynamic tree of 3")):
        with pytest.raises(SpectrainError, match=rf"{what} has depth 4, three heads drafts at most 3"):
            check_shape(shape, deepest=3, columns=None, trees=True, name="three heads")


def test_a_rank_beyond_what_the_head_can_name_is_refused_by_name():
    tree = StaticTree(((0,), (1,), (1, 0), (1, 1), (1, 2)))
    with pytest.raises(SpectrainError, match=r"tree path \[1, 2\] is beyond the 2 tokens that a small head can"):
        check_shape(tree, deepest=None, columns=2, trees=True, name="a small head")
    check_shape(tree, deepest=None, columns=3, trees=True, name="a small head")
    with pytest.raises(SpectrainError, match=r"dynamic tree of 8 is beyond the 3 tokens"):
        check_shape(DynamicTree(2, 4, 8), deepest=None, columns=3, trees=True, name="a small head")
    check_shape(Chain(50), deepest=None, columns=1, trees=True, name="a small head")


def test_a_chain_maker_is_not_asked_for_trees():
    for shape, what in ((StaticTree(MIXED), "tree of 7"), (DynamicTree(), "dynamic tree of 16")):
        with pytest.raises(SpectrainError, match=rf"lookup proposes chains, not a {what}; ask it for a draft length k"):
            check_shape(shape, deepest=None, columns=None, trees=False, name="lookup")
    check_shape(Chain(9), deepest=None, columns=None, trees=False, name="lookup")


def test_a_path_without_its_parent_is_refused_by_name():
    refused(((0,), (0, 0, 0)), r"tree path \[0, 0, 0\]: its parent \[0, 0\] is not in the tree; add it")
    refused(((0, 0),), r"tree path \[0, 0\]: its parent \[0\] is not in the tree")


def test_a_path_without_its_elder_sibling_is_refused_by_name():
    refused(((0,), (2,)), r"tree path \[2\]: its elder sibling \[1\] is not in the tree")
    refused(((1,),), r"tree path \[1\]: its elder sibling \[0\] is not in the tree")
    refused(((0,), (0, 0), (0, 2)), r"tree path \[0, 2\]: its elder sibling \[0, 1\] is not in the tree")


def test_a_path_given_twice_is_refused_by_name():
    refused(((0,), (0, 0), (1,), (0, 0)), r"tree path \[0, 0\] is there twice")


@pytest.mark.parametrize("path", [(-1,), (0, -2), (0.0,), ("0",), (True,), (None,), ()])
def test_ranks_that_are_none_are_refused_by_path(path):
    refused(((0,), path), r"tree path \[.*\]: expected ranks of 0 or more, the most likely child is 0")


def test_a_tree_without_paths_is_refused():
    refused((), r"a static tree has no paths; expected at least \(\(0,\),\)")


@pytest.mark.parametrize("children", ["drawn", "", None, "Distinct"])
def test_children_of_an_unknown_kind_are_refused(children):
    with pytest.raises(SpectrainError, match="expected distinct, independent or chosen"):
        StaticTree(((0,),), children)


@pytest.mark.parametrize("length", [0, -1, 2.0, True, "5", None])
def test_a_chain_has_a_whole_length(length):
    with pytest.raises(SpectrainError, match=r"the draft length k is .*; expected a whole number from 1 to 4096"):
        Chain(length)


@pytest.mark.parametrize("name", ["depth", "top_k", "nodes"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True])
def test_a_dynamic_tree_has_whole_sizes(name, value):
    with pytest.raises(SpectrainError, match=rf"dynamic tree's {name} is .*; expected a whole number from 1 to 4096"):
        DynamicTree(**{name: value})


@pytest.mark.parametrize(
    ("depth", "top_k", "grown"), [(1, 4, 4), (2, 4, 4 + 16), (5, 4, 4 + 4 * 16), (3, 1, 3), (3, 2, 2 + 2 * 4)]
)
def test_a_dynamic_tree_keeps_no_more_than_it_grows(depth, top_k, grown):
    assert DynamicTree(depth, top_k, grown).nodes == grown
    with pytest.raises(SpectrainError, match=rf"depth {depth} and top_k {top_k} grows {grown} nodes, fewer than the "):
        DynamicTree(depth, top_k, grown + 1)


def test_recipes_give_the_same_shapes_and_the_same_errors():
    read = TypeAdapter(Shape).validate_python
    assert read({"length": 3}) == Chain(3)
    assert read({"paths": [[1], [0]], "children": "chosen"}) == StaticTree(((0,), (1,)), "chosen")
    assert read({"depth": 2, "top_k": 3, "nodes": 7}) == DynamicTree(2, 3, 7)
    with pytest.raises(ValidationError, match="lenght"):
        TypeAdapter(Chain).validate_python({"lenght": 3})


# --- what a shape is ------------------------------------------------------------------------------------------------


def test_nodes_are_numbered_level_by_level():
    tree = StaticTree(MIXED)
    assert tree.paths == ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 1, 0))
    assert tree.parents == (-1, -1, -1, 0, 0, 1, 4)
    assert tree.levels == (((-1, 3),), ((0, 2), (1, 1)), ((4, 1),))
    assert (tree.depth, tree.nodes, tree.widest) == (3, 7, 3)
    assert tree == StaticTree(tuple(reversed(MIXED)))
    assert hash(tree) == hash(StaticTree(tuple(reversed(MIXED))))
    assert (tree.describe(), Chain(5).describe(), DynamicTree().describe()) == (
        "tree of 7",
        "k=5",
        "dynamic tree of 16",
    )


def test_what_the_other_shapes_are():
    assert (Chain(5).depth, Chain(5).nodes, Chain(5).widest) == (5, 5, 1)
    tree = DynamicTree(3, 4, 9)
    assert (tree.depth, tree.nodes, tree.widest) == (3, 9, 4)


def test_steps_of_verification():
    """Chosen children: one a level. Drawn ones: every sibling on the way may be tested."""
    tree = StaticTree(MIXED)
    assert tree.steps(drawn=False) == 3
    assert tree.steps(drawn=True) == 4  # the first child of the root, then its two, then one


@st.composite
def trees(draw):
    """Paths of a tree in any order, made by giving random nodes one child more."""
    children: dict[tuple[int, ...], int] = {(): 0}
    for _ in range(draw(st.integers(1, 12))):
        parent = draw(st.sampled_from(sorted(children)))
        children[(*parent, children[parent])] = 0
        children[parent] += 1
    return draw(st.permutations([path for path in children if path]))


@FIXED
@given(trees())
def test_any_tree_is_read_back_from_its_numbers(paths):
    tree = StaticTree(tuple(paths))
    assert sorted(tree.paths) == sorted(paths)
    assert all(parent < node for node, parent in enumerate(tree.parents))
    depths = [len(path) for path in tree.paths]
    assert depths == sorted(depths)
    for node, path in enumerate(paths_of(tree.parents)):
        ranks = [tree.paths[n][-1] for n in path]
        assert tuple(ranks) == tree.paths[node]
        assert path[-1] == node
    counted = [pair for level in tree.levels for pair in level]
    assert counted == [(p, tree.parents.count(p)) for p in sorted(set(tree.parents))]
    assert tree.widest == max(count for _, count in counted)
    assert tree.steps(drawn=False) == tree.depth <= tree.steps(drawn=True)


# --- layouts --------------------------------------------------------------------------------------------------------


def ancestors(parents):
    """Of the pending token (row 0) and every node the rows it sees: itself and what it hangs from, by walking up."""
    found = [{0}]
    for node, parent in enumerate(parents):
        found.append({node + 1} | found[max(parent, -1) + 1])
    return found


def sees(layout, row=0):
    return [set(seen.nonzero()[:, 0].tolist()) for seen in layout.sees_BMX[row]]


def test_the_tree_of_the_case():
    """Depths 0, 1, 1, 2, 2, 2 below its first node; the pending token stands one above it."""
    layout = Layout.tree(torch.tensor([C19]), 3)
    assert (layout.depth_BX[0, 1:] - 1).tolist() == [0, 1, 1, 2, 2, 2]
    assert layout.depth_BX[0, 0] == 0
    assert sees(layout) == [{0}, {0, 1}, {0, 1, 2}, {0, 1, 3}, {0, 1, 2, 4}, {0, 1, 2, 5}, {0, 1, 3, 6}]
    assert (layout.rows, layout.earlier, layout.chain) == (7, 0, False)
    assert paths_of(C19) == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5]]


def test_one_after_another():
    layout = Layout.row(4, CPU)
    assert layout.depth_BX.tolist() == [[0, 1, 2, 3]]
    assert sees(layout) == [{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}]
    assert (layout.rows, layout.earlier, layout.chain) == (4, 0, True)
    as_tree = Layout.tree(torch.arange(-1, 2)[None], 3)
    assert torch.equal(as_tree.depth_BX, layout.depth_BX)
    assert torch.equal(as_tree.sees_BMX, layout.sees_BMX)


@st.composite
def forests(draw, batch=3):
    """Parents of a few rows with as many nodes each; some are absent, and some of those have children."""
    count = draw(st.integers(1, 10))
    return [[draw(st.integers(ABSENT, node - 1)) for node in range(count)] for _ in range(draw(st.integers(1, batch)))]


@FIXED
@given(forests(), st.integers(0, 3))
def test_a_node_sees_itself_and_what_it_hangs_from(rows, more):
    want = [ancestors(parents) for parents in rows]
    depth = max(len(seen) - 1 for row in want for seen in row)
    layout = Layout.tree(torch.tensor(rows), depth + more)
    for row, seen in enumerate(want):
        assert sees(layout, row) == seen
        assert layout.depth_BX[row].tolist() == [len(ids) - 1 for ids in seen]


@FIXED
@given(st.data())
def test_a_tree_grown_level_by_level_is_the_tree_at_once(data):
    """Of every row another tree with as many nodes a level. Its nodes are numbered level by level, as columns are."""
    draw = data.draw
    B, widths = draw(st.integers(1, 3)), draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    grown, start, above = [[] for _ in range(B)], 0, 1
    layout = Layout.row(1, CPU)
    for width in widths:
        picks = [[draw(st.integers(0, above - 1)) for _ in range(width)] for _ in range(B)]
        first = start - above  # the number of the level above's first node; -1 is the pending token
        for row, pick in zip(grown, picks, strict=True):
            row.extend(first + p for p in pick)
        layout = layout.below(torch.tensor(picks))
        start, above = start + width, width
        assert (layout.rows, layout.earlier) == (width, 1 + start - width)
        whole = Layout.tree(torch.tensor(grown), len(widths))
        assert torch.equal(layout.depth_BX.expand(B, -1), whole.depth_BX)
        assert torch.equal(layout.sees_BMX, whole.sees_BMX[:, -width:])
    assert layout.chain == (widths == [1] * len(widths))


@FIXED
@given(forests(), st.data())
def test_rows_see_what_is_committed_and_no_stale_column(rows, data):
    lengths = [data.draw(st.integers(0, 6)) for _ in rows]
    layout = Layout.tree(torch.tensor(rows), 10)
    columns = max(lengths) + layout.rows + data.draw(st.integers(0, 2))
    seen_BMC = layout.seen(torch.tensor(lengths), columns)
    assert seen_BMC.shape == (len(rows), layout.rows, columns)
    for b, (parents, length) in enumerate(zip(rows, lengths, strict=True)):
        for m, own in enumerate(ancestors(parents)):
            want = set(range(length)) | {length + column for column in own}
            assert set(seen_BMC[b, m].nonzero()[:, 0].tolist()) == want


def test_a_layout_of_one_row_is_for_all():
    layout = Layout.row(2, CPU)
    seen_BMC = layout.seen(torch.tensor([1, 3]), 5)
    assert seen_BMC.int().tolist() == [[[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]], [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]]
    deeper = layout.below(torch.tensor([[1, 1], [0, 1]]))
    assert deeper.sees_BMX.int().tolist() == [[[1, 1, 1, 0], [1, 1, 0, 1]], [[1, 0, 1, 0], [1, 1, 0, 1]]]
