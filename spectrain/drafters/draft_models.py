"""Where a small draft model starts: some layers of the target, or a smaller model with the target's tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from spectrain.errors import SpectrainError
from spectrain.identity import compare, tokenizer_identity
from spectrain.target import Target, load_target

INSTEAD = "give drafter.start a plain smaller model with the same tokenizer"


def kept_layers(target: Target, layers: Sequence[int] | None) -> tuple[int, ...]:
    """These layers of the target, by default the first, the middle and the last; SpectrainError where it lacks one."""
    last = target.num_layers - 1
    if layers is None:
        return tuple(sorted({0, last // 2, last}))
    if list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] > last:
        raise SpectrainError(
            f"drafter.layers {list(layers)} are not distinct ascending layers of a target with "
            f"{last + 1} layers; expected values from 0 to {last}"
        )
    return tuple(layers)


def cut_layers(target: Target, layers: Sequence[int]) -> PreTrainedModel:
    """A model of the target's architecture with copies of these layers and of all that is not a layer, in float32.

    Raises SpectrainError, naming the architecture, where one with fewer layers would not be the same architecture.
    """
    whole, name = target.model, type(target.model).__name__
    check_plain(target)
    tensors = _kept_tensors(target, layers)
    try:
        draft = initialised(target, type(whole.config).from_dict(with_layers(whole.config, layers)))
        wrong = _first_difference(draft.state_dict(), tensors)
        if wrong is not None:
            raise ValueError(f"{wrong} would be another tensor")
        draft.load_state_dict(tensors)
    except Exception as error:  # each architecture checks its own settings in its own way
        raise SpectrainError(f"a {name} cannot be cut to its layers {list(layers)}: {error}; {INSTEAD}") from error
    return draft


def initialised(target: Target, config: PreTrainedConfig) -> PreTrainedModel:
    """A random model of the target's class; in float32 at least, for half precision cannot follow small steps."""
    draft: Any = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=target.model.config._attn_implementation
    )
    if type(draft) is not type(target.model):
        raise TypeError(f"its configuration makes a {type(draft).__name__}")
    return draft.to(torch.promote_types(target.dtype, torch.float32)).eval()


def check_plain(source: Target) -> None:
    """A draft model is trained as it is, and served by itself."""
    config, name = source.model.config, type(source.model).__name__
    fault = "is more than a causal language model" if config is not source.config else ""
    if getattr(config, "quantization_config", None) is not None:
        fault = "is quantised, so its layers cannot be trained"
    if fault:
        raise SpectrainError(f"{source.name!r} (a {name}) {fault}; {INSTEAD}")


def with_layers(config: Any, layers: Sequence[int]) -> dict[str, Any]:
    """The target's settings with these layers, in this order; so are lists with an entry a layer."""
    settings, count = config.to_dict(), config.num_hidden_layers
    for key, value in settings.items():
        if "layer" in key and isinstance(value, list) and len(value) == count:
            settings[key] = [value[layer] for layer in layers]
    settings[config.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = len(layers)
    return settings


def _kept_tensors(target: Target, layers: Sequence[int]) -> Mapping[str, Tensor]:
    """The target's tensors without those of the other layers, numbered anew."""
    prefix = next(name for name, module in target.model.named_modules() if module is target.layers) + "."
    number, kept = {str(layer): place for place, layer in enumerate(layers)}, {}
    for name, tensor in target.model.state_dict().items():
        if not name.startswith(prefix):
            kept[name] = tensor
            continue
        layer, _, rest = name.removeprefix(prefix).partition(".")
        if layer in number:
            kept[f"{prefix}{number[layer]}.{rest}"] = tensor
    return kept


def _first_difference(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> str | None:
    """The first name that only one side has, or with another shape."""
    shapes = [{name: tensor.shape for name, tensor in side.items()} for side in (mine, theirs)]
    return next((name for name in {**shapes[0], **shapes[1]} if shapes[0].get(name) != shapes[1].get(name)), None)


def smaller_model(name: str, revision: str | None, target: Target) -> PreTrainedModel:
    """The model of a folder or Hub id in float32, with as many vocabulary rows as the target.

    Raises SpectrainError when it does not load, when its attention cannot be rolled back, or when its ids mean other
    tokens than the target's.
    """
    try:
        source = load_target(name, revision=revision, device=str(target.device))
    except SpectrainError as error:  # it is read, and checked, as any model is
        raise SpectrainError(f"drafter.start {name!r} does not serve as a draft model: {error}") from error
    check_plain(source)
    eos_ids = target.eos_ids
    found = compare(tokenizer_identity(source.tokenizer, eos_ids), tokenizer_identity(target.tokenizer, eos_ids))
    if found.level == "different":
        raise SpectrainError(
            f"drafter.start {name!r} has another tokenizer than the target {target.name!r}, and they exchange ids "
            f"(draft against target): {found.first_difference}; choose a model with the target's own tokenizer"
        )
    model = source.model.requires_grad_(True)
    _set_rows(model, target.vocab_size, target.tokenizer_size)
    return model


@torch.no_grad()
def _set_rows(model: Any, rows: int, size: int) -> None:
    """As many vocabulary rows as the target, since servers compare the numbers.

    New rows are the mean of the ``size`` that stand for tokens: to a server that does not mask padding, the mean of the
    logits is never the largest one.
    """
    held = model.get_input_embeddings().weight.shape[0]
    if held == rows:
        return
    model.resize_token_embeddings(rows, mean_resizing=False)
    head = model.get_output_embeddings()
    for grown in (model.get_input_embeddings().weight, head.weight, getattr(head, "bias", None)):
        if grown is not None and held < rows:
            grown[held:] = grown[:size].mean(0)
