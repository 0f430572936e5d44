"""Which rows go together, and in which order: length buckets, shuffled by a seed, the same on every machine; and what
they count for.

Shapes: V ids.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from spectrain.data.conversations import EncodedRow
from spectrain.data.feature_rows import FeatureRows, padded, row_features
from spectrain.errors import SpectrainError
from spectrain.target import FeatureBatch, Target


def plan_epoch(lengths: Sequence[int], tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Row numbers of each micro-batch of an epoch: every row once, at most ``tokens`` padded tokens a batch.

    Rows are shuffled, sorted by length with the shuffle breaking ties, cut, and the cuts shuffled. One row may never
    exceed ``tokens`` alone: that is an error, not a truncation.
    """
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    if lengths[longest] > tokens:
        raise SpectrainError(
            f"row {longest} has {lengths[longest]} tokens, a micro-batch holds {tokens}; "
            "raise training.micro_batch_tokens or lower data.max_length"
        )
    rng = random.Random(f"{seed}/{epoch}")
    order = list(range(len(lengths)))
    rng.shuffle(order)
    # Lengths are rounded for sorting, so that rows of like length meet different companions in each epoch.
    order.sort(key=lambda row: -(-lengths[row] // 16))
    batches: list[list[int]] = []
    for row in order:
        if not batches or lengths_exceed(lengths, [*batches[-1], row], tokens):
            batches.append([])
        batches[-1].append(row)
    rng.shuffle(batches)
    return batches


def some_rows(store: FeatureRows, supervised: int, seed: int = 0) -> list[int]:
    """Rows drawn from all of the store, until they hold this many supervised tokens or none are left."""
    order = list(range(len(store)))
    random.Random(seed).shuffle(order)
    rows: list[int] = []
    for row in order:
        if supervised <= 0:
            break
        rows.append(row)
        supervised -= int(store.answer(row).sum())
    return rows


def answer_counts(rows: Iterable[EncodedRow], size: int) -> Tensor:
    """How often each id below ``size`` is an answer's token, int64 [size]."""
    counts_V = torch.zeros(size, dtype=torch.long)
    for row in rows:
        answers = torch.tensor(row.ids)[torch.tensor(row.mask, dtype=torch.bool)]
        counts_V += torch.bincount(answers, minlength=size)
    return counts_V


def lengths_exceed(lengths: Sequence[int], rows: Sequence[int], tokens: int) -> bool:
    """Whether these rows, padded to the longest, take more than ``tokens``."""
    return len(rows) * max(lengths[row] for row in rows) > tokens


def padding_share(lengths: Sequence[int], batches: Sequence[Sequence[int]]) -> float:
    """Share of padded positions among all positions of these batches."""
    padded = sum(len(rows) * max(lengths[row] for row in rows) for rows in batches)
    return 1.0 - sum(lengths[row] for rows in batches for row in rows) / padded


def live_batch(target: Target, rows: Sequence[EncodedRow]) -> FeatureBatch:
    """The features of a few rows straight from the target (as tapped now), nothing stored."""
    return padded(row_features(rows, target, target.dtype, place=target.device), target.device)
