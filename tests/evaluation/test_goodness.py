"""The chi-square test of places: its level, its power, and what many contenders at once do to it."""

import numpy as np
import pytest

from spectrain.errors import SpectrainError
from spectrain.evaluation.goodness import LEVEL, POWER, chi_square, detectable, distribution_block, holm, tail


def test_tails_from_tables():
    assert tail(3.841459, 1) == pytest.approx(0.05, rel=1e-5)
    assert tail(43.8202, 19) == pytest.approx(0.001, rel=1e-4)
    assert tail(0.0, 19) == 1.0
    # Noncentral with one degree of freedom is the square of a shifted normal: P(|Z + 3| >= 1.96).
    assert tail(3.841459, 1, 9.0) == pytest.approx(0.850838, abs=1e-5)
    assert tail(30.0, 19, 1e-12) == pytest.approx(tail(30.0, 19), rel=1e-9)


def test_chi_square_by_hand():
    statistic, p = chi_square([10, 20, 30, 40])
    assert statistic == pytest.approx(20.0)
    assert p == pytest.approx(0.00017, abs=1e-5)
    assert chi_square([5] * 20) == (0.0, 1.0)


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize("tokens", [60, 200, 5000])
def test_uniform_counts_are_called_different_less_often_than_the_level(tokens):
    """At few tokens too, where the law of the statistic is not yet the limit's."""
    bins_RX = np.random.default_rng(0).multinomial(tokens, [1 / 20] * 20, size=40_000)
    statistic_R = ((bins_RX - tokens / 20) ** 2).sum(1) / (tokens / 20)
    critical = 43.8202
    assert (statistic_R >= critical).mean() < 1.5 * LEVEL  # 60 of 40,000; the standard error is 0.16 of a level


@pytest.mark.parametrize("contenders", [1, 6])
@pytest.mark.parametrize("shape", ["spread", "one"])
def test_what_is_detectable_is_found_with_the_power_that_is_said(shape, contenders):
    """Spread over all bins is the hardest; all in one bin is found more often."""
    tokens, runs = 4000, 1500
    distance = detectable(tokens, 20, LEVEL / contenders)
    shift = np.full(20, distance / 10) if shape == "spread" else np.full(20, distance / 19)
    shift[1::2] *= -1 if shape == "spread" else 1
    if shape == "one":
        shift[:] = -distance / 19
        shift[0] = distance
    assert shift.sum() == pytest.approx(0)
    assert abs(shift).sum() / 2 == pytest.approx(distance)
    bins_RX = np.random.default_rng(1).multinomial(tokens, 1 / 20 + shift, size=runs)
    found = np.mean([chi_square(bins)[1] < LEVEL / contenders for bins in bins_RX.tolist()])
    if shape == "spread":
        assert found == pytest.approx(POWER, abs=0.025)  # three standard errors
    else:
        assert found > POWER


def test_the_block_of_several_contenders():
    flat, steep = [50] * 20, [90, 10] * 10
    exact, lossy = distribution_block([("plain", False, flat), ("eagle3 k=2 LOSSY typical", True, steep)])
    assert (exact["tokens"], exact["statistic"], exact["p_value"], exact["agrees"]) == (1000, 0.0, 1.0, True)
    assert (lossy["lossy"], lossy["agrees"], lossy["bins"]) == (True, False, steep)
    assert lossy["adjusted_p_value"] == 2 * lossy["p_value"]
    assert exact["detectable"] == lossy["detectable"] == detectable(1000, 20, LEVEL / 2)
    (alone,) = distribution_block([("plain", False, flat)])
    assert alone["detectable"] < exact["detectable"]  # the more are tested, the more each has to show
    (few,) = distribution_block([("plain", False, [1, 0])])
    assert few["detectable"] == 1.0
    assert distribution_block([]) == []


@pytest.mark.parametrize("bins", [[0] * 20, [3], [-1, 2]])
def test_counts_that_are_none_are_refused_by_name(bins):
    with pytest.raises(SpectrainError, match="'ngram k=2'"):
        distribution_block([("ngram k=2", False, bins)])
