"""One plain Accelerate loop for every trainable drafter.

The loss of an optimizer step is, for each draft depth, the sum over supervised positions divided by their count over
all micro-batches and processes of that step: the same run split any way has the same gradients.

Shapes: B batch, T positions.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from spectrain.checkpoints import Checkpoints, Metrics
from spectrain.data.batches import collate, padding_share, plan_epoch
from spectrain.data.features import FeatureStore
from spectrain.drafters.base import TrainableDrafter
from spectrain.drafters.objective import DrafterLoss, LossConfig
from spectrain.drafters.scoring import DepthScores, describe, score_batch, summary_line
from spectrain.errors import SpectrainError
from spectrain.files import json_digest
from spectrain.heads import OutputHead
from spectrain.losses import depth_weights, supervised
from spectrain.target import FeatureBatch


class OptimConfig(BaseModel):
    """AdamW with warm-up and cosine, in optimizer steps whatever the number of processes."""

    model_config = ConfigDict(frozen=True, extra="forbid")
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

    model_config = ConfigDict(frozen=True, extra="forbid")
    epochs: int = Field(4, ge=1)
    micro_batch_tokens: int = Field(2048, ge=1, description="padded tokens of one forward on one process")
    accumulation: int = Field(1, ge=1, description="micro-batches a process adds up before a step")
    precision: Literal["no", "bf16"] = Field("no", description="autocast; parameters stay float32")
    seed: int = 0
    validate_every: int = Field(100, ge=1, description="optimizer steps")
    validation_depths: int = Field(5, ge=1, description="draft tokens a round that validation looks at")
    checkpoint_every: int = Field(200, ge=1, description="optimizer steps")
    keep: int = Field(2, ge=1, description="latest checkpoints that stay on disk")
    tracker: Literal["none", "wandb", "tensorboard"] = "none"


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
        return sum(len(self.epoch(epoch)) for epoch in range(self.config.epochs))

    def steps(self, done: int) -> Iterator[tuple[int, list[list[int]]]]:
        """(epoch, micro-batches) of every step after the first ``done``."""
        number = 0
        for epoch in range(self.config.epochs):
            for step in self.epoch(epoch):
                if number >= done:
                    yield epoch, step
                number += 1


class Trainer:
    """Trains a drafter on a feature store; an interrupted run goes on from its latest checkpoint."""

    def __init__(self, drafter: TrainableDrafter, head: OutputHead, train: FeatureStore, heldout: FeatureStore, *,
                 loss: LossConfig, optim: OptimConfig, config: TrainingConfig, folder: Path,
                 save_bundle: Callable[[Path], None], settings: dict[str, Any]) -> None:  # fmt: skip
        self.config, self.optim, self.loss = config, optim, loss
        self.train_rows, self.heldout_rows, self.folder = train, heldout, folder
        self.save_bundle = save_bundle
        self.head = head
        self.accelerator = _accelerator(config, folder)
        self.curriculum = Curriculum(
            [train.length(i) for i in range(len(train))], config, self.accelerator.num_processes
        )
        self.total_steps = self.curriculum.total_steps()
        _check_supervised(drafter, train=train, heldout=heldout)
        module = DrafterLoss(drafter.train(), head, loss)
        parameters = [p for p in drafter.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay)
        # The scheduler counts optimizer steps: it is not handed to `prepare`, which would step it once a process.
        self.scheduler = LambdaLR(optimizer, lambda done: optim.rate(done + 1, self.total_steps))
        self.module, self.optimizer = self.accelerator.prepare(module, optimizer)
        self.parameters = parameters
        self.accelerator.register_for_checkpointing(self.scheduler)
        self.metrics = Metrics(folder / "metrics.jsonl")
        self.checkpoints = Checkpoints(folder / "checkpoints", self.accelerator, config.keep, self._run())
        if config.tracker != "none":
            options = {"wandb": {"dir": str(folder)}}  # else it writes to wherever the command was started
            self.accelerator.init_trackers("spectrain", config=flatten(settings), init_kwargs=options)

    @property
    def drafter(self) -> TrainableDrafter:
        return self.accelerator.unwrap_model(self.module).drafter

    def _run(self) -> dict[str, Any]:
        """What the numbers of this run depend on: only a run with the same goes on from its checkpoints."""
        ours = {"epochs", "micro_batch_tokens", "precision", "seed"}
        return {
            "drafter": self.drafter.config.model_dump(mode="json"),
            "loss": self.loss.model_dump(mode="json"),
            "optim": self.optim.model_dump(mode="json"),
            "training": self.config.model_dump(mode="json", include=ours),
            "micro_batches_per_step": self.config.accumulation * self.accelerator.num_processes,
            "features": json_digest(self.train_rows.key),
        }

    def run(self) -> dict[str, Any]:
        """Train to the end; the final validation scores and the time spent, also kept in ``metrics.jsonl``."""
        done, seconds = self.checkpoints.resume()
        if self.accelerator.is_main_process:
            self.metrics.forget_after(done)
        started = time.perf_counter() - seconds
        last: dict[str, Any] = {}
        quiet = not self.accelerator.is_main_process
        with tqdm(total=self.total_steps, initial=done, desc="train", unit="step", disable=quiet) as bar:
            for step, (epoch, batches) in enumerate(self.curriculum.steps(done), done + 1):
                last = self._step(batches, step)
                last |= {"step": step, "epoch": epoch, "seconds": time.perf_counter() - started}
                bar.update()
                bar.set_postfix(loss=f"{last['loss']:.3f}", lr=f"{last['lr']:.1e}")
                if step % self.config.validate_every == 0 or step == self.total_steps:
                    last |= {"validation": describe(self.validate())}
                    if not quiet:
                        bar.write(f"step {step}: held-out {summary_line(last['validation'])}")
                self._record(last)
                if step % self.config.checkpoint_every == 0 or step == self.total_steps:
                    self.checkpoints.save(step, last["seconds"], self.save_bundle)
        self.accelerator.end_training()
        return last or self.metrics.read()[-1]

    def _step(self, batches: list[list[int]], step: int) -> dict[str, Any]:
        """One optimizer step over this process's share of ``batches``."""
        share = batches[self.accelerator.process_index :: self.accelerator.num_processes]
        rounds = -(-len(batches) // self.accelerator.num_processes)
        started = time.perf_counter()
        micro = [collate(self.train_rows, rows, self.accelerator.device) for rows in share]
        counts = self._global_counts(micro)
        # Gradients are averaged over processes, so each contributes its part times their number.
        scale = self.accelerator.num_processes
        decay = depth_weights(len(counts), self.loss.decay)
        weights = [scale * w / max(1, c) for w, c in zip(decay, counts, strict=True)]
        total = torch.zeros((), device=self.accelerator.device)
        for number in range(rounds):
            # A process without a micro-batch of its own joins in with one that counts nothing.
            batch = (
                micro[number]
                if number < len(micro)
                else _unsupervised(collate(self.train_rows, batches[0], self.accelerator.device))
            )
            if number < rounds - 1:
                with self.accelerator.no_sync(self.module):
                    total += self._backward(batch, weights)
            else:
                total += self._backward(batch, weights)
        loss = float(self.accelerator.reduce(total, reduction="mean"))
        norm = float(self.accelerator.clip_grad_norm_(self.parameters, self.optim.clip))
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise SpectrainError(
                f"loss {loss}, gradient norm {norm} at step {step} (rows {batches}): training has diverged; "
                "lower optim.lr, or look at these rows of the prepared data"
            )
        rate = self.scheduler.get_last_lr()[0]
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        tokens = sum(self.curriculum.lengths[row] for rows in batches for row in rows)
        return {
            "loss": loss, "lr": rate, "gradient_norm": norm, "supervised": counts[0],
            "tokens_per_second": tokens / (time.perf_counter() - started),
            "padding": padding_share(self.curriculum.lengths, batches),
        }  # fmt: skip

    def _backward(self, batch: FeatureBatch, weights: list[float]) -> Tensor:
        with self.accelerator.autocast():
            loss = self.module(batch, weights)
        self.accelerator.backward(loss)
        return loss.detach()

    def _global_counts(self, micro: list[FeatureBatch]) -> list[int]:
        """Supervised positions of each depth over the whole step, all processes."""
        shifts = self.drafter.shifts()
        local = [sum(int(supervised(batch.answer_BT, shift).sum()) for batch in micro) for shift in shifts]
        return self.accelerator.reduce(torch.tensor(local, device=self.accelerator.device), reduction="sum").tolist()

    def validate(self) -> DepthScores:
        """Scores of the drafter as it is on the held-out rows, all processes together."""
        drafter = self.drafter.eval()
        lengths = [self.heldout_rows.length(i) for i in range(len(self.heldout_rows))]
        batches = plan_epoch(lengths, max(self.config.micro_batch_tokens, max(lengths)), 0, 0)
        scores = DepthScores()
        for rows in batches[self.accelerator.process_index :: self.accelerator.num_processes]:
            batch = collate(self.heldout_rows, rows, self.accelerator.device)
            with self.accelerator.autocast():
                scores = scores + score_batch(drafter, batch, self.head, self.config.validation_depths)
        drafter.train()
        return sum(self._gather_scores(scores), DepthScores())

    def _gather_scores(self, scores: DepthScores) -> list[DepthScores]:
        if self.accelerator.num_processes == 1:
            return [scores]
        everyone: list[Any] = [None] * self.accelerator.num_processes
        torch.distributed.all_gather_object(everyone, scores)
        return everyone

    def _record(self, values: dict[str, Any]) -> None:
        if self.config.tracker != "none":
            self.accelerator.log(flatten(values), step=values["step"])
        if self.accelerator.is_main_process:
            self.metrics.append(values)


def _check_supervised(drafter: TrainableDrafter, **stores: FeatureStore) -> None:
    """Rows may have answers, and yet none long enough for the first draft depth."""
    shift = drafter.shifts()[0]
    for name, store in stores.items():
        if not any(supervised(store.answer(row)[None], shift).any() for row in range(len(store))):
            raise SpectrainError(
                f"nothing is supervised in the {len(store)} {name} rows: none has {shift} answer tokens in a row, "
                "which the first draft depth needs; give longer answers, or have them generated first"
            )


def _unsupervised(batch: FeatureBatch) -> FeatureBatch:
    return FeatureBatch(**{**vars(batch), "answer_BT": torch.zeros_like(batch.answer_BT)})


def _accelerator(config: TrainingConfig, folder: Path) -> Accelerator:
    accelerator = Accelerator(
        mixed_precision=config.precision,
        log_with=None if config.tracker == "none" else config.tracker,
        project_dir=folder,
    )
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != accelerator.num_processes:
        raise SpectrainError(
            f"WORLD_SIZE is {world} but Accelerate sees {accelerator.num_processes} process(es): each would believe it "
            "is alone and overwrite the others. On CPUs start with `torchrun --nproc-per-node N` and "
            "ACCELERATE_USE_CPU=true"
        )
    set_seed(config.seed)
    return accelerator


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested metrics or settings as the flat names that trackers want."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        inner = dict(enumerate(value)) if isinstance(value, list) else value
        flat |= flatten(inner, f"{prefix}{key}/") if isinstance(inner, dict) else {f"{prefix}{key}": value}
    return flat
