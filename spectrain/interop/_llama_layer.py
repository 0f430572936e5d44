"""A draft layer in Llama's terms, as the configurations of feature drafters state it: its keys, shapes and limits.

Shapes: H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import LlamaConfig

from spectrain.errors import SpectrainError
from spectrain.interop._checkpoint import check_keys

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
EMBEDDING = "embed_tokens.weight"  # where a checkpoint has none, the server shares the target's
# fmt: off
# Keys that any transformers configuration carries and that do not change what the drafter computes.
INERT_KEYS = {
    "architectures", "attention_dropout", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id",
    "id2label", "initializer_range", "is_encoder_decoder", "label2id", "output_attentions", "output_hidden_states",
    "pad_token_id", "pretraining_tp", "problem_type", "return_dict", "tie_word_embeddings", "torch_dtype",
    "transformers_version", "use_cache", "_name_or_path",
}
# fmt: on


def check_layer(layer: Mapping[str, Any], where: str, where_keys: str) -> None:
    """Raise on a key that is missing or unknown, or a layer that is not one plain Llama layer."""
    check_keys(layer, LAYER_KEYS, INERT_KEYS, where_keys)
    fixed = {"model_type": "llama", "num_hidden_layers": 1, "attention_bias": False, "mlp_bias": False}
    for key, value in fixed.items():
        if layer[key] != value:
            raise SpectrainError(f"{where}: {key} is {layer[key]!r}; only {value!r} is supported")
    if not isinstance(layer["rope_parameters"], dict) or "rope_theta" not in layer["rope_parameters"]:
        found = layer["rope_parameters"]
        raise SpectrainError(f"{where}: rope_parameters must give rope_theta and rope_type, found {found!r}")


def read_layer(layer: Mapping[str, Any]) -> LlamaConfig:
    """The configuration of a checked layer."""
    return LlamaConfig(**{key: layer[key] for key in LAYER_KEYS if key != "model_type"})


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
