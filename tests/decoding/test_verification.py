"""The rules that judge a round, through the whole decoder: worked cases, refusals, and the lossy one."""

from collections import Counter

import pytest
import torch
from tables import PASS, REJECT, TableDrafter, TableTarget, V, p_value, results_of

from spectrain.decoding import generate
from spectrain.decoding.verification import is_lossy
from spectrain.drafters.base import Proposal
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler
from spectrain.shapes import Chain, DynamicTree, StaticTree

GREEDY, SAMPLED = Sampler(), Sampler(1.0)
RUNS = 2000
ONE, TWO = Chain(1), ((0,), (1,))


def constant(model, law):
    """Makes a table say the same after everything."""
    model.table = torch.tensor(law, dtype=torch.float64).log().clamp(min=-800).expand(V, V, V)  # exp(-800) is 0
    return model


class RawScores(TableDrafter):
    """Verified with the whole q, of which only some columns could be proposed."""

    def propose(self, state, sampler, shape, limits, uniforms_BN):
        proposal = super().propose(state, sampler, shape, limits, uniforms_BN)
        return Proposal(proposal.tokens_BN, q=self.laws(state, proposal, sampler)[:, :-1])


def drafter_of(law, ids=None, kind=TableDrafter):
    drafter = kind(ids=ids)
    constant(drafter.model, law)
    return drafter


def second_tokens(p, drafter, shape, sampler=SAMPLED, rule="token"):
    """The first token that a round decides, and whether it was drafted, of many runs. (The budget leaves room for one
    draft token and the bonus.)"""
    results = results_of(drafter, shape, sampler, new=3, runs=RUNS, verification=rule,
                         target=constant(TableTarget(0), p))  # fmt: skip
    return [result.tokens[1] for result in results], [result.rounds[0].accepted for result in results]


def check_rate(flags, rate):
    assert p_value(flags, {1: rate, 0: 1 - rate}) > PASS


def check_law(tokens, law):
    assert p_value(tokens, dict(enumerate(law))) > PASS


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_cut_proposal_is_verified_with_the_law_it_was_drawn_from(rule):
    """Case C15: proposed from the top two of q, (4/7, 3/7)."""
    p, q = (0.5, 0.25, 0.25, 0), (0.4, 0.3, 0.2, 0.1)
    tokens, accepted = second_tokens(p, drafter_of(q, ids=[0, 1]), ONE, rule=rule)
    check_law(tokens, p)
    check_rate(accepted, 0.75)


def test_a_cut_proposal_verified_with_the_uncut_law_is_seen():
    """Case C15, the fault."""
    p, q = (0.5, 0.25, 0.25, 0), (0.4, 0.3, 0.2, 0.1)
    tokens, _ = second_tokens(p, drafter_of(q, ids=[0, 1], kind=RawScores), ONE)
    check_law(tokens, (13 / 21, 5 / 14, 1 / 42, 0))
    assert p_value(tokens, dict(enumerate(p))) < REJECT


@pytest.mark.parametrize("shape", [ONE, StaticTree(TWO), StaticTree(TWO, "independent"), StaticTree(TWO, "chosen"),
                                   DynamicTree(1, 2, 2)], ids=str)  # fmt: skip
@pytest.mark.parametrize("sampler", [GREEDY, SAMPLED], ids=Sampler.describe)
def test_a_drafter_with_the_targets_own_law_is_always_accepted(shape, sampler):
    """Case C16: p = q, one-hot and uniform. (Two chosen tokens of a uniform law hold half of it.)"""
    chosen = sampler.greedy or isinstance(shape, DynamicTree) or getattr(shape, "children", "") == "chosen"
    _, accepted = second_tokens((0, 0, 1, 0), drafter_of((0, 0, 1, 0)), shape, sampler)
    assert set(accepted) == {1}
    uniform = (0.25,) * 4
    tokens, accepted = second_tokens(uniform, drafter_of(uniform), shape, sampler)
    if sampler.greedy:
        assert set(tokens) == {0}  # the lowest id of equals; which of them a tree holds is left open
        assert shape != ONE or set(accepted) == {1}
    else:
        check_law(tokens, uniform)
        check_rate(accepted, 0.5) if chosen else check_rate(accepted, 1)


@pytest.mark.parametrize("shape", [StaticTree(TWO, "chosen"), DynamicTree(1, 2, 2)], ids=str)
def test_children_that_were_chosen_are_accepted_by_the_targets_law_alone(shape):
    """Case C18: children 0 and then 1, however likely the drafter finds them."""
    p = (0.5, 0.3, 0.2, 0)
    tokens, accepted = second_tokens(p, drafter_of((0.9, 0.06, 0.03, 0.01)), shape)
    check_law(tokens, p)
    check_rate(accepted, 0.8)
    alone = second_tokens((0.51, 0.49, 0, 0), drafter_of((0.51, 0.49, 0, 0)), StaticTree(TWO[:1], "chosen"))
    check_law(alone[0], (0.51, 0.49, 0, 0))
    check_rate(alone[1], 0.51)


# --- the lossy rule -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ngram", "eagle3", "noisy", "self"])
def test_typical_acceptance_is_exact_where_nothing_is_drawn(tiny_target, tools, kind):
    target = tiny_target("gpt2", layers=3)
    want = [tools.plain(target, prompt).tokens for prompt in tools.PROMPTS]
    got = tools.batch(target, tools.drafter(kind, target), Chain(4), verification="typical_lossy")
    assert [result.tokens for result in got] == want


def test_typical_acceptance_changes_the_law():
    """p (.5, .3, .2): the drafter always says 1, which is plausible, and so 1 always comes."""
    p = (0.5, 0.3, 0.2, 0)
    tokens, accepted = second_tokens(p, drafter_of((0.01, 0.97, 0.01, 0.01), ids=[1]), ONE, rule="typical_lossy")
    assert Counter(tokens) == {1: RUNS}
    assert set(accepted) == {1}
    assert p_value(tokens, dict(enumerate(p))) < REJECT
    tokens, accepted = second_tokens(p, drafter_of((0.01, 0.97, 0.01, 0.01), ids=[1]), ONE)
    check_law(tokens, p)
    check_rate(accepted, 0.3)


def test_what_is_lossy_is_called_so():
    assert [is_lossy(rule) for rule in ("token", "block", "typical_lossy")] == [False, False, True]


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "rule", "message"),
    [
        (Chain(2), "typical", "verification 'typical' is unknown; expected one of token, block, typical_lossy"),
        (StaticTree(TWO), "block", "'block' is for chains, not for a tree of 2; use 'token'"),
        (DynamicTree(2, 2, 3), "block", "'block' is for chains, not for a dynamic tree of 3; use 'token'"),
        (StaticTree(TWO), "typical_lossy", "'typical_lossy' is for chains, not for a tree of 2"),
        (DynamicTree(2, 2, 3), "typical_lossy", "'typical_lossy' is for chains, not for a dynamic tree of 3"),
    ],
)
def test_rules_that_do_not_exist_or_do_not_fit_are_refused(tiny_target, tools, shape, rule, message):
    target = tiny_target(layers=2)
    with pytest.raises(SpectrainError, match=message):
        tools.one(target, tools.SelfDrafter(target), shape, verification=rule)


class Scored(TableDrafter):
    """Says that it drew what it chose."""

    def propose(self, state, sampler, shape, limits, uniforms_BN):
        proposal = super().propose(state, sampler, shape, limits, uniforms_BN)
        return Proposal(proposal.tokens_BN, proposal.parents_BN, self.laws(state, proposal, sampler))


@pytest.mark.parametrize("shape", [StaticTree(TWO, "chosen"), DynamicTree(1, 2, 2)], ids=str)
def test_chosen_nodes_that_come_with_a_law_are_refused(shape):
    with pytest.raises(
        SpectrainError, match=r"of chosen nodes came with a law q; expected none: .* exact only as point masses"
    ):
        generate(TableTarget(0), Scored(), [0], sampler=SAMPLED, max_new_tokens=4, shape=shape, eos_ids=())
