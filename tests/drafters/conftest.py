"""Small drafters of every trainable family, over tiny targets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spectrain.data.batches import live_batch
from spectrain.drafters import FAMILIES, TrainableDrafter
from spectrain.drafters.base import DrafterConfig
from spectrain.drafters.objective import DrafterLoss, LossConfig
from spectrain.losses import depth_weights, supervised
from spectrain.target import FeatureBatch, Target

TRAINABLE = [config for config, family in FAMILIES.items() if issubclass(family, TrainableDrafter)]
SMALL: dict[str, Any] = {"depths": 3, "draft_vocab_size": 16}


def small_config(kind: type[DrafterConfig], **settings: Any) -> Any:
    """Defaults of a family, but a few depths and a draft vocabulary that a tiny target has."""
    return kind(**{name: value for name, value in {**SMALL, **settings}.items() if name in kind.model_fields})


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


@pytest.fixture(params=TRAINABLE, ids=lambda kind: kind.model_fields["type"].default)
def family(request):
    """The config class of every trainable family in the registry."""
    return request.param


@pytest.fixture(scope="session")
def tools():
    """The functions above."""
    return SimpleNamespace(
        config=small_config, drafter=small_drafter, batch=toy_batch, weights=mean_weights, train=train
    )
