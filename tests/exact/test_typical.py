"""Typical acceptance is lossy, and is shown to be; only greedy decoding is the target's own."""

import math
from fractions import Fraction

import pytest
import torch

from spectrain.exact.law import as_law, first_token_law, point, total_variation
from spectrain.exact.sampler import Sampler
from spectrain.exact.verify.typical import LossyVerdict, accept_typical_lossy

P = as_law([".5", ".3", ".15", ".05"])


def outcomes_of_one_proposal(p, q):
    """What a round of one token drawn from q commits, both its positions with the law p."""
    rows = torch.tensor([[float(x) for x in p]] * 2, dtype=torch.float64)
    outcomes = {}
    for proposed, drawn in enumerate(q):
        edges = [sum(p[: i + 1], Fraction(0)) for i in range(len(p))]
        middles = torch.tensor([float(e - x / 2) for e, x in zip(edges, p, strict=True)], dtype=torch.float64)
        size = len(p)
        verdict = accept_typical_lossy(rows.expand(size, 2, size), torch.full((size, 1), proposed), middles)
        assert verdict.token.tolist() == list(range(size))
        for token, accepted in enumerate(verdict.accepted.tolist()):
            committed = (proposed, token) if accepted else (token,)
            outcomes[committed] = outcomes.get(committed, 0) + drawn * p[token]
    return outcomes


@pytest.mark.parametrize(
    ("q", "law"),
    [
        (point(1, 4), point(1, 4)),  # plausible, so always emitted
        (point(3, 4), P),  # .05 is below min(.09, .3 exp(-H)) and never accepted
        (as_law([".25"] * 4), as_law([".375", ".325", ".2875", ".0125"])),
        (P, as_law([".525", ".315", ".1575", ".0025"])),  # not even for q = p
    ],
)
def test_its_law_is_not_p(q, law):
    outcomes = outcomes_of_one_proposal(P, q)
    assert sum(outcomes.values()) == 1
    assert first_token_law(outcomes, 4) == law
    if q != point(3, 4):
        assert total_variation({(i,): x for i, x in enumerate(law)}, {(i,): x for i, x in enumerate(P)}) > 0


def test_the_threshold_is_that_of_the_paper():
    p = torch.full((1, 2, 100), 0.01, dtype=torch.float64)  # exp(-H) = .01
    for delta, accepted in ((0.99, 1), (1.01, 0)):
        verdict = accept_typical_lossy(p, torch.tensor([[7]]), torch.zeros(1), delta=delta)
        assert verdict.accepted.item() == accepted
    for epsilon, accepted in ((0.0099, 1), (0.0101, 0)):
        verdict = accept_typical_lossy(p, torch.tensor([[7]]), torch.zeros(1), epsilon=epsilon, delta=9.0)
        assert verdict.accepted.item() == accepted


@pytest.mark.parametrize(
    ("p", "accepted"),
    [
        ([0.88, 0.1, 0.02], 1),  # exp(-H) is high: ε = .09 decides
        ([0.9, 0.08, 0.02], 0),
        ([0.05] * 20, 1),  # here δ exp(-H) = .3 · .05
        ([0.001, 0.014, *[0.985 / 18] * 18], 0),
    ],
)
def test_the_defaults_are_those_of_the_authors(p, accepted):
    rows = torch.tensor([[p, p]], dtype=torch.float64)
    assert accept_typical_lossy(rows, torch.tensor([[1]]), torch.zeros(1)).accepted.item() == accepted


def test_a_token_at_the_threshold_is_not_plausible():
    rows = torch.tensor([[[0.25, 0.75]] * 2], dtype=torch.float64)
    assert accept_typical_lossy(rows, torch.tensor([[0]]), torch.zeros(1), epsilon=0.25, delta=9.0).accepted.item() == 0


def test_the_entropy_is_summed_in_float64():
    p = torch.rand(200, generator=torch.Generator().manual_seed(0)).softmax(-1)
    law = p.double()
    edge = (law[7] / torch.exp((law * law.log()).sum())).item()
    for delta, accepted in ((edge * (1 - 1e-11), 1), (edge * (1 + 1e-11), 0)):
        verdict = accept_typical_lossy(
            p.expand(1, 2, 200), torch.tensor([[7]], dtype=torch.int16), torch.zeros(1), epsilon=1.0, delta=delta
        )
        assert verdict.accepted.item() == accepted


def test_greedy_output_is_the_target_s():
    p = Sampler().probabilities(torch.eye(5)[[1, 2, 3, 4]])[None]
    verdict = accept_typical_lossy(p, torch.tensor([[1, 2, 0]]), torch.tensor([0.9]))
    assert isinstance(verdict, LossyVerdict)
    assert (verdict.accepted.item(), verdict.token.item()) == (2, 3)


def test_padding_is_never_accepted():
    p = torch.full((2, 3, 4), 0.25, dtype=torch.float64)
    p[0, 1:] = math.nan
    verdict = accept_typical_lossy(p, torch.tensor([[-100, 1], [1, 1]]), torch.zeros(2), torch.tensor([0, 2]))
    assert verdict.accepted.tolist() == [0, 2]


def test_nothing_waits_for_the_device():
    p, tokens = torch.empty(2, 6, 100, device="meta"), torch.empty(2, 5, device="meta", dtype=torch.int64)
    verdict = accept_typical_lossy(p, tokens, torch.empty(2, device="meta"))
    assert verdict.accepted.shape == verdict.token.shape == (2,)
