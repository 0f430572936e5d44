"""Prompt lookup: the longest suffix, its latest earlier place, and what followed it there."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from spectrain.drafters.base import Committed
from spectrain.drafters.ngram import NgramConfig, NgramDrafter
from spectrain.exact.sampler import Sampler
from spectrain.shapes import Chain
from spectrain.target import Features

NOTHING = Features(torch.empty(1, 0, 8), torch.empty(1, 0, 0))


def observe(drafter, state, *rows):
    """Tokens of every request that were just committed."""
    width = max(map(len, rows))
    padded = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    drafter.observe(state, Committed([list(row) for row in rows], padded, NOTHING))


def propose(drafter, state, length, limits=None, sampler=Sampler(1.0)):  # noqa: B008 (frozen)
    """What is proposed to every request."""
    uniforms_BN = torch.zeros(len(state), length, dtype=torch.float64)
    proposal = drafter.propose(state, sampler, Chain(length), limits or [99] * len(state), uniforms_BN)
    assert proposal.q is None
    assert proposal.parents_BN is None
    assert proposal.tokens_BN.dtype == torch.long
    return [tokens[:count] for tokens, count in zip(proposal.tokens_BN.tolist(), proposal.counts, strict=True)]


def proposed(ids, length=4, *, longest=8, shortest=1, chunks=None, sampler=Sampler(1.0)):  # noqa: B008 (frozen)
    """What is proposed after ``ids``, observed at once or in chunks that end at these places."""
    drafter = NgramDrafter(NgramConfig(longest=longest, shortest=shortest))
    state = drafter.start(ids[:1])
    for start, stop in pairwise(sorted({1, *(chunks or []), len(ids)})):
        observe(drafter, state, ids[start:stop])
        if stop < len(ids):
            propose(drafter, state, length)  # whatever was proposed before is forgotten
    (tokens,) = propose(drafter, state, length, sampler=sampler)
    return tokens


def reference(ids, length, longest, shortest):
    """By comparing every suffix with every earlier place, longest first and latest first."""
    for n in range(min(longest, len(ids) - 1), shortest - 1, -1):
        for end in range(len(ids) - 1, n - 1, -1):
            if ids[end - n : end] == ids[-n:]:
                text = list(ids)
                while len(text) < end + length:
                    text.append(text[end + len(text) - len(ids)])
                return text[end : end + length]
    return []


@given(
    ids=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    length=st.integers(1, 12),
    longest=st.integers(1, 6),
    data=st.data(),
)
@settings(max_examples=400, deadline=None)
def test_it_proposes_what_the_naive_search_finds(ids, length, longest, data):
    shortest = data.draw(st.integers(1, longest))
    chunks = sorted(data.draw(st.sets(st.integers(1, max(1, len(ids) - 1)), max_size=4)) - {len(ids)})
    got = proposed(ids, length, longest=longest, shortest=shortest, chunks=chunks)
    assert got == reference(ids, length, longest, shortest)


def test_the_longest_suffix_wins_over_a_later_shorter_one():
    #       1 2 3 -> 7 at the start; only 3 -> 9 later
    assert proposed([1, 2, 3, 7, 5, 3, 9, 1, 2, 3], 2) == [7, 5]


def test_of_equally_long_matches_the_latest_wins():
    assert proposed([2, 3, 7, 2, 3, 8, 2, 3], 1) == [8]


def test_no_match_is_no_proposal():
    assert proposed([1, 2, 3, 4]) == []
    assert proposed([1]) == []


def test_the_suffix_itself_is_no_match():
    assert proposed([5, 6, 7], 3) == []


@pytest.mark.parametrize(
    ("ids", "want"),
    [
        ([4, 4], [4, 4, 4, 4, 4, 4]),  # one token repeated
        ([9, 1, 2, 1, 2], [1, 2, 1, 2, 1, 2]),  # a period of two
        ([8, 1, 2, 3, 1, 2, 3, 1], [2, 3, 1, 2, 3, 1]),  # a period of three, in the middle of it
    ],
)
def test_a_match_that_runs_into_the_end_goes_on_through_the_proposal(ids, want):
    assert proposed(ids, 6) == want


def test_a_long_suffix_is_matched_by_its_last_tokens_only():
    ids = [1, 2, 3, 9, 5, 2, 3, 8, 1, 2, 3]
    assert proposed(ids, 1, longest=3) == [9]
    assert proposed(ids, 1, longest=2) == [8]


def test_matches_shorter_than_wanted_are_not_used():
    ids = [1, 2, 9, 3, 1, 2]
    assert proposed(ids, 1, shortest=2) == [9]
    assert proposed(ids, 1, shortest=3, longest=4) == []


@pytest.mark.parametrize("length", [1, 2, 3, 17])
def test_it_proposes_as_many_as_asked(length):
    assert proposed([1, 2, 3, 1, 2], length) == ([3, 1, 2] * 6)[:length]


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(0.5), Sampler(1.0, top_k=1)], ids=Sampler.describe)
def test_the_sampler_does_not_matter(sampler):
    assert proposed([1, 2, 3, 1, 2], 4, sampler=sampler) == [3, 1, 2, 3]


def test_requests_do_not_see_each_other():
    drafter = NgramDrafter(NgramConfig())
    state = drafter.start([1, 7, 5])
    observe(drafter, state, [2, 3, 1], [1], [5, 5, 5, 5])
    assert propose(drafter, state, 3) == [[2, 3, 1], [], [5, 5, 5]]
    assert propose(drafter, state, 3, [9, 9, 2]) == [[2, 3, 1], [], [5, 5]]
    drafter.select(state, [2, 0])
    assert propose(drafter, state, 3, [1, 2]) == [[5], [2, 3]]


def test_proposing_changes_nothing():
    drafter = NgramDrafter(NgramConfig())
    state = drafter.start([1])
    observe(drafter, state, [2, 3, 1, 2])
    assert propose(drafter, state, 4) == propose(drafter, state, 4) == [[3, 1, 2, 3]]
    assert state[0].ids == [1, 2, 3, 1, 2]


def test_settings():
    assert not NgramConfig().trainable
    assert NgramConfig.model_validate({"type": "ngram", "longest": 3}).longest == 3
    with pytest.raises(ValidationError, match="shortest suffix 5 is longer than the longest, 4"):
        NgramConfig(longest=4, shortest=5)
    for bad in ({"longest": 0}, {"shortest": 0}, {"longst": 3}):
        with pytest.raises(ValidationError):
            NgramConfig.model_validate(bad)
