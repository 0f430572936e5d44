"""Penalties on tokens that were seen before: a part of the target's law that depends on the path.

They change logits before the sampler does, at every node of a proposal with that node's own history, so that decoding
with them stays exact. A drafter need not know of them: any q is verified against the penalised p.

Shapes: V vocabulary; `...` any leading dimensions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from spectrain.errors import SpectrainError

LARGEST = 1000.0  # beyond it float32 logits would soon overflow


@dataclass(frozen=True)
class Penalties:
    """As servers define them; the defaults change nothing.

    repetition (CTRL, arXiv 1909.05858): logits of tokens in prompt or answer are divided by it where positive and
    multiplied where negative. presence, frequency: subtracted from the logits of the answer's tokens, once and per
    occurrence. Raises SpectrainError for values outside their ranges.
    """

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    def __post_init__(self) -> None:
        for name in ("repetition", "presence", "frequency"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise SpectrainError(f"{name} penalty {value!r}: expected a number")
        if not 1 / LARGEST <= self.repetition <= LARGEST:
            raise SpectrainError(
                f"repetition penalty {self.repetition!r}: expected {1 / LARGEST:g} to {LARGEST:g}; 1 changes nothing"
            )
        for name in ("presence", "frequency"):
            if not abs(getattr(self, name)) <= LARGEST:
                raise SpectrainError(
                    f"{name} penalty {getattr(self, name)!r}: expected -{LARGEST:g} to {LARGEST:g}; 0 changes nothing"
                )

    @property
    def none(self) -> bool:
        return self == Penalties()

    def apply(self, logits: Tensor, prompt: Tensor, answer: Tensor) -> Tensor:
        """Penalised logits [..., V]. prompt: bool [..., V], tokens of the prompt. answer: how often each token has
        occurred in the answer so far [..., V]."""
        occurred, logits = answer > 0, logits.float() if logits.dtype != torch.float64 else logits
        scaled = torch.where(logits > 0, logits / self.repetition, logits * self.repetition)
        logits = torch.where(prompt | occurred, scaled, logits)
        return logits - self.frequency * answer.to(logits.dtype) - self.presence * occurred.to(logits.dtype)
