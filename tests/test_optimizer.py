"""AdamW as recipes ask for it."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from spectrain.errors import SpectrainError
from spectrain.optimizer import build_optimizer
from spectrain.schedule import OptimConfig


def trained(name: str) -> torch.Tensor:
    return steps(name)[0]


def steps(name: str) -> tuple[torch.Tensor, torch.optim.Optimizer]:
    """A matrix after five steps, and what took them. Bitsandbytes keeps small tensors' moments whole."""
    torch.manual_seed(0)
    weight, data = torch.nn.Parameter(torch.randn(128, 128)), torch.randn(4, 128)
    optimizer = build_optimizer(OptimConfig(name=name, weight_decay=0.1), [{"params": [weight], "lr": 1e-2}])
    for _ in range(5):
        optimizer.zero_grad()
        (data @ weight).square().mean().backward()
        optimizer.step()
    return weight.detach(), optimizer


def test_fused_is_the_plain_one_up_to_rounding():
    plain, fused = trained("adamw"), trained("adamw_fused")
    assert (plain - fused).norm() < 1e-6 * plain.norm()


def test_fused_is_fused():
    group = {"params": [torch.nn.Parameter(torch.ones(1))], "lr": 1e-2}
    assert build_optimizer(OptimConfig(name="adamw_fused"), [group]).defaults["fused"] is True


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_8_bit_names_what_to_install():
    with pytest.raises(SpectrainError, match=r"adamw_8bit needs bitsandbytes.*install spectrain\[8bit\]"):
        trained("adamw_8bit")


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_8_bit_has_small_moments_and_learns():
    weight, optimizer = steps("adamw_8bit")
    plain, _ = steps("adamw")
    state = next(iter(optimizer.state.values()))
    assert state["state1"].dtype == state["state2"].dtype == torch.uint8
    assert 0 < (weight - plain).norm() < 1e-2 * plain.norm()
