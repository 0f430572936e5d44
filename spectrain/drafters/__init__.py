"""The registry of drafters: one line a family.

A new family is one file beside this one, one line in ``FAMILIES`` and one recipe; nothing else knows its name.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from spectrain.drafters.base import Drafter, DrafterConfig, TrainableDrafter
from spectrain.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from spectrain.drafters.ngram import NgramConfig, NgramDrafter

AnyDrafterConfig = Annotated[Eagle3Config | NgramConfig, Field(discriminator="type")]

FAMILIES: dict[type[DrafterConfig], type[Drafter]] = {
    Eagle3Config: Eagle3Drafter,
    NgramConfig: NgramDrafter,
}


def family_of(config: DrafterConfig) -> Any:
    """The drafter class a config belongs to."""
    return FAMILIES[type(config)]


__all__ = ["FAMILIES", "AnyDrafterConfig", "Drafter", "DrafterConfig", "TrainableDrafter", "family_of"]
