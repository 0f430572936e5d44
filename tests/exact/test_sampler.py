"""The sampler against a plain-Python reference, and the inverse CDF against its exact breakpoints."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, ValidationError

from spectrain.errors import SpectrainError
from spectrain.exact.sampler import LOWEST_TEMPERATURE, Sampler, draw, forbid

INF = math.inf


def reference(logits, temperature, top_k=None, top_p=None):
    """The documented rule, token by token."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if temperature == 0:
        return [float(i == order[0]) for i in range(len(logits))]
    scaled = {i: logits[i] / temperature for i in order[:top_k]}
    weights = {i: math.exp(value - scaled[order[0]]) for i, value in scaled.items()}
    kept, before = {}, 0.0
    for i, weight in weights.items():
        if top_p is not None and top_p < 1 and kept and before >= top_p:
            break
        kept[i] = weight
        before += weight / sum(weights.values())
    return [kept.get(i, 0.0) / sum(kept.values()) for i in range(len(logits))]


# Few distinct values, so that ties are common; top_p values that no mass of such logits meets exactly.
logit_rows = st.lists(st.sampled_from([0.0, 0.5, 1.25, 2.0, -3.0, -INF]), min_size=1, max_size=9).filter(
    lambda row: max(row) > -INF
)


@settings(max_examples=300, deadline=None)
@given(
    logit_rows,
    st.sampled_from([0.0, 0.3, 1.0, 1.7, 2.0]),
    st.sampled_from([None, 1, 2, 3, 20]),
    st.sampled_from([None, 1e-9, 0.3001, 0.6003, 0.9007, 1.0]),
)
def test_probabilities_follow_the_documented_rule(logits, temperature, top_k, top_p):
    sampler = Sampler(temperature, top_k, top_p)
    expected = torch.tensor(reference(logits, temperature, top_k, top_p), dtype=torch.float64)
    exact = sampler.probabilities(torch.tensor(logits, dtype=torch.float64))
    torch.testing.assert_close(exact, expected, rtol=1e-12, atol=1e-14)
    assert torch.equal(exact == 0, expected == 0)
    torch.testing.assert_close(sampler.probabilities(torch.tensor(logits)), expected.float())


def test_greedy_is_one_hot_at_the_first_maximum():
    logits = torch.tensor([[0.0, 3.0, 3.0], [2.0, 2.0, 2.0], [-INF, -INF, -1.0]])
    expected = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    assert torch.equal(Sampler().probabilities(logits), expected)
    assert torch.equal(Sampler(0.0, top_k=2, top_p=0.1).probabilities(logits), expected)


def test_top_k_comes_before_top_p():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log()
    # Of the top 3, (4/9, 3/9, 2/9), the first two reach .75; of all four only three would.
    torch.testing.assert_close(
        Sampler(1.0, top_k=3, top_p=0.75).probabilities(logits),
        torch.tensor([4 / 7, 3 / 7, 0, 0], dtype=torch.float64),
    )


def test_temperature_comes_before_top_p():
    logits = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    cold = Sampler(0.5, top_p=0.6).probabilities(logits)  # squares: 25/38 alone reaches .6
    assert torch.equal(cold, torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64))


def test_top_k_keeps_the_lowest_ids_of_equals_whatever_their_number():
    logits = torch.zeros(3, 1000, dtype=torch.bfloat16)
    logits[:, 700] = 1.0
    kept = Sampler(1.0, top_k=10).probabilities(logits) > 0
    assert kept.sum(-1).tolist() == [10] * 3
    assert kept[0].nonzero().flatten().tolist() == [*range(9), 700]


def test_padded_logits_get_exactly_nothing_and_the_input_stays():
    logits = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    logits[..., 6:] = -INF
    before = logits.clone()
    for sampler in (
        Sampler(),
        Sampler(1.0),
        Sampler(0.7, 7),
        Sampler(0.7, 7, 0.99),
        Sampler(1.0, None, 0.999),
    ):
        rows = sampler.probabilities(logits)
        assert rows.shape == logits.shape
        assert rows.dtype == torch.float32
        assert (rows[..., 6:] == 0).all()
        torch.testing.assert_close(rows.sum(-1), torch.ones(2, 3))
    assert torch.equal(logits, before)


def test_top_p_of_one_keeps_the_whole_tail():
    logits = torch.tensor([0.0, -40.0, -80.0], dtype=torch.float64)
    assert (Sampler(1.0, top_p=1.0).probabilities(logits) > 0).all()


def test_no_top_p_keeps_the_whole_of_the_top_k():
    logits = torch.tensor([0.0, -40.0, -80.0], dtype=torch.float64)
    for top_p in (None, 1.0):
        assert (Sampler(1.0, 2, top_p).probabilities(logits) > 0).tolist() == [True, True, False]


def test_a_mass_that_is_reached_exactly_is_enough():
    assert Sampler(1.0, top_p=0.5).probabilities(torch.zeros(2)).tolist() == [1.0, 0.0]


def test_top_p_is_summed_in_float64():
    # The three before hold .3: as float32, a top_p that is a billionth above would be .3 as well.
    kept = Sampler(1.0, top_p=0.3 + 1e-9).probabilities(torch.zeros(10)) > 0
    assert kept.tolist() == [True] * 4 + [False] * 6


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(1.0), Sampler(0.7, 2), Sampler(1.0, None, 0.9)])
def test_laws_of_low_precision_are_float32(sampler):
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        law = sampler.probabilities(torch.tensor([0.0, 2.0, 1.0], dtype=dtype))
        assert law.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert law.sum().item() == pytest.approx(1, abs=1e-6)  # bfloat16 would miss it by more


def test_a_whole_number_and_its_float_are_written_as_one():
    assert repr(Sampler(1, 2, 1)) == repr(Sampler(1.0, 2, 1.0))
    assert Sampler(LOWEST_TEMPERATURE).temperature == 1e-5
    assert Sampler(1.0).top_p is None


def test_forbidden_tokens_have_no_law_where_they_are_forbidden():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]] * 2)
    before = logits.clone()
    banned = forbid(logits, torch.tensor([3, 1]), torch.tensor([True, False]))
    assert banned.tolist() == [[0.0, -INF, 2.0, -INF], [0.0, 1.0, 2.0, 3.0]]
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        (Sampler(), "greedy (T=0)"),
        (Sampler(0, top_k=5), "greedy (T=0)"),
        (Sampler(1), "T=1"),
        (Sampler(0.7, 50, 0.9), "T=0.7 top-k 50 top-p 0.9"),
    ],
)
def test_describe(sampler, words):
    assert sampler.describe() == words
    assert sampler.greedy == words.startswith("greedy")


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": INF},
        {"temperature": 1e-9},
        {"temperature": "hot"},
        {"temperature": True},
        {"top_k": 0},
        {"top_k": 2.5},
        {"top_k": True},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
    ],
)
def test_values_out_of_range_are_refused_by_name(wrong):
    ((field, value),) = wrong.items()
    with pytest.raises(SpectrainError, match=f"sampler {field}: found {value!r}, expected"):
        Sampler(**wrong)


def test_recipes_can_embed_it():
    class Recipe(BaseModel):
        model_config = ConfigDict(extra="forbid")
        sampler: Sampler = Sampler()

    assert Recipe.model_validate({"sampler": {"temperature": 1, "top_k": 4}}).sampler == Sampler(1.0, 4)
    with pytest.raises(ValidationError, match=r"sampler\.topk"):
        Recipe.model_validate({"sampler": {"topk": 4}})
    with pytest.raises(ValidationError, match="expected 0 < top_p <= 1"):
        Recipe.model_validate({"sampler": {"top_p": 2}})


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=8).filter(any), st.sampled_from([1.0, 1e-6, 3e4]))
def test_draw_has_exactly_the_law_of_its_weights(weights, scale):
    total, low = sum(weights), Fraction(0)
    row = torch.tensor(weights, dtype=torch.float64) * scale
    for index, weight in enumerate(weights):
        high = low + Fraction(weight, total)
        if weight:
            # The answer is monotone in u, so the two ends of the cell decide all of it.
            ends = torch.tensor([float(low) + 1e-12, float(high) - 1e-12], dtype=torch.float64)
            assert draw(row.expand(2, -1), ends).tolist() == [index, index]
        low = high


def test_draw_never_returns_a_token_of_probability_zero():
    weights = torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0], dtype=torch.float64)
    edges = torch.tensor([0.0, 0.3, 1 - 2**-53, 1.0], dtype=torch.float64)
    assert draw(weights.expand(4, -1), edges).tolist() == [1, 3, 3, 3]
    # float32 rows that fall short of 1, and a uniform above their sum
    short = torch.tensor([0.5, 0.49998, 0.0])
    assert draw(short, torch.tensor(0.99999, dtype=torch.float64)).item() == 1
    # a tail that vanishes in the running sum is still no reason to leave the support
    tiny = torch.tensor([0.0, 1.0, 1e-30, 0.0], dtype=torch.float64)
    assert draw(tiny, torch.tensor(1.0, dtype=torch.float64)).item() == 1


def test_draw_reaches_what_float32_sums_cannot_hold():
    weights = torch.tensor([1.0, 1e-9])
    uniforms = torch.tensor([1 - 1e-10, 1 - 1e-8], dtype=torch.float64)
    assert draw(weights.expand(2, -1), uniforms).tolist() == [1, 0]
    assert draw(torch.zeros(3), torch.tensor(0.5)).item() == 0


def test_draw_survives_a_running_sum_that_rises_by_rounding(monkeypatch):
    # What a parallel prefix sum may return for (.3, 0, .7): the second is one unit in the last place up.
    running = torch.tensor([0.3, math.nextafter(0.3, 1), 1.0], dtype=torch.float64)
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda *_, **__: running.clone())
    uniform = torch.tensor(0.3, dtype=torch.float64)
    assert draw(torch.tensor([0.3, 0.0, 0.7]), uniform).item() == 2


def test_broken_logits_stay_visible():
    for sampler in (Sampler(1.0), Sampler(1.0, 2), Sampler(1.0, 2, 0.5), Sampler(1.0, None, 0.5)):
        assert sampler.probabilities(torch.full((2, 4), math.nan)).isnan().all()


def test_draw_takes_any_leading_shape():
    generator = torch.Generator().manual_seed(1)
    weights = torch.rand(2, 3, 5, generator=generator)
    uniforms = torch.rand(2, 3, generator=generator, dtype=torch.float64)
    drawn = draw(weights, uniforms)
    assert drawn.shape == (2, 3)
    assert drawn.dtype == torch.int64
    alone = [draw(weights[b, i], uniforms[b, i]).item() for b in range(2) for i in range(3)]
    assert drawn.flatten().tolist() == alone


def test_nothing_waits_for_the_device():
    """Meta tensors hold no values: whatever reads one, or has a shape that depends on one, raises."""
    logits = torch.empty(2, 6, 100, device="meta")
    uniforms = torch.empty(2, 6, device="meta", dtype=torch.float64)
    for sampler in (
        Sampler(),
        Sampler(1.0),
        Sampler(0.7, 50),
        Sampler(0.7, 50, 0.9),
        Sampler(1.0, None, 0.9),
    ):
        rows = sampler.probabilities(logits)
        assert rows.shape == (2, 6, 100)
        assert draw(rows, uniforms).shape == (2, 6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_stays_not_finite(bad, temperature):
    """A greedy law made of a NaN would be a token like any other."""
    logits = torch.tensor([[0.0, bad, 1.0], [0.0, -torch.inf, 1.0]])
    law = Sampler(temperature).probabilities(logits)
    assert not law[0, 0].isfinite()
    assert law[1].isfinite().all()
