"""One plain Accelerate loop for every trainable drafter.

The loss of an optimizer step is, for each draft depth, the sum over supervised positions divided by their count over
all micro-batches and processes of that step: the same run split any way has the same gradients.

Shapes: B batch, T positions, N supervised positions of all depths, H hidden, D columns of the drafter's head.
"""

from __future__ import annotations

import json
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
from torch import Tensor, nn
from tqdm import tqdm
from transformers import get_scheduler

from spectrain.checkpoints import Checkpoints
from spectrain.data.batches import collate, padding_share, plan_epoch
from spectrain.data.features import FeatureStore
from spectrain.drafters.base import TrainableDrafter
from spectrain.drafters.scoring import DepthScores, score_batch
from spectrain.errors import SpectrainError
from spectrain.losses import LOSSES, depth_weights, head_loss, supervised
from spectrain.target import FeatureBatch


class LossConfig(BaseModel):
    """Which per-position loss, and how much later depths count."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: Literal["forward_kl", "total_variation"] = "forward_kl"
    decay: float = Field(0.8, gt=0, le=1, description="weight of draft depth d is decay^d")


class OptimConfig(BaseModel):
    """AdamW with warm-up and cosine, in optimizer steps whatever the number of processes."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    lr: float = Field(5e-5, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    clip: float = Field(0.5, gt=0, description="largest gradient norm")
    warmup: float = Field(0.05, ge=0, lt=1, description="share of all optimizer steps")
    schedule: Literal["cosine", "linear", "constant_with_warmup"] = "cosine"


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


class DrafterLoss(nn.Module):
    """A drafter and its loss as one module, so that whatever wraps it for many devices sees the whole computation."""

    def __init__(self, drafter: TrainableDrafter, target_head_VH: Tensor, config: LossConfig) -> None:
        super().__init__()
        self.drafter, self.config, self.loss = drafter, config, LOSSES[config.name]
        self._head = (target_head_VH.detach(),)  # in a tuple: the target is not ours to train, move or save

    def forward(self, batch: FeatureBatch, weights: Sequence[float]) -> Tensor:
        """Sum over depths of ``weights[d]`` times the loss summed over the depth's supervised positions."""
        output = self.drafter(batch)
        head_VH = self._head[0]
        teacher_DH = head_VH if output.columns_D is None else head_VH[output.columns_D]
        total = batch.hidden_BTH.new_zeros((), dtype=torch.float32)
        for head_DH in {id(depth.head_DH): depth.head_DH for depth in output.depths}.values():
            rows = [(d, w) for d, w in zip(output.depths, weights, strict=True) if d.head_DH is head_DH]
            hidden_NH, weight_N, law = _gather(batch, rows, teacher_DH)
            total = total + head_loss(hidden_NH, head_DH, law, _weighted(self.loss, weight_N))
        return total


def _weighted(
    loss: Callable[[Tensor, Tensor], Tensor], weight_N: Tensor
) -> Callable[[Tensor, Tensor, slice], Tensor]:
    return lambda z_CD, log_p_CD, rows: loss(z_CD, log_p_CD) * weight_N[rows]


def _gather(
    batch: FeatureBatch, rows: list[tuple[Any, float]], teacher_DH: Tensor
) -> tuple[Tensor, Tensor, Callable[[slice], Tensor]]:
    """Supervised positions of several depths in the order of the token they predict, so that depths share teacher rows."""
    T = batch.ids_BT.shape[1]
    hidden, weights, places = [], [], []
    for depth, weight in rows:
        row_N, at_N = depth.mask_BT.nonzero(as_tuple=True)
        hidden.append(depth.hidden_BTH[row_N, at_N])
        places.append(row_N * T + at_N + depth.shift - 1)
        weights.append(torch.full((len(row_N),), weight, device=row_N.device))
    place_N = torch.cat(places)
    order_N = place_N.argsort()
    place_N = place_N[order_N]
    state_XH, normaliser_X = batch.hidden_BTH.flatten(0, 1), batch.log_normaliser_BT.flatten()

    def law(chunk: slice) -> Tensor:
        place_U, back_C = place_N[chunk].unique_consecutive(return_inverse=True)
        logits_UD = (state_XH[place_U].to(teacher_DH.dtype) @ teacher_DH.T).float()
        return (logits_UD - normaliser_X[place_U, None])[back_C]

    return torch.cat(hidden)[order_N], torch.cat(weights)[order_N], law


class Trainer:
    """Trains a drafter on a feature store; an interrupted run goes on from its latest checkpoint."""

    def __init__(self, drafter: TrainableDrafter, target_head_VH: Tensor, train: FeatureStore, heldout: FeatureStore, *,
                 loss: LossConfig, optim: OptimConfig, config: TrainingConfig, folder: Path,
                 save_bundle: Callable[[Path, dict[str, Any]], None], settings: dict[str, Any]) -> None:  # fmt: skip
        self.config, self.optim, self.loss = config, optim, loss
        self.train_rows, self.heldout_rows, self.folder = train, heldout, folder
        self.save_bundle = save_bundle
        self.head_VH = target_head_VH
        self.accelerator = _accelerator(config, folder)
        self.curriculum = Curriculum(
            [train.length(i) for i in range(len(train))], config, self.accelerator.num_processes
        )
        self.total_steps = self.curriculum.total_steps()
        module = DrafterLoss(drafter.train(), target_head_VH, loss)
        parameters = [p for p in drafter.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            parameters, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay
        )
        # The scheduler counts optimizer steps: it is not handed to `prepare`, which would step it once a process.
        warmup = math.ceil(optim.warmup * self.total_steps)
        self.scheduler = get_scheduler(optim.schedule, optimizer, warmup, self.total_steps)
        self.module, self.optimizer = self.accelerator.prepare(module, optimizer)
        self.parameters = parameters
        self.accelerator.register_for_checkpointing(self.scheduler)
        self.checkpoints = Checkpoints(folder / "checkpoints", self.accelerator, config.keep)
        if config.tracker != "none":
            self.accelerator.init_trackers("spectrain", config=settings)

    @property
    def drafter(self) -> TrainableDrafter:
        return self.accelerator.unwrap_model(self.module).drafter

    def run(self) -> dict[str, Any]:
        """Train to the end; the final validation scores and the time spent, also kept in ``metrics.jsonl``."""
        done, seconds = self.checkpoints.resume()
        self._forget_metrics_after(done)
        bar = tqdm(
            total=self.total_steps,
            initial=done,
            desc="train",
            unit="step",
            disable=not self.accelerator.is_main_process,
        )
        started = time.perf_counter() - seconds
        last: dict[str, Any] = {}
        for step, (epoch, batches) in enumerate(self.curriculum.steps(done), done + 1):
            values = self._step(batches, step)
            values |= {"step": step, "epoch": epoch, "seconds": time.perf_counter() - started}
            bar.update()
            bar.set_postfix(loss=f"{values['loss']:.3f}", lr=f"{values['lr']:.1e}")
            if step % self.config.validate_every == 0 or step == self.total_steps:
                values |= {"validation": describe(self.validate())}
                bar.write(f"step {step}: held-out {summary_line(values['validation'])}")
            self._record(values)
            last = values
            if step % self.config.checkpoint_every == 0 or step == self.total_steps:
                self.checkpoints.save(step, values["seconds"], lambda path: self.save_bundle(path, values))
        bar.close()
        self.accelerator.end_training()
        return last or self._last_metrics()

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
        return self.accelerator.reduce(
            torch.tensor(local, device=self.accelerator.device), reduction="sum"
        ).tolist()

    def validate(self) -> DepthScores:
        """Scores of the drafter as it is on the held-out rows, all processes together."""
        drafter = self.drafter.eval()
        lengths = [self.heldout_rows.length(i) for i in range(len(self.heldout_rows))]
        batches = plan_epoch(lengths, max(self.config.micro_batch_tokens, max(lengths)), 0, 0)
        scores = DepthScores()
        for rows in batches[self.accelerator.process_index :: self.accelerator.num_processes]:
            batch = collate(self.heldout_rows, rows, self.accelerator.device)
            with self.accelerator.autocast():
                scores = scores + score_batch(drafter, batch, self.head_VH, self.config.validation_depths)
        drafter.train()
        return sum(self._gather_scores(scores), DepthScores())

    def _gather_scores(self, scores: DepthScores) -> list[DepthScores]:
        if self.accelerator.num_processes == 1:
            return [scores]
        everyone: list[Any] = [None] * self.accelerator.num_processes
        torch.distributed.all_gather_object(everyone, scores)
        return everyone

    # --- what is written ----------------------------------------------------------------------------------------

    @property
    def metrics_file(self) -> Path:
        return self.folder / "metrics.jsonl"

    def _record(self, values: dict[str, Any]) -> None:
        if self.config.tracker != "none":
            self.accelerator.log(flatten(values), step=values["step"])
        if self.accelerator.is_main_process:
            with self.metrics_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(values) + "\n")

    def _metrics(self) -> list[dict[str, Any]]:
        if not self.metrics_file.exists():
            return []
        lines = self.metrics_file.read_text(encoding="utf-8").split("\n")
        return [
            json.loads(line) for line in lines[:-1]
        ]  # what follows the last newline was cut off while writing

    def _forget_metrics_after(self, step: int) -> None:
        if self.accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            kept = [values for values in self._metrics() if values["step"] <= step]
            self.metrics_file.write_text(
                "".join(json.dumps(values) + "\n" for values in kept), encoding="utf-8"
            )

    def _last_metrics(self) -> dict[str, Any]:
        return self._metrics()[-1]


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
            f"WORLD_SIZE is {world} but Accelerate sees {accelerator.num_processes} process(es): each would believe it is "
            "alone and overwrite the others. On CPUs start with `torchrun --nproc-per-node N` and ACCELERATE_USE_CPU=true"
        )
    set_seed(config.seed)
    return accelerator


def describe(scores: DepthScores) -> dict[str, Any]:
    """Scores as plain numbers: tokens per round at T=0, and by depth alpha at T=1 and conditional greedy acceptance."""
    return {
        "tokens_per_round": scores.tokens_per_round(),
        "alpha": scores.mean_alpha(),
        "conditional": scores.conditional(),
        "positions": scores.positions,
    }


def summary_line(validation: dict[str, Any]) -> str:
    """One line for a person watching."""

    def by_depth(name: str) -> str:
        return " ".join(f"{value:.2f}" for value in validation[name])

    return (
        f"tokens/round {validation['tokens_per_round']:.2f} (T=0) | conditional acceptance {by_depth('conditional')} (T=0)"
        f" | α {by_depth('alpha')} (T=1)"
    )


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Nested metrics as the flat names that trackers want."""
    flat: dict[str, float] = {}
    for key, value in values.items():
        inner = dict(enumerate(value)) if isinstance(value, list) else value
        flat |= flatten(inner, f"{prefix}{key}/") if isinstance(inner, dict) else {f"{prefix}{key}": value}
    return flat
