"""Drafters whose acceptance is known beforehand: the target itself, and one that is robbed of what it reads.

Shapes: B batch, T positions, F tapped features, H hidden.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from spectrain.decoding import generate, generate_batch
from spectrain.drafters.base import Committed, Drafter
from spectrain.drafters.eagle3 import Eagle3Config
from spectrain.drafters.language_model import LanguageModelConfig, LanguageModelDrafter
from spectrain.drafters.medusa import MedusaConfig
from spectrain.drafters.scoring import score_batch
from spectrain.exact.sampler import Sampler
from spectrain.shapes import Chain
from spectrain.target import Features

GREEDY, WARM = Sampler(), Sampler(0.8, top_p=0.9)
PROMPTS = [[3, 1, 4, 1, 5, 9], [7], [2, 7, 1, 8, 2, 8, 1, 8]]


class Witness(Drafter):
    """A drafter that compares its state with a fresh one's, which was told the whole request at once, every round."""

    trees = True

    def __init__(self, drafter: Any, tools: Any, target: Any) -> None:
        self.drafter, self.tools, self.target, self.compared = drafter, tools, target, 0
        self.config, self.columns, self.deepest = drafter.config, drafter.columns, drafter.deepest
        self.tap_layers = drafter.tap_layers

    def start(self, first):
        self.texts = [[token] for token in first]
        return self.drafter.start(first)

    def observe(self, state, committed):
        self.drafter.observe(state, committed)
        self.texts = [[*text, *new] for text, new in zip(self.texts, committed.tokens, strict=True)]

    def propose(self, state, sampler, shape, limits, uniforms_BN):
        fresh = self.tools.observed(self.drafter, self.target, self.texts)
        assert state.lengths == fresh.lengths
        for row, length in enumerate(state.lengths):
            for mine, theirs in zip(state.cache.layers, fresh.cache.layers, strict=True):
                for name in ("keys", "values"):
                    kept, whole = (getattr(layer, name)[row, :, :length] for layer in (mine, theirs))
                    torch.testing.assert_close(kept, whole, rtol=1e-6, atol=1e-8)
        self.compared += 1
        got = self.drafter.propose(state, sampler, shape, limits, uniforms_BN)
        want = self.drafter.propose(fresh, sampler, shape, limits, uniforms_BN)
        assert torch.equal(got.tokens_BN, want.tokens_BN)
        return got

    def select(self, state, rows):
        self.texts = [self.texts[row] for row in rows]
        self.drafter.select(state, rows)


@pytest.fixture(scope="module")
def itself(tiny_target):
    """A target of three layers, and a small draft that has them all."""
    target = tiny_target("llama", layers=3, padding=4)
    config = LanguageModelConfig(layers=(0, 1, 2))
    return target, LanguageModelDrafter.build(config, target, torch.zeros(target.vocab_size, dtype=torch.long))


def test_a_draft_that_is_the_target_is_certain_to_be_accepted_at_every_position(itself, tools, make_rows):
    target, drafter = itself
    rows = make_rows(target, 5, answer=(6, 12))
    scores = score_batch(drafter, tools.batch(target, drafter, rows), target.head, 5)
    assert len(scores.positions) == 5
    assert min(scores.positions) > 5
    assert scores.alpha == pytest.approx(scores.positions, rel=1e-5)
    assert scores.greedy == scores.positions
    assert scores.conditional() == [1.0] * 5


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("sampler", [GREEDY, WARM, Sampler(1.0)], ids=Sampler.describe)
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_it_gets_k_plus_1_tokens_a_round_and_keeps_the_state_of_a_fresh_prefill(itself, tools, k, sampler, rule):
    """At T > 0 because p = q: nothing is ever rejected."""
    target, drafter = itself
    witness = Witness(drafter, tools, target)
    results = generate_batch(target, witness, PROMPTS, seeds=range(3), sampler=sampler, max_new_tokens=1 + 3 * (k + 1),
                             shape=Chain(k), eos_ids=(), verification=rule)  # fmt: skip
    for result in results:
        assert [(r.proposed, r.accepted, r.committed) for r in result.rounds] == [(k, k, k + 1)] * 3
    assert witness.compared == 3


def test_an_untrained_head_scores_as_the_targets_own_next_token_law(tools, tiny_target, make_rows):
    """Head d is asked about token t + 2 + d and gives the law of token t + 1, so its acceptance is known."""
    target = tiny_target("llama", layers=2, padding=4)
    rows = make_rows(target, 4)
    drafter = tools.drafter(target, MedusaConfig(heads=3), rows).double()
    batch = tools.batch(target, drafter, rows)
    law_BTV = torch.softmax(target.logits(batch.hidden_BTH).double(), -1)
    scores = score_batch(drafter, batch, target.head)
    for depth, step in enumerate(drafter(batch).depths):
        want = sum(
            float(torch.minimum(law_BTV[b, t], law_BTV[b, t + 1 + depth]).sum())
            for b, t in step.mask_BT.nonzero().tolist()
        )
        assert scores.alpha[depth] == pytest.approx(want, rel=1e-4)


# --- robbed of the target's features --------------------------------------------------------------------------------


class Deaf(Drafter):
    """A drafter that is told noise, of the size of the features, in their place."""

    def __init__(self, drafter: Any) -> None:
        self.drafter, self.trees, self.columns, self.deepest = drafter, drafter.trees, drafter.columns, drafter.deepest
        self.config, self.tap_layers = drafter.config, drafter.tap_layers
        self.generator = torch.Generator().manual_seed(0)

    def noise(self, values: torch.Tensor) -> torch.Tensor:
        drawn = torch.randn(values.shape, generator=self.generator, dtype=torch.float64).to(values.dtype)
        return drawn * values.std(dim=1, keepdim=True, correction=0).mean()

    def start(self, first):
        return self.drafter.start(first)

    def observe(self, state, committed: Committed):
        features = Features(self.noise(committed.features.hidden_BTH), self.noise(committed.features.taps_BTF))
        self.drafter.observe(state, replace(committed, features=features))

    def propose(self, *arguments):
        return self.drafter.propose(*arguments)

    def select(self, state, rows):
        self.drafter.select(state, rows)


def accepted_share(target, drafter, rows) -> float:
    """Of the greedy draft tokens on the prompts of these rows."""
    rounds = []
    for row in rows:
        prompt = row.ids[: row.mask.index(1)]
        run = generate(
            target, drafter, prompt, sampler=GREEDY, shape=Chain(3), max_new_tokens=sum(row.mask), eos_ids=()
        )
        rounds += run.rounds
    return sum(r.accepted for r in rounds) / sum(r.proposed for r in rounds)


def test_a_trained_drafter_loses_its_acceptance_when_its_features_are_noise(tools, tiny_target, make_rows):
    """So it is the target's features that it goes by, not the tokens alone."""
    target = tiny_target("llama", dtype=torch.float32)
    rows = make_rows(target, 12, answer=(10, 14))
    drafter = tools.drafter(target, Eagle3Config(depths=3, draft_vocab_size=24), rows)
    tools.train(drafter, target, tools.batch(target, drafter, rows), 150)
    drafter.eval()
    heard = accepted_share(target, drafter, rows)
    deaf = accepted_share(target, Deaf(drafter), rows)
    assert heard > 0.6
    assert deaf < 0.5 * heard
