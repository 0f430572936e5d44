"""EAGLE-3 checkpoints as their authors, SpecForge and SGLang write them, out and in.

The one layer is called midlayer; config.json is that of a Llama model. Which layers the target gives is told only where
it is not the default, and the two keys for it count differently: SGLang reads ``eagle_config`` and takes an id for the
*output* of that layer, vLLM reads the key at the top and takes it for the *input*. So both are written, one apart.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from spectrain.drafters.eagle3 import Eagle3Config
from spectrain.errors import SpectrainError
from spectrain.interop import speculators_eagle3
from spectrain.interop._checkpoint import WEIGHTS_FILE, check_shapes
from spectrain.interop._layout import Checkpoint, Native
from spectrain.interop._llama_layer import EMBEDDING, borrowed_or_own, layer_of, with_old_rope
from spectrain.interop._parts import TargetParts
from spectrain.taps import check_taps, default_taps

NAME = "sglang-eagle3"
ABOUT = "EAGLE-3 as SGLang, SpecForge and its authors have it"
WEIGHTS = WEIGHTS_FILE
FORMAT = speculators_eagle3.NAME

_ARCHITECTURE = "LlamaForCausalLMEagle3"
_NESTED, _IDS = "eagle_config", "eagle_aux_hidden_state_layer_ids"
_OWN_KEYS = ("draft_vocab_size", "target_hidden_size", _NESTED, _IDS, *speculators_eagle3.MUST_BE_FALSE)
_OURS, _THEIRS = "layers.0.", "midlayer."


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    return any(name.startswith(_THEIRS) for name in names) or config.get("architectures") == [_ARCHITECTURE]


def from_native(config: Mapping[str, Any], tensors: Mapping[str, Tensor], parts: TargetParts) -> Checkpoint:
    """config.json and tensors; SpectrainError where the drafter has an embedding of its own."""
    settings, tensors = speculators_eagle3.from_checkpoint(config, tensors, "the EAGLE-3 drafter")
    if settings.embed_requires_grad:
        raise SpectrainError(
            f"this drafter was trained with an embedding of its own, which {NAME} cannot hold: its readers put the "
            "target's in its place. Train with drafter.embedding=target"
        )
    written: dict[str, Any] = {
        "architectures": [_ARCHITECTURE],
        **with_old_rope(settings.layer_config),
        "draft_vocab_size": settings.draft_vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": str(tensors["fc.weight"].dtype).removeprefix("torch."),
    }
    if settings.target_hidden_size != settings.layer_config["hidden_size"]:
        written["target_hidden_size"] = settings.target_hidden_size
    if settings.taps != _default(parts.num_layers):
        outputs = [tap - 1 for tap in settings.taps]
        written |= {_NESTED: {"use_aux_hidden_state": True, _IDS: outputs}, _IDS: list(settings.taps)}
    kept = {name: tensor for name, tensor in tensors.items() if name != EMBEDDING}
    return written, {name.replace(_OURS, _THEIRS, 1): tensor for name, tensor in kept.items()}


def to_native(config: Mapping[str, Any], tensors: Mapping[str, Tensor], parts: TargetParts, where: str) -> Native:
    """The speculators format of a checkpoint; the taps are told in a note.

    An ``embed_tokens.weight`` that is not the target's is the drafter's own.
    """
    where_config = f"{where}: config.json"
    layer = layer_of(config, _OWN_KEYS, where_config)
    speculators_eagle3.check_variant(config, where_config)
    if type(config.get("draft_vocab_size")) is not int:
        raise SpectrainError(
            f"{where_config}: draft_vocab_size is {config.get('draft_vocab_size')!r}, expected the number of rows of "
            "lm_head.weight; give it with --set draft_vocab_size=ROWS"
        )
    taps, how = _taps(config, parts.num_layers, where_config)
    check_taps(taps, parts.num_layers)
    kept, embedding = borrowed_or_own(tensors, parts.embedding_weight)
    settings = speculators_eagle3.Eagle3Settings(
        layer_config=layer,
        taps=taps,
        draft_vocab_size=config["draft_vocab_size"],
        target_hidden_size=config.get("target_hidden_size", layer["hidden_size"]),
        speculative_tokens=Eagle3Config().depths,
        verifier_name=parts.name,
        verifier_architectures=(parts.architecture,),
        embed_requires_grad=embedding == "own",
    )
    expected = speculators_eagle3.shapes(settings)
    theirs = {name.replace(_OURS, _THEIRS, 1): shape for name, shape in expected.items()}
    check_shapes(tensors, theirs, {EMBEDDING}, where)  # under the names that the file has
    ours = {name.replace(_THEIRS, _OURS, 1): tensor for name, tensor in kept.items()}
    native, ours = speculators_eagle3.to_checkpoint(settings, ours, where)
    return Native(native, ours, notes=(f"it reads what enters the target's layers {list(taps)}: {how}",))


def _taps(config: Mapping[str, Any], layers: int, where: str) -> tuple[tuple[int, ...], str]:
    nested = config.get(_NESTED) or {}
    if not isinstance(nested, Mapping) or set(nested) - {_IDS, "use_aux_hidden_state"}:
        raise SpectrainError(f"{where}: {_NESTED} is {nested!r}; expected {_IDS} and use_aux_hidden_state")
    if nested.get("use_aux_hidden_state", True) is not True:
        raise SpectrainError(
            f"{where}: {_NESTED}.use_aux_hidden_state is false; drafters of one feature are not EAGLE-3"
        )
    outputs, inputs = (_ids(side.get(_IDS), where) for side in (nested, config))
    entering = None if outputs is None else tuple(tap + 1 for tap in outputs)
    if entering is not None and inputs is not None and entering != inputs:
        raise SpectrainError(
            f"{where}: {_NESTED} names the outputs of layers {list(outputs or ())}, which are the inputs of "
            f"{list(entering)}, but the {_IDS} at the top, which are inputs, are {list(inputs)}. Say which ones it was "
            f"trained on: --set {_NESTED}=null --set '{_IDS}=[A,B,C]', as inputs"
        )
    if entering is not None:
        return entering, f"{_NESTED} names the layers before, whose outputs these are, as SGLang reads it"
    if inputs is not None:
        return inputs, f"{_IDS} names them, as vLLM reads it"
    if _default(layers) is None:
        raise SpectrainError(
            f"{where}: it does not say which layers it reads, and a target of {layers} layers has no default; give "
            f"their inputs with --set '{_IDS}=[A,B,C]'"
        )
    return default_taps(layers), "the default, since config.json names none"


def _ids(found: Any, where: str) -> tuple[int, ...] | None:
    if found is None:
        return None
    if not isinstance(found, list) or any(type(tap) is not int for tap in found):
        raise SpectrainError(f"{where}: {_IDS} is {found!r}, expected layer ids")
    return tuple(found)


def _default(layers: int) -> tuple[int, ...] | None:
    try:
        return default_taps(layers)
    except SpectrainError:
        return None
