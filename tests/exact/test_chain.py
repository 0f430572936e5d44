"""The torch kernel has the law that law.py enumerates.

`kernel_law` runs over every proposal and integrates the kernel over its uniforms (integrated.py). Laws are compared
with `==`.
"""

import math
from fractions import Fraction
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from integrated import (
    V,
    cells,
    chain_law,
    check_on_meta,
    check_rows_alone,
    constant,
    inverse_cdf_breakpoints,
    random_round,
    tables,
    tensor,
)

from spectrain.errors import SpectrainError
from spectrain.exact.law import (
    as_law,
    chain_round,
    expected_accepted,
    first_token_law,
    normalised,
    point,
    resampled,
)
from spectrain.exact.sampler import Sampler, draw
from spectrain.exact.verify.chain import (
    ChainVerdict,
    acceptance_probability,
    verify_chain,
)
from spectrain.exact.verify.check import check_chain, check_probabilities


def pieces(p_rows, q_rows, tokens):
    """The cells of every uniform: acceptance thresholds, then the steps of every repair or bonus law."""
    ratios = [p[x] / q[x] for p, q, x in zip(p_rows[:-1], q_rows, tokens, strict=True)]
    residuals = [
        [max(pi - qi, Fraction(0)) for pi, qi in zip(p, q, strict=True)]
        for p, q in zip(p_rows[:-1], q_rows, strict=True)
    ]
    last = [b for row in [*p_rows, *residuals] for b in inverse_cdf_breakpoints(row)]
    return product(*(cells([ratio]) for ratio in ratios), cells(last))


def kernel_law(target, proposal, k, *, kernel=verify_chain, **options):
    """Outcomes of a round by the torch kernel."""
    return chain_law(kernel, pieces, target, proposal, k, **options)


@settings(max_examples=40, deadline=None)
@given(tables(3), tables(3), st.integers(0, 2), st.booleans())
def test_the_kernel_has_the_enumerated_law(p, q, k, same):
    target, proposal = p.__getitem__, (p if same else q).__getitem__
    outcomes = kernel_law(target, proposal, k)
    assert outcomes == chain_round(target, proposal, k)
    assert first_token_law(outcomes, V) == p[()]
    if same:
        assert expected_accepted(outcomes) == k


@settings(max_examples=40, deadline=None)
@given(tables(3), tables(3), st.integers(0, 2))
def test_chosen_tokens_have_the_enumerated_law_of_point_masses(p, q, k):
    def chosen(prefix):
        return point(max(range(V), key=q[prefix].__getitem__), V)

    outcomes = kernel_law(p.__getitem__, chosen, k, points=True)
    assert outcomes == chain_round(p.__getitem__, chosen, k)
    assert outcomes == kernel_law(p.__getitem__, chosen, k)  # q None is q one-hot
    assert first_token_law(outcomes, V) == p[()]


def test_worked_example():
    p, q = as_law([".1", ".3", ".6"]), as_law([".4", ".4", ".2"])
    outcomes = kernel_law(constant(p), constant(q), 1)
    accepted = [sum(w for x, w in outcomes.items() if len(x) == 2 and x[0] == j) for j in range(3)]
    assert accepted == [Fraction(1, 10), Fraction(3, 10), Fraction(2, 10)]
    assert {x: w for x, w in outcomes.items() if len(x) == 1} == {(2,): Fraction(4, 10)}


def test_a_kernel_that_repairs_from_p_is_caught():
    def wrong(p_BKV, q_BKV, tokens_BK, uniforms_BK):
        verdict = verify_chain(p_BKV, q_BKV, tokens_BK, uniforms_BK)
        p_BV = p_BKV[torch.arange(len(p_BKV)), verdict.accepted]
        return ChainVerdict(verdict.accepted, draw(p_BV, uniforms_BK[:, -1]))

    p, q = as_law([".1", ".3", ".6"]), as_law([".4", ".4", ".2"])
    outcomes = kernel_law(constant(p), constant(q), 1, kernel=wrong)
    assert outcomes == chain_round(constant(p), constant(q), 1, repair=resampled)
    assert first_token_law(outcomes, 3) == as_law([".14", ".42", ".44"]) != p


def test_the_warped_law_of_a_truncated_draft_is_the_one_to_verify_with():
    p, raw = as_law([".5", ".25", ".25", "0"]), as_law([".4", ".3", ".2", ".1"])
    warped = as_law(["4/7", "3/7", "0", "0"])
    sampled = Sampler(1.0, top_k=2).probabilities(tensor([raw]).log())
    torch.testing.assert_close(sampled, tensor([warped]))
    right = kernel_law(constant(p), constant(warped), 1)
    assert first_token_law(right, 4) == p
    assert expected_accepted(right) == Fraction(3, 4)
    wrong = kernel_law(constant(p), constant(warped), 1, scored=constant(raw))
    assert first_token_law(wrong, 4) == as_law(["13/21", "5/14", "1/42", "0"])


def test_an_argmax_draft_must_be_verified_as_a_point_mass():
    p, q = as_law([".4", ".35", ".25"]), as_law([".5", ".3", ".2"])
    choose = constant(point(0, 3))
    assert first_token_law(kernel_law(constant(p), choose, 1, points=True), 3) == p
    wrong = kernel_law(constant(p), choose, 1, scored=constant(q))
    assert first_token_law(wrong, 3) == as_law([".8", ".1", ".1"])


def test_a_chosen_token_is_accepted_with_its_target_probability():
    p = as_law([".51", ".49"])
    outcomes = kernel_law(constant(p), constant(point(0, 2)), 1, points=True)
    assert expected_accepted(outcomes) == Fraction(51, 100)
    assert first_token_law(outcomes, 2) == p


@pytest.mark.parametrize("law", [point(1, 4), as_law(["1/4"] * 4)], ids=["one-hot", "uniform"])
def test_equal_laws_always_accept(law):
    uniforms = torch.tensor([[0.0, 0.0], [0.5, 0.5], [1 - 2**-53, 1 - 2**-53]], dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        p = tensor([law, law]).to(dtype).expand(3, 2, 4)
        verdict = verify_chain(p, p[:, :1], torch.ones(3, 1, dtype=torch.int64), uniforms)
        assert verdict.accepted.tolist() == [1, 1, 1]
        assert verdict.token.tolist() == draw(p[:, 1], uniforms[:, 1]).tolist()


def test_nothing_left_after_a_forced_rejection_draws_from_p():
    # Rounding left q a little above p: the residual is zero, and normalising it would give NaN.
    p = torch.tensor([[[0.5, 0.499999, 0.0], [0.0, 0.0, 1.0]]])
    before = p.clone()
    uniforms = torch.tensor([[1 - 1e-9, 0.75]], dtype=torch.float64)
    q = torch.tensor([[[0.500001, 0.499999, 0.0]]])
    verdict = verify_chain(p, q, torch.tensor([[0]]), uniforms)
    assert (verdict.accepted.item(), verdict.token.item()) == (0, 1)
    one_hot = torch.tensor([[[0.0, 0.999999, 0.0], [0.0, 0.0, 1.0]]])
    verdict = verify_chain(one_hot, None, torch.tensor([[1]]), uniforms.fill_(0.9999999))
    assert (verdict.accepted.item(), verdict.token.item()) == (0, 1)
    assert torch.equal(p, before)


def test_a_token_of_target_probability_zero_is_never_accepted():
    p = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]])
    for q in (None, torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[0.0, 1.0]]])):
        verdict = verify_chain(p, q, torch.tensor([[0]]), torch.zeros(1, 2, dtype=torch.float64))
        assert (verdict.accepted.item(), verdict.token.item()) == (0, 1)


def test_greedy_laws_accept_the_common_prefix_and_repair_with_the_target():
    one_hot = torch.eye(5)
    target = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [0, 0, 0, 0]])
    proposed = torch.tensor([[1, 2, 3], [1, 0, 3], [4, 0, 0]])
    uniforms = torch.rand(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for q in (None, one_hot[proposed]):
        verdict = verify_chain(one_hot[target], q, proposed, uniforms)
        assert verdict.accepted.tolist() == [3, 1, 0]
        assert verdict.token.tolist() == [4, 2, 0]


def test_a_prefix_ends_at_the_first_rejection():
    """CASES C23."""
    accepts = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1], [0, 1, 0, 0]])
    p = torch.nn.functional.one_hot(torch.nn.functional.pad(1 - accepts, (0, 1)), 2).double()
    verdict = verify_chain(p, None, torch.zeros_like(accepts), torch.full((3, 5), 0.5, dtype=torch.float64))
    assert verdict.accepted.tolist() == [1, 4, 0]


@pytest.mark.parametrize("points", [False, True])
def test_padding_never_matches_and_rows_do_not_touch(points):
    p, q, tokens, uniforms = random_round(batch=64, k=4, vocabulary=6, seed=1)
    q = None if points else q
    lengths = torch.arange(64) % 5
    padding = torch.arange(4) >= lengths[:, None]
    padded_q = None if q is None else q.masked_fill(padding[..., None], math.nan)
    padded = verify_chain(p, padded_q, tokens.masked_fill(padding, -100), uniforms, lengths)
    check_rows_alone(verify_chain, padded, (p, q, tokens, uniforms), lengths)


def test_the_inputs_stay_as_they_were():
    inputs = random_round(batch=4, k=3, vocabulary=6, seed=2)
    before = [x.clone() for x in inputs]
    verify_chain(*inputs, torch.tensor([3, 2, 1, 0]))
    verify_chain(inputs[0], None, *inputs[2:])
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


def test_no_proposals_draw_from_p():
    p, _, _, uniforms = random_round(batch=5, k=0, vocabulary=6, seed=3)
    empty = torch.empty(5, 0, dtype=torch.int64)
    for q in (None, torch.empty(5, 0, 6)):
        verdict = verify_chain(p, q, empty, uniforms)
        check_chain(p, q, empty, uniforms)
        assert verdict.accepted.tolist() == [0] * 5
        assert torch.equal(verdict.token, draw(p[:, 0], uniforms[:, 0]))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=V, max_size=V).filter(any),
    st.lists(st.integers(0, 9), min_size=V, max_size=V).filter(any),
)
def test_rows_that_miss_a_sum_of_one_cost_no_more_than_they_miss(p, q):
    p, q = [Fraction(x, 16) for x in p], [Fraction(x, 16) for x in q]  # sums far from 1, exact in binary
    outcomes = kernel_law(constant(p), constant(normalised(q)), 1, scored=constant(q))
    law = first_token_law(outcomes, V)
    distance = sum(abs(a - b) for a, b in zip(law, normalised(p), strict=True)) / 2
    assert sum(law) == 1
    assert distance <= abs(sum(p) - sum(q)) / max(sum(p), sum(q))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_float32_rows_over_a_real_vocabulary(temperature):
    generator = torch.Generator().manual_seed(4)
    logits = 2 * torch.randn(2, 6, 49152, generator=generator)
    p = Sampler(temperature).probabilities(logits)
    q = Sampler(temperature).probabilities(logits + 1e-6 * torch.randn(logits.shape, generator=generator))[:, :5]
    tokens = draw(q, torch.rand(2, 5, generator=generator, dtype=torch.float64))
    uniforms = torch.rand(2, 6, generator=generator, dtype=torch.float64)
    verdict = verify_chain(p, q, tokens, uniforms)
    assert verdict.accepted.tolist() == [5, 5]  # p and q differ by rounding only
    assert (p[:, 5].gather(-1, verdict.token[:, None]) > 0).all()
    forced = verify_chain(p, q, tokens, torch.full_like(uniforms, 1 - 2**-53))
    emitted = p[torch.arange(2), forced.accepted].gather(-1, forced.token[:, None])
    assert (emitted > 0).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_ids_may_be_of_any_whole_type(dtype):
    p, q, tokens, uniforms = random_round(batch=8, k=3, vocabulary=6, seed=5)
    one, other = verify_chain(p, q, tokens, uniforms), verify_chain(p, q, tokens.to(dtype), uniforms)
    assert torch.equal(one.accepted, other.accepted)
    assert torch.equal(one.token, other.token)
    check_chain(p, q, tokens.to(dtype), uniforms)


def test_nothing_waits_for_the_device():
    check_on_meta(verify_chain)


def test_acceptance_probability_is_the_accepted_length_of_one_proposal_and_has_a_gradient():
    p, q = as_law([".5", ".3", ".2"]), as_law([".2", ".7", ".1"])
    drafted = tensor([q]).requires_grad_()
    alpha = acceptance_probability(tensor([p]), drafted)
    assert alpha.item() == pytest.approx(float(expected_accepted(chain_round(constant(p), constant(q), 1))))
    alpha.sum().backward()
    assert drafted.grad is not None
    assert drafted.grad.tolist() == [[1.0, 0.0, 1.0]]


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ([[0.5, 0.6, -0.1]], "expected no negative probability"),
        ([[0.5, math.nan, 0.5]], "not finite"),
        ([[math.inf, 0.0, 0.0]], "not finite"),
        ([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2 + 2e-12]], "found a row of sum 1.00000000000"),
        ([[0.5, 0.3, 0.1]], "expected 1 within 1e-12; normalise the rows in float64"),
        ([[0.0, 0.0, 0.0]], "found a row of sum 0.0"),
        ([[0.5, 0.5, 0.25], [0.25, 0.0, 0.0]], "found a row of sum 0.25"),  # the worst of them
    ],
)
def test_rows_that_are_no_laws_are_refused_and_never_clipped(rows, complaint):
    with pytest.raises(SpectrainError, match=f"draft: .*{complaint}"):
        check_probabilities(torch.tensor(rows, dtype=torch.float64), "draft")


def test_laws_pass():
    check_probabilities(torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2 + 5e-13]], dtype=torch.float64), "p")
    check_probabilities(torch.eye(4), "p")  # float32 is fine where it is exact
    check_chain(*random_round(batch=4, k=3, vocabulary=6, seed=6))
    with pytest.raises(SpectrainError, match=r"found a row of sum 1\.00000000"):
        check_probabilities(torch.tensor([1.0, 1e-9]), "p")  # in float32 its sum would be 1
    p, q, tokens, uniforms = random_round(batch=4, k=3, vocabulary=6, seed=6)
    check_chain(p, q, tokens, uniforms.clone().fill_(0.0))
    for wrong in (torch.eye(4).long(), torch.tensor(1.0), torch.empty(2, 3, 0)):
        with pytest.raises(SpectrainError, match="floating-point rows"):
            check_probabilities(wrong, "p")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"p": lambda x: x[:, :3]}, r"p: found shape \[4, 3, 6\], expected \[4, 4, 6\]"),
        ({"p": lambda x: x[0]}, "p: found shape"),
        ({"p": lambda x: x * 0.9}, "p: found a row of sum"),
        ({"q": lambda x: x[..., :5]}, r"q: found shape \[4, 3, 5\], expected \[4, 3, 6\]"),
        ({"q": lambda x: -x}, "q: found .* expected no negative"),
        ({"q": lambda x: torch.eye(6, dtype=x.dtype)[5].expand_as(x)}, "q: found 0 for a proposed token"),
        ({"tokens": lambda x: x[0]}, r"tokens: found shape \[3\], expected \[B, K\]"),
        ({"tokens": lambda x: x + 6}, r"tokens: found an id outside 0\.\.5"),
        ({"uniforms": lambda x: x[:, :3]}, "uniforms: found shape"),
        ({"tokens": lambda x: x * 0 - 1}, r"tokens: found an id outside 0\.\.5"),
        ({"tokens": lambda x: x * 0 + 6}, r"tokens: found an id outside 0\.\.5"),
        ({"uniforms": lambda x: x + 1}, r"uniforms: found a value outside \[0, 1\)"),
        ({"p": lambda x: x[0, 0, 0]}, r"p: found shape \[\], expected \[B, K\+1, V\]"),
        ({"uniforms": lambda x: x.index_fill(1, torch.tensor(3), 1.0)}, r"uniforms: found a value outside \[0, 1\)"),
        ({"lengths": lambda x: x + torch.arange(4) // 3}, r"lengths: found \[3, 3, 3, 4\], expected 0\.\.3"),
        ({"uniforms": torch.ones_like}, r"uniforms: found a value outside \[0, 1\)"),
        ({"uniforms": lambda x: x * 0 - 0.5}, r"uniforms: found a value outside \[0, 1\)"),
        ({"lengths": lambda x: x * 0 - 1}, r"lengths: found \[-1, -1, -1, -1\], expected 0\.\.3"),
        ({"lengths": lambda x: x[:2]}, "lengths: found shape"),
        ({"lengths": lambda x: x + 1}, r"lengths: found \[4, 4, 4, 4\], expected 0\.\.3"),
    ],
)
def test_calls_that_make_no_sense_are_refused_by_name(change, complaint):
    p, q, tokens, uniforms = random_round(batch=4, k=3, vocabulary=6, seed=7)
    # token 5 is never proposed here, so that a q which is certain of it cannot have drawn these
    tokens = tokens.clamp(max=4)
    call = {"p": p, "q": q, "tokens": tokens, "uniforms": uniforms, "lengths": torch.full((4,), 3)}
    check_chain(*call.values())
    ((name, wrong),) = change.items()
    call[name] = wrong(call[name])
    with pytest.raises(SpectrainError, match=complaint):
        check_chain(*call.values())


@pytest.mark.parametrize("token", [0, 5])
def test_a_proposed_token_is_looked_up_in_q_at_its_own_id(token):
    p, _, _, uniforms = random_round(batch=2, k=2, vocabulary=6, seed=9)
    rows, tokens = torch.eye(6, dtype=torch.float64), torch.full((2, 2), token)
    check_chain(p, rows[tokens], tokens, uniforms)
    with pytest.raises(SpectrainError, match="q: found 0 for a proposed token"):
        check_chain(p, rows[(tokens - 1).abs()], tokens, uniforms)


def test_padding_is_not_checked():
    p, q, tokens, uniforms = random_round(batch=4, k=3, vocabulary=6, seed=8)
    lengths = torch.tensor([0, 1, 2, 3])
    padding = torch.arange(3) >= lengths[:, None]
    for anything in (-1, 99):
        filled = tokens.masked_fill(padding, anything)
        check_chain(p, q.masked_fill(padding[..., None], 0.0), filled, uniforms, lengths)
