"""The contract of every drafter: one way to train it, one way to ask it for a proposal.

Shapes: B batch, T positions, N proposed nodes, H hidden, F tapped features, V vocabulary, D columns of a
drafter's head.

A drafter owns its alignment and its decode state. In training, ``forward`` returns hidden states for each draft depth
with the mask of supervised positions; heads and losses are applied outside, in chunks. In decoding, ``observe`` tells
it what was committed and ``propose`` asks what comes next; after any sequence of rounds its state equals that of a
fresh drafter that observed the committed prefix at once (what its probes were answered may be remembered besides).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor, nn

from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler
from spectrain.shapes import Shape
from spectrain.target import FeatureBatch, Features, Target


class DrafterConfig(BaseModel):
    """What a recipe says about a drafter; each family adds its own fields and its literal ``type``."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    type: str

    @classmethod
    def recorded(cls, values: Mapping[str, Any]) -> Self:
        """The settings that a bundle's manifest keeps of its drafter; SpectrainError names the key that is wrong."""
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, ("drafter", *first["loc"])))
            raise SpectrainError(
                f"spectrain.json: {key}: {first['msg']} (found {first['input']!r:.80}); it does not fit this checkpoint"
            ) from error

    @property
    def trainable(self) -> bool:
        """Whether there is anything to train (a training-free proposer has no weights)."""
        return True

    def taps(self, target: Target) -> tuple[int, ...]:
        """Target layers whose entering streams this family reads."""
        return ()

    def context(self, target: Target) -> int | None:
        """The longest row, in tokens, that its drafter can read; None: any that the target can."""
        return None

    @property
    def trained_depths(self) -> int:
        """How many draft depths training sees: all that it can ever draft, where that is limited."""
        return self.limits[0] or 1

    @property
    def limits(self) -> tuple[int | None, int | None]:
        """How many tokens ahead its drafter can draft at most, and how many different ones; None: no such limit."""
        return None, None


def check_type(found: str, expected: str) -> None:
    """SpectrainError where weights of one type of drafter are to start another."""
    if found != expected:
        raise SpectrainError(f"found drafter type {found!r}, expected {expected!r}; choose a bundle of that type")


@dataclass(frozen=True)
class DepthOutput:
    """One draft depth: position t predicts token t + shift wherever ``mask_BT`` is true, through ``head_DH``.

    ``cap`` is the soft cap of its logits, if it has one. With ``predicts_features`` the first H values of each state
    stand for the target's own last hidden state of position t + shift - 1, and are trained towards it.
    """

    hidden_BTH: Tensor
    head_DH: Tensor
    shift: int
    mask_BT: Tensor
    cap: float | None = None
    predicts_features: bool = False


@dataclass(frozen=True)
class Auxiliary:
    """States that are held to the target's law as it was, whatever the depths learn: position t is about token
    t + shift wherever ``mask_BT`` is true, through ``head_DH``, which has the target's own columns. ``weight`` is its
    share of the loss, divided by how many positions of all count."""

    hidden_BTH: Tensor
    head_DH: Tensor
    shift: int
    mask_BT: Tensor
    weight: float
    cap: float | None = None


@dataclass(frozen=True)
class DraftOutput:
    """All depths of a training forward. ``columns_D`` are the target ids of the head's columns (None: all).

    ``teacher`` is the batch as a jointly trained target sees it: the depths are then held to that law, in training and
    in scores. ``auxiliary`` are held to the law of the batch that was given.
    """

    depths: tuple[DepthOutput, ...]
    columns_D: Tensor | None
    teacher: FeatureBatch | None = None
    auxiliary: tuple[Auxiliary, ...] = ()

    def held_to(self, batch: FeatureBatch) -> FeatureBatch:
        """Whose law the depths are held to, where ``batch`` was given."""
        return batch if self.teacher is None else self.teacher


@dataclass(frozen=True)
class Probes:
    """Extra nodes that the target evaluates and that are never verified, numbered on from the proposal's own.

    None is more than ``depth`` below the pending token. The target's most likely tokens after the last ``answers`` (one
    or more) of them come back with what was committed.
    """

    tokens_BN: Tensor
    parents_BN: Tensor
    answers: int
    depth: int


@dataclass(frozen=True)
class Proposal:
    """Candidate tokens ``tokens_BN`` after each request's pending token: a chain, or a tree where there are parents.

    ``q`` are the laws they were really sampled from, over the target's vocabulary: of a chain [B, N, V], row n for
    token n; of a tree [B, N + 1, V], row 0 for the root's children and row n + 1 for node n's. None means that they
    were chosen (point masses). ``counts`` says how many nodes of each row are there; None: all.
    """

    tokens_BN: Tensor
    parents_BN: Tensor | None = None
    q: Tensor | None = None
    counts: list[int] | None = None
    probes: Probes | None = None


@dataclass(frozen=True)
class Committed:
    """Newly committed tokens of B requests, right-padded, ``counts`` of each row being real (one or more).

    Token i of a row was decided from position i of ``features``: the target's states of the token before it. So
    feature and following token stand side by side, from a request's second token on. ``tokens`` are the same without
    padding, on the host. ``answers`` are the target's most likely tokens after the probes that asked, of every row as
    many; None where there were no probes.
    """

    tokens: list[list[int]]
    tokens_BT: Tensor
    features: Features
    answers: list[list[int]] | None = None

    @property
    def counts(self) -> list[int]:
        return [len(row) for row in self.tokens]


class Drafter(ABC):
    """Anything that proposes, for B requests at once. Trainable families are also ``TrainableDrafter``."""

    config: DrafterConfig
    tap_layers: tuple[int, ...] = ()
    """Target layers this drafter was made for: the decoder and the feature store set them on the target."""
    trees: bool = False
    """Whether it can fill a tree; any drafter can make a chain."""
    deepest: int | None = None
    """How many tokens ahead it can draft at most; None: any number."""
    columns: int | None = None
    """How many tokens it can ever propose; None: the whole vocabulary."""

    @property
    def name(self) -> str:
        """What messages call it: the type that recipes know it by, or its class where no recipe can ask for it."""
        config = getattr(self, "config", None)
        return type(self).__name__ if config is None else str(config.type)

    @abstractmethod
    def start(self, first: Sequence[int]) -> Any:
        """A fresh decode state for requests whose first tokens are these."""

    @abstractmethod
    def observe(self, state: Any, committed: Committed) -> None:
        """Take what was committed since the last call.

        After it, a request has n tokens, of which the last is pending: the target has not read it yet. Whatever was
        proposed before is forgotten.
        """

    @abstractmethod
    def propose(self, state: Any, sampler: Sampler, shape: Shape, limits: Sequence[int],
                uniforms_BN: Tensor) -> Proposal:  # fmt: skip
        """Tokens to follow the pending ones, of this shape.

        A request needs none deeper than its limit, which is what its budget still holds besides the token after them
        (one limit at least is 1 or more); those that it gets do not count.
        Sampling consumes ``uniforms_BN``, one a node. A request's part depends on that request alone.
        """

    @abstractmethod
    def select(self, state: Any, rows: Sequence[int]) -> None:
        """Keep these requests, in this order; the others have finished."""

    def memory(self, state: Any) -> int:
        """Bytes that the state holds on the device."""
        return 0

    def came_to(self) -> dict[str, Any]:
        """What settings that ask for as much as there is came to, by the name of the setting."""
        return {}


class TrainableDrafter(Drafter, nn.Module):
    """A drafter with weights. ``bind`` lends it the frozen target's embedding; it is never saved with the drafter."""

    shardable: bool = True
    """Whether all that it trains lies in its own modules, so that it may be sharded over processes."""

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

    def auxiliary_shifts(self) -> tuple[int, ...]:
        """How far ahead each auxiliary of a training forward looks."""
        return ()

    def parameter_groups(self) -> list[dict[str, Any]]:
        """What is trained: ``params``, and ``lr_scale``, their share of the learning rate."""
        return [{"params": [p for p in self.parameters() if p.requires_grad], "lr_scale": 1.0}]

    def set_progress(self, step: int, total: int) -> None:
        """Told before optimizer step ``step`` (from 1) of ``total``: a drafter may train in phases."""
        return

    def as_saved(self) -> TrainableDrafter:
        """The drafter whose weights its bundle holds: itself, unless some of what is trained is folded into others."""
        return self

    def write_more(self, folder: Path) -> None:
        """Put what else belongs to the drafter into its half-written bundle, as safetensors and JSON."""
        return

    def warm_start(self, other: TrainableDrafter, target: Target, *, remap: bool = False) -> tuple[str, ...]:
        """Take the weights of a drafter of the same family and sizes; notes on what differs harmlessly.

        ``remap`` allows another draft vocabulary than ``other``'s, where a family has one.
        """
        self.check_family(other)
        if remap:
            raise SpectrainError(f"{self.name} drafters have no draft vocabulary to remap; leave warm_start.remap out")
        self.take_weights(other.state_dict())
        return ()

    def check_family(self, other: Drafter) -> None:
        """SpectrainError where ``other`` is of another family, whose weights are no start."""
        if type(other) is not type(self):
            check_type(other.name, self.name)

    def take_weights(self, theirs: Mapping[str, Tensor]) -> None:
        """Replace all weights by another drafter's; SpectrainError names the first that is not of the same shape."""
        own = self.state_dict()
        for name in {**own, **theirs}:
            shapes = [None if side.get(name) is None else list(side[name].shape) for side in (theirs, own)]
            if shapes[0] != shapes[1]:
                raise SpectrainError(
                    f"{name} is {shapes[0]} in the bundle, {shapes[1]} in this recipe's drafter; give the "
                    "drafter the bundle's settings"
                )
        self.load_state_dict(theirs, strict=True)
