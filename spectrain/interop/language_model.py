"""Draft models as plain transformers folders: what ``save_pretrained`` writes, read strictly.

vLLM loads such a folder with the method draft_model, transformers as an assistant model. Tied weights are stored once,
under the name of the embedding, and config.json says that they are tied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from spectrain.drafters.language_model import LanguageModelConfig, LanguageModelDrafter
from spectrain.errors import SpectrainError
from spectrain.interop._checkpoint import check_keys, check_shapes
from spectrain.interop._served import Served
from spectrain.weights import loading

NAME = "transformers causal language model"
SERVED = Served("draft_model", "STANDALONE", assistant=True)
DRAFTER = LanguageModelDrafter
TAP_CONVENTION = None  # a draft model reads tokens alone


@dataclass(frozen=True)
class LanguageModelSettings:
    """The architecture of a draft model as its config.json states it."""

    config: PreTrainedConfig
    taps: None = None


def from_drafter(
    drafter: LanguageModelDrafter, target: str, architectures: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors as transformers writes them; the target is known to the server and to the manifest."""
    model = drafter.as_saved().model
    # Keys that the class does not know came with a checkpoint made elsewhere and change nothing that it computes.
    known = known_keys(type(model.config))
    config = {key: value for key, value in model.config.to_diff_dict().items() if key in known}
    named = {"architectures": [type(model).__name__], "dtype": str(model.dtype).removeprefix("torch.")}
    return {**named, **{key: value for key, value in config.items() if key not in named}}, stored_tensors(model)


def to_drafter(
    settings: LanguageModelSettings, tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None
) -> LanguageModelDrafter:
    """The drafter of a checkpoint; ``config`` is its manifest's, or None for a checkpoint made elsewhere."""
    own = LanguageModelConfig() if config is None else LanguageModelConfig.recorded(config)
    capped = getattr(settings.config, "attn_logit_softcapping", None)
    architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(settings.config)]
    with loading(sum(tensor.nbytes for tensor in tensors.values())):
        model = architecture.from_pretrained(
            None,
            config=settings.config,
            state_dict=dict(tensors),
            dtype=next(iter(tensors.values())).dtype,
            attn_implementation="eager" if capped else None,  # SDPA would drop the cap
        )
    return LanguageModelDrafter(own, model)


def recognises(config: Mapping[str, Any]) -> bool:
    named = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(config.get("model_type")))
    return named is not None and config.get("architectures") == [named]


def from_checkpoint(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str
) -> tuple[LanguageModelSettings, dict[str, Tensor]]:
    """Settings and tensors of a checkpoint, or SpectrainError naming the first key or tensor that is wrong.

    ``where`` opens the messages (a path). Nothing of its own code is ever run: the architecture must be one that
    transformers brings.
    """
    where_config = f"{where}: config.json"
    check_keys(config, ("architectures", "model_type"), config, where_config)
    if not recognises(config):
        found = f"{config['architectures']} with model_type {config['model_type']!r}"
        raise SpectrainError(f"{where_config}: expected a causal language model of transformers, found {found}")
    kind = CONFIG_MAPPING[config["model_type"]]
    check_keys(config, (), known_keys(kind), where_config)
    try:
        parsed = kind.from_dict(dict(config))
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(parsed)
    except Exception as error:  # each architecture checks its own settings in its own way
        raise SpectrainError(f"{where_config}: {type(error).__name__}: {error}") from error
    expected = stored_tensors(empty)
    check_shapes(tensors, {name: tuple(tensor.shape) for name, tensor in expected.items()}, (), where)
    _check_types(expected, tensors, where)
    return LanguageModelSettings(parsed), dict(tensors)


def draft_vocabulary(tensors: Mapping[str, Tensor]) -> None:
    """None: a draft model has a row for every token."""


def stored_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """A model's tensors under the names that its checkpoints have on disk, each once."""
    kept: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            kept[name] = tensor.detach()
    return revert_weight_conversion(model, kept)


def known_keys(kind: type[PreTrainedConfig]) -> set[str]:
    """Keys that an architecture's config.json may have."""
    fields = {field.name for field in dataclasses.fields(kind)}
    return {*fields, "model_type", "transformers_version", "dtype"}


def _check_types(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor], where: str) -> None:
    """Weights are floating and of one kind, or a server would read some of them otherwise."""
    first = next(name for name, tensor in expected.items() if tensor.is_floating_point())
    wanted = tensors[first].dtype
    for name, tensor in tensors.items():
        floating = expected[name].is_floating_point()
        if tensor.is_floating_point() != floating or (floating and tensor.dtype != wanted):
            raise SpectrainError(f"{where}: tensor {name} is {tensor.dtype}, {first} is {wanted}")
