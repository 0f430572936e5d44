"""Places of tokens in the law they were drawn from: uniform under exact sampling, and not under known faults."""

import pytest
import torch
from bigram import Bigram

from spectrain.decoding import generate_batch, generate_plain, verification
from spectrain.evaluation.goodness import distribution_block, tail
from spectrain.evaluation.law_test import PLACES, placed, places
from spectrain.exact.sampler import Sampler, draw
from spectrain.exact.verify.chain import ChainVerdict, verify_chain
from spectrain.shapes import Chain, StaticTree

VOCABULARY, ANSWERS, TOKENS = 24, 160, 24
T1, TOP_P = Sampler(1.0), Sampler(0.7, top_p=0.8)
CHAIN, TREE = Chain(3), StaticTree(((0,), (1,), (0, 0), (1, 0)))
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target(layers=2, vocab=VOCABULARY, hidden=16)


def counted(target, sampler, *, shape=CHAIN, rule="token", decoded_with=None, drafter=True, **drafts):
    """The distribution block of one contender, and how many tokens the law could not give."""
    proposer = Bigram(target, **drafts) if drafter else None
    results = generate_batch(
        target, proposer, [PROMPT] * ANSWERS, seeds=range(ANSWERS), sampler=decoded_with or sampler,
        max_new_tokens=TOKENS, shape=shape if drafter else None, eos_ids=(5,), verification=rule,
    )  # fmt: skip
    bins, outside = [0] * PLACES, 0
    for seed, result in enumerate(results):
        found = placed(target, sampler, PROMPT, result.tokens, name="c", seed=seed)
        bins = [a + b for a, b in zip(bins, found["bins"], strict=True)]
        outside += found["outside"]
    assert sum(bins) == sum(len(result.tokens) for result in results)
    (block,) = distribution_block([("one", False, bins)])
    return block, outside


def power(block):
    """How often a repetition rejects, if the law of the places is as far from uniform as these counts, less their
    noise, say."""
    return tail(43.8202, PLACES - 1, max(0.0, block["statistic"] - (PLACES - 1)))  # a tail of 0.001


# --- by hand ------------------------------------------------------------------------------------------------------


def test_places_by_hand():
    """Likelier tokens first, equals by id; a share of the token's own mass; rows need not sum to 1."""
    p_V = torch.tensor([0.2, 0.5, 0.2, 0.1, 0.0])
    token_C, share_C = torch.tensor([1, 0, 2, 3, 4, 2]), torch.tensor([0.5, 0.0, 0.5, 1.0, 0.3, 0.0])
    found = places(p_V.expand(6, -1), token_C, share_C)
    assert found.tolist() == pytest.approx([0.25, 0.5, 0.8, 1.0, 1.0, 0.7])
    assert places(3 * p_V.expand(6, -1), token_C, share_C).tolist() == pytest.approx(found.tolist())


def test_a_place_comes_from_conversation_seed_and_position_alone(target):
    tokens = generate_plain(target, PROMPT, sampler=T1, max_new_tokens=40, eos_ids=()).tokens
    whole = placed(target, T1, PROMPT, tokens, name="a", seed=1)
    assert whole == placed(target, T1, PROMPT, tokens, name="a", seed=1, chunk=2)
    others = [placed(target, T1, PROMPT, tokens, name=name, seed=seed) for name, seed in (("b", 1), ("a", 2))]
    assert all(other["bins"] != whole["bins"] for other in others)
    shorter = placed(target, T1, PROMPT, tokens[:4], name="a", seed=1)
    assert all(a <= b for a, b in zip(shorter["bins"], whole["bins"], strict=True))


# --- exact decoding -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", [T1, TOP_P], ids=Sampler.describe)
@pytest.mark.parametrize(
    "contender",
    [{"drafter": False}, {}, {"rule": "block"}, {"chosen": True}, {"shape": TREE}],
    ids=["plain", "chain", "block", "chosen", "tree"],
)
def test_places_are_uniform_under_exact_decoding(target, contender, sampler):
    """Answers that end with EOS among them: an end depends on the tokens, their places' law does not on the end."""
    block, outside = counted(target, sampler, **contender)
    assert power(block) < 0.5
    assert block["agrees"]
    assert outside == 0
    assert block["tokens"] > 1500
    assert block["detectable"] < 0.1


def test_rounding_does_not_fail_it(tiny_target):
    """A bfloat16 target decodes in blocks and batches, and is asked again in one forward: all round otherwise."""
    target = tiny_target(layers=2, vocab=VOCABULARY, hidden=16, dtype=torch.bfloat16)
    for sampler in (T1, TOP_P):
        block, outside = counted(target, sampler)
        assert block["agrees"]
        assert outside <= 0.01 * block["tokens"]  # at the edge of the nucleus one token may come or go


# --- known faults -------------------------------------------------------------------------------------------------


def repaired_from_p(p_BKV, q_BKV, tokens_BK, uniforms_BK, lengths_B=None):
    right = verify_chain(p_BKV, q_BKV, tokens_BK, uniforms_BK, lengths_B)
    return ChainVerdict(right.accepted, draw(p_BKV[torch.arange(len(p_BKV)), right.accepted], uniforms_BK[:, -1]))


def always_accepted(p_BKV, q_BKV, tokens_BK, uniforms_BK, lengths_B=None):
    rows_B = torch.arange(len(p_BKV))
    return ChainVerdict(lengths_B, draw(p_BKV[rows_B, lengths_B], uniforms_BK[:, -1]))


@pytest.mark.parametrize(
    ("fault", "sampler", "sharpness"),
    [
        (repaired_from_p, T1, 0.4),  # a drafter of the target's own sureness hides it best: errors go both ways
        (repaired_from_p, TOP_P, 2.5),
        (always_accepted, T1, 1.0),
        (always_accepted, TOP_P, 1.0),
    ],
)
def test_known_faults_of_verification_are_found(target, monkeypatch, fault, sampler, sharpness):
    monkeypatch.setattr(verification, "verify_chain", fault)
    block, _ = counted(target, sampler, sharpness=sharpness)
    assert not block["agrees"]
    assert power(block) > 0.99


@pytest.mark.parametrize("wrong", [Sampler(0.7), Sampler(1.4), Sampler(1.0, top_p=0.8), Sampler(1.0, top_k=5)],
                         ids=Sampler.describe)  # fmt: skip
def test_another_sampler_is_found(target, wrong):
    block, _ = counted(target, T1, decoded_with=wrong)
    assert not block["agrees"]
    assert power(block) > 0.99


def test_tokens_that_the_law_cannot_give_are_counted(target):
    block, outside = counted(target, TOP_P, decoded_with=Sampler(0.7))
    assert not block["agrees"]
    assert 0.02 * block["tokens"] < outside <= block["bins"][-1]


def test_typical_acceptance_is_found(target):
    block, _ = counted(target, T1, rule="typical_lossy")
    assert not block["agrees"]
