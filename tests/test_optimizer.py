"""AdamW as recipes ask for it."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch

from spectrain.errors import SpectrainError
from spectrain.optimizer import build_optimizer
from spectrain.schedule import OptimConfig


def trained(name: str) -> torch.Tensor:
    torch.manual_seed(0)
    weight, data = torch.nn.Parameter(torch.randn(8, 8)), torch.randn(4, 8)
    optimizer = build_optimizer(OptimConfig(name=name, weight_decay=0.1), [{"params": [weight], "lr": 1e-2}])
    for _ in range(5):
        optimizer.zero_grad()
        (data @ weight).square().mean().backward()
        optimizer.step()
    return weight.detach()


def test_fused_is_the_plain_one_up_to_rounding():
    plain, fused = trained("adamw"), trained("adamw_fused")
    assert (plain - fused).norm() < 1e-6 * plain.norm()


def test_fused_is_fused():
    group = {"params": [torch.nn.Parameter(torch.ones(1))], "lr": 1e-2}
    assert build_optimizer(OptimConfig(name="adamw_fused"), [group]).defaults["fused"] is True


def test_fused_is_refused_where_the_device_has_none():
    group = {"params": [torch.nn.Parameter(torch.ones(1, device="meta"))], "lr": 1e-2}
    with pytest.raises(SpectrainError, match=r"adamw_fused does not work here .* use optim\.name=adamw"):
        build_optimizer(OptimConfig(name="adamw_fused"), [group])


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_8_bit_names_what_to_install():
    with pytest.raises(SpectrainError, match=r"adamw_8bit needs bitsandbytes.*install spectrain\[8bit\]"):
        trained("adamw_8bit")


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_8_bit_has_small_moments_and_learns():
    assert json.dumps(trained("adamw_8bit").tolist()) != json.dumps(trained("adamw").tolist())
