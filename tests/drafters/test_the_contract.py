"""The contract of proposals lets through what is right and says of what is wrong why: toys, some broken on purpose."""

from __future__ import annotations

from typing import Any

import pytest
import test_proposals as contract
import torch
from torch.nn.functional import one_hot

from spectrain.drafters.base import Drafter, Proposal
from spectrain.exact.sampler import Sampler, draw

ROWS = 28  # of the target's head


class Dice(Drafter):
    """Draws from a law over the first six ids that is fixed but for the pending token; says so."""

    law_V = torch.nn.functional.pad(torch.tensor([0.1, 0.3, 0.2, 0.15, 0.05, 0.2], dtype=torch.float64), (0, ROWS - 6))

    def start(self, first):
        return list(first)

    def observe(self, state, committed):
        state[:] = [tokens[-1] for tokens in committed.tokens]

    def select(self, state, rows):
        state[:] = [state[row] for row in rows]

    def propose(self, state, sampler, shape, limits, uniforms_BN):
        length = min(shape.depth, max(limits))
        law_BV = torch.stack([self.law_V.roll(token % 6, 0) for token in state])
        if sampler.greedy:
            return Proposal(law_BV.argmax(-1, keepdim=True).expand(-1, length))
        q_BNV = law_BV[:, None].expand(-1, length, -1)
        return self.drawn(Proposal(draw(q_BNV, uniforms_BN[:, :length]), q=q_BNV))

    def drawn(self, proposal: Proposal) -> Proposal:
        return proposal


class Sharper(Dice):
    def drawn(self, proposal):
        assert proposal.q is not None
        return Proposal(proposal.tokens_BN, q=torch.nn.functional.normalize(proposal.q**2, p=1, dim=-1))


class Silent(Dice):
    def drawn(self, proposal):
        return Proposal(proposal.tokens_BN)


class Certain(Dice):
    """Its law is a point mass, and it says so."""

    def drawn(self, proposal):
        tokens_BN = proposal.tokens_BN * 0 + 3
        return Proposal(tokens_BN, q=one_hot(tokens_BN, ROWS).double())


class Deaf(Dice):
    def observe(self, state, committed):
        """Hears nothing: the first tokens stay."""


class Endless(Dice):
    def propose(self, state, sampler, shape, limits, uniforms_BN):
        return super().propose(state, sampler, shape, [9] * len(limits), uniforms_BN)


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target("llama", padding=4)


@pytest.fixture
def law(target, tools):
    """The checks of a proposal's law, in one."""

    def law(drafter: Any) -> None:
        sampler = Sampler(1.0)
        contract.test_there_is_a_law_exactly_where_tokens_were_drawn(drafter, target, tools, "chain", sampler)
        drawing = drafter, contract.copies_for(drafter, target, tools)
        contract.test_a_chains_law_is_the_law_that_is_sampled(drawing, {})

    return law


def test_who_draws_and_says_from_what_need_not_be_grown(law, target, tools):
    law(Dice())
    contract.test_what_was_committed_changes_what_is_proposed(Dice(), target, tools, Sampler())
    contract.test_nothing_is_deeper_than_the_furthest_limit(Dice(), target, tools, "chain", Sampler(1.0))


def test_a_law_of_one_token_is_a_law(law):
    with pytest.raises(pytest.skip.Exception, match="point masses"):
        law(Certain())


@pytest.mark.parametrize(
    ("toy", "reason"),
    [
        (Sharper, "q is not the law that tokens were drawn from"),
        (Silent, "gives no q.*they change with the uniforms"),
    ],
)
def test_another_law_than_that_which_is_drawn_from_is_named(law, toy, reason):
    with pytest.raises(AssertionError, match=reason):
        law(toy())


def test_who_does_not_hear_what_was_committed_is_named(target, tools):
    with pytest.raises(AssertionError, match=r"observe\(\) does not take what was committed"):
        contract.test_what_was_committed_changes_what_is_proposed(Deaf(), target, tools, Sampler())


def test_who_goes_beyond_the_limits_is_named(target, tools):
    with pytest.raises(AssertionError, match="a node at depth 4, but no request needs more than 1"):
        contract.test_nothing_is_deeper_than_the_furthest_limit(Endless(), target, tools, "chain", Sampler(1.0))
