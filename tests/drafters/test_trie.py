"""Continuations merged into a tree: shared beginnings, numbers level by level, room for so many nodes; and the
prompt-lookup drafter, whose matches of several suffixes make one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import paths_of

from spectrain.drafters.base import Committed
from spectrain.drafters.ngram import NgramConfig, NgramDrafter
from spectrain.drafters.trie import merged, point_masses
from spectrain.exact.sampler import Sampler
from spectrain.shapes import ABSENT, Chain, DynamicTree, StaticTree
from spectrain.target import Features

CPU = torch.device("cpu")
SMALL = DynamicTree(depth=3, top_k=3, nodes=6)
NOTHING = Features(torch.empty(1, 0, 4), torch.empty(1, 0, 0))


def test_equal_beginnings_are_shared_and_numbers_go_level_by_level():
    tokens, parents = merged([(5, 6, 7), (5, 8), (9, 6, 7), (5, 6, 4)], 16)
    assert tokens == [5, 9, 6, 8, 6, 7, 7, 4]
    assert parents == [-1, -1, 0, 0, 1, 2, 4, 2]


def test_the_first_paths_get_the_room():
    assert merged([(5, 6, 7), (9, 6), (5, 6, 4)], 4) == ([5, 9, 6, 7], [-1, -1, 0, 2])
    assert merged([(5, 6, 7), (9, 6)], 2) == ([5, 6], [-1, 0])
    assert merged([], 4) == merged([()], 4) == merged([(5,)], 0) == ([], [])


@given(
    paths=st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=8),
    nodes=st.integers(0, 40),
)
@settings(max_examples=200, deadline=None)
def test_every_tree_is_well_formed_and_holds_just_the_prefixes(paths, nodes):
    tokens, parents = merged(paths, nodes)
    prefixes = list(dict.fromkeys(tuple(path[:i]) for path in paths for i in range(1, len(path) + 1)))
    found = [tuple(tokens[node] for node in path) for path in paths_of(parents)]
    assert sorted(found) == sorted(prefixes[:nodes])
    assert [len(path) for path in found] == sorted(map(len, found))  # level by level
    assert len(set(zip(parents, tokens, strict=True))) == len(tokens)  # children are distinct
    assert all(parent < node for node, parent in enumerate(parents))


def test_a_batch_is_padded_with_absent_nodes():
    proposal = point_masses([[(1, 2), (1, 3)], [], [(4,)]], SMALL, CPU)
    assert proposal.q is None
    assert proposal.counts == [3, 0, 1]
    assert proposal.tokens_BN.tolist() == [[1, 2, 3], [0, 0, 0], [4, 0, 0]]
    assert proposal.parents_BN.tolist() == [[-1, 0, 0], [ABSENT] * 3, [-1, ABSENT, ABSENT]]


def test_a_chain_takes_the_best_path_alone():
    proposal = point_masses([[(1, 2), (3, 4, 5)], [], [(6,)]], Chain(3), CPU)
    assert proposal.parents_BN is None
    assert proposal.counts == [2, 0, 1]
    assert proposal.tokens_BN.tolist() == [[1, 2], [0, 0], [6, 0]]


@pytest.mark.parametrize("shape", [Chain(3), SMALL], ids=lambda shape: shape.describe())
def test_nothing_found_is_a_proposal_without_nodes(shape):
    proposal = point_masses([[], [()]], shape, CPU)
    assert proposal.tokens_BN.shape == (2, 0)
    assert proposal.tokens_BN.dtype == torch.long
    assert proposal.counts == [0, 0]


# --- prompt lookup as a tree ------------------------------------------------------------------------------------


def looked_up(ids, shape, *, limit=9, **config):
    drafter = NgramDrafter(NgramConfig(**config))
    state = drafter.start(ids[:1])
    if ids[1:]:
        drafter.observe(state, Committed([ids[1:]], torch.tensor([ids[1:]]), NOTHING))
    proposal = drafter.propose(state, Sampler(), shape, [limit], torch.zeros(1, shape.nodes))
    (tokens,), (parents,) = proposal.tokens_BN.tolist(), proposal.parents_BN.tolist()
    return {tuple(tokens[node] for node in path) for path in paths_of(parents)}, tokens


def test_shorter_suffixes_bring_their_own_continuations():
    #      2 3 -> 7 8 9, but the latest 3 alone -> 5 6 1
    ids = [2, 3, 7, 8, 9, 3, 5, 6, 1, 2, 3]
    found, _ = looked_up(ids, SMALL)
    assert found == {(7,), (7, 8), (7, 8, 9), (5,), (5, 6), (5, 6, 1)}


def test_the_longest_suffix_gets_the_room_first():
    ids = [2, 3, 7, 8, 9, 3, 5, 6, 1, 2, 3]
    found, _ = looked_up(ids, DynamicTree(depth=3, top_k=2, nodes=4))
    assert found == {(7,), (7, 8), (7, 8, 9), (5,)}


def test_matches_that_agree_are_one_path():
    found, tokens = looked_up([1, 2, 3, 1, 2, 3], SMALL)
    assert found == {(1,), (1, 2), (1, 2, 3)}
    assert len(tokens) == 3


def test_no_deeper_than_the_shape_or_the_limit():
    ids = [1, 2, 3, 1, 2, 3]
    assert looked_up(ids, StaticTree(((0,), (1,), (0, 0))))[0] == {(1,), (1, 2)}
    assert looked_up(ids, SMALL, limit=1)[0] == {(1,)}
    assert looked_up(ids, SMALL, limit=0)[0] == set()
    assert looked_up([1, 2, 3], SMALL)[0] == set()
