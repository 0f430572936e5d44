"""Block verification: exact in Fractions, never shorter than token-wise, and the kernel has the enumerated law."""

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

from spectrain.exact.block_law import block_round, excess, keep_probability
from spectrain.exact.law import (
    acceptance,
    as_law,
    chain_round,
    expected_accepted,
    first_token_law,
    point,
    residual,
    sequence_law,
    survival,
    target_law,
)
from spectrain.exact.sampler import Sampler, draw
from spectrain.exact.verify.block import verify_block
from spectrain.exact.verify.chain import ChainVerdict, verify_chain


def argmax(q):
    return lambda prefix: point(max(range(V), key=q[prefix].__getitem__), V)


@settings(max_examples=40, deadline=None)
@given(tables(5), tables(5), st.integers(0, 2), st.sampled_from(["q", "p", "argmax"]))
def test_whole_sequences_have_the_law_of_plain_decoding(p, q, k, drafter):
    proposal = {"q": q.__getitem__, "p": p.__getitem__, "argmax": argmax(q)}[drafter]
    length = 3  # a round that starts at length 2 may look two tokens further

    def round_at(prefix):
        return block_round(p.__getitem__, proposal, k, prefix=prefix)

    assert sequence_law(round_at, length) == target_law(p.__getitem__, length)
    if drafter == "p":
        assert expected_accepted(round_at(())) == k


@settings(max_examples=40, deadline=None)
@given(tables(4), tables(4), st.integers(1, 3))
def test_the_accepted_prefix_is_never_shorter_than_token_wise(p, q, k):
    block = block_round(p.__getitem__, q.__getitem__, k)
    token_wise = chain_round(p.__getitem__, q.__getitem__, k)
    pairs = zip(survival(block, k), survival(token_wise, k), strict=True)
    assert all(more >= less for more, less in pairs)
    chosen = argmax(q)
    assert block_round(p.__getitem__, chosen, k) == chain_round(p.__getitem__, chosen, k)


def test_laws_of_two_vocabularies_have_no_excess():
    with pytest.raises(ValueError, match="zip"):
        excess(Fraction(1), point(0, 2), point(0, 3))


def test_eleven_ninths_against_ten_ninths():
    p, q = as_law(["1/3", "2/3"]), as_law(["2/3", "1/3"])
    block = block_round(constant(p), constant(q), 2)
    assert expected_accepted(block) == Fraction(11, 9)
    assert expected_accepted(chain_round(constant(p), constant(q), 2)) == Fraction(10, 9)
    assert expected_accepted(kernel_law(constant(p), constant(q), 2)) == Fraction(11, 9)


def test_the_repair_of_token_wise_verification_is_biased_here():
    p, q = as_law([".2", ".3", ".5"]), as_law([".5", ".1", ".4"])
    wrong = block_round(constant(p), constant(q), 2, repair=lambda reach, p, q: residual(p, q))
    assert sequence_law(lambda prefix: wrong, 2) != target_law(constant(p), 2)


def test_scoring_with_the_raw_law_of_a_truncated_draft_is_biased():
    p, raw = as_law([".5", ".25", ".25", "0"]), as_law([".4", ".3", ".2", ".1"])
    warped = as_law(["4/7", "3/7", "0", "0"])
    for law in (block_round, kernel_law):
        right = law(constant(p), constant(warped), 1)
        assert first_token_law(right, 4) == p
        assert expected_accepted(right) == Fraction(3, 4)
        wrong = law(constant(p), constant(warped), 1, scored=constant(raw))
        assert first_token_law(wrong, 4) == as_law(["13/21", "5/14", "1/42", "0"])


# The kernel is integrated over its uniforms, as in test_chain.py.


def pieces(p_rows, q_rows, tokens):
    """The cells of every uniform: the thresholds of each length, then the steps of every law that may end it."""
    reaches = [Fraction(1)]
    for p, q, x in zip(p_rows[:-1], q_rows, tokens, strict=True):
        reaches.append(acceptance(reaches[-1] * p[x], q[x]))
    laws = list(zip(reaches[:-1], p_rows[:-1], q_rows, strict=True))
    thresholds = [keep_probability(*law) for law in laws[1:]] + reaches[-1:] if tokens else []
    last = [b for row in [*p_rows, *(excess(*law) for law in laws)] for b in inverse_cdf_breakpoints(row)]
    return product(*(cells([threshold]) for threshold in thresholds), cells(last))


def kernel_law(target, proposal, k, *, kernel=verify_block, **options):
    """Outcomes of a round by the torch kernel."""
    return chain_law(kernel, pieces, target, proposal, k, **options)


@settings(max_examples=30, deadline=None)
@given(tables(4), tables(4), st.integers(0, 3), st.booleans())
def test_the_kernel_has_the_enumerated_law(p, q, k, same):
    target, proposal = p.__getitem__, (p if same else q).__getitem__
    outcomes = kernel_law(target, proposal, k)
    assert outcomes == block_round(target, proposal, k)
    if same:
        assert expected_accepted(outcomes) == k


@settings(max_examples=30, deadline=None)
@given(tables(4), tables(4), st.integers(0, 3))
def test_chosen_tokens_have_the_enumerated_law_of_point_masses(p, q, k):
    outcomes = kernel_law(p.__getitem__, argmax(q), k, points=True)
    assert outcomes == block_round(p.__getitem__, argmax(q), k)
    assert outcomes == kernel_law(p.__getitem__, argmax(q), k)  # q None is q one-hot


def test_a_kernel_that_repairs_as_token_wise_is_caught():
    def wrong(p_BKV, q_BKV, tokens_BK, uniforms_BK):
        verdict = verify_block(p_BKV, q_BKV, tokens_BK, uniforms_BK)
        rows, at = torch.arange(len(p_BKV)), verdict.accepted.clamp(max=1)
        residual_BV = (p_BKV[rows, at] - q_BKV[rows, at]).clamp(min=0)
        repaired = draw(residual_BV, uniforms_BK[:, -1])
        return ChainVerdict(verdict.accepted, torch.where(verdict.accepted < 2, repaired, verdict.token))

    p, q = as_law([".2", ".3", ".5"]), as_law([".5", ".1", ".4"])
    outcomes = kernel_law(constant(p), constant(q), 2, kernel=wrong)
    assert outcomes == block_round(constant(p), constant(q), 2, repair=lambda reach, p, q: residual(p, q))
    assert sequence_law(lambda prefix: outcomes, 2) != target_law(constant(p), 2)


@pytest.mark.parametrize("law", [point(1, 4), as_law(["1/4"] * 4)], ids=["one-hot", "uniform"])
def test_equal_laws_always_accept(law):
    uniforms = torch.tensor([[0.0] * 3, [0.5] * 3, [1 - 2**-53] * 3], dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        p = tensor([law] * 3).to(dtype).expand(3, 3, 4)
        verdict = verify_block(p, p[:, :2], torch.ones(3, 2, dtype=torch.int64), uniforms)
        assert verdict.accepted.tolist() == [2, 2, 2]
        assert verdict.token.tolist() == draw(p[:, 2], uniforms[:, 2]).tolist()


def test_nothing_left_after_a_forced_rejection_draws_from_p():
    # Rounding left q a little above p: the excess is zero, and normalising it would give NaN.
    p = torch.tensor([[[0.5, 0.499999, 0.0], [0.0, 0.0, 1.0]]])
    before = p.clone()
    uniforms = torch.tensor([[1 - 1e-9, 0.75]], dtype=torch.float64)
    verdict = verify_block(p, torch.tensor([[[0.500001, 0.499999, 0.0]]]), torch.tensor([[0]]), uniforms)
    assert (verdict.accepted.item(), verdict.token.item()) == (0, 1)
    assert torch.equal(p, before)


def test_a_prefix_that_went_all_the_way_is_kept_when_rounding_rejects_the_next_token():
    row, above = [0.5, 0.499999, 0.0], [0.500001, 0.499999, 0.0]
    uniforms = torch.tensor([[1 - 1e-9, 1 - 1e-9, 0.75]], dtype=torch.float64)
    p, q = torch.tensor([[row, row, row]]), torch.tensor([[row, above]])
    verdict = verify_block(p, q, torch.tensor([[0, 0]]), uniforms)
    assert (verdict.accepted.item(), verdict.token.item()) == (1, 1)


def test_a_token_of_target_probability_zero_is_never_kept():
    p = torch.tensor([[[0.0, 1.0], [0.5, 0.5], [0.5, 0.5]]])
    for q in (None, torch.tensor([[[1.0, 0.0], [0.5, 0.5]]]), torch.tensor([[[0.0, 1.0], [0.5, 0.5]]])):
        verdict = verify_block(p, q, torch.tensor([[0, 1]]), torch.zeros(1, 3, dtype=torch.float64))
        assert (verdict.accepted.item(), verdict.token.item()) == (0, 1)


def test_float32_rows_are_summed_in_float64():
    p, _, _, _ = random_round(batch=1, k=2, vocabulary=500, seed=6, dtype=torch.float32)
    rows = p[0].double()
    for first, second in ((a, b) for a in range(20) for b in range(20)):
        reach = rows[0, first]
        left = reach * (rows[1].sum() - rows[1, second])
        edge = (left / (left + 1 - reach)).item()
        for u, kept in ((edge * (1 - 1e-11), 1), (edge * (1 + 1e-11), 0)):
            uniforms = torch.tensor([[u, 1 - 1e-12, 0.5]], dtype=torch.float64)
            assert verify_block(p, None, torch.tensor([[first, second]]), uniforms).accepted.item() == kept


@pytest.mark.parametrize("points", [False, True])
def test_padding_is_never_kept_and_rows_do_not_touch(points):
    p, q, tokens, uniforms = random_round(batch=64, k=4, vocabulary=6, seed=1)
    q = None if points else q
    lengths = torch.arange(64) % 5
    padding = torch.arange(4) >= lengths[:, None]
    padded_q = None if q is None else q.masked_fill(padding[..., None], math.nan)
    padded_p = p.clone()
    padded_p[:, 1:].masked_fill_(padding[..., None], math.nan)
    padded = verify_block(padded_p, padded_q, tokens.masked_fill(padding, -100), uniforms, lengths)
    check_rows_alone(verify_block, padded, (p, q, tokens, uniforms), lengths)


def test_one_proposal_is_verified_as_token_wise():
    p, q, tokens, uniforms = random_round(batch=256, k=1, vocabulary=6, seed=2)
    for law in (q, None):
        block, chain = verify_block(p, law, tokens, uniforms), verify_chain(p, law, tokens, uniforms)
        assert torch.equal(block.accepted, chain.accepted)
        assert torch.equal(block.token, chain.token)


def test_the_inputs_stay_as_they_were_and_ids_may_be_of_any_whole_type():
    inputs = random_round(batch=8, k=3, vocabulary=6, seed=3)
    before = [x.clone() for x in inputs]
    p, q, tokens, uniforms = inputs
    one, other = verify_block(*inputs), verify_block(p, q, tokens.short(), uniforms)
    verify_block(p, None, tokens, uniforms, torch.tensor([3, 2, 1, 0] * 2))
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))
    assert torch.equal(one.accepted, other.accepted)
    assert torch.equal(one.token, other.token)


def test_no_proposals_draw_from_p():
    p, _, _, uniforms = random_round(batch=5, k=0, vocabulary=6, seed=4)
    empty = torch.empty(5, 0, dtype=torch.int64)
    for q in (None, torch.empty(5, 0, 6)):
        verdict = verify_block(p, q, empty, uniforms)
        assert verdict.accepted.tolist() == [0] * 5
        assert torch.equal(verdict.token, draw(p[:, 0], uniforms[:, 0]))


def test_float32_rows_over_a_real_vocabulary():
    generator = torch.Generator().manual_seed(5)
    logits = 2 * torch.randn(2, 6, 49152, generator=generator)
    p = Sampler(1.0).probabilities(logits)
    q = Sampler(1.0).probabilities(logits + 1e-6 * torch.randn(logits.shape, generator=generator))[:, :5]
    tokens = draw(q, torch.rand(2, 5, generator=generator, dtype=torch.float64))
    uniforms = torch.rand(2, 6, generator=generator, dtype=torch.float64)
    assert verify_block(p, q, tokens, uniforms).accepted.tolist() == [5, 5]  # p and q differ by rounding only
    forced = verify_block(p, q, tokens, torch.full_like(uniforms, 1 - 2**-53))
    assert (p[torch.arange(2), forced.accepted].gather(-1, forced.token[:, None]) > 0).all()


def test_nothing_waits_for_the_device():
    check_on_meta(verify_block)
