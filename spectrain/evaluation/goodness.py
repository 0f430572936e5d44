"""Are counts in equal bins those of a uniform law? Pearson's chi-square, many contenders at once, and its power.

What is counted: ``law_test``. Under exact sampling each contender's counts are those of independent uniform places.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from spectrain.errors import SpectrainError

LEVEL = 0.001
"""How often an exact contender is called different at most, however many are tested beside it. At fewer than 100 tokens
the chi-square law is not quite that of the statistic: then up to 2.5 times as often."""
POWER = 0.9


def distribution_block(counted: Sequence[tuple[str, bool, Sequence[int]]]) -> list[dict[str, Any]]:
    """The test of every contender, from (name, lossy, counts in equal bins summed over its answers).

    Returns:
        For each: ``tokens``, ``bins``, ``statistic``, ``p_value``; ``adjusted_p_value``: Holm's, over all contenders;
        ``agrees``: that is at least ``LEVEL``; ``detectable``: any law of the bins that lies at least so far from the
        uniform one in total variation is found by this many tokens with a probability of ``POWER``, at most 1. Lossy
        contenders are expected to differ.

    Raises:
        SpectrainError: a contender without a token, or with fewer than two bins.
    """
    for name, _, bins in counted:
        if len(bins) < 2 or min(bins) < 0 or not sum(bins):
            raise SpectrainError(f"contender {name!r}: counts {list(bins)}, expected a token in two bins or more")
    tests = [chi_square(bins) for _, _, bins in counted]
    adjusted = holm([p for _, p in tests])
    return [
        {
            "contender": name,
            "lossy": lossy,
            "tokens": int(sum(bins)),
            "bins": [int(count) for count in bins],  # whatever kind of number was added up
            "statistic": statistic,
            "p_value": p,
            "adjusted_p_value": holms,
            "agrees": holms >= LEVEL,
            "detectable": detectable(int(sum(bins)), len(bins), LEVEL / len(counted)),
        }
        for (name, lossy, bins), (statistic, p), holms in zip(counted, tests, adjusted, strict=True)
    ]


def chi_square(bins: Sequence[int]) -> tuple[float, float]:
    """Pearson's statistic of counts against equal ones, and the probability that chance makes it as large."""
    expected = sum(bins) / len(bins)
    statistic = sum((count - expected) ** 2 for count in bins) / expected
    return float(statistic), tail(float(statistic), len(bins) - 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjustment (1979): rejecting those below a level errs in any of them less often than that."""
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def tail(statistic: float, freedom: int, shift: float = 0.0) -> float:
    """P(χ² ≥ statistic) with so many degrees of freedom; ``shift`` is the noncentrality.

    A noncentral law is a central one whose degrees of freedom are raised by twice a Poisson number of mean shift / 2.
    """
    half = shift / 2
    number = torch.arange(int(half + 12 * math.sqrt(half) + 40), dtype=torch.float64)
    log_weight = torch.special.xlogy(number, torch.tensor(half)) - half - torch.lgamma(number + 1)
    central = torch.special.gammaincc(freedom / 2 + number, torch.full_like(number, statistic / 2))
    return float((log_weight.exp() * central).sum())


def detectable(tokens: int, bins: int, level: float) -> float:
    """The total variation from which on every law of the bins is found at ``level`` with a power of ``POWER``.

    Of laws at one distance the hardest to find spreads it over all bins (half of them up, half down, all alike): its
    noncentrality is 4 × tokens × distance².
    """
    return min(1.0, math.sqrt(_needed(bins - 1, level) / (4 * tokens)))


@cache
def _needed(freedom: int, level: float) -> float:
    """The noncentrality that is found with a power of ``POWER``."""
    critical = _solved(lambda x: level - tail(x, freedom))
    return _solved(lambda shift: tail(critical, freedom, shift) - POWER)


def _solved(rising: Callable[[float], float]) -> float:
    """Where a rising function that starts below zero gets to zero."""
    low, high = 0.0, 1.0
    while rising(high) < 0:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return high
