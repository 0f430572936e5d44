"""Intervals over conversations, for rounds and tokens of one conversation are not independent.

One method for every figure, each a ratio of sums over conversations or a ratio of two such ratios: the BCa bootstrap
(Efron 1987) of whole conversations. It corrects for bias and skewness, which a plain percentile interval does not, and
its normal quantiles are widened to √(n/(n−1)) · t(n−1), as Hesterberg does for percentiles (arXiv 1411.5279): the
resamples of n conversations vary too little by that much. Over 48 conversations the plain percentile interval holds
the truth in 92 to 94 of a hundred cases, this one in 94 to 96.

Shapes: F figures, C conversations, R resamples; `...` any leading dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import torch

from spectrain.errors import SpectrainError

Floats = npt.NDArray[np.float64]

METHOD = "BCa bootstrap of whole conversations, quantiles widened to t(n-1)"
RESAMPLE_CELLS = 1 << 20  # conversations × resamples held at a time: 8 MiB of weights


@dataclass(frozen=True)
class Interval:
    """A measured value and its interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Intervals:
    """Values [...] and their intervals; NaN where a figure has none."""

    value: Floats
    low: Floats
    high: Floats


def ratio_intervals(
    tops: Floats,
    bottoms: Floats,
    base_tops: Floats | None = None,
    base_bottoms: Floats | None = None,
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Intervals:
    """Σ tops ÷ Σ bottoms over conversations [..., C], with intervals; divided by the same ratio of a base, if given.

    Every figure sees the same resampled conversations. Nothing is checked: a figure whose denominators sum to 0 is
    NaN, and resamples that have no ratio are left out.
    """
    parts = [part for part in (tops, bottoms, base_tops, base_bottoms) if part is not None]
    table = np.stack(parts)
    count, shape = table.shape[-1], table.shape[1:-1]
    flat_PFC = table.reshape(len(parts), -1, count)
    value_F = _ratios(flat_PFC.sum(-1))
    draws_FR = np.concatenate([_ratios(flat_PFC @ weights_CR) for weights_CR in _weights(count, resamples, seed)], -1)
    low_F, high_F = _bounds(value_F, draws_FR, _influence(flat_PFC, value_F), confidence)
    # Draws can be so lopsided that BCa's interval lies beside its estimate: it is widened to hold it.
    low_F, high_F = np.minimum(low_F, value_F), np.maximum(high_F, value_F)
    return Intervals(*(bound.reshape(shape) for bound in (value_F, low_F, high_F)))


def ratio_interval(
    numerators_C: npt.ArrayLike,
    denominators_C: npt.ArrayLike,
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Σ numerators ÷ Σ denominators with an interval over conversations, drawn whole and with replacement.

    Resamples whose denominators are all 0 have no ratio and are left out. Raises SpectrainError for fewer
    than two conversations, values that are not finite, negative denominators or a sum of 0.
    """
    table_2C = _table(numerators_C, denominators_C)
    return _one(table_2C, confidence, resamples, seed)


def ratio_of_ratios_interval(
    numerators_a_C: npt.ArrayLike,
    denominators_a_C: npt.ArrayLike,
    numerators_b_C: npt.ArrayLike,
    denominators_b_C: npt.ArrayLike,
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """(Σ num a ÷ Σ den a) ÷ (Σ num b ÷ Σ den b), a speedup say, with an interval.

    Entry c of every argument belongs to the same conversation: both sides see the same resampled ones, so
    what they share cancels. Otherwise as `ratio_interval`.
    """
    a_2C, b_2C = _table(numerators_a_C, denominators_a_C), _table(numerators_b_C, denominators_b_C)
    if a_2C.shape != b_2C.shape or not b_2C[0].sum() > 0:
        raise SpectrainError(
            f"interval: found {a_2C.shape[1]} and {b_2C.shape[1]} conversations and a base of "
            f"{b_2C[0].sum()}, expected the same conversations on both sides and a base above 0"
        )
    return _one(np.concatenate([a_2C, b_2C]), confidence, resamples, seed)


def percentile_interval(value: Floats, draws_R: Floats, confidence: float) -> Interval:
    """A value with the plain percentile interval of draws that were made elsewhere; those that are NaN are left out."""
    tail = (1 - _checked(confidence)) / 2
    low, high = np.quantile(draws_R[np.isfinite(draws_R)], [tail, 1 - tail])
    return Interval(float(value), float(low), float(high))


@lru_cache(maxsize=64)
def student_quantile(probability: float, freedom: int) -> float:
    """The quantile of Student's t with whole degrees of freedom, for probabilities above 1/2."""
    low, high = 0.0, 1.0
    while _student_cdf(high, freedom) < probability:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_cdf(middle, freedom) < probability else (low, middle)
    return high


def _student_cdf(t: float, freedom: int) -> float:
    """The finite sums of Abramowitz and Stegun 26.7.3 and 26.7.4."""
    if freedom > 2000:  # the normal law, but for a term that is below 1e-4 of it and is kept
        return NormalDist().cdf(t * (1 - 1 / (4 * freedom)) / math.sqrt(1 + t * t / (2 * freedom)))
    angle = math.atan(t / math.sqrt(freedom))
    cos2, odd = math.cos(angle) ** 2, freedom % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for i in range(freedom // 2):
        total += term
        term *= cos2 * (2 * i + 1 + odd) / (2 * i + 2 + odd)
    both = math.sin(angle) * total
    return 0.5 + ((angle + both) / math.pi if odd else both / 2)


# --- the bootstrap ------------------------------------------------------------------------------------------------


def _weights(conversations: int, resamples: int, seed: int) -> Iterator[Floats]:
    """How often each conversation was drawn, [C, R] by parts: the stream of draws does not depend on their size."""
    if resamples < 1:
        raise SpectrainError(f"interval: found {resamples} resamples, expected at least 1 (2000 is usual)")
    rng, part = np.random.default_rng(seed), max(1, RESAMPLE_CELLS // conversations)
    for start in range(0, resamples, part):
        rows = min(part, resamples - start)
        drawn_RC = rng.integers(conversations, size=(rows, conversations))
        drawn_RC += np.arange(rows)[:, None] * conversations
        counts = np.bincount(drawn_RC.ravel(), minlength=rows * conversations)
        yield counts.reshape(rows, conversations).T.astype(np.float64)


def _ratios(sums_PX: Floats) -> Floats:
    """The ratio of the first two rows, over that of the last two if there are four; NaN where there is none."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = sums_PX[0] / sums_PX[1]
        ratio = ratio if len(sums_PX) == 2 else ratio / (sums_PX[2] / sums_PX[3])
    return np.where(np.isfinite(ratio), ratio, np.nan)


def _influence(parts_PFC: Floats, value_F: Floats) -> Floats:
    """What each conversation adds to the deviation of a ratio, up to a factor: the derivative by its weight [F, C]."""
    sums_PF1 = parts_PFC.sum(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        shares_PFC = parts_PFC / sums_PF1
        # top ÷ bottom moves with the share of the top less that of the bottom; where the top is 0 nothing moves.
        moved_FC = np.nan_to_num(shares_PFC[0]) - shares_PFC[1]
        if len(parts_PFC) == 4:
            moved_FC -= shares_PFC[2] - shares_PFC[3]
    return np.nan_to_num(moved_FC * np.sign(np.nan_to_num(value_F))[:, None])


def _bounds(value_F: Floats, draws_FR: Floats, influence_FC: Floats, confidence: float) -> tuple[Floats, Floats]:
    """The BCa quantiles of the draws."""
    count, ordered_FR = influence_FC.shape[-1], np.sort(draws_FR, axis=-1)  # NaN comes last
    found_F = np.isfinite(ordered_FR).sum(-1)
    below_F = (ordered_FR < value_F[:, None]).sum(-1) + (ordered_FR == value_F[:, None]).sum(-1) / 2
    least_F = 1 / np.maximum(found_F, 2)
    bias_F = _quantile(np.clip(below_F / np.maximum(found_F, 1), least_F, 1 - least_F))
    cubes_F, squares_F = (influence_FC**3).sum(-1), (influence_FC**2).sum(-1)
    skew_F = np.divide(cubes_F, 6 * squares_F**1.5, out=np.zeros_like(cubes_F), where=squares_F > 0)
    wide = math.sqrt(count / (count - 1)) * student_quantile((1 + _checked(confidence)) / 2, count - 1)
    bounds = []
    for z in (-wide, wide):
        shifted_F = bias_F + z
        with np.errstate(divide="ignore"):
            place_F = _cumulative(bias_F + shifted_F / np.maximum(1 - skew_F * shifted_F, 0.0))
        bounds.append(np.where(found_F > 0, _at(ordered_FR, place_F * np.maximum(found_F - 1, 0)), np.nan))
    return bounds[0], bounds[1]


def _at(ordered_FR: Floats, place_F: Floats) -> Floats:
    """Entries at places between entries."""
    rows, last = np.arange(len(ordered_FR)), ordered_FR.shape[-1] - 1
    before = np.floor(place_F).astype(np.int64)
    low_F, high_F = ordered_FR[rows, before], ordered_FR[rows, np.minimum(np.ceil(place_F).astype(np.int64), last)]
    return low_F + (high_F - low_F) * (place_F - before)


def _quantile(probability: Floats) -> Floats:
    return torch.special.ndtri(torch.from_numpy(probability)).numpy()


def _cumulative(z: Floats) -> Floats:
    return torch.special.ndtr(torch.from_numpy(z)).numpy()


# --- arguments ----------------------------------------------------------------------------------------------------


def _one(table_PC: Floats, confidence: float, resamples: int, seed: int) -> Interval:
    found = ratio_intervals(*table_PC, confidence=confidence, resamples=resamples, seed=seed)
    return Interval(float(found.value), float(found.low), float(found.high))


def _table(numerators_C: npt.ArrayLike, denominators_C: npt.ArrayLike) -> Floats:
    rows = [np.asarray(values, dtype=np.float64) for values in (numerators_C, denominators_C)]
    if rows[0].ndim != 1 or rows[0].shape != rows[1].shape or len(rows[0]) < 2:
        shapes = " and ".join(str(list(row.shape)) for row in rows)
        raise SpectrainError(
            f"interval: found shapes {shapes}, expected one entry a conversation and at least 2 conversations"
        )
    table_2C = np.stack(rows)
    if not np.isfinite(table_2C).all() or (rows[1] < 0).any() or not rows[1].sum() > 0:
        raise SpectrainError("interval: expected finite values and denominators >= 0 with a sum above 0")
    return table_2C


def _checked(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise SpectrainError(f"interval: found confidence {confidence!r}, expected a number between 0 and 1")
    return confidence
