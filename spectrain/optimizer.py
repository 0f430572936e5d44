"""AdamW in the forms that a recipe may ask for."""

from __future__ import annotations

from typing import Any

import torch

from spectrain.errors import SpectrainError
from spectrain.schedule import OptimConfig


def build_optimizer(config: OptimConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The optimizer of these parameter groups, each with its ``lr``.

    Raises SpectrainError where what it needs is not installed.
    """
    settings: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "weight_decay": config.weight_decay}
    if config.name == "adamw_8bit":
        return _eight_bit()(groups, **settings)
    return torch.optim.AdamW(groups, fused=True if config.name == "adamw_fused" else None, **settings)


def check_optimizer(config: OptimConfig) -> None:
    """SpectrainError where what it needs is not installed."""
    if config.name == "adamw_8bit":
        _eight_bit()


def _eight_bit() -> Any:
    try:
        from bitsandbytes.optim import AdamW8bit  # an extra of its own: it brings kernels for each kind of device
    except ImportError as error:
        raise SpectrainError(
            f"optim.name: adamw_8bit needs bitsandbytes, which does not load here ({error}); install "
            "spectrain[8bit], or use optim.name=adamw"
        ) from error
    return AdamW8bit
