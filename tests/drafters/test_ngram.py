"""Prompt lookup: the longest suffix, its latest earlier place, and what followed it there."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from spectrain.drafters.ngram import NgramConfig, NgramDrafter
from spectrain.exact.sampler import Sampler
from spectrain.target import Features

NOTHING = Features(torch.empty(1, 0, 8), torch.empty(1, 0, 0))
UNIFORMS = torch.zeros(64, dtype=torch.float64)


def proposed(ids, length=4, *, longest=8, shortest=1, chunks=None, sampler=Sampler(1.0)):  # noqa: B008 (frozen)
    """What is proposed after ``ids``, observed at once or in chunks that end at these places."""
    drafter = NgramDrafter(NgramConfig(longest=longest, shortest=shortest))
    state = drafter.start()
    ends = [*(chunks or []), len(ids)]
    for start, stop in zip([0, *ends[:-1]], ends, strict=True):
        drafter.observe(state, ids[start:stop], NOTHING)
        if stop < len(ids):
            drafter.propose(state, sampler, length, UNIFORMS)  # whatever was proposed before is forgotten
    proposal = drafter.propose(state, sampler, length, UNIFORMS)
    assert proposal.q_KV is None
    assert proposal.tokens_K.dtype == torch.long
    return proposal.tokens_K.tolist()


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
    assert proposed([], 4) == []


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
    one, two = drafter.start(), drafter.start()
    drafter.observe(one, [1, 2, 3, 1], NOTHING)
    drafter.observe(two, [7, 1], NOTHING)
    assert drafter.propose(two, Sampler(), 3, UNIFORMS).tokens_K.tolist() == []
    assert drafter.propose(one, Sampler(), 3, UNIFORMS).tokens_K.tolist() == [2, 3, 1]


def test_proposing_changes_nothing():
    drafter = NgramDrafter(NgramConfig())
    state = drafter.start()
    drafter.observe(state, [1, 2, 3, 1, 2], NOTHING)
    first, second = (drafter.propose(state, Sampler(), 4, UNIFORMS).tokens_K.tolist() for _ in range(2))
    assert first == second == [3, 1, 2, 3]
    assert state.ids == [1, 2, 3, 1, 2]


def test_settings():
    assert not NgramConfig().trainable
    assert NgramConfig.model_validate({"type": "ngram", "longest": 3}).longest == 3
    with pytest.raises(ValidationError, match="shortest suffix 5 is longer than the longest, 4"):
        NgramConfig(longest=4, shortest=5)
    for bad in ({"longest": 0}, {"shortest": 0}, {"longst": 3}):
        with pytest.raises(ValidationError):
            NgramConfig.model_validate(bad)
