"""One plain Accelerate loop for every trainable drafter.

The loss of an optimizer step is, for each draft depth, the sum over supervised positions divided by their count over
all micro-batches and processes of that step: the same run split any way has the same gradients.

Shapes: B batch, T positions.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from spectrain.checkpoints import Checkpoints, Metrics
from spectrain.data.batches import padding_share, plan_epoch
from spectrain.data.conversations import EncodedRow
from spectrain.data.feature_rows import FeatureRows
from spectrain.drafters.base import TrainableDrafter
from spectrain.drafters.objective import DrafterLoss, LossConfig
from spectrain.drafters.scoring import DepthScores, describe, score_batch, summary_line
from spectrain.errors import SpectrainError
from spectrain.files import json_digest
from spectrain.heads import OutputHead
from spectrain.losses import depth_weights, supervised
from spectrain.on_policy import OnPolicy, Prompts
from spectrain.schedule import Curriculum, OptimConfig, Step, TrainingConfig
from spectrain.target import FeatureBatch

MicroBatch = Sequence[int] | Sequence[EncodedRow]
"""Numbers of prepared rows, or on-policy rows whose features are computed on the spot."""


class Trainer:
    """Trains a drafter on rows of features, stored or live; an interrupted run goes on from its latest checkpoint."""

    def __init__(self, drafter: TrainableDrafter, head: OutputHead, train: FeatureRows, heldout: FeatureRows, *,
                 loss: LossConfig, optim: OptimConfig, config: TrainingConfig, folder: Path,
                 save_bundle: Callable[[Path], None], settings: dict[str, Any],
                 prompts: Prompts | None = None, origin: dict[str, Any] | None = None) -> None:  # fmt: skip
        self.config, self.optim, self.loss = config, optim, loss
        self.train_rows, self.heldout_rows, self.folder = train, heldout, folder
        self.save_bundle, self.origin = save_bundle, origin
        self.head = head
        self.accelerator = _accelerator(config, folder)
        self.curriculum = Curriculum(
            [train.length(i) for i in range(len(train))], config, self.accelerator.num_processes
        )
        self.total_steps = self.curriculum.total_steps()
        _check_supervised(drafter, train=train, heldout=heldout)
        module = DrafterLoss(drafter.train(), head, loss)
        parts = drafter.parameter_groups()
        groups = [{"params": part["params"], "lr": optim.lr * part["lr_scale"]} for part in parts]
        optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay)
        # The scheduler counts optimizer steps: it is not handed to `prepare`, which would step it once a process.
        self.scheduler = LambdaLR(optimizer, lambda done: optim.rate(done + 1, self.total_steps))
        self.lr_scale = parts[0]["lr_scale"]
        self.module, self.optimizer = self.accelerator.prepare(module, optimizer)
        self.parameters = [parameter for group in groups for parameter in group["params"]]
        self.accelerator.register_for_checkpointing(self.scheduler)
        self.on_policy = self._on_policy(prompts)
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
        ours = {"epochs", "micro_batch_tokens", "precision", "seed", "on_policy"}
        ours |= {"steps"} if self.config.steps is not None else set()  # runs of before it could be set go on
        live = {} if self.on_policy is None else {"prompts": json_digest(self.on_policy.prompts)}
        return {
            "drafter": self.drafter.config.model_dump(mode="json"),
            "loss": self.loss.model_dump(mode="json"),
            "optim": self.optim.model_dump(mode="json"),
            "training": self.config.model_dump(mode="json", include=ours),
            "micro_batches_per_step": self.config.accumulation * self.accelerator.num_processes,
            "features": json_digest(self.train_rows.key),
            **live,
            **({} if self.origin is None else {"warm_start": self.origin}),
        }

    def _on_policy(self, prompts: Prompts | None) -> OnPolicy | None:
        config = self.config.on_policy
        if config is None:
            return None
        if prompts is None:
            raise SpectrainError("training.on_policy is set, but the trainer was given no prompts to write from")
        return OnPolicy(config, prompts, self.drafter, self.folder / "on_policy", self.accelerator,
                        self.config.micro_batch_tokens)  # fmt: skip

    def run(self) -> dict[str, Any]:
        """Train to the end; the final validation scores and the time spent, also kept in ``metrics.jsonl``."""
        done, seconds = self.checkpoints.resume()
        if self.accelerator.is_main_process:
            self.metrics.forget_after(done)
        started = time.perf_counter() - seconds
        last: dict[str, Any] = {}
        quiet = not self.accelerator.is_main_process
        with tqdm(total=self.total_steps, initial=done, desc="train", unit="step", disable=quiet) as bar:
            for planned in self.curriculum.steps(done):
                step = planned.number
                self.drafter.set_progress(step, self.total_steps)
                live, written = self._write(planned)
                last = self._step([*planned.batches, *live], step) | written
                last |= {"step": step, "epoch": planned.epoch, "seconds": time.perf_counter() - started}
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

    def _write(self, step: Step) -> tuple[list[list[EncodedRow]], dict[str, Any]]:
        """The step's on-policy micro-batches, and what was written for them if this is where new rows are due."""
        if self.on_policy is None:
            return [], {}
        kept = [int(path.name.removeprefix("step-")) for path in self.checkpoints.all()]
        written = self.on_policy.prepare(step.number, step.on_policy.start, kept)
        return self.on_policy.micro_batches(step.on_policy), {} if written is None else {"on_policy": written}

    def _step(self, batches: Sequence[MicroBatch], step: int) -> dict[str, Any]:
        """One optimizer step over this process's share of ``batches``."""
        share = batches[self.accelerator.process_index :: self.accelerator.num_processes]
        rounds = -(-len(batches) // self.accelerator.num_processes)
        started = time.perf_counter()
        counts = self._global_counts(share)
        weights = self._weights(counts)
        total = torch.zeros((), device=self.accelerator.device)
        for number in range(rounds):
            # A process without a micro-batch of its own joins in with one that counts nothing.
            batch = self._features(share[number]) if number < len(share) else _unsupervised(self._features(batches[0]))
            if number < rounds - 1:
                with self.accelerator.no_sync(self.module):
                    total += self._backward(batch, weights)
            else:
                total += self._backward(batch, weights)
        loss = float(self.accelerator.reduce(total, reduction="mean"))
        norm = float(self.accelerator.clip_grad_norm_(self.parameters, self.optim.clip))
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise SpectrainError(
                f"loss {loss}, gradient norm {norm} at step {step} (rows {_rows(batches)}): training has diverged; "
                "lower optim.lr, or look at these rows of the prepared data"
            )
        rate = self.scheduler.get_last_lr()[0] / self.lr_scale
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        lengths = [self._length(row) for rows in batches for row in rows]
        numbers = iter(range(len(lengths)))
        return {
            "loss": loss, "lr": rate, "gradient_norm": norm, "supervised": counts[0],
            "tokens_per_second": sum(lengths) / (time.perf_counter() - started),
            "padding": padding_share(lengths, [[next(numbers) for _ in rows] for rows in batches]),
        }  # fmt: skip

    def _features(self, batch: MicroBatch) -> FeatureBatch:
        live = [row for row in batch if isinstance(row, EncodedRow)]
        if live and self.on_policy is not None:
            return self.on_policy.features(live)
        return self.train_rows.batch([row for row in batch if isinstance(row, int)], self.accelerator.device)

    def _answer(self, row: int | EncodedRow) -> Tensor:
        return torch.tensor(row.mask, dtype=torch.bool) if isinstance(row, EncodedRow) else self.train_rows.answer(row)

    def _length(self, row: int | EncodedRow) -> int:
        return len(row.ids) if isinstance(row, EncodedRow) else self.curriculum.lengths[row]

    def _weights(self, counts: list[int]) -> list[float]:
        """What a position counts, of each draft depth and then of each auxiliary.

        Gradients are averaged over processes, so each contributes its part times their number.
        """
        depths = len(self.drafter.shifts())
        decay = 1.0 if self.loss.positions == "d_pace" else self.loss.decay  # D-PACE weighs positions by itself
        shares = [*depth_weights(depths, decay), *(1.0 for _ in counts[depths:])]
        return [self.accelerator.num_processes * w / max(1, c) for w, c in zip(shares, counts, strict=True)]

    def _backward(self, batch: FeatureBatch, weights: list[float]) -> Tensor:
        with self.accelerator.autocast():
            loss = self.module(batch, weights)
        self.accelerator.backward(loss)
        return loss.detach()

    def _global_counts(self, share: Sequence[MicroBatch]) -> list[int]:
        """Supervised positions of each depth, then of each auxiliary, over the whole step and all processes.

        They are known from the masks alone, so that the features of a step are never all in memory.
        """
        shifts = (*self.drafter.shifts(), *self.drafter.auxiliary_shifts())
        masks = [pad_sequence([self._answer(row) for row in rows], batch_first=True) for rows in share]
        local = [sum(int(supervised(answer_BT, shift).sum()) for answer_BT in masks) for shift in shifts]
        return self.accelerator.reduce(torch.tensor(local, device=self.accelerator.device), reduction="sum").tolist()

    def validate(self) -> DepthScores:
        """Scores of the drafter as it is on the held-out rows, all processes together."""
        drafter = self.drafter.eval()
        lengths = [self.heldout_rows.length(i) for i in range(len(self.heldout_rows))]
        batches = plan_epoch(lengths, max(self.config.micro_batch_tokens, max(lengths)), 0, 0)
        scores = DepthScores()
        for rows in batches[self.accelerator.process_index :: self.accelerator.num_processes]:
            batch = self.heldout_rows.batch(rows, self.accelerator.device)
            with self.accelerator.autocast():
                scores = scores + score_batch(drafter, batch, self.head, self.config.validation_depths)
        drafter.train()
        return sum(gather_object([scores]), DepthScores())

    def _record(self, values: dict[str, Any]) -> None:
        if self.config.tracker != "none":
            self.accelerator.log(flatten(values), step=values["step"])
        if self.accelerator.is_main_process:
            self.metrics.append(values)


def _check_supervised(drafter: TrainableDrafter, **stores: FeatureRows) -> None:
    """Rows may have answers, and yet none long enough for the first draft depth."""
    shift = drafter.shifts()[0]
    for name, store in stores.items():
        if not any(supervised(store.answer(row)[None], shift).any() for row in range(len(store))):
            raise SpectrainError(
                f"nothing is supervised in the {len(store)} {name} rows: none has {shift} answer tokens in a row, "
                "which the first draft depth needs; give longer answers, or have them generated first"
            )


def _rows(batches: Sequence[MicroBatch]) -> list[list[int | str]]:
    """Micro-batches for people: numbers of prepared rows, conversations of on-policy ones."""
    return [[f"on-policy {row.conversation}" if isinstance(row, EncodedRow) else row for row in b] for b in batches]


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
