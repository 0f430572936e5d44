"""The registry of drafters.

A new family is one file beside this one, its config in ``AnyDrafterConfig`` and one line in ``FAMILIES``. One with
weights also has a recipe and a serving format, a module of ``interop`` that is in ``interop.FORMATS``. Nothing else
knows its name.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from spectrain.drafters.base import Drafter, DrafterConfig, TrainableDrafter
from spectrain.drafters.eagle import EagleConfig, EagleDrafter
from spectrain.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from spectrain.drafters.language_model import LanguageModelConfig, LanguageModelDrafter
from spectrain.drafters.lookahead import LookaheadConfig, LookaheadDrafter
from spectrain.drafters.medusa import MedusaConfig, MedusaDrafter
from spectrain.drafters.ngram import NgramConfig, NgramDrafter

AnyDrafterConfig = Annotated[
    EagleConfig | Eagle3Config | LanguageModelConfig | LookaheadConfig | MedusaConfig | NgramConfig,
    Field(discriminator="type"),
]

FAMILIES: dict[type[DrafterConfig], type[Drafter]] = {
    EagleConfig: EagleDrafter,
    Eagle3Config: Eagle3Drafter,
    LanguageModelConfig: LanguageModelDrafter,
    LookaheadConfig: LookaheadDrafter,
    MedusaConfig: MedusaDrafter,
    NgramConfig: NgramDrafter,
}


def family_of(config: DrafterConfig) -> Any:
    """The drafter class a config belongs to."""
    return FAMILIES[type(config)]


__all__ = ["FAMILIES", "AnyDrafterConfig", "Drafter", "DrafterConfig", "TrainableDrafter", "family_of"]
