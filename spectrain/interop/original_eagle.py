"""EAGLE (2401.15077) checkpoints as their authors and SGLang read them, out and in.

Both want a bias in ``fc``, which ours has not: it is written as zeros, and anything else is refused. The authors' code
takes the embedding from the file, which therefore holds a copy of the target's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from spectrain.errors import SpectrainError
from spectrain.interop import eagle
from spectrain.interop._checkpoint import WEIGHTS_FILE, check_shapes
from spectrain.interop._layout import Checkpoint, Native
from spectrain.interop._llama_layer import EMBEDDING, borrowed_or_own, layer_of, with_old_rope
from spectrain.interop._parts import TargetParts

NAME = "eagle"
ABOUT = "EAGLE as its authors and SGLang have it"
WEIGHTS = WEIGHTS_FILE
FORMAT = eagle.NAME

_ARCHITECTURE = "LlamaForCausalLMEagle"
_BIAS = "fc.bias"


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    named = config.get("architectures")
    plain = named in ([_ARCHITECTURE], ["LlamaForCausalLM"], None) and "draft_vocab_size" not in config
    return plain and "fc.weight" in names and "lm_head.weight" not in names


def from_native(config: Mapping[str, Any], tensors: Mapping[str, Tensor], parts: TargetParts) -> Checkpoint:
    """config.json and tensors, the target's embedding and a bias of zeros among them."""
    settings, tensors = eagle.from_checkpoint(config, tensors, "the EAGLE drafter")
    weight = tensors["fc.weight"]
    written = {
        "architectures": [_ARCHITECTURE],
        "bias": True,
        **with_old_rope(settings.layer_config),
        "tie_word_embeddings": False,
        "torch_dtype": str(weight.dtype).removeprefix("torch."),
    }
    embedding = tensors.get(EMBEDDING, parts.embedding_weight).to(weight.dtype)
    return written, {**tensors, EMBEDDING: embedding, _BIAS: torch.zeros(len(weight), dtype=weight.dtype)}


def to_native(config: Mapping[str, Any], tensors: Mapping[str, Tensor], parts: TargetParts, where: str) -> Native:
    """vLLM's format of a checkpoint. An ``embed_tokens.weight`` that is not the target's is the drafter's own."""
    where_config = f"{where}: config.json"
    layer = layer_of(config, ("bias",), where_config)
    bias = config.get("bias", True)  # what the authors' code takes when it is absent
    if type(bias) is not bool:
        raise SpectrainError(f"{where_config}: bias is {bias!r}; expected true or false")
    if bias and _BIAS not in tensors:
        told = "config.json says bias true" if "bias" in config else "config.json has no key bias, which means true"
        raise SpectrainError(f"{where}: tensor {_BIAS} is missing and {told}; if it was trained without one, give "
                             "--set bias=false")  # fmt: skip
    settings = eagle.EagleSettings(layer)
    shapes = {**eagle.shapes(settings), **({_BIAS: (layer["hidden_size"],)} if bias else {})}
    check_shapes(tensors, shapes, {EMBEDDING}, where)
    if bias and bool(tensors[_BIAS].any()):
        raise SpectrainError(
            f"{where}: tensor {_BIAS} is not zero; spectrain's drafter and vLLM's have no bias in fc, so this "
            "checkpoint would draft something else with them"
        )
    kept, embedding = borrowed_or_own(tensors, parts.embedding_weight)
    kept.pop(_BIAS, None)
    native, kept = eagle.to_checkpoint(settings, kept, where)
    return Native(native, kept, {"type": eagle.DRAFTER_TYPE, "embedding": embedding})
