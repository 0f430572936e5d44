"""Sampled speculative decoding has the target's law over whole sequences: goodness of fit, with its power shown.

Every sequence of a small vocabulary is enumerated, so the test sees any fault that moves probability: in verdicts,
repairs, bonus tokens, budget ends, caches, or alignment. What the same sample sizes would detect is shown on decoders
with known faults, whose exact laws are enumerated too: their samples fit their own law and not the target's.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from fractions import Fraction
from functools import cached_property, lru_cache

import pytest
import torch
from tables import (
    PASS,
    PROMPT,
    REJECT,
    TARGET,
    Chosen,
    TableDrafter,
    Uneven,
    V,
    certainty,
    chi_square_tail,
    p_value,
    results_of,
    sequences_of,
)

from spectrain.decoding import generate_plain, outcome, verification
from spectrain.decoding.history import History
from spectrain.decoding.requests import Options
from spectrain.drafters.base import Proposal
from spectrain.drafters.ngram import NgramConfig, NgramDrafter
from spectrain.exact import biased, tree_law
from spectrain.exact.block_law import block_round
from spectrain.exact.law import chain_round, normalised, resampled, sequence_law, spread, target_law
from spectrain.exact.penalties import Penalties
from spectrain.exact.sampler import Sampler, draw
from spectrain.exact.verify.chain import ChainVerdict, verify_chain
from spectrain.exact.verify.tree import verify_tree
from spectrain.shapes import Chain, DynamicTree, StaticTree

NEW = 5  # tokens a run: the prefill's, a round two deep, and what is left for a second and a third
RUNS, MORE = 2000, 4000  # of every scheme, and where a fault has to be found
SAMPLERS = [Sampler(1.0), Sampler(0.7), Sampler(1.0, top_p=0.8), Sampler(0.7, top_k=3)]
PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0))
CHAIN, TWO = Chain(2), StaticTree(((0,), (1,)))
DRAWN, CUT, NGRAM = TableDrafter(), TableDrafter(seed=9, ids=[0, 2, 3]), NgramDrafter(NgramConfig(longest=2))
DYNAMIC = DynamicTree(depth=2, top_k=2, nodes=4)
SCHEMES = {  # name: drafter, shape, verification
    "chain, token": (DRAWN, CHAIN, "token"),
    "chain, block": (DRAWN, CHAIN, "block"),
    "chain, cut vocabulary": (CUT, CHAIN, "block"),
    "uneven chain, token": (Uneven(), CHAIN, "token"),
    "uneven chain, block": (Uneven(), CHAIN, "block"),
    "chain of argmaxes": (Chosen(), CHAIN, "token"),
    "ngram chain, token": (NGRAM, CHAIN, "token"),
    "ngram chain, block": (NGRAM, CHAIN, "block"),
    "ngram tree": (NGRAM, DYNAMIC, "token"),
    "tree, distinct": (DRAWN, StaticTree(PATHS, "distinct"), "token"),
    "tree, distinct, cut vocabulary": (CUT, StaticTree(PATHS, "distinct"), "token"),
    "tree, independent": (DRAWN, StaticTree(PATHS, "independent"), "token"),
    "tree, chosen": (DRAWN, StaticTree(PATHS, "chosen"), "token"),
    "tree, dynamic": (DRAWN, DYNAMIC, "token"),
}


@lru_cache
def exact_law(sampler):
    return target_law(law_of(TARGET, sampler), NEW)


@lru_cache
def runs_of(scheme, sampler):
    """Tokens of every run, and what each of its rounds accepted."""
    drafter, shape, rule = SCHEMES[scheme]
    results = results_of(drafter, shape, sampler, new=NEW, runs=RUNS, verification=rule)
    return [(tuple(result.tokens), tuple(round_.accepted for round_ in result.rounds)) for result in results]


def test_the_tail_of_the_chi_square_law():
    assert chi_square_tail(3.841459, 1) == pytest.approx(0.05, rel=1e-5)
    assert chi_square_tail(124.342113, 100) == pytest.approx(0.05, rel=1e-5)


# --- every scheme has the target's law --------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS, ids=Sampler.describe)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_speculative_decoding_has_the_targets_law(scheme, sampler):
    runs = runs_of(scheme, sampler)
    assert p_value([tokens for tokens, _ in runs], exact_law(sampler)) > PASS
    assert sum(sum(accepted) for _, accepted in runs) > RUNS / 5, "next to nothing was accepted: nothing is tested"


@pytest.mark.parametrize("sampler", SAMPLERS, ids=Sampler.describe)
def test_plain_decoding_has_the_targets_law_and_is_the_same_alone(sampler):
    batch = sequences_of(None, None, sampler, new=NEW, runs=RUNS)
    request = {"sampler": sampler, "max_new_tokens": NEW, "eos_ids": ()}
    assert p_value(batch, exact_law(sampler)) > PASS
    assert batch[:50] == [tuple(generate_plain(TARGET, PROMPT, seed=seed, **request).tokens) for seed in range(50)]


# --- it accepts as much as it should ----------------------------------------------------------------------------


@lru_cache
def law_of(model, sampler):
    """The law of the target, or of a drafter."""
    return model.law(sampler)


def siblings_of(kind, q):
    if kind in ("chosen", "dynamic"):
        return tree_law.chosen(biased.by_confidence(q), V)
    return (tree_law.without_replacement if kind == "distinct" else tree_law.independent)(q)


def nested(paths, node=()):
    """A tree of paths as ``tree_law`` takes it."""
    children = sorted(path for path in paths if path[:-1] == node and len(path) == len(node) + 1)
    return tuple(nested(paths, child) for child in children)


def grown(q, shape, depth, prefix):
    """The paths of a dynamic tree, by ranks: EAGLE-2 written once more, from q alone (the drafter's, unwarped)."""
    level, found = [((), (), Fraction(1))], []
    for _ in range(depth):
        children = []
        for ranks, tokens, score in level:
            law = q(prefix + tokens)
            for rank, token in enumerate(biased.by_confidence(q)(prefix + tokens)[: shape.top_k]):
                children.append(((*ranks, rank), (*tokens, token), score * law[token]))
        found += children
        level = sorted(children, key=lambda child: -child[2])[: shape.top_k]
    return [ranks for ranks, _, _ in sorted(found, key=lambda child: -child[2])[: shape.nodes]]


def round_of(scheme, sampler, depth, prefix):
    """What a round of this scheme commits, by enumeration."""
    drafter, shape, rule = SCHEMES[scheme]
    p, q = law_of(TARGET, sampler), law_of(drafter, sampler)
    if isinstance(shape, Chain):
        length = min(depth, prefix[-1]) if isinstance(drafter, Uneven) else depth
        return (block_round if rule == "block" else chain_round)(p, q, length, prefix=prefix)
    if isinstance(shape, DynamicTree):
        kind, paths = "dynamic", grown(law_of(drafter, Sampler(1.0)), shape, depth, prefix)
    else:
        kind, paths = shape.children, [path for path in shape.paths if len(path) <= depth]
    return tree_law.tree_round(p, siblings_of(kind, q), nested(paths), prefix=prefix)


def first_round(scheme, sampler):
    """The law of the prefill's token and what the first round commits."""
    law = defaultdict(Fraction)
    for first, weight in enumerate(law_of(TARGET, sampler)(())):
        for committed, share in round_of(scheme, sampler, 2, (first,)).items() if weight else ():
            law[first, *committed] += weight * share
    return law


ENUMERATED = [name for name, (drafter, _, _) in SCHEMES.items() if isinstance(drafter, TableDrafter) and drafter != CUT]


@pytest.mark.parametrize("sampler", [SAMPLERS[0], SAMPLERS[3]], ids=Sampler.describe)
@pytest.mark.parametrize("scheme", ENUMERATED)
def test_the_first_round_commits_what_enumeration_says(scheme, sampler):
    """A decoder that never accepts has the right law too: here it would be rejected."""
    law, lengths = first_round(scheme, sampler), defaultdict(Fraction)
    for committed, weight in law.items():
        lengths[len(committed) - 2] += weight
    runs = runs_of(scheme, sampler)
    found = [tokens[: 2 + accepted[0]] for tokens, accepted in runs]
    assert p_value(found, law) > PASS
    assert p_value([0] * RUNS, lengths) < REJECT  # accepting nothing
    assert p_value([accepted[0] for _, accepted in runs], lengths) > PASS


def test_block_verification_accepts_more_than_token_by_token():
    expected = {}
    for scheme in ("chain, token", "chain, block"):
        law = first_round(scheme, SAMPLERS[0])
        expected[scheme] = float(sum(weight * (len(committed) - 2) for committed, weight in law.items()))
        mean = sum(accepted[0] for _, accepted in runs_of(scheme, SAMPLERS[0])) / RUNS
        assert mean == pytest.approx(expected[scheme], abs=4 / RUNS**0.5)  # accepted lengths deviate by 1 at most
    assert expected["chain, block"] > expected["chain, token"] + 0.02


# --- penalties, a law that depends on the whole path ---------------------------------------------------------------


PENALTIES = Penalties(repetition=1.5, presence=0.4, frequency=0.7)
OF_PENALTIES = ["chain, token", "chain, block", "ngram tree", "tree, distinct", "tree, independent", "tree, dynamic"]


@lru_cache
def penalised_law(sampler):
    """The law of whole answers, from the definitions: every token knows what came before it."""

    def law(prefix):
        logits = TARGET.table[tuple([*PROMPT, *prefix][-2:])].clone()
        for token in range(V):
            times = prefix.count(token)
            if times or token in PROMPT:
                logits[token] *= 1 / 1.5 if logits[token] > 0 else 1.5
            logits[token] -= 0.7 * times + 0.4 * (times > 0)
        return normalised(map(Fraction, sampler.probabilities(logits).tolist()))

    return target_law(law, NEW)


def penalised_runs(scheme, sampler):
    drafter, shape, rule = (None, None, "token") if scheme == "plain" else SCHEMES[scheme]
    return sequences_of(drafter, shape, sampler, new=NEW, runs=RUNS, verification=rule, penalties=PENALTIES)


@pytest.mark.parametrize("sampler", [SAMPLERS[0], SAMPLERS[3]], ids=Sampler.describe)
@pytest.mark.parametrize("scheme", ["plain", *OF_PENALTIES])
def test_penalties_are_part_of_the_law_at_every_node(scheme, sampler):
    found = penalised_runs(scheme, sampler)
    assert p_value(found, penalised_law(sampler)) > PASS
    assert p_value(found, exact_law(sampler)) < REJECT


@pytest.mark.parametrize("scheme", ["chain, token", "tree, distinct"])
def test_penalties_that_forget_what_was_drafted_are_rejected(monkeypatch, scheme):
    """A known fault: every node of a round is penalised as the pending token is."""

    def behind(history, tokens_BN, sees_BMM):
        return history.answer_BV.unsqueeze(1).repeat(1, tokens_BN.shape[1] + 1, 1)

    monkeypatch.setattr(History, "behind", behind)
    assert p_value(penalised_runs(scheme, SAMPLERS[3]), penalised_law(SAMPLERS[3])) < REJECT


# --- known faults are rejected -----------------------------------------------------------------------------------


def schedule_law(round_at):
    """The law of whole answers: the prefill's token, then rounds as deep as the budget lets them be."""

    def at(prefix):
        if not prefix:
            return {(token,): w for token, w in enumerate(round_at.first) if w}
        return round_at(prefix, min(2, NEW - len(prefix) - 1))

    return sequence_law(at, NEW)


class Fault:
    """A fault to plant: the drafter and the settings that go with it, and the law that it gives a round."""

    shape, rule, sampler, drafter = CHAIN, "token", SAMPLERS[0], DRAWN

    def plant(self, monkeypatch):
        """Nothing, where the drafter or the rule is the fault."""

    @property
    def first(self):
        return self.p(())

    @cached_property
    def p(self):
        return law_of(TARGET, self.sampler)

    @cached_property
    def q(self):
        return law_of(self.drafter, self.sampler)


class RepairFromP(Fault):
    """After a rejection the token is drawn from p again, not from what q left of it."""

    def plant(self, monkeypatch):
        def kernel(p_BKV, q_BKV, tokens_BK, uniforms_BK, lengths_B=None):
            right = verify_chain(p_BKV, q_BKV, tokens_BK, uniforms_BK, lengths_B)
            rows = torch.arange(len(p_BKV))
            return ChainVerdict(right.accepted, draw(p_BKV[rows, right.accepted], uniforms_BK[:, -1]))

        monkeypatch.setattr(verification, "verify_chain", kernel)

    def __call__(self, prefix, depth):
        return chain_round(self.p, self.q, depth, repair=resampled, prefix=prefix)


class RepairFromPTruncated(RepairFromP):
    sampler = SAMPLERS[3]


class RepairFromPChosen(RepairFromP):
    drafter = Chosen()


class ScoredAsDrawn(Fault):
    """The argmax, verified with the softmax."""

    class Drafter(Chosen):
        def propose(self, state, sampler, shape, limits, uniforms_BN):
            proposal = super().propose(state, sampler, shape, limits, uniforms_BN)
            return Proposal(proposal.tokens_BN, q=self.laws(state, proposal, sampler)[:, :-1])

    drafter = Drafter()

    def __call__(self, prefix, depth):
        scored = law_of(self.drafter.model, self.sampler)
        return chain_round(self.p, self.q, depth, scored=scored, prefix=prefix)


class RawLaw(Fault):
    """Drawn through temperature and truncation, verified without."""

    class Drafter(TableDrafter):
        def propose(self, state, sampler, shape, limits, uniforms_BN):
            proposal = super().propose(state, sampler, shape, limits, uniforms_BN)
            return Proposal(proposal.tokens_BN, q=self.laws(state, proposal, Sampler(1.0))[:, :-1])

    drafter, sampler = Drafter(seed=10), Sampler(1.0, top_p=0.6)

    def __call__(self, prefix, depth):
        scored = law_of(self.drafter.model, Sampler(1.0))
        return chain_round(self.p, self.q, depth, scored=scored, prefix=prefix)


class RawBonus(Fault):
    """The token after a proposal that was kept whole skips the sampler."""

    sampler = SAMPLERS[3]

    def plant(self, monkeypatch):
        raw, right_law, right_verify = [], Options.law, outcome.verify

        def law(options, logits_BMV, *rest):
            raw[:] = [logits_BMV.softmax(-1)]
            return right_law(options, logits_BMV, *rest)

        def verify(rule, shape, p_BMV, proposal, uniforms_BU, counts_B):
            path_BN, accepted_B, token_B = right_verify(rule, shape, p_BMV, proposal, uniforms_BU, counts_B)
            bonus_B = draw(raw[0][torch.arange(len(token_B)), accepted_B], uniforms_BU[:, -1])
            return path_BN, accepted_B, torch.where(accepted_B == counts_B, bonus_B, token_B)

        monkeypatch.setattr(Options, "law", law)
        monkeypatch.setattr(outcome, "verify", verify)

    def __call__(self, prefix, depth):
        law, bonus = defaultdict(Fraction), law_of(TARGET, Sampler(1.0))
        for committed, weight in chain_round(self.p, self.q, depth, prefix=prefix).items():
            if len(committed) <= depth:
                law[committed] += weight
            else:
                spread(law, committed[:-1], weight, bonus(prefix + committed[:-1]))
        return law


class TypicalLossy(Fault):
    """Typical acceptance: what it is known as, sold as exact."""

    rule = "typical_lossy"

    def __call__(self, prefix, depth):
        law = defaultdict(Fraction)

        def walk(committed, weight):
            p = self.p(prefix + committed)
            if len(committed) == depth:
                spread(law, committed, weight, p)
                return
            values = torch.tensor([float(pi) for pi in p], dtype=torch.float64)
            threshold = min(0.09, 0.3 * float(torch.exp(torch.xlogy(values, values).sum())))
            for token, drawn in enumerate(self.q(prefix + committed)):
                if drawn and p[token] > threshold:
                    walk((*committed, token), weight * drawn)
                elif drawn:
                    spread(law, committed, weight * drawn, p)

        walk((), Fraction(1))
        return law


class OfTrees(Fault):
    """A fault in how children come about or are tested; ``siblings`` has its law."""

    shape = TWO

    def __call__(self, prefix, depth):
        tree = ((), ()) if depth else ()
        return tree_law.tree_round(self.p, self.siblings(), tree, prefix=prefix)


class NotRenormalised(OfTrees):
    """Drawn without replacement, each tested with the whole q."""

    def plant(self, monkeypatch):
        def kernel(*arguments, replacement, **options):
            return verify_tree(*arguments, replacement=True, **options)

        monkeypatch.setattr(verification, "verify_tree", kernel)

    def siblings(self):
        return biased.not_renormalised(self.q)


class Resorted(OfTrees):
    """Drawn without replacement, then tested in the order of q."""

    class Drafter(TableDrafter):
        def propose(self, state, sampler, shape, limits, uniforms_BN):
            proposal = super().propose(state, sampler, shape, limits, uniforms_BN)
            q_B2 = proposal.q[:, 0].gather(1, proposal.tokens_BN)
            order_B2 = q_B2.argsort(dim=1, descending=True, stable=True)
            return Proposal(proposal.tokens_BN.gather(1, order_B2), proposal.parents_BN, proposal.q)

    drafter = Drafter()

    def siblings(self):
        return biased.resorted(self.q)


class AsDrawn(OfTrees):
    """Chosen children, verified as if they had been drawn from q."""

    shape = StaticTree(((0,), (1,)), "chosen")

    class Drafter(TableDrafter):
        def propose(self, state, sampler, shape, limits, uniforms_BN):
            proposal = super().propose(state, sampler, shape, limits, uniforms_BN)
            self.scored = self.laws(state, proposal, sampler)
            return proposal

    def __init__(self):
        self.drafter = self.Drafter()

    def plant(self, monkeypatch):
        def verify(rule, shape, p_BMV, proposal, uniforms_BU, counts_B):
            N = proposal.tokens_BN.shape[1]
            parents_BN = proposal.parents_BN if N else torch.empty_like(proposal.tokens_BN)
            scored = self.drafter.scored if N else p_BMV
            uniforms_BM = torch.cat([uniforms_BU[:, :N], uniforms_BU[:, -1:]], 1)
            found = verify_tree(p_BMV, scored, proposal.tokens_BN, parents_BN, uniforms_BM, counts_B)
            return found.path, found.accepted, found.token

        monkeypatch.setattr(outcome, "verify", verify)

    def siblings(self):
        return biased.chosen_scored_as_drawn(self.q, V)


class DynamicAsDrawn(AsDrawn):
    """A tree that was grown and cut by confidence, verified as if it had been drawn."""

    shape = DYNAMIC

    def __call__(self, prefix, depth):
        paths = grown(law_of(self.drafter, Sampler(1.0)), self.shape, depth, prefix)
        return tree_law.tree_round(self.p, self.siblings(), nested(paths), prefix=prefix)


FAULTS = [RepairFromP, RepairFromPTruncated, RepairFromPChosen, ScoredAsDrawn, RawLaw, RawBonus, TypicalLossy,
          NotRenormalised, Resorted, AsDrawn, DynamicAsDrawn]  # fmt: skip


@pytest.mark.parametrize("kind", FAULTS, ids=lambda kind: kind.__name__)
def test_the_same_sample_rejects_known_faults(monkeypatch, kind):
    """Power: each fault's exact law lies over 4 standard deviations beyond rejection at 1e-8, and is found there."""
    fault = kind()
    right, wrong = exact_law(fault.sampler), schedule_law(fault)
    assert certainty(right, wrong, MORE) > 4
    fault.plant(monkeypatch)
    found = sequences_of(fault.drafter, fault.shape, fault.sampler, new=NEW, runs=MORE, verification=fault.rule)
    assert p_value(found, right) < REJECT
    assert p_value(found, wrong) > PASS


@pytest.mark.parametrize("scheme", ["chain, token", "tree, distinct", "tree, dynamic"])
def test_the_enumerated_schedule_without_a_fault_is_exact(scheme):
    class Right(Fault):
        sampler = SAMPLERS[3]

        def __call__(self, prefix, depth):
            return round_of(scheme, self.sampler, depth, prefix)

    assert schedule_law(Right()) == exact_law(SAMPLERS[3])


# --- a real model and a real drafter -----------------------------------------------------------------------------

WORDS, SHORT, START = 3, 4, [1, 2, 0]
OF_EAGLE = {
    "chain, token": (CHAIN, "token"),
    "chain, block": (CHAIN, "block"),
    "tree, distinct": (StaticTree(PATHS, "distinct"), "token"),
    "tree, independent": (StaticTree(PATHS, "independent"), "token"),
    "tree, dynamic": (DynamicTree(2, 2, 4), "token"),
}


def model_law(target, sampler):
    """Every sequence of SHORT tokens with its probability, from forwards without a cache."""
    sequences = list(itertools.product(range(WORDS), repeat=SHORT))
    ids = torch.tensor([[*START, *sequence[:-1]] for sequence in sequences])
    p_BTV = sampler.probabilities(target.logits(target.forward(ids).hidden_BTH[:, -SHORT:]))
    p_B = p_BTV.gather(-1, torch.tensor(sequences).unsqueeze(-1)).squeeze(-1).prod(-1)
    assert float(p_B.sum()) == pytest.approx(1, abs=1e-6)
    return dict(zip(sequences, p_B.tolist(), strict=True))


@pytest.fixture(scope="module")
def model_pair(tiny_target, tools):
    target = tiny_target("llama", layers=3, hidden=16, vocab=WORDS, padding=3, seed=1)
    with torch.no_grad():
        target.head_weight.mul_(0.4)
    drafter = tools.eagle3(target, draft_vocab=3, tap_layers=(0, 1, 2), seed=1)
    with torch.no_grad():
        drafter.lm_head.weight.mul_(4.0)  # far from the target's law, so that a wrong repair shows
    return target, drafter


def eagle_runs(model_pair, sampler, scheme):
    target, drafter = model_pair
    shape, rule = OF_EAGLE[scheme]
    return sequences_of(drafter, shape, sampler, new=SHORT, runs=RUNS, verification=rule, prompt=START, target=target)


@pytest.mark.parametrize("sampler", [SAMPLERS[0], Sampler(0.7, top_k=2)], ids=Sampler.describe)
@pytest.mark.parametrize("scheme", OF_EAGLE)
def test_a_real_model_with_an_eagle_drafter_keeps_its_law(model_pair, sampler, scheme):
    assert p_value(eagle_runs(model_pair, sampler, scheme), model_law(model_pair[0], sampler)) > PASS


def test_the_same_sample_of_the_real_model_rejects_a_repair_from_p(model_pair, monkeypatch):
    RepairFromP().plant(monkeypatch)
    sequences = eagle_runs(model_pair, SAMPLERS[0], "chain, token")
    assert p_value(sequences, model_law(model_pair[0], SAMPLERS[0])) < REJECT
