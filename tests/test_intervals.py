import numpy as np
import pytest

from spectrain import intervals
from spectrain.errors import SpectrainError
from spectrain.intervals import ratio_interval, ratio_of_ratios_interval
from spectrain.measures import pooled_rate


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
    monkeypatch.setattr(intervals, "RESAMPLE_CELLS", 7 * 60)
    parts = ratio_interval(tokens, rounds, resamples=500)
    assert (parts.low, parts.high) == pytest.approx((whole.low, whole.high), rel=1e-12)


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
