"""Drafters for tests: the target itself, with and without noise, and scripts that are right as long as they are told.

Shapes: B batch, W nodes of a level, N nodes, V vocabulary.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spectrain.cache import KeyValueCache, last_positions
from spectrain.decoding import generate, generate_batch, generate_plain
from spectrain.drafters.base import Drafter, Proposal
from spectrain.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from spectrain.drafters.growth import GrowingDrafter, below
from spectrain.drafters.ngram import NgramConfig, NgramDrafter
from spectrain.exact.sampler import Sampler
from spectrain.shapes import ABSENT, Chain, DynamicTree, Layout, StaticTree

GREEDY = Sampler()
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9], [0, 0, 0], [23, 22, 21, 20, 19]]
PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (1, 0, 0))
SHAPES = {"chain": Chain(3), "static": StaticTree(PATHS), "dynamic": DynamicTree(3, 3, 8)}


@dataclass
class SelfState:
    """The drafter's own cache, of which ``lengths`` positions are committed; what the target says after the pending
    tokens; and the tokens and the layout of the level drafted last."""

    cache: KeyValueCache
    lengths: list[int]
    root_B1V: torch.Tensor
    layout: Layout | None = None


class SelfDrafter(GrowingDrafter):
    """The target as its own drafter, with a cache of its own; ``noise`` makes it err, the same way after a token."""

    def __init__(self, target, noise=0.0):
        self.target, self.columns = target, target.vocab_size
        generator = torch.Generator().manual_seed(0)
        self.noise_VV = noise * torch.randn(self.columns, self.columns, generator=generator, dtype=torch.float64)

    def logits(self, hidden_BWH, last_BW):
        return self.target.logits(hidden_BWH) + self.noise_VV[last_BW]

    def start(self, first):
        cache, ids_B1 = self.target.new_cache(len(first)), torch.tensor(first)[:, None]
        hidden_B1H = self.target.forward(ids_B1, cache=cache).hidden_BTH
        return SelfState(cache, [1] * len(first), self.logits(hidden_B1H, ids_B1))

    def observe(self, state, committed):
        state.cache.rollback(state.lengths)
        hidden_BTH = self.target.forward(committed.tokens_BT, cache=state.cache).hidden_BTH
        state.lengths = [length + count for length, count in zip(state.lengths, committed.counts, strict=True)]
        state.cache.rollback(state.lengths)
        last_B1 = torch.tensor([[tokens[-1]] for tokens in committed.tokens])
        state.root_B1V = self.logits(last_positions(hidden_BTH, committed.counts), last_B1)

    def root(self, state):
        state.cache.rollback(state.lengths)
        state.layout = None
        return state.root_B1V

    def extend(self, state, tokens_BW, parents_BW):
        state.layout = below(state.layout, parents_BW)
        features = self.target.forward(tokens_BW, cache=state.cache, layout=state.layout)
        return self.logits(features.hidden_BTH, tokens_BW)

    def vocabulary(self):
        return self.columns, None

    def select(self, state, rows):
        state.cache.select(rows)
        state.lengths, state.root_B1V = [state.lengths[row] for row in rows], state.root_B1V[list(rows)]


class ScriptDrafter(Drafter):
    """Knows each request's answer, errs from a random place on, and proposes a random number of nodes: every way that
    a round can go. ``scripts`` are prompt and answer of the requests."""

    trees = True

    def __init__(self, scripts: Sequence[Sequence[int]], *, seed: int = 0, wrong: int = 0) -> None:
        self.scripts, self.wrong = [list(script) for script in scripts], wrong
        self.randoms = [random.Random(f"{seed}/{i}") for i in range(len(scripts))]

    def start(self, first):
        return [SimpleNamespace(request=i, read=1) for i in range(len(first))]

    def observe(self, state, committed):
        for one, tokens in zip(state, committed.tokens, strict=True):
            one.read += len(tokens)

    def select(self, state, rows):
        state[:] = [state[row] for row in rows]

    def propose(self, state, sampler, shape, limits, uniforms_BN):
        if isinstance(shape, Chain):
            rows = [self.chain(one, min(shape.length, limit)) for one, limit in zip(state, limits, strict=True)]
            counts = [len(row) for row in rows]
            padded = [row + [0] * (max(counts) - len(row)) for row in rows]
            return Proposal(torch.tensor(padded, dtype=torch.long).view(len(rows), -1), counts=counts)
        tokens, parents = zip(*(self.tree(one, shape) for one in state), strict=True)
        return Proposal(torch.tensor(tokens), torch.tensor(parents))

    def chain(self, one, length):
        dice = self.randoms[one.request]
        known = self.scripts[one.request][one.read :][: dice.randint(0, length)]
        right = dice.randint(0, len(known))
        return [token if i < right else self.wrong for i, token in enumerate(known)]

    def tree(self, one, shape):
        """Any nodes but the ones on a random path wrong, and some of them absent."""
        dice, script = self.randoms[one.request], self.scripts[one.request][one.read :]
        tokens = [dice.choice([self.wrong, self.wrong + 1]) for _ in shape.parents]
        parents = [ABSENT if dice.random() < 0.1 else parent for parent in shape.parents]
        node, depth = -1, 0
        while (children := [n for n, parent in enumerate(parents) if parent == node]) and depth < len(script):
            node = dice.choice(children)
            tokens[node] = script[depth] if dice.random() < 0.9 else self.wrong
            depth += 1
        return tokens, parents


class FullScript(ScriptDrafter):
    """Always the whole length, always right."""

    def chain(self, one, length):
        return self.scripts[one.request][one.read :][:length]


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


def drafter_for(kind: str, target: Any, scripts: Sequence[Sequence[int]] = ()) -> Drafter:
    """``scripts``: prompt and answer of every request, for "script"."""
    if kind == "ngram":
        return NgramDrafter(NgramConfig())
    if kind == "eagle3":
        return eagle3_for(target)
    if kind == "script":
        return ScriptDrafter(scripts)
    return SelfDrafter(target, noise={"self": 0.0, "noisy": 2.0}[kind])


class Decoders:
    """Plain and speculative decoding with the settings that most tests share."""

    @staticmethod
    def plain(target, prompt=PROMPTS[0], count=16, sampler=GREEDY, eos=(), **more):
        return generate_plain(target, prompt, sampler=sampler, max_new_tokens=count, eos_ids=eos, **more)

    @staticmethod
    def one(target, drafter, shape, prompt=PROMPTS[0], count=16, sampler=GREEDY, eos=(), **more):
        settings = {"sampler": sampler, "max_new_tokens": count, "eos_ids": eos, "shape": shape, **more}
        return generate(target, drafter, prompt, **settings)

    @staticmethod
    def batch(target, drafter, shape, prompts=PROMPTS, count=16, sampler=GREEDY, eos=(), seeds=None, **more):
        settings = {"sampler": sampler, "max_new_tokens": count, "eos_ids": eos, "shape": shape, **more}
        return generate_batch(target, drafter, prompts, seeds=seeds or range(len(prompts)), **settings)


def check_books(result, shape, count):
    """The rounds account for every token but the first, which came from the prefill. (No shape: nothing is drafted.)"""
    deepest, most = (shape.depth, shape.nodes) if shape else (0, 0)
    assert len(result.tokens) == bool(result.tokens) + sum(r.committed for r in result.rounds) <= count
    left = count - 1
    for round_ in result.rounds:
        assert 0 <= round_.accepted <= round_.proposed <= min(deepest, left - 1)
        assert round_.proposed <= round_.nodes <= most
        assert round_.accepted <= round_.committed <= round_.accepted + 1
        if isinstance(shape, Chain):
            assert round_.nodes == round_.proposed
        if round_.clipped in (None, "budget"):
            assert round_.committed == round_.accepted + 1
        assert (round_.clipped == "budget") == (left - 1 < deepest and round_.clipped not in ("eos", "stop"))
        left -= round_.committed
    assert all(round_.clipped in (None, "budget") for round_ in result.rounds[:-1])
    if result.finished == "budget":
        assert len(result.tokens) == count


def told(results):
    return [(result.tokens, result.finished) for result in results]


@pytest.fixture(autouse=True, scope="module")
def _frozen():
    """Thousands of requests make many small objects; half the time would go into looking for garbage among imports."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def tools():
    """The functions and classes above."""
    return SimpleNamespace(
        PROMPTS=PROMPTS,
        SHAPES=SHAPES,
        plain=Decoders.plain,
        one=Decoders.one,
        batch=Decoders.batch,
        check_books=check_books,
        told=told,
        drafter=drafter_for,
        eagle3=eagle3_for,
        SelfDrafter=SelfDrafter,
        ScriptDrafter=ScriptDrafter,
        FullScript=FullScript,
    )
