"""A random draft model: nothing but the target's architecture, in another size."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from spectrain.attention import check_attention
from spectrain.drafters.draft_models import check_plain, initialised, with_layers
from spectrain.errors import SpectrainError
from spectrain.target import Target


def new_model(target: Target, shape: Mapping[str, Any]) -> PreTrainedModel:
    """A random model of the target's architecture with the settings of ``shape`` replaced, in float32.

    Raises SpectrainError, naming the setting, where ``new_settings`` does, and where the model does not run.
    """
    config = new_settings(target, shape)
    try:
        draft = initialised(target, config)
        if draft.device.type != "meta":
            check_attention(draft, config)
    except Exception as error:  # each architecture checks its own settings in its own way
        raise SpectrainError(f"drafter.shape {dict(shape)} does not make a model that runs: {error}") from error
    return draft


def new_settings(target: Target, shape: Mapping[str, Any]) -> PreTrainedConfig:
    """The target's configuration with the settings of ``shape`` replaced, by their own names or by the common ones.

    The size of an attention head follows where it does in the target. Of more layers than the target has, the kinds
    repeat. Raises SpectrainError on a setting that the architecture lacks, that belongs to the vocabulary, or that
    contradicts another.
    """
    check_plain(target)
    whole, given = target.model.config, _own_names(target, shape)
    layers = whole.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    count = whole.num_hidden_layers
    settings = with_layers(whole, [layer % count for layer in range(given.get(layers, count))]) | given
    before, after = (_heads(side, whole.attribute_map) for side in (whole.to_dict(), settings))
    follows = "head_dim" not in given and before.get("head_dim") == _share(before)
    if follows:
        del after["head_dim"]
    _check_heads(after)
    if follows:
        settings["head_dim"] = _share(after)
    try:
        return type(whole).from_dict(settings)
    except Exception as error:  # each architecture checks its own settings in its own way
        raise SpectrainError(f"drafter.shape {dict(shape)} does not fit a {_name(target)}: {error}") from error


def _own_names(target: Target, shape: Mapping[str, Any]) -> dict[str, Any]:
    """``shape`` under the architecture's own names, each of which can be replaced."""
    whole = target.model.config
    fields = {field.name for field in dataclasses.fields(type(whole))}
    free = {name for name in fields if not _is_fixed(name)}
    common = {name: own for name, own in whole.attribute_map.items() if own in free}
    given: dict[str, Any] = {}
    for name, value in shape.items():
        where, own = f"drafter.shape.{name}", common.get(name, name)
        if own not in free:
            raise SpectrainError(f"{where} {_refusal(target, name, fields, sorted({*free, *common}))}")
        if own in given:
            raise SpectrainError(f"{where} says the same as another key of drafter.shape, {own}; keep one of them")
        now = getattr(whole, own)
        counted = type(now) is int and now > 0
        if counted and (type(value) is not int or value < 1):
            raise SpectrainError(f"{where} is {value!r}; expected a whole number of at least 1, as the target's {now}")
        given[own] = value
    return given


def _is_fixed(name: str) -> bool:
    """Whether a draft model shares it with its target, or it says nothing about the model's computation."""
    about_ids = name in ("vocab_size", "model_type") or name.endswith(("_token_id", "_token_ids", "_token_index"))
    return about_ids or name in {field.name for field in dataclasses.fields(PreTrainedConfig)}


def _refusal(target: Target, name: str, fields: set[str], free: list[str]) -> str:
    if name in fields or _is_fixed(name):
        return "cannot be chosen: a draft model has its target's vocabulary rows, ids and kind; leave it out"
    near = difflib.get_close_matches(name, free, 1)
    hint = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(free)}"
    return f"is no setting of a {_name(target)}. {hint}"


def _name(target: Target) -> str:
    return type(target.model).__name__


def _heads(settings: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """What there is of the sizes that attention heads depend on, under the common names."""
    wanted = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    found = {name: settings.get(names.get(name, name)) for name in wanted}
    return {name: value for name, value in found.items() if value is not None}


def _share(sizes: Mapping[str, int]) -> int:
    """A head's part of the model's width."""
    return sizes.get("hidden_size", 0) // sizes.get("num_attention_heads", 1)


def _check_heads(sizes: Mapping[str, int]) -> None:
    hidden, heads = sizes.get("hidden_size", 0), sizes.get("num_attention_heads", 1)
    if "head_dim" not in sizes and hidden % heads:
        fitting = [count for count in range(1, 2 * heads) if hidden % count == 0]
        raise SpectrainError(
            f"drafter.shape: hidden_size {hidden} is no multiple of num_attention_heads {heads}; give another of the "
            f"two, for instance one of these numbers of heads: {', '.join(map(str, fitting))}"
        )
    groups = sizes.get("num_key_value_heads", heads)
    if heads % groups:
        fitting = [count for count in range(1, heads + 1) if heads % count == 0]
        raise SpectrainError(
            f"drafter.shape: num_attention_heads {heads} is no multiple of num_key_value_heads {groups}; give "
            f"num_key_value_heads, one of {', '.join(map(str, fitting))}"
        )
