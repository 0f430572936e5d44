"""Checkpoint layouts by name: what bundles can be exported to and imported from. A new one is an entry in LAYOUTS."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from spectrain.drafters.base import TrainableDrafter
from spectrain.errors import SpectrainError
from spectrain.interop import FORMATS, Format, original_eagle, original_medusa, sglang_eagle3
from spectrain.interop._checkpoint import foreign_weights, read_config, read_foreign_tensors
from spectrain.interop._layout import Layout, Native
from spectrain.interop._parts import TargetParts
from spectrain.interop.as_served import AS_SERVED

__all__ = [
    "LAYOUTS",
    "Layout",
    "Native",
    "TargetParts",
    "drafter_of",
    "foreign_weights",
    "layout_named",
    "layouts_of",
    "read_layout",
]

# The first that recognises a checkpoint reads it: an original EAGLE has the config.json of a plain Llama model.
LAYOUTS = cast(tuple[Layout, ...], (sglang_eagle3, original_medusa, original_eagle, *AS_SERVED))


def layout_named(name: str) -> Layout:
    """The layout that commands call so."""
    found = next((layout for layout in LAYOUTS if name == layout.NAME), None)
    if found is None:
        known = ", ".join(layout.NAME for layout in LAYOUTS)
        raise SpectrainError(f"there is no format {name!r}; there are {known}")
    return found


def layouts_of(format_name: str) -> tuple[Layout, ...]:
    """The layouts that a bundle in this serving format can be written in."""
    return tuple(layout for layout in LAYOUTS if format_name == layout.FORMAT)


def read_layout(folder: Path, parts: TargetParts, changes: Mapping[str, Any] | None = None) -> tuple[Layout, Native]:
    """The layout of a checkpoint folder and what it holds; SpectrainError names the first key or tensor that is wrong.

    ``changes`` are keys of config.json to read in place of those that are there; None leaves one out.
    """
    config, tensors = read_config(folder), read_foreign_tensors(folder)
    for key, value in (changes or {}).items():
        config[key] = value
        if value is None:
            del config[key]
    layout = next((layout for layout in LAYOUTS if layout.recognises(config, tensors)), None)
    if layout is None:
        shown = {key: config.get(key) for key in ("architectures", "model_type", "speculators_model_type")}
        known = ", ".join(layout.NAME for layout in LAYOUTS)
        raise SpectrainError(
            f"{folder}: no drafter checkpoint that is known: config.json says {shown}, and the first tensor is "
            f"{min(tensors, default=None)}. Known formats: {known}"
        )
    return layout, layout.to_native(config, tensors, parts, str(folder))


def drafter_of(layout: Layout, native: Native, where: str) -> TrainableDrafter:
    """The drafter of a checkpoint made elsewhere, without any target."""
    format_ = _format(layout)
    settings, tensors = format_.from_checkpoint(native.config, native.tensors, where)
    return format_.to_drafter(settings, tensors, native.drafter)


def _format(layout: Layout) -> Format:
    return next(format_ for format_ in FORMATS if format_.NAME == layout.FORMAT)
