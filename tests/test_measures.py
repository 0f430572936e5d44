import json

import numpy as np
import pytest
import torch

from spectrain import measures
from spectrain.errors import SpectrainError
from spectrain.measures import (
    RoundCounts,
    accepted_prefix_lengths,
    pooled_rate,
    ratio_interval,
    ratio_of_ratios_interval,
)

FLAGS = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1], [0, 1, 0, 0]])


def test_a_prefix_ends_at_the_first_rejection():
    assert accepted_prefix_lengths(FLAGS).tolist() == [1, 4, 0]
    assert accepted_prefix_lengths(FLAGS.bool()).tolist() == [1, 4, 0]
    assert accepted_prefix_lengths(torch.empty(2, 0)).tolist() == [0, 0]


def test_marginal_and_conditional_rates_are_different_columns():
    counts = RoundCounts.from_flags(FLAGS)
    assert counts.survival == [2 / 3, 1 / 3, 1 / 3, 1 / 3]
    assert counts.conditional == [2 / 3, 1 / 2, 1.0, 1.0]
    assert counts.tokens_per_round == pytest.approx(2.667, abs=5e-4)
    assert counts.tokens_per_round == pytest.approx(1 + sum(counts.survival))
    assert counts.accepted_histogram == [1, 1, 0, 0, 1]
    assert counts.alpha == 5 / 7  # 5 accepted of 2 + 4 + 1 tested
    assert counts.acceptance_rate == 5 / 12


def test_two_workers_pool_by_their_sums():
    first = RoundCounts.from_rounds([(5, 5, 6, None), (5, 3, 4, None)])
    second = RoundCounts.from_rounds([(5, 5, 6, None)] * 3 + [(5, 3, 4, None)])
    assert (first.accepted_tokens, first.proposed_tokens) == (8, 10)
    assert (second.accepted_tokens, second.proposed_tokens) == (18, 20)
    both = first + second
    assert both.acceptance_rate == 26 / 30
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


def test_shorter_rounds_of_flags_end_at_their_length():
    counts = RoundCounts.from_flags(FLAGS, torch.tensor([4, 2, 0]))
    assert counts == RoundCounts.from_rounds([(4, 1, 2, None), (2, 2, 3, None), (0, 0, 1, None)])


def test_clipped_rounds_stand_apart():
    whole = RoundCounts.from_rounds([(3, 1, 2, None), (3, 3, 4, None)])
    counts = whole + RoundCounts.from_rounds([(3, 3, 2, "eos"), (3, 2, 1, "budget")])
    assert (counts.rounds, counts.clipped_rounds) == (4, 2)
    assert counts.survival == whole.survival
    assert counts.conditional == whole.conditional
    assert counts.alpha == whole.alpha
    assert counts.accepted_histogram == whole.accepted_histogram
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


def test_json_and_back():
    counts = RoundCounts.from_rounds([(5, 2, 3, None), (5, 2, 3, None), (5, 5, 2, "eos"), (0, 0, 1, None)])
    rows = json.loads(json.dumps(counts.to_json()))
    assert rows == [[0, 0, 1, False, 1], [5, 2, 3, False, 2], [5, 5, 2, True, 1]]
    assert RoundCounts.from_json(rows) == counts
    with pytest.raises(SpectrainError, match="round: found"):
        RoundCounts.from_json([[1, 2, 3, False, 1]])
    with pytest.raises(SpectrainError, match="round counts: found -1"):
        RoundCounts.from_json([[1, 1, 2, False, -1]])
    with pytest.raises(SpectrainError, match=r"round counts: found 2\.5"):
        RoundCounts.from_rounds([(5, 2.5, 3, None)])


def conversations(count=60, seed=0):
    rng = np.random.default_rng(seed)
    rounds = rng.integers(5, 40, count)
    return rounds * rng.normal(2.5, 0.5, count), rounds


def test_an_interval_holds_the_pooled_value_and_is_repeatable():
    tokens, rounds = conversations()
    interval = ratio_interval(tokens, rounds)
    assert interval.value == pytest.approx(pooled_rate(tokens, rounds))
    assert interval.low < interval.value < interval.high
    assert interval == ratio_interval(tokens, rounds)
    assert interval != ratio_interval(tokens, rounds, seed=1)
    wide = ratio_interval(tokens, rounds, confidence=0.99)
    assert wide.low < interval.low
    assert wide.high > interval.high


def test_the_interval_has_the_width_of_the_delta_method():
    tokens, rounds = conversations(count=400, seed=1)
    ratio = tokens.sum() / rounds.sum()
    spread = np.std(tokens - ratio * rounds) / rounds.mean() / np.sqrt(len(rounds))
    interval = ratio_interval(tokens, rounds, resamples=4000)
    assert (interval.high - interval.low) / 2 == pytest.approx(1.96 * spread, rel=0.08)


def test_intervals_cover_the_truth_as_often_as_they_say():
    hits = 0
    for seed in range(200):
        tokens, rounds = conversations(count=50, seed=seed)
        interval = ratio_interval(tokens, rounds, resamples=400, seed=seed)
        hits += interval.low <= 2.5 <= interval.high
    assert 0.90 <= hits / 200 <= 0.99


def test_conversations_are_resampled_whole():
    """Copies inside a conversation add rounds, not evidence: the interval must not shrink."""
    tokens, rounds = conversations()
    once, copied = ratio_interval(tokens, rounds), ratio_interval(tokens * 10, rounds * 10)
    assert (copied.value, copied.low, copied.high) == pytest.approx((once.value, once.low, once.high))


def test_a_paired_speedup_cancels_what_the_conversations_share():
    rng = np.random.default_rng(2)
    tokens = rng.integers(20, 200, 40)
    plain_s = tokens * rng.lognormal(0.0, 1.0, 40)
    drafted_s = plain_s / 1.5
    exact = ratio_of_ratios_interval(tokens, drafted_s, tokens, plain_s)
    assert (exact.value, exact.low, exact.high) == pytest.approx((1.5, 1.5, 1.5))
    swapped = ratio_of_ratios_interval(tokens, plain_s, tokens, drafted_s)
    assert swapped.value == pytest.approx(1 / 1.5)
    alone = ratio_interval(tokens, drafted_s)
    assert alone.high / alone.low > 1.3


def test_small_parts_give_the_same_interval(monkeypatch):
    tokens, rounds = conversations()
    whole = ratio_interval(tokens, rounds, resamples=500)
    monkeypatch.setattr(measures, "RESAMPLE_CELLS", 7 * 60)
    assert ratio_interval(tokens, rounds, resamples=500) == whole


def test_resamples_without_a_denominator_are_left_out():
    interval = ratio_interval([0, 0, 2], [0, 0, 4])
    assert (interval.value, interval.low, interval.high) == (0.5, 0.5, 0.5)
    paired = ratio_of_ratios_interval([0, 0, 2], [0, 0, 4], [0, 0, 1], [0, 0, 4])
    assert (paired.value, paired.low, paired.high) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (([1.0], [1.0]), "at least 2 conversations"),
        (([1.0, 2.0], [1.0]), "one entry a conversation"),
        (([1.0, 2.0], [0.0, 0.0]), "sum above 0"),
        (([1.0, 2.0], [3.0, -1.0]), "denominators >= 0"),
        (([1.0, float("nan")], [1.0, 1.0]), "finite values"),
        (([1.0, 2.0], [1.0, 1.0], {"confidence": 95}), "between 0 and 1"),
        (([1.0, 2.0], [1.0, 1.0], {"resamples": 0}), "at least 1"),
    ],
)
def test_intervals_of_nothing_are_refused(arguments, complaint):
    values, options = arguments[:2], dict(*arguments[2:])
    with pytest.raises(SpectrainError, match=complaint):
        ratio_interval(*values, **options)


def test_both_sides_of_a_pair_need_the_same_conversations():
    with pytest.raises(SpectrainError, match="the same conversations on both sides"):
        ratio_of_ratios_interval([1, 2], [1, 1], [1, 2, 3], [1, 1, 1])
    with pytest.raises(SpectrainError, match="a base above 0"):
        ratio_of_ratios_interval([1, 2], [1, 1], [0, 0], [1, 1])
