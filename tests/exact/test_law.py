"""The rules in Fractions: lossless ones reproduce the target exactly, biased ones are caught."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from integrated import V, constant, tables

from spectrain.errors import SpectrainError
from spectrain.exact.law import (
    acceptance,
    as_law,
    chain_round,
    expected_accepted,
    first_token_law,
    normalised,
    point,
    resampled,
    residual,
    sequence_law,
    survival,
    target_law,
    total_variation,
)


@settings(max_examples=40, deadline=None)
@given(tables(5), tables(5), st.integers(0, 2), st.sampled_from(["q", "p", "argmax"]))
def test_whole_sequences_have_the_law_of_plain_decoding(p, q, k, drafter):
    proposals = {
        "q": q.__getitem__,
        "p": p.__getitem__,
        "argmax": lambda prefix: point(max(range(V), key=q[prefix].__getitem__), V),
    }
    length = 3  # a round that starts at length 2 may look two tokens further

    def round_at(prefix):
        return chain_round(p.__getitem__, proposals[drafter], k, prefix=prefix)

    assert sequence_law(round_at, length) == target_law(p.__getitem__, length)
    if drafter == "p":
        assert expected_accepted(round_at(())) == k


@settings(max_examples=60, deadline=None)
@given(tables(1), tables(1), st.integers(1, 4))
def test_independent_positions_accept_alpha_to_the_i(p, q, k):
    alpha = sum(map(min, p[()], q[()]))
    outcomes = chain_round(constant(p[()]), constant(q[()]), k)
    assert sum(outcomes.values()) == 1
    assert survival(outcomes, k) == [alpha**i for i in range(1, k + 1)]
    assert expected_accepted(outcomes) == sum(survival(outcomes, k))


def test_worked_example_and_the_repair_that_draws_from_p_again():
    p, q = as_law([".1", ".3", ".6"]), as_law([".4", ".4", ".2"])
    outcomes = chain_round(constant(p), constant(q), 1)
    accepted = [sum(w for x, w in outcomes.items() if len(x) == 2 and x[0] == j) for j in range(3)]
    repaired = [outcomes.get((j,), 0) for j in range(3)]
    assert accepted == [Fraction(1, 10), Fraction(3, 10), Fraction(2, 10)]
    assert repaired == [0, 0, Fraction(4, 10)]
    assert residual(p, q) == point(2, 3)
    assert first_token_law(outcomes, 3) == p

    wrong = first_token_law(chain_round(constant(p), constant(q), 1, repair=resampled), 3)
    assert wrong == as_law([".14", ".42", ".44"]) != p


def test_scoring_with_the_raw_law_of_a_truncated_draft_is_biased():
    p, raw = as_law([".5", ".25", ".25", "0"]), as_law([".4", ".3", ".2", ".1"])
    warped = as_law(["4/7", "3/7", "0", "0"])
    right = chain_round(constant(p), constant(warped), 1)
    assert first_token_law(right, 4) == p
    assert expected_accepted(right) == Fraction(3, 4)
    wrong = first_token_law(chain_round(constant(p), constant(warped), 1, scored=constant(raw)), 4)
    assert wrong == as_law(["13/21", "5/14", "1/42", "0"])


def test_an_argmax_draft_scored_with_its_softmax_is_biased():
    p, q = as_law([".4", ".35", ".25"]), as_law([".5", ".3", ".2"])
    choose = constant(point(0, 3))
    wrong = chain_round(constant(p), choose, 1, scored=constant(q))
    assert first_token_law(wrong, 3) == as_law([".8", ".1", ".1"])
    assert total_variation(wrong, chain_round(constant(p), choose, 1)) >= Fraction(2, 5)
    assert first_token_law(chain_round(constant(p), choose, 1), 3) == p


def test_a_chosen_token_is_accepted_with_its_target_probability():
    p = as_law([".51", ".49"])
    outcomes = chain_round(constant(p), constant(point(0, 2)), 1)
    assert expected_accepted(outcomes) == Fraction(51, 100)
    assert first_token_law(outcomes, 2) == p


def test_token_wise_verification_accepts_ten_ninths():
    p, q = as_law(["1/3", "2/3"]), as_law(["2/3", "1/3"])
    assert expected_accepted(chain_round(constant(p), constant(q), 2)) == Fraction(10, 9)


def test_acceptance_is_that_of_the_kernel_also_where_q_is_zero():
    half, quarter = Fraction(1, 2), Fraction(1, 4)
    cases = [(0, 0), (0, half), (half, 0), (quarter, half), (half, half), (half, quarter)]
    assert [acceptance(Fraction(p), Fraction(q)) for p, q in cases] == [0, 0, 1, half, 1, 1]


def test_sequences_by_hand():
    """Both sides of the proofs above come from `sequence_law`: it must not be wrong, or empty, on both alike."""
    laws = {(): as_law(["1/4", "3/4"]), (0,): as_law(["1/3", "2/3"]), (1,): as_law([1, 0])}
    assert target_law(laws.__getitem__, 2) == {
        (0, 0): Fraction(1, 12), (0, 1): Fraction(2, 12), (1, 0): Fraction(3, 4)
    }  # fmt: skip
    rounds = {
        (): {(0, 1, 1): Fraction(1, 2), (1,): Fraction(1, 2)},
        (1,): {(0,): Fraction(1, 3), (1, 0): Fraction(2, 3)},
    }
    assert sequence_law(rounds.__getitem__, 2) == {
        (0, 1): Fraction(1, 2), (1, 0): Fraction(1, 6), (1, 1): Fraction(1, 3)
    }  # fmt: skip
    assert sequence_law(rounds.__getitem__, 0) == {(): 1}


def test_nothing_left_to_repair_falls_back_to_p():
    p = as_law(["1/2", "1/2"])
    assert residual(p, p) == p
    assert all(chain_round(constant(p), constant(p), 2).values())  # and no repair is listed with a weight of 0


def test_laws_of_two_vocabularies_have_no_residual():
    with pytest.raises(ValueError, match="zip"):
        residual(point(0, 2), point(0, 3))


def test_total_variation():
    one, other = {(0,): Fraction(1)}, {(1, 1): Fraction(1)}
    assert total_variation(one, one) == 0
    assert total_variation(one, other) == 1


@pytest.mark.parametrize("weights", [["1/2", "1/3"], ["3/2", "-1/2"], []])
def test_only_laws_are_laws(weights):
    with pytest.raises(SpectrainError, match="law: found"):
        as_law(weights)


def test_zero_weights_cannot_be_normalised():
    with pytest.raises(SpectrainError, match="sum 0"):
        normalised([0, 0])
