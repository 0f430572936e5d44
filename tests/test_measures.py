import pytest

from spectrain.errors import SpectrainError
from spectrain.measures import RoundCounts, pooled_rate


def test_marginal_and_conditional_rates_are_different_columns():
    counts = RoundCounts.from_rounds([(4, 1, 2, None), (4, 4, 5, None), (4, 0, 1, None)])
    assert counts.survival == [2 / 3, 1 / 3, 1 / 3, 1 / 3]
    assert counts.conditional == [2 / 3, 1 / 2, 1.0, 1.0]
    assert counts.tokens_per_round == pytest.approx(2.667, abs=5e-4)
    assert counts.tokens_per_round == pytest.approx(1 + sum(counts.survival))
    assert counts.alpha == 5 / 7  # 5 accepted of 2 + 4 + 1 tested


def test_two_workers_pool_by_their_sums():
    first = RoundCounts.from_rounds([(5, 5, 6, None), (5, 3, 4, None)])
    second = RoundCounts.from_rounds([(5, 5, 6, None)] * 3 + [(5, 3, 4, None)])
    assert (first.accepted_tokens, first.proposed_tokens) == (8, 10)
    assert (second.accepted_tokens, second.proposed_tokens) == (18, 20)
    both = first + second
    assert (both.accepted_tokens, both.proposed_tokens) == (26, 30)
    assert both == second + first
    assert (first.rounds, second.rounds, both.rounds) == (2, 4, 6)
    assert sum([first, second], RoundCounts()) == both


def test_pooled_rates_are_no_means_of_rates():
    assert pooled_rate([100, 300], [1.0, 6.0]) == pytest.approx(57.14, abs=0.005)
    with pytest.raises(SpectrainError, match="tokens per second: found a denominator of 0"):
        pooled_rate([], [], "tokens per second")


def test_conditionals_count_only_rounds_that_proposed_a_token_there():
    # a drafter that proposes what it finds: 0, 1 or 3 tokens
    counts = RoundCounts.from_rounds([(0, 0, 1, None), (1, 1, 2, None), (3, 2, 3, None), (3, 0, 1, None)])
    assert counts.conditional == [2 / 3, 1.0, 0.0]
    assert counts.survival == [2 / 4, 1 / 4, 0.0]
    assert counts.tokens_per_round == 7 / 4 == 1 + sum(counts.survival)
    unseen = RoundCounts.from_rounds([(2, 0, 1, None)])
    assert unseen.conditional == [0.0, None]


def test_clipped_rounds_stand_apart():
    whole = RoundCounts.from_rounds([(3, 1, 2, None), (3, 3, 4, None)])
    counts = whole + RoundCounts.from_rounds([(3, 3, 2, "eos"), (3, 2, 1, "budget")])
    assert (counts.rounds, counts.whole.rounds) == (4, 2)
    assert counts.survival == whole.survival
    assert counts.conditional == whole.conditional
    assert counts.alpha == whole.alpha
    assert counts.whole == whole
    assert whole.tokens_per_round == 1 + sum(whole.survival)
    # what reached the output: 1 + 3 + 2 + 1 drafts, 2 + 4 + 2 + 1 tokens
    assert counts.accepted_tokens == 7
    assert counts.committed_tokens == 9
    assert counts.tokens_per_round == 9 / 4


def test_plain_decoding_commits_one_token_a_round():
    plain = RoundCounts.from_rounds([(0, 0, 1, None)] * 9 + [(0, 0, 1, "eos")])
    assert plain.tokens_per_round == 1.0
    assert plain.survival == plain.conditional == []
    with pytest.raises(SpectrainError, match="alpha: found a denominator of 0"):
        _ = plain.alpha


@pytest.mark.parametrize(
    "wrong",
    [
        (3, 4, 5, False),
        (3, -1, 0, False),
        (3, 1, 1, False),
        (3, 1, 3, False),
        (3, 1, 3, True),
        (3, 1, 0, True),
    ],
)
def test_rounds_that_contradict_themselves_are_refused(wrong):
    with pytest.raises(SpectrainError, match=f"proposed=3, accepted={wrong[1]}, committed={wrong[2]}"):
        RoundCounts().add(*wrong)


def test_rounds_are_counted_in_whole_numbers():
    with pytest.raises(SpectrainError, match="round counts: found -1"):
        RoundCounts.from_rounds([(5, -1, 3, None)])
    with pytest.raises(SpectrainError, match=r"round counts: found 2\.5"):
        RoundCounts.from_rounds([(5, 2.5, 3, None)])
