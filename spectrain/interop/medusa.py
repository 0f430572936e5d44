"""Medusa checkpoints in the layout that vLLM reads, out and in.

vLLM drops tensors whose names it does not know, takes absent settings for its own defaults, and renames *every* key of
config.json that contains "num" with "heads" or "layers". So nothing is left to it here. A shared head is stored once,
as the first one, because vLLM does not borrow the target's.

Shapes: H hidden, V vocabulary rows of the target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spectrain.drafters.medusa import MOST_HEADS, MOST_LAYERS, MedusaConfig, MedusaDrafter
from spectrain.errors import SpectrainError
from spectrain.interop._checkpoint import check_keys, check_shapes
from spectrain.interop._served import Served

NAME = "vllm medusa"
SERVED = Served("medusa", None, most="num_heads")
DRAFTER = MedusaDrafter
ARCHITECTURE = "MedusaModel"
TAP_CONVENTION = None  # Medusa reads the last hidden state alone

_KEYS = ("architectures", "model_type", "hidden_size", "vocab_size", "num_heads", "num_hidden_layers")
_FLAGS = ("medusa_fc_bias", "original_lm_head")  # absent means false to vLLM
# Keys that do not change what the heads compute.
_INERT_KEYS = {"dtype", "torch_dtype", "transformers_version", "max_paths", "topk", "max_seq_len"}
_OPTIONAL_KEYS = {*_FLAGS, *_INERT_KEYS, "truncated_vocab_size", "logit_scale"}


@dataclass(frozen=True)
class MedusaSettings:
    """The architecture of Medusa heads as their checkpoint states it."""

    hidden_size: int
    vocab_size: int
    heads: int
    layers: int
    bias: bool
    shared: bool
    taps: None = None


def from_drafter(
    drafter: MedusaDrafter, target: str, architectures: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors of a drafter; the target is known to the server and to the manifest."""
    settings, shared = drafter.config, drafter.config.head == "shared"
    config = config_of(drafter.hidden_size, drafter.vocab_size, settings.heads, settings.layers, shared=shared)
    # Adapters of a target that was trained with the heads went into that target.
    tensors = {name: tensor for name, tensor in drafter.state_dict().items() if not name.startswith("adapter.")}
    if shared:
        tensors["lm_heads.0.weight"] = drafter.borrowed().weight_VH
    return config, tensors


def config_of(hidden_size: int, vocab_size: int, heads: int, layers: int, *, shared: bool) -> dict[str, Any]:
    """config.json of heads with biases."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "medusa",
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "num_heads": heads,
        "num_hidden_layers": layers,
        "medusa_fc_bias": True,
        "original_lm_head": shared,
    }


def to_drafter(
    settings: MedusaSettings, tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None
) -> MedusaDrafter:
    """The drafter of a checkpoint; ``config`` is its manifest's, or None for a checkpoint made elsewhere.

    A shared head is the target's: it is borrowed from it, and compared with the stored one when they are bound.
    Blocks without biases get biases of zero.
    """
    known = MedusaConfig(heads=settings.heads, layers=settings.layers, head="shared" if settings.shared else "own")
    own = known if config is None else MedusaConfig.recorded(config)
    if own.model_copy(update={"joint": None}) != known:
        raise SpectrainError(f"the manifest says {own!r} of these Medusa heads, their config.json {known!r}")
    drafter = MedusaDrafter(own, settings.hidden_size, settings.vocab_size)
    weights = dict(tensors)
    if settings.shared:
        drafter.expect_head(weights.pop("lm_heads.0.weight"))
    if not settings.bias:
        names = [name for name in drafter.state_dict() if name.endswith(".bias")]
        weights |= {name: torch.zeros(settings.hidden_size) for name in names}
    drafter.load_state_dict(weights, strict=True)
    return drafter


def recognises(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") == "medusa" or config.get("architectures") == [ARCHITECTURE]


def from_checkpoint(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str
) -> tuple[MedusaSettings, dict[str, Tensor]]:
    """Settings and tensors of a checkpoint, or SpectrainError naming the first key or tensor that is wrong.

    ``where`` opens the messages (a path).
    """
    where_config = f"{where}: config.json"
    check_keys(config, _KEYS, _OPTIONAL_KEYS, where_config)
    if config["architectures"] != [ARCHITECTURE] or config["model_type"] != "medusa":
        found = f"{config['architectures']} with model_type {config['model_type']!r}"
        raise SpectrainError(f"{where_config}: expected ['{ARCHITECTURE}'] with 'medusa', found {found}")
    settings = _settings(config, where_config)
    check_shapes(tensors, _shapes(settings), (), where)
    _check_types(tensors, where)
    return settings, dict(tensors)


def draft_vocabulary(tensors: Mapping[str, Tensor]) -> None:
    """None: every head has a row for every token."""


def _settings(config: Mapping[str, Any], where: str) -> MedusaSettings:
    ranges = {"hidden_size": None, "vocab_size": None, "num_heads": MOST_HEADS, "num_hidden_layers": MOST_LAYERS}
    for key, most in ranges.items():
        value = config[key]
        if type(value) is not int or value < 1 or (most is not None and value > most):
            expected = "a whole number of at least 1" if most is None else f"a whole number from 1 to {most}"
            raise SpectrainError(f"{where}: {key} is {value!r}; expected {expected}")
    for key in _FLAGS:
        if type(config.get(key, False)) is not bool:
            raise SpectrainError(f"{where}: {key} is {config[key]!r}; expected true or false")
    size = config["vocab_size"]
    # vLLM 0.32 does not start with a reduced head, whose columns a token map would name.
    for key, whole in {"truncated_vocab_size": size, "logit_scale": 1}.items():
        if config.get(key) not in (None, whole):
            raise SpectrainError(f"{where}: {key} is {config[key]!r}; only {whole} is supported")
    return MedusaSettings(
        config["hidden_size"],
        size,
        config["num_heads"],
        config["num_hidden_layers"],
        config.get("medusa_fc_bias", False),
        config.get("original_lm_head", False),
    )


def _shapes(settings: MedusaSettings) -> dict[str, tuple[int, ...]]:
    H, V = settings.hidden_size, settings.vocab_size
    layers = [f"blocks.{i}.layers.{j}" for i in range(settings.heads) for j in range(settings.layers)]
    expected: dict[str, tuple[int, ...]] = {f"{name}.weight": (H, H) for name in layers}
    if settings.bias:
        expected |= {f"{name}.bias": (H,) for name in layers}
    heads = 1 if settings.shared else settings.heads
    return expected | {f"lm_heads.{i}.weight": (V, H) for i in range(heads)}


def _check_types(tensors: Mapping[str, Tensor], where: str) -> None:
    """Floating, and one kind for all blocks and one for all heads: a shared head keeps the target's."""
    for part, first in {"blocks.": "blocks.0.layers.0.weight", "lm_heads.": "lm_heads.0.weight"}.items():
        wanted = tensors[first].dtype
        for name, tensor in tensors.items():
            if name.startswith(part) and (not tensor.is_floating_point() or tensor.dtype != wanted):
                raise SpectrainError(f"{where}: tensor {name} is {tensor.dtype}, {first} is {wanted}")
