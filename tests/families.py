"""Every family of the registry, small: tests over ``FAMILY_NAMES`` or ``TRAINABLE`` cover a new one at once."""

from __future__ import annotations

from typing import Any

import torch

from spectrain.drafters import FAMILIES, TrainableDrafter
from spectrain.drafters.base import DrafterConfig
from spectrain.target import Target


def named(kind: type[DrafterConfig]) -> str:
    """The type that recipes know a family by."""
    return str(kind.model_fields["type"].default)


FAMILY_NAMES = {named(kind): kind for kind in sorted(FAMILIES, key=named)}
TRAINABLE = [kind for kind in FAMILY_NAMES.values() if issubclass(FAMILIES[kind], TrainableDrafter)]
SMALL: dict[str, Any] = {"depths": 3, "draft_vocab_size": 16, "noise": 0.0}


def small_config(kind: type[DrafterConfig], **settings: Any) -> Any:
    """Defaults of a family, but a few depths, a draft vocabulary that a tiny target has, and no noise."""
    return kind(**{name: value for name, value in {**SMALL, **settings}.items() if name in kind.model_fields})


def ready_drafter(kind: type[DrafterConfig], target: Target, seed: int = 0, **settings: Any) -> Any:
    """A drafter of this family that can decode: trained ones random, but far from undecided, and in float64."""
    config = small_config(kind, **settings)
    if kind not in TRAINABLE:
        return FAMILIES[kind](config)  # type: ignore[call-arg]
    torch.manual_seed(seed)
    counts = torch.randint(1, 100, (target.vocab_size,))
    drafter: Any = FAMILIES[kind].build(config, target, counts).double().eval()  # type: ignore[attr-defined]
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.5 / parameter.shape[1] ** 0.5)
            else:
                parameter.add_(0.3 * torch.randn_like(parameter))
    target.tap(drafter.tap_layers)
    return drafter
