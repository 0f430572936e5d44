"""Drafters for tests: the target itself, and a script that is right for as long as it was told to be."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from spectrain.cache import cached_length, rollback
from spectrain.drafters.base import Drafter, Proposal
from spectrain.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from spectrain.drafters.ngram import NgramConfig, NgramDrafter
from spectrain.exact.sampler import draw


@dataclass
class SelfState:
    cache: Any
    ids: list[int] = field(default_factory=list)
    read: int = 0


class SelfDrafter(Drafter):
    """The target as its own drafter, with a cache of its own; it samples, and says so, at T>0."""

    def __init__(self, target):
        self.target = target

    def start(self):
        return SelfState(self.target.new_cache())

    def observe(self, state, ids, features):
        state.ids.extend(ids)
        if cached_length(state.cache):
            rollback(state.cache, state.read)

    def propose(self, state, sampler, length, uniforms_K):
        inputs, tokens, laws = state.ids[state.read :], [], []
        state.read = len(state.ids)
        for uniform in uniforms_K[:length]:
            hidden = self.target.forward(torch.tensor([inputs]), cache=state.cache).hidden_BTH[0, -1]
            laws.append(sampler.probabilities(self.target.logits(hidden)))
            tokens.append(draw(laws[-1], uniform))
            inputs = [int(tokens[-1])]
        return Proposal(torch.stack(tokens), None if sampler.greedy else torch.stack(laws))


class ScriptDrafter(Drafter):
    """Proposes the known answer, wrong from a random place on, and of a random length: every way a round can go."""

    def __init__(self, prompt: Sequence[int], answer: Sequence[int], *, seed: int = 0, wrong: int = 0) -> None:
        self.script, self.wrong = [*prompt, *answer], wrong
        self.random = random.Random(seed)

    def start(self):
        return []

    def observe(self, state, ids, features):
        state.extend(ids)

    def propose(self, state, sampler, length, uniforms_K):
        known = self.script[len(state) :][: self.random.randint(0, length)]
        right = self.random.randint(0, len(known))
        tokens = [t if i < right else self.wrong for i, t in enumerate(known)]
        return Proposal(torch.tensor(tokens, dtype=torch.long), None)


class FullScript(ScriptDrafter):
    """Always the whole length, always right."""

    def propose(self, state, sampler, length, uniforms_K):
        return Proposal(torch.tensor(self.script[len(state) :][:length], dtype=torch.long), None)


def eagle3_for(target, *, draft_vocab: int = 16, seed: int = 0, **config: Any) -> Eagle3Drafter:
    """A random EAGLE-3 drafter: right now and then, sampling from a reduced vocabulary."""
    torch.manual_seed(seed)
    if target.num_layers < 7:
        config.setdefault("tap_layers", (0, 1, target.num_layers - 1))
    settings = Eagle3Config(draft_vocab_size=draft_vocab, **config)
    counts = torch.randint(1, 100, (target.vocab_size,))
    drafter = Eagle3Drafter.build(settings, target, counts)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.5 / parameter.shape[1] ** 0.5)
    return drafter


def drafter_for(kind: str, target: Any, prompt: Sequence[int], answer: Sequence[int]) -> Drafter:
    if kind == "ngram":
        return NgramDrafter(NgramConfig())
    if kind == "eagle3":
        return eagle3_for(target)
    return SelfDrafter(target) if kind == "self" else ScriptDrafter(prompt, answer)


@pytest.fixture(scope="session")
def make_drafter():
    return drafter_for


@pytest.fixture(scope="session")
def make_eagle3_drafter():
    return eagle3_for


@pytest.fixture(scope="session")
def self_drafter():
    return SelfDrafter


@pytest.fixture(scope="session")
def script_drafter():
    return ScriptDrafter


@pytest.fixture(scope="session")
def full_script():
    return FullScript
