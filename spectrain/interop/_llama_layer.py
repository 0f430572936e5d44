"""A draft layer in Llama's terms, as the configurations of feature drafters state it: its keys, shapes and limits.

Shapes: H hidden.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from spectrain.errors import SpectrainError
from spectrain.interop._checkpoint import check_keys, check_sizes

# Servers give a layer's configuration no defaults, or others than ours: what is absent crashes or silently changes
# proposals.
LAYER_KEYS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "attention_bias",
    "mlp_bias",
    "max_position_embeddings",
    "rope_parameters",
)
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
          "max_position_embeddings")  # fmt: skip
_OLD_ROPE = ("rope_theta", "rope_scaling")
EMBEDDING = "embed_tokens.weight"  # where a checkpoint has none, the server shares the target's
# fmt: off
# Keys that any transformers configuration carries and that do not change what the drafter computes.
INERT_KEYS = {
    "architectures", "attention_dropout", "bos_token_id", "chunk_size_feed_forward", "cls_token_id",
    "decoder_start_token_id", "dtype", "eos_token_id", "id2label", "initializer_range", "is_encoder_decoder",
    "is_llama_config", "label2id", "mask_token_id", "output_attentions", "output_hidden_states", "pad_token_id",
    "pretraining_tp", "problem_type", "return_dict", "sep_token_id", "tie_word_embeddings", "torch_dtype",
    "transformers.js_config", "transformers_version", "unk_token_id", "use_cache", "_name_or_path",
}
# fmt: on


def check_layer(layer: Mapping[str, Any], where: str, where_keys: str) -> None:
    """Raise on a key that is missing or unknown, or a layer that is not one plain Llama layer."""
    check_keys(layer, LAYER_KEYS, INERT_KEYS, where_keys)
    fixed = {"model_type": "llama", "num_hidden_layers": 1, "attention_bias": False, "mlp_bias": False}
    for key, value in fixed.items():
        if layer[key] != value:
            raise SpectrainError(f"{where}: {key} is {layer[key]!r}; only {value!r} is supported")
    check_sizes(layer, _SIZES, where)
    if not isinstance(layer["rope_parameters"], dict) or "rope_theta" not in layer["rope_parameters"]:
        found = layer["rope_parameters"]
        raise SpectrainError(f"{where}: rope_parameters must give rope_theta and rope_type, found {found!r}")
    part = layer["rope_parameters"].get("partial_rotary_factor", 1.0)
    if part != 1.0:
        raise SpectrainError(f"{where}: rope_parameters.partial_rotary_factor is {part!r}; only 1.0 is supported")
    if layer["hidden_act"] not in list(ACT2FN):
        raise SpectrainError(f"{where}: hidden_act is {layer['hidden_act']!r}; expected one of {', '.join(ACT2FN)}")
    try:
        LlamaRotaryEmbedding(read_layer(layer))
    except Exception as error:  # the library checks each setting in a way of its own
        raise SpectrainError(
            f"{where}: transformers makes no layer of it, with rope_parameters {layer['rope_parameters']!r}: "
            f"{type(error).__name__}: {error}"
        ) from error


def read_layer(layer: Mapping[str, Any]) -> LlamaConfig:
    """The configuration of a checked layer."""
    return LlamaConfig(**{key: layer[key] for key in LAYER_KEYS if key != "model_type"})


def layer_of(config: Mapping[str, Any], others: Collection[str], where: str) -> dict[str, Any]:
    """LAYER_KEYS of a config.json that any version of transformers may have written: what is absent has the value that
    its LlamaConfig takes. ``others`` are keys of the format besides.

    Raises SpectrainError for a key that is unknown, or a layer that is not one plain Llama layer.
    """
    sizes = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    check_keys(config, sizes, {*LAYER_KEYS, *INERT_KEYS, *_OLD_ROPE, *others}, where)
    check_sizes(config, sizes[1:], where)
    heads = config["num_attention_heads"]
    absent = {
        "num_hidden_layers": 1,
        "num_key_value_heads": heads,
        "head_dim": config["hidden_size"] // heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": 2048,
    }
    found = {key: config[key] for key in LAYER_KEYS if config.get(key) is not None}
    layer = {**absent, **found, "rope_parameters": _rope(config, where)}
    check_layer(layer, where, where)
    return {key: layer[key] for key in LAYER_KEYS}


def _rope(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """rope_parameters, or the two keys that stood for them up to transformers 4; SpectrainError where both disagree."""
    for key in ("rope_scaling", "rope_parameters"):
        if config.get(key) is not None and not isinstance(config[key], Mapping):
            raise SpectrainError(f"{where}: {key} is {config[key]!r}, expected an object")
    scaling = dict(config.get("rope_scaling") or {})
    kind = scaling.pop("type", "default")
    old = {"rope_theta": config.get("rope_theta", 10000.0), "rope_type": kind, **scaling}
    new = config.get("rope_parameters")
    if new is None:
        return old
    told = [key for key in _OLD_ROPE if config.get(key) is not None]
    compared = [key for key in old if ("rope_theta" if key == "rope_theta" else "rope_scaling") in told]
    if any(old[key] != new.get(key) for key in compared):
        raise SpectrainError(
            f"{where}: rope_parameters is {new!r}, but {' and '.join(told)} say {old!r}; leave the wrong one out, for "
            "instance with --set rope_theta=null"
        )
    return dict(new)


def with_old_rope(layer: Mapping[str, Any]) -> dict[str, Any]:
    """The layer's keys for readers of any age: rope_parameters, and rope_theta with rope_scaling beside them."""
    rope = dict(layer["rope_parameters"])
    theta = rope.pop("rope_theta")
    scaling = None if rope.get("rope_type", "default") == "default" else rope
    return {**{key: layer[key] for key in LAYER_KEYS}, "rope_theta": theta, "rope_scaling": scaling}


def borrowed_or_own(tensors: Mapping[str, Tensor], target_VH: Tensor) -> tuple[dict[str, Tensor], str]:
    """Tensors without a copy of the target's embedding, and whether the drafter's is the "target"'s or its "own".

    Equal to the target's, in the kind of number that the checkpoint has, is a copy of it.
    """
    if EMBEDDING not in tensors:
        return dict(tensors), "target"
    stored_VH = tensors[EMBEDDING]
    floating = stored_VH.is_floating_point()
    if floating and stored_VH.shape == target_VH.shape and torch.equal(stored_VH, target_VH.to("cpu", stored_VH.dtype)):
        return {name: tensor for name, tensor in tensors.items() if name != EMBEDDING}, "target"
    return dict(tensors), "own"


def layer_shapes(layer: Mapping[str, Any], width: int, norms: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Tensors of the one layer, whose attention reads ``width`` values; ``norms`` are those before it."""
    H, inner = layer["hidden_size"], layer["intermediate_size"]
    queries = layer["num_attention_heads"] * layer["head_dim"]
    keys = layer["num_key_value_heads"] * layer["head_dim"]
    shapes = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (H, queries),
        **dict.fromkeys((*norms, "post_attention_layernorm"), (H,)),
        "mlp.gate_proj": (inner, H),
        "mlp.up_proj": (inner, H),
        "mlp.down_proj": (H, inner),
    }
    return {f"layers.0.{name}.weight": shape for name, shape in shapes.items()}


def check_dtype(weights: Mapping[str, Tensor], where: str) -> None:
    """Raise on a weight that is not floating, or not of the kind of ``fc.weight``."""
    dtype = weights["fc.weight"].dtype
    for name, tensor in weights.items():
        if not tensor.is_floating_point() or tensor.dtype != dtype:
            raise SpectrainError(f"{where}: tensor {name} is {tensor.dtype}, fc.weight is {dtype}")


def chosen(tensors: Mapping[str, Tensor], embedding: str) -> dict[str, Tensor]:
    """The tensors of a drafter whose embedding is its "own" or the "target"'s. SpectrainError if its own is missing."""
    if embedding == "own" and EMBEDDING not in tensors:
        raise SpectrainError(f"the drafter has an embedding of its own, but tensor {EMBEDDING} is missing")
    return {name: tensor for name, tensor in tensors.items() if name != EMBEDDING or embedding == "own"}
