import pytest

from spectrain.errors import SpectrainError
from spectrain.exact.cost import (
    Choice,
    alpha_for_tokens,
    best_k,
    break_even_alpha,
    break_even_cost,
    break_even_tokens,
    by_length,
    expected_tokens,
    expected_tokens_from_survival,
    geometric_survival,
    interpolate,
    speedup,
)


@pytest.mark.parametrize(
    ("alpha", "k", "tokens"),
    [(0.7, 5, 2.94117), (0.8, 6, 3.951424), (0.0, 4, 1.0), (1.0, 4, 5.0), (0.3, 0, 1.0)],
)
def test_expected_tokens(alpha, k, tokens):
    assert expected_tokens(alpha, k) == pytest.approx(tokens, abs=1e-9)
    assert expected_tokens_from_survival(geometric_survival(alpha, k)) == expected_tokens(alpha, k)
    if alpha < 1:
        assert expected_tokens(alpha, k) == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha))


def test_speedup_of_a_good_and_a_bad_drafter():
    assert speedup(expected_tokens(0.8, 6), 6, 0.1) == pytest.approx(2.47, abs=0.005)
    assert speedup(expected_tokens(0.1, 6), 6, 0.1) == pytest.approx(0.69, abs=0.005)
    assert break_even_tokens(6, 0.1) == pytest.approx(1.6)


def test_measured_verification_costs_replace_the_constant():
    v = [1.0, 1.6, 2.0, 1.5]
    assert speedup(2.0, 3, 0.1, v) == pytest.approx(2.0 / 1.8)
    with pytest.raises(SpectrainError, match="found 4 verification costs"):
        speedup(2.0, 4, 0.1, v)


def test_best_k_is_the_best_of_all_and_zero_means_off():
    survival = geometric_survival(0.8, 12)
    best = best_k(survival, 0.1)
    every = {k: speedup(expected_tokens(0.8, k), k, 0.1) for k in range(1, 13)}
    assert best.k == max(every, key=every.__getitem__) == 6
    assert best.speedup == pytest.approx(max(every.values()))
    assert best_k(geometric_survival(0.1, 12), 0.2) == Choice(0, 1.0)
    assert best_k([], 0.1) == Choice(0, 1.0)
    assert best_k([0.0], 1.0, 0.5) == Choice(0, 1.0)  # off is plain decoding, whatever a verification costs
    assert best_k([0.0], 0.0) == Choice(0, 1.0)  # a draft that costs nothing and gains nothing
    assert best_k([1.0, 1.0], 1.0, [1.0, 0.5, 0.25]).k == 1  # 2/1.5 and 3/2.25: the shortest of equals
    # two- and three-token forwards that are slower than four: the verification cost moves the best length
    assert best_k([0.8, 0.6, 0.5], 0.0, [1.0, 1.7, 2.1, 1.5]).k == 3


@pytest.mark.parametrize(("k", "c", "v"), [(1, 0.1, 1.0), (5, 0.2, 1.0), (3, 0.05, 1.8), (6, 0.1, 1.0)])
def test_break_even_alpha_is_where_the_speedup_is_one(k, c, v):
    alpha = break_even_alpha(k, c, v)
    assert alpha is not None
    assert speedup(expected_tokens(alpha, k), k, c, v) == pytest.approx(1.0, abs=1e-12)
    assert speedup(expected_tokens(alpha - 1e-6, k), k, c, v) < 1


def test_break_even_alpha_at_the_ends():
    assert break_even_alpha(1, 0.3) == pytest.approx(0.3)  # one proposal pays when α exceeds its cost
    assert break_even_alpha(4, 0.0) == 0.0
    assert break_even_alpha(2, 1.5) is None
    assert break_even_alpha(2, 0.0, 0.5) == 0.0  # a round that costs less than a plain step always pays


@pytest.mark.parametrize(("alpha", "k"), [(0.0, 3), (0.3, 1), (0.7, 5), (1.0, 4)])
def test_tokens_imply_the_alpha_they_came_from(alpha, k):
    assert alpha_for_tokens(expected_tokens(alpha, k), k) == pytest.approx(alpha, abs=1e-12)


def test_tokens_that_no_alpha_yields():
    assert alpha_for_tokens(5.1, 4) is None
    assert alpha_for_tokens(5.0 + 1e-14, 4) == 1.0
    assert alpha_for_tokens(5.0 + 1e-9, 4) is None
    with pytest.raises(SpectrainError, match=r"tokens per round: found 0\.9"):
        alpha_for_tokens(0.9, 4)


def test_break_even_cost_is_where_the_speedup_is_one():
    c = break_even_cost(2.4, 3, 1.5)
    assert c == pytest.approx(0.3)
    assert speedup(2.4, 3, c, 1.5) == pytest.approx(1)
    assert break_even_cost(1.4, 3, 1.5) is None  # verification alone costs more
    assert break_even_cost(1.5, 3, 1.5) == 0.0
    assert break_even_cost(2.5, 3) == 0.5  # verification costs a plain step
    assert break_even_cost(1.5, 1, 1.25) == 0.25
    with pytest.raises(SpectrainError, match="k: found 0"):
        break_even_cost(1.4, 0)


def test_a_table_of_every_length():
    rows = by_length([0.8, 0.6, 0.5], 0.1, [1.0, 1.2, 1.4, 1.3])
    assert [row.k for row in rows] == [1, 2, 3]
    assert [row.tokens_per_round for row in rows] == pytest.approx([1.8, 2.4, 2.9])
    assert [row.round_cost for row in rows] == pytest.approx([1.3, 1.6, 1.6])
    assert [row.speedup for row in rows] == pytest.approx([1.8 / 1.3, 2.4 / 1.6, 2.9 / 1.6])
    assert by_length([0.8], 0.1)[0].round_cost == pytest.approx(1.1)
    assert rows[0].break_even_alpha == pytest.approx(0.3)
    assert rows[2].break_even_c == pytest.approx(1.6 / 3)


def test_costs_lie_between_those_measured():
    points = [(4.0, 2.0), (1.0, 1.0), (8.0, 6.0)]
    assert [interpolate(points, x) for x in (0, 1, 2.5, 4, 6, 8, 99)] == pytest.approx([1, 1, 1.5, 2, 4, 6, 6])


def test_impossible_numbers_are_refused():
    with pytest.raises(SpectrainError, match=r"alpha: found 1\.2"):
        expected_tokens(1.2, 3)
    with pytest.raises(SpectrainError, match=r"alpha: found -0\.2"):
        expected_tokens(-0.2, 3)
    with pytest.raises(SpectrainError, match="k: found -1"):
        expected_tokens(0.5, -1)
    with pytest.raises(SpectrainError, match="multiplied up"):
        expected_tokens_from_survival([0.5, 0.6])
    with pytest.raises(SpectrainError, match="survival"):
        expected_tokens_from_survival([1.1])
    with pytest.raises(SpectrainError, match="survival"):
        expected_tokens_from_survival([0.5, -0.1])
    for k, c, v in ((0, 0.0, 0.0), (-1, 0.1, 2.0), (2, -0.1, 1.0), (1, 0.0, float("nan"))):
        with pytest.raises(SpectrainError, match="round cost"):
            speedup(1.0, k, c, v)
    with pytest.raises(SpectrainError, match="v: found 2 verification costs"):
        break_even_tokens(-1, 0.1, [1.0, 2.0])
    assert break_even_tokens(0, 0.1, [1.5]) == 1.5
