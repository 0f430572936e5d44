"""What a checkpoint layout is: another way to write down what one of the serving formats holds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from spectrain.interop._parts import TargetParts

Checkpoint = tuple[dict[str, Any], dict[str, Tensor]]
"""config.json and tensors."""


@dataclass(frozen=True)
class Native:
    """A checkpoint in the serving format of its family.

    ``drafter`` are the settings that the format cannot say and the tensors do; None: the format says all. ``notes``
    tell how what is ambiguous elsewhere was read.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    drafter: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()


class Layout(Protocol):
    """What a module of this package offers that reads and writes checkpoints of others.

    ``NAME`` is what commands call it, ``ABOUT`` who reads it, ``WEIGHTS`` its file of tensors, and ``FORMAT`` the
    ``NAME`` of the serving format that holds the same.
    """

    NAME: str
    ABOUT: str
    WEIGHTS: str
    FORMAT: str

    def recognises(self, config: Mapping[str, Any], names: Collection[str], /) -> bool:
        """Whether a checkpoint with this config.json and tensors of these names is in this layout."""

    def from_native(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], parts: TargetParts, /
    ) -> Checkpoint:
        """The checkpoint in this layout; SpectrainError says what of it has no place there."""

    def to_native(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], parts: TargetParts, where: str, /
    ) -> Native:
        """Strict: SpectrainError names the first key or tensor that is wrong. ``where`` opens the messages (a path)."""
