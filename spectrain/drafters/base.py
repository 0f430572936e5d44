"""The contract of every drafter: one way to train it, one way to ask it for a proposal.

Shapes: B batch, T positions, K draft length, H hidden, F tapped features, V vocabulary, D columns of a drafter's head.

A drafter owns its alignment and its decode state. In training, ``forward`` returns hidden states for each draft depth
with the mask of supervised positions; heads and losses are applied outside, in chunks. In decoding, ``observe`` tells
it what was committed and ``propose`` asks what comes next; after any sequence of rounds its state equals that of a
fresh drafter that observed the committed prefix at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from spectrain.exact.sampler import Sampler
from spectrain.target import FeatureBatch, Features, Target


class DrafterConfig(BaseModel):
    """What a recipe says about a drafter; each family adds its own fields and its literal ``type``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: str

    @property
    def trainable(self) -> bool:
        """Whether there is anything to train (a training-free proposer has no weights)."""
        return True

    def taps(self, target: Target) -> tuple[int, ...]:
        """Target layers whose entering streams this family reads."""
        return ()


@dataclass(frozen=True)
class DepthOutput:
    """One draft depth: position t predicts token t + shift wherever ``mask_BT`` is true, through ``head_DH``."""

    hidden_BTH: Tensor
    head_DH: Tensor
    shift: int
    mask_BT: Tensor


@dataclass(frozen=True)
class DraftOutput:
    """All depths of a training forward. ``columns_D`` are the target ids of the head's columns (None: all)."""

    depths: tuple[DepthOutput, ...]
    columns_D: Tensor | None


@dataclass(frozen=True)
class Proposal:
    """A chain of candidate tokens ``tokens_K`` after the pending token.

    ``q_KV`` are the laws they were really sampled from, over the target's vocabulary; None means point masses.
    """

    tokens_K: Tensor
    q_KV: Tensor | None


class Drafter(ABC):
    """Anything that proposes. Trainable families are also ``TrainableDrafter``."""

    config: DrafterConfig
    tap_layers: tuple[int, ...] = ()
    """Target layers this drafter was made for: the decoder and the feature store set them on the target."""

    @abstractmethod
    def start(self) -> Any:
        """A fresh decode state for one request."""

    @abstractmethod
    def observe(self, state: Any, ids: Sequence[int], features: Features) -> None:
        """Tokens newly committed and the target's features of newly cached positions, in order.

        After it, the state has seen n tokens and the features of the first n - 1: the last token is pending, the
        target has not read it yet. Whatever was proposed before is forgotten.
        """

    @abstractmethod
    def propose(self, state: Any, sampler: Sampler, length: int, uniforms_K: Tensor) -> Proposal:
        """At most ``length`` tokens to follow the pending one. Sampling consumes ``uniforms_K``, one a token."""


class TrainableDrafter(Drafter, nn.Module):
    """A drafter with weights. ``bind`` lends it the frozen target's embedding; it is never saved with the drafter."""

    @classmethod
    @abstractmethod
    def build(cls, config: Any, target: Target, counts_V: Tensor) -> TrainableDrafter:
        """A new drafter bound to ``target``; ``counts_V`` counts the answer tokens of the training rows."""

    @abstractmethod
    def bind(self, target: Target) -> None:
        """Take references to the target's frozen parts."""

    @abstractmethod
    def shifts(self, depths: int | None = None) -> tuple[int, ...]:
        """How far ahead each depth predicts: position t at depth d is about token t + shifts[d]."""

    @abstractmethod
    def forward(self, batch: FeatureBatch, depths: int | None = None) -> DraftOutput:
        """Hidden states of every depth. ``depths`` overrides the configured number, for validation."""
