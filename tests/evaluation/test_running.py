"""Tokens per round while measuring goes on, and the rule that may end it."""

import math
import re

import numpy as np
import pytest

from spectrain.evaluation.running import FEWEST, Running, RunningRatio
from spectrain.measures import ratio_interval


def sample(committed, contender="eagle3 k=3", temperature=0.0):
    rounds = [[3, c - 1, c, None, 3] for c in committed]
    shape = None if contender == "plain" else {"type": "chain", "depth": 3, "nodes": 3}
    return {"contender": contender, "shape": shape, "sampler": {"temperature": temperature}, "rounds": rounds}


def test_the_half_width_is_that_of_the_bootstrap():
    rng = np.random.default_rng(0)
    rounds = rng.integers(5, 40, 60)
    committed = rounds * rng.uniform(1.5, 3.5, 60)
    ratio = RunningRatio()
    for above, below in zip(committed, rounds, strict=True):
        ratio.add(float(above), float(below))
    found = ratio_interval(committed, rounds)
    assert ratio.value == pytest.approx(found.value)
    assert ratio.half_width == pytest.approx((found.high - found.low) / 2, rel=0.1)


def test_nothing_is_claimed_of_one_conversation_or_of_none():
    ratio = RunningRatio()
    assert math.isnan(ratio.value)
    assert ratio.half_width == math.inf
    ratio.add(5, 2)
    assert ratio.half_width == math.inf
    ratio.add(0, 0)  # an answer of one token has no round
    assert ratio.value == 2.5


def test_it_is_enough_when_the_widest_of_all_is_narrow():
    running = Running(stop_at=0.2)
    for turn in range(2 * FEWEST):
        wide = [1, 4] if turn % 2 else [1, 1]
        running.add([sample([2, 2]), sample(wide, temperature=1.0), sample([1, 1], "plain")])
    assert running.ratios.keys() == {('{"temperature": 0.0}', "eagle3 k=3"), ('{"temperature": 1.0}', "eagle3 k=3")}
    assert running.enough is None
    assert running.rule() is None
    while running.enough is None:
        running.add([sample([2, 2]), sample([1, 4], temperature=1.0), sample([2, 2], temperature=1.0)])
    assert running.enough == running.conversations > 2 * FEWEST
    rule = running.rule()
    assert rule["half_width"] <= rule["asked"] == 0.2
    running.add([sample([1])])  # another process has measured more than was needed
    assert (running.rule(), running.conversations) == (rule, running.enough)


def test_few_conversations_are_never_enough():
    running = Running(stop_at=10.0)
    for turn in range(FEWEST):
        assert running.enough is None, turn
        running.add([sample([2, 3])])
    assert running.enough == FEWEST


def test_it_never_ends_early_unasked():
    running = Running()
    for _ in range(100):
        running.add([sample([2, 2])])
    assert running.enough is None


def test_the_progress_line_names_tokens_per_round():
    running = Running()
    running.add([sample([2, 3], name) for name in ("plain", "ngram k=3", "eagle3 k=3")])
    assert running.shown() == {"ngram k=3": "τ 2.50", "eagle3 k=3": "τ 2.50"}
    running.add([sample([4], "ngram k=3"), sample([1], "eagle3 k=3"), sample([1], "eagle3 k=3", temperature=1.0)])
    shown = running.shown()
    assert set(shown) == {"ngram k=3", "eagle3 k=3"}
    assert all(re.fullmatch(r"τ \d\.\d\d ± \d\.\d\d", value) for value in shown.values())
