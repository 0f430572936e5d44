"""EAGLE (2401.15077) checkpoints as vLLM reads them with the method eagle, out and in.

config.json is that of a Llama model of one layer. vLLM makes EagleLlamaForCausalLM of an architecture that is not
called so already, takes embedding and head from the target where the file has none, and has no bias in ``fc``: it
refuses a file with ``fc.bias``, and takes the key ``bias``, with which the original gives ``fc`` one unless it says
false, for a bias of the attention. So the key is always written, and false. An SGLang server needs a bias (of zeros)
and LlamaForCausalLMEagle as the architecture; the original also needs the target's embedding.

Shapes: H hidden, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from spectrain.drafters.eagle import EagleConfig, EagleDrafter
from spectrain.errors import SpectrainError
from spectrain.interop._checkpoint import check_keys, check_shapes
from spectrain.interop._llama_layer import (
    EMBEDDING,
    INERT_KEYS,
    LAYER_KEYS,
    check_dtype,
    check_layer,
    chosen,
    layer_shapes,
    read_layer,
)
from spectrain.interop._served import Served

NAME = "vllm eagle"
SERVED = Served("eagle", "EAGLE", "eagle")
DRAFTER = EagleDrafter
DRAFTER_TYPE = "eagle"
ARCHITECTURE = "EagleLlamaForCausalLM"
TAP_CONVENTION = "no taps: the feature is the last hidden state after the final norm, which the head reads"


@dataclass(frozen=True)
class EagleSettings:
    """The architecture of an EAGLE drafter as its checkpoint states it.

    ``layer_config`` holds LAYER_KEYS, with the target's ``vocab_size``.
    """

    layer_config: dict[str, Any]
    taps: tuple[int, ...] = ()


def from_drafter(
    drafter: EagleDrafter, target: str, architectures: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors of a drafter; the target is known to the server and to the manifest."""
    return to_checkpoint(EagleSettings(drafter.layer_config.to_dict()), drafter.state_dict())


def to_drafter(
    settings: EagleSettings, tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None
) -> EagleDrafter:
    """The drafter of a checkpoint; ``config`` is its manifest's, or None for a checkpoint made elsewhere.

    An ``embed_tokens.weight`` of which no manifest says that it was trained is left out: drafters borrow the target's.
    """
    own = EagleConfig() if config is None else EagleConfig.recorded(config)
    drafter = EagleDrafter(own, read_layer(settings.layer_config))
    drafter.load_state_dict(chosen(tensors, own.embedding))
    return drafter


def recognises(config: Mapping[str, Any]) -> bool:
    return config.get("architectures") == [ARCHITECTURE]


def to_checkpoint(
    settings: EagleSettings, tensors: Mapping[str, Tensor], where: str = "the EAGLE drafter"
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors that vLLM loads; raises SpectrainError on anything it would load wrongly."""
    check_layer(settings.layer_config, where, where)
    _check_tensors(settings, tensors, where)
    layer = {key: settings.layer_config[key] for key in LAYER_KEYS}
    return {"architectures": [ARCHITECTURE], "bias": False, **layer, "tie_word_embeddings": False}, dict(tensors)


def from_checkpoint(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str
) -> tuple[EagleSettings, dict[str, Tensor]]:
    """Settings and tensors of a checkpoint, or SpectrainError naming the first key or tensor that is wrong.

    ``where`` opens the messages (a path). ``embed_tokens.weight`` [V, H] is kept when the file has it.
    """
    where_config = f"{where}: config.json"
    check_keys(config, ("architectures", "bias", *LAYER_KEYS), INERT_KEYS, where_config)
    if config["architectures"] != [ARCHITECTURE]:
        raise SpectrainError(f"{where_config}: expected ['{ARCHITECTURE}'], found {config['architectures']}")
    if config["bias"] is not False:
        raise SpectrainError(
            f"{where_config}: bias is {config['bias']!r}; only false is supported: vLLM has no bias in fc, and would "
            "give the attention one that nothing was trained for"
        )
    layer = {key: value for key, value in config.items() if key not in {"architectures", "bias"}}
    check_layer(layer, where_config, where_config)
    settings = EagleSettings({key: layer[key] for key in LAYER_KEYS})
    _check_tensors(settings, tensors, where)
    return settings, dict(tensors)


def draft_vocabulary(tensors: Mapping[str, Tensor]) -> None:
    """None: the target's head names every token."""


def _check_tensors(settings: EagleSettings, tensors: Mapping[str, Tensor], where: str) -> None:
    check_shapes(tensors, shapes(settings), {EMBEDDING}, where)
    check_dtype(tensors, where)


def shapes(settings: EagleSettings) -> dict[str, tuple[int, ...]]:
    """What each tensor's shape has to be, the embedding's included."""
    H, V = settings.layer_config["hidden_size"], settings.layer_config["vocab_size"]
    return {"fc.weight": (H, 2 * H), **layer_shapes(settings.layer_config, H, ()), EMBEDDING: (V, H)}
