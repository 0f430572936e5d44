"""Small drafters of every family, over tiny targets, and what a decoder would tell them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import FAMILY_NAMES, TRAINABLE, named, ready_drafter, small_config

from spectrain.data.batches import live_batch
from spectrain.drafters import FAMILIES, TrainableDrafter
from spectrain.drafters.base import Committed, Drafter, DrafterConfig
from spectrain.drafters.objective import DrafterLoss, LossConfig
from spectrain.losses import depth_weights, supervised
from spectrain.target import FeatureBatch, Features, Target


def small_drafter(target: Target, config: DrafterConfig, rows: list[Any], seed: int = 0) -> Any:
    """A new drafter whose draft vocabulary was counted on ``rows``."""
    torch.manual_seed(seed)
    answers = [token for row in rows for token, answer in zip(row.ids, row.mask, strict=True) if answer]
    counts = torch.bincount(torch.tensor(answers), minlength=target.vocab_size)
    return FAMILIES[type(config)].build(config, target, counts)  # type: ignore[attr-defined]


def toy_batch(target: Target, drafter: TrainableDrafter, rows: list[Any]) -> FeatureBatch:
    target.tap(drafter.tap_layers)
    return live_batch(target, rows)


def mean_weights(drafter: TrainableDrafter, batch: FeatureBatch, decay: float = 0.8) -> list[float]:
    """What the trainer multiplies each depth with: its decay over its count."""
    shifts = drafter.shifts()
    counts = [int(supervised(batch.answer_BT, shift).sum()) for shift in shifts]
    return [w / max(1, c) for w, c in zip(depth_weights(len(shifts), decay), counts, strict=True)]


def train(drafter: TrainableDrafter, target: Target, batch: FeatureBatch, steps: int, lr: float = 3e-3) -> list[float]:
    """The losses of ``steps`` AdamW steps on one batch."""
    module = DrafterLoss(drafter.train(), target.head, LossConfig())
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=lr)
    losses = []
    for _ in range(steps):
        loss = module(batch, mean_weights(drafter, batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@lru_cache(maxsize=256)
def _features(target: Target, taps: tuple[int, ...], text: tuple[int, ...]) -> Features:
    return target.forward(torch.tensor([text]))


def told(target: Target, texts: Sequence[Sequence[int]], starts: Sequence[int], stops: Sequence[int]) -> Committed:
    """What a decoder says of these requests' tokens ``starts[b]`` to ``stops[b]``, the first of which has number 1."""
    tokens = [list(text[start:stop]) for text, start, stop in zip(texts, starts, stops, strict=True)]
    width = max(map(len, tokens))
    padded = torch.tensor([[*row, *[0] * (width - len(row))] for row in tokens])
    hidden, taps = [], []
    for text, start, row in zip(texts, starts, tokens, strict=True):
        features = _features(target, target._taps, tuple(text))[start - 1 : start - 1 + len(row)]
        room = (0, 0, 0, width - len(row))
        hidden.append(torch.nn.functional.pad(features.hidden_BTH, room))
        taps.append(torch.nn.functional.pad(features.taps_BTF, room))
    return Committed(tokens, padded, Features(torch.cat(hidden), torch.cat(taps)))


def observed(drafter: Drafter, target: Target, texts: Sequence[Sequence[int]]) -> Any:
    """The state of a fresh drafter that was told all of these requests at once."""
    state = drafter.start([text[0] for text in texts])
    drafter.observe(state, told(target, texts, [1] * len(texts), [len(text) for text in texts]))
    return state


@pytest.fixture(params=sorted(FAMILY_NAMES))
def any_family(request):
    """The config class of every family in the registry."""
    return FAMILY_NAMES[request.param]


@pytest.fixture(params=TRAINABLE, ids=named)
def family(request):
    """The config class of every trainable family in the registry."""
    return request.param


@pytest.fixture(scope="session")
def tools():
    """The functions above."""
    return SimpleNamespace(
        config=small_config, drafter=small_drafter, batch=toy_batch, weights=mean_weights, train=train,
        ready=ready_drafter, told=told, observed=observed,
    )  # fmt: skip
