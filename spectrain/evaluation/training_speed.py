"""Speed and memory of a training step, beside the plain way to write it: all logits at once.

Both ways run the same drafter on the same features of the target's, each in a process of its own, in turn: so the
machine's moods meet both, and neither's memory hides the other's.

Shapes: B batch, T positions, D columns of the head, V vocabulary.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from spectrain.data.batches import live_batch
from spectrain.data.conversations import EncodedRow
from spectrain.drafters import family_of
from spectrain.drafters.base import DrafterConfig, TrainableDrafter
from spectrain.drafters.objective import DrafterLoss, LossConfig
from spectrain.errors import SpectrainError
from spectrain.evaluation.memory import MEBIBYTE, Gauge
from spectrain.evaluation.wording import interval, number
from spectrain.evaluation.workbench import Stopwatch, machine, shown_name, table
from spectrain.heads import OutputHead, soft_capped
from spectrain.intervals import percentile_interval
from spectrain.losses import depth_weights, supervised
from spectrain.target import FeatureBatch, load_target

CHUNKED, ALL_LOGITS = "in chunks", "all logits at once"
WAYS = (CHUNKED, ALL_LOGITS)


@dataclass(frozen=True)
class Job:
    """A step on ``tokens`` tokens in rows of ``row_tokens``, of which the last ``answer_share`` are an answer's."""

    name: str
    target: str
    dtype: str
    drafter: DrafterConfig
    tokens: int
    row_tokens: int
    answer_share: float
    seed: int


class AllLogits(nn.Module):
    """Forward KL the plain way: the target's law and the drafter's logits of every position, over whole rows, held
    until the backward pass. What ``DrafterLoss`` computes in chunks, up to rounding."""

    def __init__(self, drafter: TrainableDrafter, head: OutputHead) -> None:
        super().__init__()
        self.drafter, self.head = drafter, head

    def forward(self, batch: FeatureBatch, weights: Sequence[float]) -> Tensor:
        output = self.drafter(batch)
        log_p_BTV = self.head.logits(batch.hidden_BTH).log_softmax(-1)
        total = torch.zeros((), device=log_p_BTV.device)
        for depth, weight in zip(output.depths, weights, strict=True):
            z_BTD = soft_capped(depth.hidden_BTH @ depth.head_DH.T, depth.cap)
            p_BTV = log_p_BTV.roll(1 - depth.shift, dims=1).exp()
            p_BTD = p_BTV if output.columns_D is None else p_BTV[..., output.columns_D]
            loss_BT = -(p_BTD * z_BTD.log_softmax(-1)).sum(-1)
            total = total + weight * loss_BT[depth.mask_BT].sum()
        return total


class Step:
    """One way to train, ready to take steps on one batch."""

    def __init__(self, way: str, job: Job) -> None:
        torch.manual_seed(job.seed)
        target = load_target(job.target, dtype=job.dtype)
        counts_V = torch.ones(target.vocab_size, dtype=torch.long)
        self.drafter: TrainableDrafter = family_of(job.drafter).build(job.drafter, target, counts_V).train()
        if self.drafter.auxiliary_shifts():
            raise SpectrainError(
                "a drafter that also trains its target has no plain step to stand beside; leave joint out"
            )
        target.tap(self.drafter.tap_layers)
        self.batch = live_batch(target, _rows(job, target.tokenizer_size))
        self.head, self.device, self.machine = target.head, target.device, machine(target.device, target.dtype)
        self.module: Callable[[FeatureBatch, Sequence[float]], Tensor] = (
            DrafterLoss(self.drafter, self.head, LossConfig(regression=0.0)) if way == CHUNKED
            else AllLogits(self.drafter, self.head)
        )  # fmt: skip
        self.optimizer = torch.optim.AdamW(self.drafter.parameters(), lr=1e-5)
        del target  # but for its head and embedding, as in training on stored features
        self.gauge = Gauge(self.device)
        self.loaded = self.gauge.now()
        self.gauge.reset()

    def take(self) -> dict[str, float]:
        """One optimizer step; its loss, the norm of its gradient, and its seconds."""
        shifts = self.drafter.shifts()
        with Stopwatch(self.device) as watch:
            counts = [int(supervised(self.batch.answer_BT, shift).sum()) for shift in shifts]
            weights = [w / c for w, c in zip(depth_weights(len(shifts), 0.8), counts, strict=True)]
            loss = self.module(self.batch, weights)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(self.drafter.parameters(), 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return {"loss": float(loss.detach()), "gradient_norm": float(norm), "seconds": watch.seconds}


def _rows(job: Job, size: int) -> list[EncodedRow]:
    rng, length = random.Random(job.seed), job.row_tokens
    asked = length - round(job.answer_share * length)
    mask = [0] * asked + [1] * (length - asked)
    return [
        EncodedRow(str(i), "random", [rng.randrange(size) for _ in range(length)], mask)
        for i in range(job.tokens // length)
    ]


_here: Step | None = None  # of this process


def _prepare(way: str, job: Job) -> dict[str, Any]:
    global _here
    _here = Step(way, job)
    first = _here.take()  # also the warm-up
    return {"first": first, "loaded_bytes": _here.loaded, "machine": _here.machine}


def _take() -> dict[str, float]:
    assert _here is not None
    return _here.take()


def _peak() -> int:
    assert _here is not None
    gc.collect()
    return _here.gauge.peak()


def measure(jobs: Sequence[Job], steps: int, *, progress: bool = True) -> dict[str, Any]:
    """Every job both ways, ``steps`` steps each after a warm-up."""
    cases: list[dict[str, Any]] = []
    about: dict[str, Any] = {}
    with tqdm(total=len(jobs) * steps, desc="training steps", unit="pair", disable=not progress) as bar:
        for job in jobs:
            case, about = _case(job, steps, bar)
            cases.append(case)
    return {"benchmark": "training", "machine": about, "rows": cases}


def _case(job: Job, steps: int, bar: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    context = get_context("spawn")
    pools = {way: ProcessPoolExecutor(1, mp_context=context) for way in WAYS}
    try:
        start = {way: pool.submit(_prepare, way, job).result() for way, pool in pools.items()}
        _check_same({way: found["first"] for way, found in start.items()}, job.name)
        taken: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        rng = random.Random(job.seed)
        for _ in range(steps):
            for way in rng.sample(WAYS, len(WAYS)):
                taken[way].append(pools[way].submit(_take).result())
            bar.update()
        peaks = {way: pool.submit(_peak).result() for way, pool in pools.items()}
    finally:
        for pool in pools.values():
            pool.shutdown()
    about = start[CHUNKED].pop("machine")
    ways = {way: {"peak_bytes": peaks[way], "loaded_bytes": start[way]["loaded_bytes"], "first": start[way]["first"],
                  "seconds": [step["seconds"] for step in taken[way]]} for way in WAYS}  # fmt: skip
    settings = {**asdict(job), "target": shown_name(job.target), "drafter": job.drafter.model_dump(mode="json")}
    return {"settings": settings, "ways": ways, **_ratios(ways, job.tokens, job.seed)}, about


def _check_same(first: dict[str, dict[str, float]], name: str) -> None:
    """A comparison of speeds says something only where both compute the same."""
    for value in ("loss", "gradient_norm"):
        one, other = (first[way][value] for way in WAYS)
        if not abs(one - other) <= 1e-3 * abs(other):
            raise SpectrainError(f"{name}: {value} is {one} {WAYS[0]} and {other} with {WAYS[1]}; they should agree")


def _ratios(ways: dict[str, Any], tokens: int, seed: int) -> dict[str, Any]:
    """Speed of the first way over the second's, with an interval over pairs of steps; tokens per second of each."""
    pairs_S2 = np.array([ways[way]["seconds"] for way in WAYS]).T
    draws_RS = np.random.default_rng(seed).integers(len(pairs_S2), size=(2000, len(pairs_S2)))
    sums_R2 = pairs_S2[draws_RS].sum(1)
    mean_2 = pairs_S2.mean(0)
    return {
        "speed_ratio": asdict(percentile_interval(mean_2[1] / mean_2[0], sums_R2[:, 1] / sums_R2[:, 0], 0.95)),
        "peak_ratio": ways[CHUNKED]["peak_bytes"] / ways[ALL_LOGITS]["peak_bytes"],
        "tokens_per_second": dict(zip(WAYS, (tokens / mean_2).tolist(), strict=True)),
    }


def render(document: dict[str, Any]) -> str:
    """The document as a Markdown table."""
    speeds, peaks = ([f"{way}, {unit}" for way in WAYS] for unit in ("tokens/s", "peak MiB"))
    heads = ("step", *speeds, "times as fast (95%)", *peaks, "of its memory")
    return table(heads, [[
        row["settings"]["name"], *(number(row["tokens_per_second"][way], 0) for way in WAYS),
        interval(row["speed_ratio"]), *(number(row["ways"][way]["peak_bytes"] / MEBIBYTE, 0) for way in WAYS),
        number(row["peak_ratio"]),
    ] for row in document["rows"]])  # fmt: skip
