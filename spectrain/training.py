"""One plain Accelerate loop for every trainable drafter.

The loss of an optimizer step is, for each draft depth, the sum over supervised positions divided by their count over
all micro-batches and processes of that step: the same run split any way has the same gradients.

Shapes: B batch, T positions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from spectrain.checkpoints import Checkpoints, Progress
from spectrain.data.batches import padding_share, plan_epoch
from spectrain.data.conversations import EncodedRow
from spectrain.data.feature_rows import FeatureRows, unsupervised
from spectrain.decoding.requests import stream_seed
from spectrain.distributed import check_sharding, gathered_number, start_accelerator, whole
from spectrain.drafters.base import TrainableDrafter
from spectrain.drafters.objective import DrafterLoss, LossConfig
from spectrain.drafters.scoring import DepthScores, describe, score_batch, summary_line
from spectrain.drafters.tally import Tally
from spectrain.errors import SpectrainError
from spectrain.files import json_digest
from spectrain.heads import OutputHead
from spectrain.losses import depth_weights, supervised
from spectrain.on_policy import OnPolicy, Prompts
from spectrain.optimizer import build_optimizer
from spectrain.run_record import run_record
from spectrain.schedule import Curriculum, OptimConfig, Step, TrainingConfig, check_supervised
from spectrain.selection import Selection
from spectrain.target import FeatureBatch
from spectrain.tracking import Tracking, peak_memory

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
        self.head, self.selection, self.chosen = head, Selection(), 0
        self.accelerator = start_accelerator(
            folder, precision=config.precision, seed=config.seed, tracker=config.tracker
        )
        self.curriculum = Curriculum(
            [train.length(i) for i in range(len(train))], config, self.accelerator.num_processes
        )
        self.total_steps = self.curriculum.total_steps()
        check_supervised(drafter, train=train, heldout=heldout)
        module = DrafterLoss(drafter.train(), head, loss)
        parts = drafter.parameter_groups()
        groups = [{"params": part["params"], "lr": optim.lr * part["lr_scale"]} for part in parts]
        optimizer = build_optimizer(optim, groups)
        # The scheduler counts optimizer steps: it is not handed to `prepare`, which would step it once a process.
        self.scheduler = LambdaLR(optimizer, lambda done: optim.rate(done + 1, self.total_steps))
        self.lr_scale = parts[0]["lr_scale"]
        self.module, self.optimizer = self.accelerator.prepare(module, optimizer)
        check_sharding(self.module, drafter)
        # Of the optimizer, for where they are sharded, others have taken the place of the drafter's own.
        self.parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        self.accelerator.register_for_checkpointing(self.scheduler)
        self.on_policy = self._on_policy(prompts)
        self.tracking = Tracking(folder, self.accelerator, config.tracker, settings)
        self.checkpoints = Checkpoints(folder / "checkpoints", self.accelerator, config.keep, self._run(),
                                       keep_best=config.select == "best", module=self.module)  # fmt: skip

    @property
    def drafter(self) -> TrainableDrafter:
        return self.accelerator.unwrap_model(self.module).drafter

    def _run(self) -> dict[str, Any]:
        live = {} if self.on_policy is None else {"prompts": json_digest(self.on_policy.prompts)}
        record = run_record(self.drafter.config, self.loss, self.optim, self.config, self.accelerator.num_processes,
                            self.origin)  # fmt: skip
        return {**record, "features": json_digest(self.train_rows.key), **live}

    def _on_policy(self, prompts: Prompts | None) -> OnPolicy | None:
        config = self.config.on_policy
        if config is None:
            return None
        if prompts is None:
            raise SpectrainError("training.on_policy is set, but the trainer was given no prompts to write from")
        return OnPolicy(config, prompts, self.drafter, self.folder / "on_policy", self.accelerator,
                        self.config.micro_batch_tokens)  # fmt: skip

    def run(self) -> dict[str, Any]:
        """Train to the end and leave the drafter as it was at the ``chosen`` step.

        The last step's numbers with its validation scores and the time spent, also kept in ``metrics.jsonl``.
        """
        progress = self.checkpoints.resume()
        done, self.selection = progress.step, progress.selection
        if self.accelerator.is_main_process:
            self.tracking.metrics.forget_after(done)
        started = time.perf_counter() - progress.seconds
        last: dict[str, Any] = {}
        quiet = not self.accelerator.is_main_process
        every = self.config.checkpoint_every
        bar = tqdm(total=self.total_steps, initial=done, desc="train", unit="step", disable=quiet)
        with self.checkpoints.telling_when_stopped(lambda: bar.n, self.total_steps, every), bar:
            for planned in self.curriculum.steps(done):
                if self.selection.exhausted(self.config.patience):
                    break
                last = self._train_step(planned, started)
                bar.update()
                bar.set_postfix(loss=f"{last['loss']:.3f}", lr=f"{last['lr']:.1e}")
                if "validation" in last and not quiet:
                    bar.write(f"step {planned.number}: held-out {summary_line(last['validation'])}")
        last = last or self.tracking.metrics.last()
        self.chosen = self.checkpoints.chosen(self.selection)
        if self.chosen != last["step"]:
            self.checkpoints.load(self.chosen)
        self.drafter.set_progress(self.chosen, self.total_steps)
        self.tracking.finish(self.folder / "training.png", self.chosen)
        return last

    @property
    def finished(self) -> bool:
        """Whether no step is left, by the latest checkpoint."""
        progress = self.checkpoints.latest()
        return progress.step >= self.total_steps or progress.selection.exhausted(self.config.patience)

    @property
    def choice(self) -> str:
        """Which step was chosen, for people."""
        found, score = f"step {self.chosen} of {self.total_steps}", self.selection.tokens_per_round
        if self.chosen != self.selection.step or score is None:
            return f"{found}, the last"
        return f"{found}, the best on the held-out rows: {score:.2f} tokens per round"

    def _train_step(self, planned: Step, started: float) -> dict[str, Any]:
        """One optimizer step with all that is due after it: validation, its record, a checkpoint."""
        step, config = planned.number, self.config
        self.drafter.set_progress(step, self.total_steps)
        live, written = self._write(planned)
        values = self._step([*planned.batches, *live], step) | written
        values |= {"step": step, "epoch": planned.epoch, "seconds": time.perf_counter() - started}
        save = step % config.checkpoint_every == 0 or step == self.total_steps
        if step % config.validate_every == 0 or step == self.total_steps:
            values |= {"validation": describe(self.validate())}
            found = values["validation"]
            self.selection = self.selection.after(step, found["tokens_per_round"], fmean(found["alpha"] or [0.0]))
            save |= config.select == "best" and self.selection.step == step
            if self.selection.exhausted(config.patience):
                values["stopped_early"] = save = True
        self.tracking.record(values)
        if save:
            self.checkpoints.save(Progress(step, values["seconds"], self.selection), self.save_bundle)
        return values

    def _write(self, step: Step) -> tuple[list[list[EncodedRow]], dict[str, Any]]:
        """The step's on-policy micro-batches, and what was written for them if this is where new rows are due."""
        if self.on_policy is None:
            return [], {}
        with whole(self.module):
            written = self.on_policy.prepare(step.number, step.on_policy.start, self.checkpoints.steps())
        return self.on_policy.micro_batches(step.on_policy), {} if written is None else {"on_policy": written}

    def _step(self, batches: Sequence[MicroBatch], step: int) -> dict[str, Any]:
        """One optimizer step over this process's share of ``batches``."""
        started = time.perf_counter()
        objective = self.accelerator.unwrap_model(self.module)
        objective.tally = tally = Tally() if step % self.config.acceptance_every == 0 else None
        losses, counts = self._gradients(batches, step)
        loss = float(self.accelerator.reduce(torch.stack(losses).sum(), reduction="mean"))
        norm = gathered_number(self.accelerator.clip_grad_norm_(self.parameters, self.optim.clip))
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise SpectrainError(
                f"loss {loss}, gradient norm {norm} at step {step} ({self._suspects(batches, losses)}): training has "
                "diverged; lower optim.lr, or look at these rows of the prepared data"
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
            "peak_memory": peak_memory(self.accelerator.device),
            **({} if tally is None else {"acceptance": tally.describe(_all(tally.scores))}),
        }  # fmt: skip

    def _gradients(self, batches: Sequence[MicroBatch], step: int) -> tuple[list[Tensor], list[int]]:
        """Add up the gradients of this process's share; its loss of each micro-batch, and the positions that count."""
        processes, own = self.accelerator.num_processes, self.accelerator.process_index
        share, rounds = batches[own::processes], -(-len(batches) // processes)
        counts = self._global_counts(share)
        weights = self._weights(counts)
        losses = []
        for number in range(rounds):
            # What a drafter draws, noise for instance, goes by the micro-batch and not by who computes it.
            torch.manual_seed(stream_seed(self.config.seed, step, number * processes + own))
            # A process without a micro-batch of its own joins in with one that counts nothing.
            batch = self._features(share[number]) if number < len(share) else unsupervised(self._features(batches[0]))
            if number < rounds - 1:
                with self.accelerator.no_sync(self.module):
                    losses.append(self._backward(batch, weights))
            else:
                losses.append(self._backward(batch, weights))
        return losses, counts

    def _suspects(self, batches: Sequence[MicroBatch], losses: list[Tensor]) -> str:
        """The micro-batches whose own loss is no number, for people; all of them where only the gradient is none."""
        finite = gather_object([[math.isfinite(float(loss)) for loss in losses]])
        processes = len(finite)
        bad = [b for i, b in enumerate(batches) if not finite[i % processes][i // processes]]
        return "; ".join(", ".join(map(self._named, batch)) for batch in bad or batches)

    def _named(self, row: int | EncodedRow) -> str:
        """A row for people: its number among the prepared ones, and its chat as far as that is known."""
        if isinstance(row, EncodedRow):
            return f"on-policy row of conversation {row.conversation!r}"
        chat = self.train_rows.conversation(row)
        return f"row {row}" if chat is None else f"row {row} of conversation {chat!r}"

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
        with whole(self.module):
            return self._scores(self.drafter.eval())

    def _scores(self, drafter: TrainableDrafter) -> DepthScores:
        lengths = [self.heldout_rows.length(i) for i in range(len(self.heldout_rows))]
        batches = plan_epoch(lengths, max(self.config.micro_batch_tokens, max(lengths)), 0, 0)
        scores = DepthScores()
        for rows in batches[self.accelerator.process_index :: self.accelerator.num_processes]:
            batch = self.heldout_rows.batch(rows, self.accelerator.device)
            with self.accelerator.autocast():
                scores = scores + score_batch(drafter, batch, self.head, self.config.validation_depths)
        drafter.train()
        return _all(scores)


def _all(scores: DepthScores) -> DepthScores:
    """Of all processes together."""
    return sum(gather_object([scores]), DepthScores())
