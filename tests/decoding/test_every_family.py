"""Losslessness of every family, end to end; one that is added to the registry is tested here by itself.

Trained families have random weights: right now and then, wrong mostly, which is what a decoder has to survive.
"""

from __future__ import annotations

from functools import cache as once

import pytest
from families import FAMILY_NAMES, ready_drafter

from spectrain.exact.sampler import Sampler
from spectrain.shapes import Chain, DynamicTree, StaticTree, check_shape

COUNT = 14
# Text that repeats, so that those who look text up find something; and requests of unlike length.
PROMPTS = [[3, 1, 4, 1, 5, 9, 3, 1, 4, 1, 5, 9, 3, 1], [7], [7, 2, 7, 2, 8, 7, 2], [0, 0, 0], [23, 22, 21, 20, 19]]
PATHS = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
SHAPES = {"chain": Chain(3), "static": StaticTree(PATHS), "dynamic": DynamicTree(3, 2, 6)}
SAMPLED = Sampler(1.0)
SEEDS = range(5)


@pytest.fixture(scope="module")
def target(tiny_target):
    """With rows of the head that no token has."""
    return tiny_target("llama", layers=8, padding=4)


@pytest.fixture(scope="module")
def plain(target, tools):
    """What plain decoding gives after each prompt."""
    return [tools.plain(target, prompt, COUNT).tokens for prompt in PROMPTS]


@pytest.fixture(scope="module")
def made(target):
    return once(lambda kind: ready_drafter(kind, target))


@pytest.fixture(params=FAMILY_NAMES.values(), ids=FAMILY_NAMES.keys())
def drafter(request, made):
    return made(request.param)


@pytest.fixture(params=SHAPES)
def shape(request, drafter):
    """Every shape that the drafter fills. Chains are for all."""
    shape = SHAPES[request.param]
    if drafter.trees or request.param == "chain":
        check_shape(shape, deepest=drafter.deepest, columns=drafter.columns, trees=drafter.trees, name=drafter.name)
        return shape
    pytest.skip("this family proposes no trees")


def test_greedy_text_is_that_of_plain_decoding(target, tools, drafter, shape, plain):
    """Alone, and in a batch of requests that end one after another."""
    results = [tools.one(target, drafter, shape, prompt, COUNT) for prompt in PROMPTS]
    assert [result.tokens for result in results] == plain
    together = tools.batch(target, drafter, shape, PROMPTS, COUNT)
    assert [result.tokens for result in together] == plain, "a request hears of its companions"
    for result in (*results, *together):
        tools.check_books(result, shape, COUNT)
    assert any(round_.proposed for result in results for round_ in result.rounds), f"{drafter.name} proposed nothing"
    ends = {text[6] for text in plain}
    stopped = tools.batch(target, drafter, shape, PROMPTS, COUNT, eos=ends)
    cut = [next((i + 1 for i, token in enumerate(text) if token in ends), COUNT) for text in plain]
    assert len(set(cut)) > 1
    assert [result.tokens for result in stopped] == [text[:end] for text, end in zip(plain, cut, strict=True)]


def test_sampled_text_is_the_same_alone_and_in_a_batch(target, tools, drafter, shape):
    alone = [tools.one(target, drafter, shape, p, COUNT, SAMPLED, seed=s) for p, s in zip(PROMPTS, SEEDS, strict=True)]
    together = tools.batch(target, drafter, shape, PROMPTS, COUNT, SAMPLED, seeds=SEEDS)
    assert tools.told(together) == tools.told(alone), "a request hears of its companions"
