"""Medusa (2401.10774) checkpoints as their authors' code writes and reads them, out and in.

Head i is a list: residual blocks ``{i}.{j}.linear``, and last its own output head, ``{i}.{layers}``. A head that all
share with the target is written once for each; heads that are all equal to the target's are read as shared.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from spectrain.drafters.medusa import MOST_HEADS, MOST_LAYERS
from spectrain.errors import SpectrainError
from spectrain.interop import medusa
from spectrain.interop._checkpoint import check_keys, check_shapes
from spectrain.interop._layout import Checkpoint, Native
from spectrain.interop._parts import TargetParts

NAME = "medusa"
ABOUT = "Medusa heads as their authors have them"
WEIGHTS = "medusa_lm_head.safetensors"
FORMAT = medusa.NAME

_KEYS = ("medusa_num_heads", "medusa_num_layers")
# fmt: off
_INERT_KEYS = {
    "base_model_name_or_path", "version", "model_type", "architectures", "hidden_size", "vocab_size", "dtype",
    "torch_dtype", "transformers_version", "_name_or_path",
}
# fmt: on


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    return "medusa_num_heads" in config or any(re.fullmatch(r"\d+\.\d+\.linear\.weight", name) for name in names)


def from_native(config: Mapping[str, Any], tensors: Mapping[str, Tensor], parts: TargetParts) -> Checkpoint:
    """config.json and tensors: every head with an output head and biases of its own."""
    settings, tensors = medusa.from_checkpoint(config, tensors, "the Medusa heads")
    written = {
        "medusa_num_heads": settings.heads,
        "medusa_num_layers": settings.layers,
        "base_model_name_or_path": parts.name,
    }
    theirs: dict[str, Tensor] = {}
    for i in range(settings.heads):
        for j in range(settings.layers):
            weight = tensors[f"blocks.{i}.layers.{j}.weight"]
            theirs[f"{i}.{j}.linear.weight"] = weight
            none = torch.zeros(len(weight), dtype=weight.dtype)
            theirs[f"{i}.{j}.linear.bias"] = tensors.get(f"blocks.{i}.layers.{j}.bias", none)
        theirs[f"{i}.{settings.layers}.weight"] = tensors[f"lm_heads.{0 if settings.shared else i}.weight"]
    return written, theirs


def to_native(config: Mapping[str, Any], tensors: Mapping[str, Tensor], parts: TargetParts, where: str) -> Native:
    """vLLM's format of a checkpoint."""
    where_config = f"{where}: config.json"
    check_keys(config, _KEYS, _INERT_KEYS, where_config)
    counts = {key: config[key] for key in _KEYS}
    for key, most in zip(_KEYS, (MOST_HEADS, MOST_LAYERS), strict=True):
        if type(counts[key]) is not int or not 0 < counts[key] <= most:
            raise SpectrainError(f"{where_config}: {key} is {counts[key]!r}; expected a whole number from 1 to {most}")
    heads, layers = counts.values()
    V, H = parts.head_weight.shape
    expected: dict[str, tuple[int, ...]] = {}
    renamed: dict[str, str] = {}
    for i in range(heads):
        for j in range(layers):
            for part, shape in {"weight": (H, H), "bias": (H,)}.items():
                expected[f"{i}.{j}.linear.{part}"] = shape
                renamed[f"{i}.{j}.linear.{part}"] = f"blocks.{i}.layers.{j}.{part}"
        expected[f"{i}.{layers}.weight"] = (V, H)
        renamed[f"{i}.{layers}.weight"] = f"lm_heads.{i}.weight"
    check_shapes(tensors, expected, (), where)
    ours = {renamed[name]: tensor for name, tensor in tensors.items()}
    shared = all(_same(ours[f"lm_heads.{i}.weight"], parts.head_weight) for i in range(heads))
    if shared:
        ours = {name: tensor for name, tensor in ours.items() if not re.fullmatch(r"lm_heads\.[1-9]\d*\.weight", name)}
    native = medusa.config_of(H, V, heads, layers, shared=shared)
    return Native(native, medusa.from_checkpoint(native, ours, where)[1])


def _same(stored_VH: Tensor, target_VH: Tensor) -> bool:
    return torch.equal(stored_VH, target_VH.detach().to("cpu", stored_VH.dtype))
