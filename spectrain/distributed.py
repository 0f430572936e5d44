"""Processes of a training run: how they find each other, and how a drafter sharded over them is made whole for a while.

The loop hands Accelerate one module, drafter and loss together. Where it is sharded (FSDP2), its forward gathers every
parameter first, so that heads may be used as plain tensors anywhere inside it. Whatever uses the drafter outside of
that forward (validation, generation, a bundle) asks for ``whole`` parameters, all processes together.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from spectrain.drafters.base import TrainableDrafter
from spectrain.errors import SpectrainError


def processes() -> PartialState:
    """The processes that this one was started among. Accelerate's own first look overlooks those on CPUs.

    SpectrainError where they do not see each other: two that both believe to be the first corrupt a run.
    """
    state = PartialState(cpu=os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on"))
    _check_world(state.num_processes)  # here, so that it is said before anything is prepared
    return state


def _check_world(seen: int) -> None:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != seen:
        raise SpectrainError(
            f"WORLD_SIZE is {world} but Accelerate sees {seen} process(es): each would believe it is alone and "
            "overwrite the others. On CPUs start with `torchrun --nproc-per-node N` and ACCELERATE_USE_CPU=true"
        )


def start_accelerator(folder: Path, *, precision: str, seed: int, tracker: str) -> Accelerator:
    """Processes, device and precision of a run. SpectrainError where processes do not see each other, or FSDP is not
    version 2."""
    accelerator = Accelerator(mixed_precision=precision, log_with=None if tracker == "none" else tracker,
                              project_dir=folder)  # fmt: skip
    _check_world(accelerator.num_processes)
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None:
        if plugin.fsdp_version != 2:
            found = plugin.fsdp_version
            raise SpectrainError(f"fsdp_version: found {found}, expected 2, as in recipes/accelerate/fsdp.yaml")
        # Precision is autocast's whatever the topology: parameters are gathered as they are, in float32.
        plugin.mixed_precision_policy = None
    set_seed(seed)
    return accelerator


def check_sharding(module: nn.Module, drafter: TrainableDrafter) -> None:
    """SpectrainError where parts are sharded on their own: drafters call methods of their layers, past their hooks. And
    where the target would have to be sharded with the drafter."""
    sharded = [name for name, part in module.named_modules() if isinstance(part, FSDPModule)]
    if sharded and not drafter.shardable:
        raise SpectrainError(
            f"this {type(drafter).__name__} also trains weights inside the target, which are not sharded with it; use "
            "recipes/accelerate/gpus.yaml"
        )
    inner = [name for name in sharded if name]
    if inner:
        raise SpectrainError(
            f"fsdp_auto_wrap_policy: {inner[0]} was sharded as a part of its own, and a drafter is sharded as a whole; "
            "use NO_WRAP, as in recipes/accelerate/fsdp.yaml"
        )


@contextmanager
def whole(module: nn.Module) -> Iterator[None]:
    """Plain full parameters in place of sharded ones, on every process; all of them have to enter together.

    Without sharding nothing happens. What is changed inside is lost.
    """
    sharded: list[tuple[nn.Module, str, Any]] = [
        (part, name, parameter)
        for part in module.modules()
        for name, parameter in part._parameters.items()
        if isinstance(parameter, DTensor)
    ]
    gathered: dict[int, nn.Parameter] = {}  # a tied parameter stays tied
    for part, name, parameter in sharded:
        if id(parameter) not in gathered:
            with torch.no_grad():
                gathered[id(parameter)] = nn.Parameter(parameter.full_tensor(), requires_grad=False)
        part._parameters[name] = gathered[id(parameter)]
    try:
        yield
    finally:
        for part, name, parameter in sharded:
            part._parameters[name] = parameter


def gathered_number(value: Tensor) -> float:
    """Of a tensor that may lie in equal parts on all processes."""
    return float(value.full_tensor() if isinstance(value, DTensor) else value)
