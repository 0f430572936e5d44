"""EAGLE-3 checkpoints in the layout of vLLM's speculators library, out and in.

Tap k is the residual stream *entering* target layer k: ``hidden_states[k]`` of a transformers model, for k
below the number of layers. d2t holds offsets: draft token i is target token i + d2t[i] (arXiv 2503.01840 and
its code). Shapes: H hidden, D draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from spectrain.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from spectrain.drafters.vocabulary import target_ids
from spectrain.errors import SpectrainError
from spectrain.interop._checkpoint import check_keys, check_shapes, check_sizes
from spectrain.interop._llama_layer import (
    EMBEDDING,
    LAYER_KEYS,
    check_dtype,
    check_layer,
    chosen,
    layer_shapes,
    read_layer,
)
from spectrain.interop._served import Served

NAME = "speculators eagle3"
SERVED = Served("eagle3", "EAGLE3", "sglang-eagle3")
DRAFTER = Eagle3Drafter
ARCHITECTURE = "Eagle3Speculator"
TAP_CONVENTION = "layer input: tap k is the residual stream entering layer k (hidden_states[k])"
FORMAT_VERSION = "0.9.0"  # the speculators release whose layout this is

_KEYS = (
    "architectures",
    "speculators_model_type",
    "draft_vocab_size",
    "target_hidden_size",
    "norm_before_residual",
    "eagle_aux_hidden_state_layer_ids",
    "transformer_layer_config",
    "speculators_config",
)
MUST_BE_FALSE = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# fmt: off
_INERT_KEYS = {
    "speculators_version", "embed_requires_grad", "auto_map", "has_no_defaults_at_init", "transformers_version",
    "dtype", "torch_dtype", "tie_word_embeddings",
}
# fmt: on


@dataclass(frozen=True)
class Eagle3Settings:
    """The architecture of an EAGLE-3 drafter as its checkpoint states it.

    ``layer_config`` holds LAYER_KEYS, with the target's ``vocab_size``; ``taps`` are three ascending layer
    ids in TAP_CONVENTION; ``speculative_tokens`` is the k that a server proposes by default;
    ``embed_requires_grad`` says that the embedding was trained with the drafter, so that the checkpoint has to hold it.
    """

    layer_config: dict[str, Any]
    taps: tuple[int, ...]
    draft_vocab_size: int
    target_hidden_size: int
    speculative_tokens: int
    verifier_name: str
    verifier_architectures: tuple[str, ...]
    embed_requires_grad: bool = False


def from_drafter(
    drafter: Eagle3Drafter, target: str, architectures: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors of a drafter, to be served beside ``target`` (its name or path)."""
    settings = Eagle3Settings(
        layer_config=drafter.layer_config.to_dict(),
        taps=drafter.tap_layers,
        draft_vocab_size=drafter.lm_head.out_features,
        target_hidden_size=drafter.layer_config.hidden_size,
        speculative_tokens=drafter.config.depths,
        verifier_name=target,
        verifier_architectures=tuple(architectures),
        embed_requires_grad=drafter.embed_tokens is not None,
    )
    return to_checkpoint(settings, drafter.state_dict())


def to_drafter(
    settings: Eagle3Settings, tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None
) -> Eagle3Drafter:
    """The drafter of a checkpoint; ``config`` is its manifest's, or None for a checkpoint made elsewhere.

    An ``embed_tokens.weight`` that was not trained is left out: drafters borrow the target's embedding.
    """
    embedding: Literal["target", "own"] = "own" if settings.embed_requires_grad else "target"
    known = Eagle3Config(draft_vocab_size=settings.draft_vocab_size, tap_layers=settings.taps, embedding=embedding)
    own = known if config is None else Eagle3Config.recorded(config)
    if own.embedding != embedding:
        raise SpectrainError(
            f"the EAGLE-3 checkpoint has embed_requires_grad {settings.embed_requires_grad}, its manifest says "
            f"drafter.embedding {own.embedding!r}; they are not of one run"
        )
    drafter = Eagle3Drafter(own, read_layer(settings.layer_config), settings.taps, draft_vocabulary(tensors))
    drafter.load_weights(chosen(tensors, own.embedding))
    return drafter


def recognises(config: Mapping[str, Any]) -> bool:
    return config.get("speculators_model_type") == "eagle3" or config.get("architectures") == [ARCHITECTURE]


def to_checkpoint(
    settings: Eagle3Settings, tensors: Mapping[str, Tensor], where: str = "the EAGLE-3 drafter"
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors that vLLM loads; raises SpectrainError on anything it would load wrongly."""
    _check_settings(settings, where)
    _check_tensors(settings, tensors, where)
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": settings.speculative_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    verifier = {
        "name_or_path": settings.verifier_name,
        "architectures": list(settings.verifier_architectures),
    }
    config = {
        "architectures": [ARCHITECTURE],
        "speculators_model_type": "eagle3",
        "speculators_version": FORMAT_VERSION,
        "draft_vocab_size": settings.draft_vocab_size,
        "target_hidden_size": settings.target_hidden_size,
        **dict.fromkeys(MUST_BE_FALSE, False),  # always written: absent means true to vLLM for the first
        "embed_requires_grad": settings.embed_requires_grad,
        "eagle_aux_hidden_state_layer_ids": list(settings.taps),
        "transformer_layer_config": {key: settings.layer_config[key] for key in LAYER_KEYS},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
    }
    return config, dict(tensors)


def from_checkpoint(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str
) -> tuple[Eagle3Settings, dict[str, Tensor]]:
    """Settings and tensors of a checkpoint, or SpectrainError naming the first key or tensor that is wrong.

    ``where`` opens the messages (a path). ``embed_tokens.weight`` [V, H] is kept when the file has it, and has to be
    there when it was trained.
    """
    where_config = f"{where}: config.json"
    check_keys(config, _KEYS, {*MUST_BE_FALSE, *_INERT_KEYS}, where_config)
    if config["architectures"] != [ARCHITECTURE] or config["speculators_model_type"] != "eagle3":
        found = f"{config['architectures']} with speculators_model_type {config['speculators_model_type']!r}"
        raise SpectrainError(f"{where_config}: expected ['{ARCHITECTURE}'] with 'eagle3', found {found}")
    check_variant(config, where_config)
    settings = _settings(config, where_config)
    _check_settings(settings, where_config)
    _check_tensors(settings, tensors, where)
    return settings, dict(tensors)


def check_variant(config: Mapping[str, Any], where: str) -> None:
    """Raise on a key that asks for a layer other than the published one."""
    for key in MUST_BE_FALSE:
        if config.get(key, False) is not False:
            raise SpectrainError(f"{where}: {key} is {config[key]!r}; only false is supported")


def draft_vocabulary(tensors: Mapping[str, Tensor]) -> Tensor:
    """Target id of each draft token, int64 [D], ascending: i + d2t[i]."""
    return target_ids(tensors["d2t"].cpu())


def _settings(config: Mapping[str, Any], where: str) -> Eagle3Settings:
    serving = config["speculators_config"]
    check_keys(
        serving,
        ("algorithm", "default_proposal_method", "proposal_methods", "verifier"),
        (),
        f"{where}: speculators_config",
    )
    taps = config["eagle_aux_hidden_state_layer_ids"]
    try:
        return Eagle3Settings(
            layer_config=dict(config["transformer_layer_config"]),
            taps=tuple(taps or ()),
            draft_vocab_size=config["draft_vocab_size"],
            target_hidden_size=config["target_hidden_size"],
            speculative_tokens=serving["proposal_methods"][0]["speculative_tokens"],
            verifier_name=serving["verifier"]["name_or_path"],
            verifier_architectures=tuple(serving["verifier"]["architectures"]),
            embed_requires_grad=config.get("embed_requires_grad", False),
        )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise SpectrainError(f"{where}: malformed: {type(error).__name__}: {error}") from error


def _check_settings(settings: Eagle3Settings, where: str) -> None:
    layer, taps = settings.layer_config, settings.taps
    check_layer(layer, where, f"{where}: transformer_layer_config")
    sizes = {"draft_vocab_size": settings.draft_vocab_size, "target_hidden_size": settings.target_hidden_size}
    check_sizes(sizes, sizes, where)
    if len(taps) != 3 or any(type(tap) is not int or tap < 0 for tap in taps) or sorted(set(taps)) != list(taps):
        raise SpectrainError(
            f"{where}: eagle_aux_hidden_state_layer_ids must be three distinct ascending layer ids, found {list(taps)}"
        )
    if not isinstance(settings.embed_requires_grad, bool):
        raise SpectrainError(
            f"{where}: embed_requires_grad is {settings.embed_requires_grad!r}, expected true or false"
        )
    if settings.draft_vocab_size > layer["vocab_size"]:
        raise SpectrainError(
            f"{where}: draft_vocab_size is {settings.draft_vocab_size}, the target's vocabulary has "
            f"{layer['vocab_size']} entries"
        )


def _check_tensors(settings: Eagle3Settings, tensors: Mapping[str, Tensor], where: str) -> None:
    check_shapes(tensors, shapes(settings), set() if settings.embed_requires_grad else {EMBEDDING}, where)
    weights = {name: tensor for name, tensor in tensors.items() if name not in {"d2t", "t2d"}}
    check_dtype(weights, where)
    for name, wanted in {"d2t": torch.int64, "t2d": torch.bool}.items():
        if tensors[name].dtype != wanted:
            raise SpectrainError(f"{where}: tensor {name} is {tensors[name].dtype}, expected {wanted}")
    _check_maps(draft_vocabulary(tensors), tensors["t2d"].cpu(), where)


def _check_maps(ids_D: Tensor, t2d_V: Tensor, where: str) -> None:
    broken = (ids_D.diff() <= 0).nonzero().flatten()
    if len(broken):
        i = int(broken[0]) + 1
        raise SpectrainError(
            f"{where}: d2t must hold offsets (target id − draft id) of ascending unique ids; draft token {i} "
            f"maps to {int(ids_D[i])} after {int(ids_D[i - 1])}"
        )
    if int(ids_D[0]) < 0 or int(ids_D[-1]) >= len(t2d_V):
        raise SpectrainError(
            f"{where}: d2t maps to ids {int(ids_D[0])} to {int(ids_D[-1])}, outside the target's vocabulary "
            f"of {len(t2d_V)}; it must hold offsets (target id − draft id)"
        )
    wanted_V = torch.zeros_like(t2d_V)
    wanted_V[ids_D] = True
    wrong = (wanted_V != t2d_V).nonzero().flatten()
    if len(wrong):
        token = int(wrong[0])
        raise SpectrainError(f"{where}: t2d[{token}] is {bool(t2d_V[token])}, but d2t says {not t2d_V[token]}")


def shapes(settings: Eagle3Settings) -> dict[str, tuple[int, ...]]:
    """What each tensor's shape has to be, the embedding's included."""
    layer = settings.layer_config
    H, V, D = layer["hidden_size"], layer["vocab_size"], settings.draft_vocab_size
    return {
        "fc.weight": (H, 3 * settings.target_hidden_size),
        **layer_shapes(layer, 2 * H, ("hidden_norm", "input_layernorm")),
        "norm.weight": (H,),
        "lm_head.weight": (D, H),
        "d2t": (D,),
        "t2d": (V,),
        EMBEDDING: (V, H),
    }
