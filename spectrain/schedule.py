"""Which rows every optimizer step of a run trains on, and at which learning rate: known before the first one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from spectrain.data.batches import plan_epoch
from spectrain.data.feature_rows import FeatureRows
from spectrain.drafters.base import TrainableDrafter
from spectrain.errors import SpectrainError
from spectrain.losses import supervised
from spectrain.on_policy import OnPolicyConfig


class OptimConfig(BaseModel):
    """AdamW with warm-up and cosine, in optimizer steps whatever the number of processes."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    name: Literal["adamw", "adamw_fused", "adamw_8bit"] = Field(
        "adamw", description="plain; one kernel a step; or moments in 8 bits (spectrain[8bit])"
    )
    lr: float = Field(5e-5, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    clip: float = Field(0.5, gt=0, description="largest gradient norm")
    warmup: float = Field(0.05, ge=0, lt=1, description="share of all optimizer steps")
    schedule: Literal["cosine", "linear", "constant_with_warmup"] = "cosine"

    def rate(self, step: int, total: int) -> float:
        """Share of ``lr`` that optimizer step ``step`` of ``total`` (from 1) uses: full at the last warm-up step.

        Neither the first step nor the last one is wasted on a rate of zero.
        """
        peak = max(1, math.ceil(self.warmup * total))
        if step < peak or self.schedule == "constant_with_warmup":
            return min(1.0, step / peak)
        left = (total + 1 - step) / (total + 1 - peak)
        return left if self.schedule == "linear" else (1 - math.cos(math.pi * left)) / 2


class TrainingConfig(BaseModel):
    """How long, how much at once, and what to write."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    epochs: int = Field(4, ge=1)
    steps: int | None = Field(None, ge=1, description="optimizer steps at most, where the epochs would take more")
    micro_batch_tokens: int = Field(2048, ge=1, description="padded tokens of one forward on one process")
    accumulation: int = Field(1, ge=1, description="micro-batches of prepared rows a process adds up before a step")
    precision: Literal["no", "bf16"] = Field("no", description="autocast; parameters stay float32")
    seed: int = 0
    validate_every: int = Field(100, ge=1, description="optimizer steps")
    acceptance_every: int = Field(
        10, ge=1, description="optimizer steps between records of acceptance by depth on the rows they train on"
    )
    validation_depths: int = Field(5, ge=1, description="draft tokens a round that validation looks at")
    checkpoint_every: int = Field(200, ge=1, description="optimizer steps")
    keep: int = Field(2, ge=1, description="latest checkpoints that stay on disk, besides the best one")
    select: Literal["best", "last"] = Field(
        "best", description="the run's bundle: of most tokens per round on the held-out rows, or of the last step"
    )
    patience: int | None = Field(None, ge=1, description="stop after so many validations without a better one")
    on_policy: OnPolicyConfig | None = Field(None, description="rows written during training, beside the prepared ones")
    verify_bundle: bool = Field(
        True, description="read the bundle back in a fresh process, which has to draft the same"
    )
    tracker: Literal["none", "wandb", "tensorboard"] = "none"


@dataclass(frozen=True)
class Step:
    """An optimizer step: its number (from 1), and over all processes its micro-batches of prepared rows and the numbers
    of its on-policy ones, which count from the first of the run (0)."""

    number: int
    epoch: int
    batches: list[list[int]]
    on_policy: range


@dataclass(frozen=True)
class Curriculum:
    """Optimizer steps of a run, and the micro-batches of each."""

    lengths: Sequence[int]
    config: TrainingConfig
    processes: int

    def epoch(self, epoch: int) -> list[list[list[int]]]:
        """Steps of an epoch; each is the list of its micro-batches over all processes."""
        batches = plan_epoch(self.lengths, self.config.micro_batch_tokens, self.config.seed, epoch)
        size = self.config.accumulation * self.processes
        return [batches[i : i + size] for i in range(0, len(batches), size)]

    def total_steps(self) -> int:
        """Of all epochs, or the most that the run may take: what the learning rate falls over."""
        steps = sum(len(self.epoch(epoch)) for epoch in range(self.config.epochs))
        return steps if self.config.steps is None else min(steps, self.config.steps)

    def steps(self, done: int) -> Iterator[Step]:
        """Every step after the first ``done``.

        On-policy micro-batches come on top of the prepared rows, which are all seen once an epoch. After any step there
        have been as many of them, rounded down, as make up their share of all micro-batches so far.
        """
        number = before = 0
        each, last = self._on_policy_each(), self.total_steps()
        for epoch in range(self.config.epochs):
            for batches in self.epoch(epoch):
                number, after = number + 1, before + len(batches)
                if number > last:
                    return
                if number > done:
                    yield Step(number, epoch, batches, range(int(before * each), int(after * each)))
                before = after

    def _on_policy_each(self) -> Fraction:
        """On-policy micro-batches for each of prepared rows, exactly: a rounding error would move one to another
        step."""
        if self.config.on_policy is None:
            return Fraction(0)
        share = Fraction(str(self.config.on_policy.share))
        return share / (1 - share)


def check_supervised(drafter: TrainableDrafter, **stores: FeatureRows) -> None:
    """Rows may have answers, and yet none long enough for the first draft depth."""
    shift = drafter.shifts()[0]
    for name, store in stores.items():
        if not any(supervised(store.answer(row)[None], shift).any() for row in range(len(store))):
            raise SpectrainError(
                f"nothing is supervised in the {len(store)} {name} rows: none has {shift} answer tokens in a row, "
                "which the first draft depth needs; give longer answers, or have them generated first"
            )
