"""Serving formats, which bundles are written in: one module here and one entry in FORMATS for every trainable family.

What others write the same drafters in are layouts: see ``layouts``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from torch import Tensor

from spectrain.drafters.base import TrainableDrafter
from spectrain.errors import SpectrainError
from spectrain.interop import eagle, language_model, medusa, speculators_eagle3
from spectrain.interop._checkpoint import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    read_config,
    read_tensors,
    write_checkpoint,
)
from spectrain.interop._listing import SUFFIXES, check_listing, list_files
from spectrain.interop._served import Served, vllm_command

__all__ = [
    "CONFIG_FILE",
    "FORMATS",
    "SUFFIXES",
    "WEIGHTS_FILE",
    "Format",
    "Served",
    "check_listing",
    "format_for",
    "format_for_type",
    "format_of",
    "format_of_config",
    "list_files",
    "read_config",
    "read_tensors",
    "vllm_command",
    "write_checkpoint",
]


class Format(Protocol):
    """What a module of this package offers that bundles of ``DRAFTER`` are written in; no other module has that class.

    ``TAP_CONVENTION`` says how ``taps`` of the settings are counted; None goes with ``taps`` of None.
    """

    NAME: str
    SERVED: Served
    TAP_CONVENTION: str | None
    DRAFTER: type[TrainableDrafter]

    def from_drafter(
        self, drafter: Any, target: str, architectures: Sequence[str]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """config.json and tensors of a drafter, named beside the target it is served with."""

    def to_drafter(
        self, settings: Any, tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None
    ) -> TrainableDrafter:
        """The drafter of a checkpoint; ``config`` is what its manifest says of it, if it has one."""

    def recognises(self, config: Mapping[str, Any], /) -> bool: ...

    def from_checkpoint(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str
    ) -> tuple[Any, dict[str, Tensor]]:
        """Strict: SpectrainError names the first key or tensor that is wrong. Settings have ``taps``."""

    def draft_vocabulary(self, tensors: Mapping[str, Tensor], /) -> Tensor | None:
        """Target id of each draft token, int64 [D]; None: all of them."""


# Modules are checked as they are called.
FORMATS = cast(tuple[Format, ...], (speculators_eagle3, eagle, medusa, language_model))


def format_for(drafter: TrainableDrafter) -> Format:
    """The format that bundles of this drafter are written in."""
    return format_for_type(type(drafter))


def format_for_type(kind: type[TrainableDrafter]) -> Format:
    """The format of a drafter class; SpectrainError where there is none, so that none of its drafters can be saved."""
    for candidate in FORMATS:
        if candidate.DRAFTER is kind:
            return candidate
    raise SpectrainError(
        f"{kind.__name__} has no serving format, so no bundle of it can be written: write a module of "
        f"spectrain/interop/ that states DRAFTER = {kind.__name__} and what else Format asks for, and add it to "
        "interop.FORMATS"
    )


def format_of(folder: Path) -> Format:
    """The format of a checkpoint folder, by its config.json."""
    return format_of_config(read_config(folder), str(folder))


def format_of_config(config: Mapping[str, Any], where: str) -> Format:
    """The format that a config.json states; SpectrainError names what was found and what is known."""
    for candidate in FORMATS:
        if candidate.recognises(config):
            return candidate
    found = {key: config.get(key) for key in ("speculators_model_type", "architectures", "model_type")}
    shown = ", ".join(f"{key} {value!r}" for key, value in found.items() if value is not None) or "neither key"
    known = ", ".join(candidate.NAME for candidate in FORMATS)
    raise SpectrainError(f"{where}: unknown drafter checkpoint: config.json says {shown}. Known formats: {known}")
