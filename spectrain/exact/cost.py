"""What a round yields and what it costs, so which draft length pays (arXiv 2211.17192, sections 3.2 and 3.3).

Costs are in target steps: one plain decoding step of the target takes 1. A round takes k·c + v: c for each
drafted token, v for the verification of k + 1 tokens. `v` may be a sequence with v[k] the measured cost at
draft length k, for a forward of several tokens seldom costs exactly one step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from spectrain.errors import SpectrainError


@dataclass(frozen=True)
class Choice:
    """A draft length and its speedup over plain decoding; k = 0 means "off"."""

    k: int
    speedup: float


def geometric_survival(alpha: float, k: int) -> list[float]:
    """P(first i accepted) = α^i for i = 1..k, if each token is accepted with probability α."""
    if not 0 <= alpha <= 1:
        raise SpectrainError(f"alpha: found {alpha!r}, expected an acceptance probability in 0..1")
    if k < 0:
        raise SpectrainError(f"k: found {k!r}, expected a draft length of at least 0")
    return [alpha**i for i in range(1, k + 1)]


def expected_tokens(alpha: float, k: int) -> float:
    """Tokens per round 1 + α + … + α^k = (1 - α^(k+1)) / (1 - α), with the repair or bonus token."""
    return 1.0 + sum(geometric_survival(alpha, k))


def expected_tokens_from_survival(survival: Sequence[float]) -> float:
    """Tokens per round 1 + Σ_i P(first i accepted), whatever the dependence between positions.

    Raises SpectrainError unless the values fall from at most 1 to at least 0.
    """
    chain = [1.0, *survival, 0.0]
    if not all(before >= after for before, after in pairwise(chain)):
        raise SpectrainError(
            f"survival: found {list(survival)}, expected P(first i accepted): within 0..1 and never rising; "
            "conditional acceptances must be multiplied up first"
        )
    return 1.0 + sum(survival)


def speedup(tokens_per_round: float, k: int, c: float, v: float | Sequence[float] = 1.0) -> float:
    """Speedup over plain decoding: tokens per round ÷ (k·c + v). Below 1 drafting does not pay."""
    return tokens_per_round / break_even_tokens(k, c, v)


def break_even_tokens(k: int, c: float, v: float | Sequence[float] = 1.0) -> float:
    """Tokens per round at which a round costs what plain decoding of the same tokens costs: k·c + v."""
    cost = k * c + _verification(v, k)
    if k < 0 or c < 0 or not cost > 0:
        raise SpectrainError(f"round cost: found k={k}, c={c}, v={v}, expected k >= 0, c >= 0 and k·c + v > 0")
    return cost


def best_k(survival: Sequence[float], c: float, v: float | Sequence[float] = 1.0) -> Choice:
    """The draft length in 0..len(survival) of the highest speedup; the shortest of equals.

    k = 0 is plain decoding, with a speedup of 1 by definition: `Choice(0, 1.0)` says that no draft length
    pays. A shorter round is taken to accept the same first tokens as the one whose survival was measured.
    """
    best = Choice(0, 1.0)
    for k in range(1, len(survival) + 1):
        gain = speedup(expected_tokens_from_survival(survival[:k]), k, c, v)
        if gain > best.speedup:
            best = Choice(k, gain)
    return best


def break_even_alpha(k: int, c: float, v: float | Sequence[float] = 1.0) -> float | None:
    """The lowest α at which k independent proposals pay for themselves; None when not even α = 1 does."""
    return alpha_for_tokens(max(break_even_tokens(k, c, v), 1.0), k)


def break_even_cost(tokens_per_round: float, k: int, v: float | Sequence[float] = 1.0) -> float | None:
    """The draft cost c, in target steps a token, above which these rounds no longer pay; None when none is low enough,
    for verification alone costs more than the tokens are worth."""
    if k < 1:
        raise SpectrainError(f"k: found {k!r}, expected a draft length of at least 1")
    spare = tokens_per_round - _verification(v, k)
    return spare / k if spare >= 0 else None


def alpha_for_tokens(tokens_per_round: float, k: int) -> float | None:
    """The α of k independent proposals that yields so many tokens a round; None when not even α = 1 does.

    What a published number of tokens per round implies, if all positions accept alike.
    """
    if not tokens_per_round >= 1:
        raise SpectrainError(f"tokens per round: found {tokens_per_round!r}, expected at least 1: a round commits one")
    if tokens_per_round > (k + 1) * (1 + 1e-12):  # of a perfect drafter, rounding may make a little more
        return None
    if tokens_per_round == 1:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(60):  # expected_tokens rises with α: bisection to the last bit
        middle = (low + high) / 2
        low, high = (low, middle) if expected_tokens(middle, k) >= tokens_per_round else (middle, high)
    return high


@dataclass(frozen=True)
class Length:
    """What a draft length yields and costs, and where it would break even (see `break_even_alpha` and `_cost`)."""

    k: int
    tokens_per_round: float
    round_cost: float
    speedup: float
    break_even_alpha: float | None
    break_even_c: float | None


def by_length(survival: Sequence[float], c: float, v: float | Sequence[float] = 1.0) -> list[Length]:
    """Every draft length 1..len(survival), with the first values of the same survival curve."""
    rows = []
    for k in range(1, len(survival) + 1):
        tokens, cost = expected_tokens_from_survival(survival[:k]), break_even_tokens(k, c, v)
        rows.append(Length(k, tokens, cost, tokens / cost, break_even_alpha(k, c, v), break_even_cost(tokens, k, v)))
    return rows


def interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """A measured cost between the points where it was measured, (x, cost): linear between them, flat beyond."""
    below = max((p for p in points if p[0] <= x), default=min(points))
    above = min((p for p in points if p[0] >= x), default=max(points))
    if above[0] == below[0]:
        return below[1]
    return below[1] + (above[1] - below[1]) * (x - below[0]) / (above[0] - below[0])


def _verification(v: float | Sequence[float], k: int) -> float:
    if not isinstance(v, Sequence):
        return float(v)
    if not 0 <= k < len(v):
        raise SpectrainError(f"v: found {len(v)} verification costs, expected one for each draft length 0..{k}")
    return float(v[k])
