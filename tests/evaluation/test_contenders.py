"""Contenders: every draft of every drafter once, under a name of its own, and refused before anything runs."""

import pytest
from pydantic import ValidationError

from spectrain.drafters.base import Drafter, DrafterConfig
from spectrain.errors import SpectrainError
from spectrain.evaluation.contenders import AcceptanceConfig, contenders, tree_names, unfillable
from spectrain.shapes import Chain, DynamicTree, StaticTree

SMALL, WIDE = StaticTree(((0,), (0, 0), (1,))), StaticTree(((0,), (1,), (2,), (0, 0)))
DYNAMIC = DynamicTree(3, 2, 8)


class Stub(Drafter):
    """A drafter that is only asked what it can do."""

    def __init__(self, *, trees=False, deepest=None, columns=None):
        self.config = DrafterConfig(type="stub")
        self.trees, self.deepest, self.columns = trees, deepest, columns

    start = observe = propose = select = None


def refusal(*arguments):
    with pytest.raises(SpectrainError) as error:
        contenders(*arguments)
    return str(error.value)


def test_every_draft_of_every_drafter_once():
    drafters = {"chains": Stub(), "both": Stub(trees=True)}
    found = contenders(drafters, (2, 1, 2), [SMALL, DYNAMIC], ["token", "block", "token", "typical_lossy"])
    assert [c.name for c in found] == [
        "plain",
        *(f"{name} k={k}{rule}" for name in ("chains",) for k in (1, 2) for rule in ("", " block", " LOSSY typical")),
        *(f"both k={k}{rule}" for k in (1, 2) for rule in ("", " block", " LOSSY typical")),
        "both tree of 3",
        "both dynamic tree of 8",
    ]
    assert [c.family for c in found] == ["plain", *["chains"] * 6, *["both"] * 8]
    assert [c.k for c in found[:3]] == [0, 1, 1]
    assert [c.k for c in found[-2:]] == [None, None]
    assert {c.verification for c in found if c.k is None} == {"token"}  # there is no other rule for trees
    assert [c.name for c in found if c.lossy] == [c.name for c in found if "LOSSY" in c.name]
    assert found[-1].drafter is drafters["both"]
    assert (found[0].shape, found[1].shape, found[-2].shape, found[-1].shape) == (None, Chain(1), SMALL, DYNAMIC)


def test_a_sample_says_all_of_its_contender():
    plain, chain, static, dynamic = contenders({"d": Stub(trees=True)}, (4,), [WIDE, DYNAMIC], ["block"])
    assert plain.described() == {
        "contender": "plain", "drafter": "plain", "k": 0, "shape": None, "verification": None, "lossy": False,
    }  # fmt: skip
    assert chain.described() == {
        "contender": "d k=4 block", "drafter": "d", "k": 4, "shape": {"type": "chain", "depth": 4, "nodes": 4},
        "verification": "block", "lossy": False,
    }  # fmt: skip
    paths = [[0], [1], [2], [0, 0]]
    static_shape = {"type": "static tree", "depth": 2, "nodes": 4, "paths": paths, "children": "distinct"}
    assert static.described()["shape"] == static_shape
    assert dynamic.described()["shape"] == {"type": "dynamic tree", "depth": 3, "nodes": 8, "top_k": 2}
    assert dynamic.described()["k"] is None


@pytest.mark.parametrize(
    ("trees", "names"),
    [
        ([SMALL, WIDE, DYNAMIC], ["tree of 3", "tree of 4", "dynamic tree of 8"]),
        (
            [DynamicTree(3, 2, 8), DynamicTree(4, 3, 8), SMALL],
            ["dynamic tree of 8 (depth 3, top 2)", "dynamic tree of 8 (depth 4, top 3)", "tree of 3"],
        ),
        (
            [SMALL, StaticTree(SMALL.paths, "chosen"), StaticTree(((0,), (1,), (2,)))],
            ["tree of 3 (depth 2, distinct)", "tree of 3 (depth 2, chosen)", "tree of 3 (depth 1, distinct)"],
        ),
        (
            [SMALL, StaticTree(((0,), (1,), (1, 0))), StaticTree(((0,), (1,), (2,)))],
            ["tree of 3 (depth 2, distinct) #1", "tree of 3 (depth 2, distinct) #2", "tree of 3 (depth 1, distinct)"],
        ),
    ],
)
def test_names_of_trees_are_as_short_as_they_can_be_and_never_the_same(trees, names):
    assert tree_names(trees) == names


def test_trees_need_a_drafter_that_fills_them():
    message = refusal({"chains": Stub()}, (3,), [SMALL])
    assert message == "tree of 3: found chains, expected a drafter that fills trees; leave it out"


def test_a_draft_that_a_drafter_cannot_fill_is_named():
    """Case C20."""
    deep = StaticTree(((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)))
    assert "tree path [0, 0, 0, 0] has depth 4" in refusal({"d": Stub(trees=True, deepest=3)}, (3,), [deep])
    assert "tree path [2] is beyond the 2 tokens" in refusal({"d": Stub(trees=True, columns=2)}, (3,), [WIDE])
    assert "k=5 has depth 5, d drafts at most 4" in refusal({"d": Stub(deepest=4)}, (3, 5))


def test_what_one_drafter_cannot_fill_is_left_out_where_that_is_asked_for():
    drafters = {"any": Stub(trees=True), "two": Stub(trees=True, deepest=2), "chains": Stub()}
    found = contenders(drafters, (2, 3), [SMALL, DYNAMIC], ["token", "block"], leave_out=True)
    assert [c.name for c in found if c.family == "two"] == ["two k=2", "two k=2 block", "two tree of 3"]
    assert [c.name for c in found if c.family == "chains"] == [
        f"chains k={k}{r}" for k in (2, 3) for r in ("", " block")
    ]
    assert len([c for c in found if c.family == "any"]) == 2 * 2 + 2
    notes = unfillable(drafters, (3, 2, 3), [SMALL, DYNAMIC])
    assert [(n.drafter, n.draft) for n in notes] == [
        ("two", "k=3"), ("two", "dynamic tree of 8"), ("chains", "tree of 3"), ("chains", "dynamic tree of 8"),
    ]  # fmt: skip
    assert str(notes[0]) == "two k=3 is left out: k=3 has depth 3, two drafts at most 2 tokens ahead"
    assert "k=3 has depth 3" in refusal(drafters, (2, 3))  # elsewhere every draft is asked of every drafter


@pytest.mark.parametrize(
    ("drafters", "message"),
    [
        ({"one": Stub(deepest=1), "two": Stub(deepest=2)}, "k=3 has depth 3, one drafts at most 1"),
        ({"any": Stub(), "one": Stub(deepest=1)}, "k=2 has depth 2, one drafts at most 1"),
    ],
    ids=["no drafter fills it", "the drafter fills none"],
)
def test_what_would_leave_nothing_is_refused(drafters, message):
    lengths = (1, 3) if "two" in drafters else (2, 3)
    with pytest.raises(SpectrainError, match=message):
        contenders(drafters, lengths, leave_out=True)


@pytest.mark.parametrize(
    ("trees", "message"),
    [
        ([{}], "expected a tree"),
        (["0;1"], "expected a tree"),
        ([{"paths": [[0]], "depth": 2}], "Unexpected keyword"),
        ([{"depth": 2, "children": "chosen"}], "paths"),
        ([{"paths": [[0], [1, 0]]}], r"tree path \[1, 0\]: its parent \[1\]"),
        ([{"depth": 2}, {"depth": 2, "top_k": 4}], "the same tree twice"),
        ([{"paths": [[0]]}, {"paths": [[0]], "children": "distinct"}], "the same tree twice"),
    ],
)
def test_a_tree_is_one_kind_or_the_other(trees, message):
    with pytest.raises(ValidationError, match=message):
        AcceptanceConfig(trees=trees)


def test_settings_come_back_from_their_json():
    config = AcceptanceConfig(trees=(WIDE, DYNAMIC), verification=("block", "typical_lossy"))
    assert AcceptanceConfig.model_validate(config.model_dump(mode="json")) == config
