"""The serving formats that bundles are written in, as layouts: what others wrote in them comes in strictly."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from spectrain.errors import SpectrainError
from spectrain.interop import eagle, language_model, medusa, speculators_eagle3
from spectrain.interop._checkpoint import WEIGHTS_FILE, check_keys
from spectrain.interop._layout import Checkpoint, Native
from spectrain.interop._llama_layer import EMBEDDING, INERT_KEYS, borrowed_or_own, layer_of
from spectrain.interop._parts import TargetParts

# Names of a weight that is tied to the embedding, as older checkpoints store it a second time.
_TIED = ("lm_head.weight", "output.weight", "embed_out.weight")
_LIBRARY_CLASS = "Eagle3DraftModel"  # what the speculators library calls what it saves; servers know the other name
_OLD_KEYS = ("torch_dtype", "rope_theta", "rope_scaling")


@dataclass(frozen=True)
class AsServed:
    """A serving format by the name that commands know it by; ``adapt`` is what is done to a checkpoint made elsewhere
    before it is checked, ``complete`` adds what other readers of the format want besides."""

    NAME: str
    ABOUT: str
    module: Any
    adapt: Callable[[Mapping[str, Any], Mapping[str, Tensor], TargetParts, str], Native]
    complete: Callable[[Mapping[str, Tensor], TargetParts], dict[str, Tensor]] = lambda tensors, _: dict(tensors)
    WEIGHTS: str = WEIGHTS_FILE

    @property
    def FORMAT(self) -> str:  # noqa: N802 - the name of a constant where a layout is a module
        return cast(str, self.module.NAME)

    def recognises(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        return bool(self.module.recognises(config))

    def from_native(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], parts: TargetParts) -> Checkpoint:
        return dict(config), self.complete(tensors, parts)

    def to_native(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], parts: TargetParts,
                  where: str) -> Native:  # fmt: skip
        native = self.adapt(config, tensors, parts, where)
        self.module.from_checkpoint(native.config, native.tensors, where)
        return native


def _as_it_is(config: Mapping[str, Any], tensors: Mapping[str, Tensor], parts: TargetParts, where: str) -> Native:
    return Native(dict(config), dict(tensors))


def _speculators(config: Mapping[str, Any], tensors: Mapping[str, Tensor], parts: TargetParts, where: str) -> Native:
    """What its library leaves out is filled in, for vLLM needs it: what is transformers' default in the layer, the
    target's width where it is the layer's, and the maps of a draft vocabulary that is the target's own.

    What says nothing of the norm is refused: its readers do not agree on what that means.
    """
    norm = "norm_before_residual"
    if norm not in config:
        raise SpectrainError(
            f"{where}: config.json has no key {norm}, which vLLM takes for true and EAGLE-3 as published for false; if "
            f"the layer adds the hidden state as it was before its norm, give --set {norm}=false"
        )
    whole, tensors = _filled(config, tensors, where)
    if config.get("embed_requires_grad"):
        return Native(whole, dict(tensors))
    kept, embedding = borrowed_or_own(tensors, parts.embedding_weight)
    notes = list[str]()
    if embedding == "own":
        whole["embed_requires_grad"] = True
        notes.append("its embedding was not trained, but is not this target's either: it is kept as the drafter's own")
    return Native(whole, kept, notes=tuple(notes))


def _filled(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """See ``_speculators``."""
    whole, layer, found = dict(config), config.get("transformer_layer_config"), dict(tensors)
    if config.get("architectures") == [_LIBRARY_CLASS]:
        whole["architectures"] = [speculators_eagle3.ARCHITECTURE]
    if not isinstance(layer, Mapping):
        return whole, found
    whole["transformer_layer_config"] = layer_of(layer, (), f"{where}: config.json: transformer_layer_config")
    if config.get("target_hidden_size") is None:
        whole["target_hidden_size"] = layer["hidden_size"]
    rows = layer["vocab_size"]
    if config.get("draft_vocab_size") == rows and not {"d2t", "t2d"} & found.keys():
        found |= {"d2t": torch.zeros(rows, dtype=torch.int64), "t2d": torch.ones(rows, dtype=torch.bool)}
    return whole, found


def _with_embedding(tensors: Mapping[str, Tensor], parts: TargetParts) -> dict[str, Tensor]:
    """A copy of the target's where there is none: without it the library drafts on an embedding of zeros, silently."""
    embedding = parts.embedding_weight.to(tensors["fc.weight"].dtype)
    return {EMBEDDING: embedding, **tensors}


def _eagle(config: Mapping[str, Any], tensors: Mapping[str, Tensor], parts: TargetParts, where: str) -> Native:
    """No key says whose an embedding in the file is: the target's own is left out."""
    kept, embedding = borrowed_or_own(tensors, parts.embedding_weight)
    return Native(dict(config), kept, {"type": eagle.DRAFTER_TYPE, "embedding": embedding})


def _causal_model(config: Mapping[str, Any], tensors: Mapping[str, Tensor], parts: TargetParts, where: str) -> Native:
    """Keys of older versions of transformers under their present names, and tied weights once."""
    kind = CONFIG_MAPPING[config["model_type"]]
    known = language_model.known_keys(kind)
    try:
        parsed = kind.from_dict(dict(config))
    except Exception as error:  # each architecture checks its own settings in its own way
        raise SpectrainError(f"{where}: config.json: {type(error).__name__}: {error}") from error
    if not set(config) <= known:
        check_keys(config, (), {*known, *INERT_KEYS, *_OLD_KEYS}, f"{where}: config.json")
        dtype = next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())
        named = {"architectures": config["architectures"], "dtype": str(dtype).removeprefix("torch.")}
        present = {key: value for key, value in parsed.to_diff_dict().items() if key in known and key not in named}
        config = {**named, **present}
    embeddings = [tensor for name, tensor in tensors.items() if name not in _TIED]
    copies = {
        name
        for name in _TIED
        if name in tensors and parsed.tie_word_embeddings and any(_equal(tensors[name], e) for e in embeddings)
    }
    return Native(dict(config), {name: tensor for name, tensor in tensors.items() if name not in copies})


def _equal(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and torch.equal(left, right)


AS_SERVED = (
    AsServed("vllm-eagle3", "EAGLE-3 as vLLM and its speculators library have it", speculators_eagle3, _speculators,
             _with_embedding),
    AsServed("vllm-eagle", "EAGLE as vLLM has it", eagle, _eagle),
    AsServed("vllm-medusa", "Medusa heads as vLLM has them", medusa, _as_it_is),
    AsServed("transformers", "a draft model as transformers (assistant_model) and vLLM have it", language_model,
             _causal_model),
)  # fmt: skip
