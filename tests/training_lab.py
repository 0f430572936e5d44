"""A tiny target with the features of a few rows, and trainers on them: for tests and for the processes they start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny import build_rows, build_store, build_target

from spectrain.drafters.base import TrainableDrafter
from spectrain.drafters.eagle import EagleConfig, EagleDrafter
from spectrain.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from spectrain.drafters.objective import LossConfig
from spectrain.training import OptimConfig, Trainer, TrainingConfig

TIMES = {"seconds", "tokens_per_second", "peak_memory"}
LONGEST = 18  # tokens of a row; none is of half that or less, so a batch of LONGEST tokens holds one row
TAPS = (2, 4, 5)


class Lab:
    """Training and held-out rows in ``folder``, made or, if another process has made them, read."""

    def __init__(self, folder: Path, rows: int = 8) -> None:
        self.folder = folder
        self.target = build_target("llama", dtype=torch.float32)
        self.rows = build_rows(self.target, rows, answer=(10, 12))
        assert all(LONGEST / 2 < len(row.ids) <= LONGEST for row in self.rows)
        self.store = self.store_of("train", self.rows)
        self.heldout = self.store_of("heldout", build_rows(self.target, 4, seed=1))

    def store_of(self, name: str, rows: list[Any]) -> Any:
        return build_store(self.folder / name, self.target, rows, TAPS)

    def drafter(self, depths: int = 2, noise: float | None = None) -> TrainableDrafter:
        """EAGLE-3; with ``noise`` an EAGLE drafter that disturbs its features in training."""
        torch.manual_seed(0)
        counts_V = torch.ones(24, dtype=torch.long)
        if noise is not None:
            return EagleDrafter.build(EagleConfig(noise=noise), self.target, counts_V)
        return Eagle3Drafter.build(Eagle3Config(depths=depths, draft_vocab_size=16), self.target, counts_V)

    def trainer(self, folder: Path, *, store: Any = None, save: Any = None, depths: int = 2,
                noise: float | None = None, optim: dict[str, Any] | None = None,
                settings: dict[str, Any] | None = None, **config: Any) -> Trainer:  # fmt: skip
        drafter = self.drafter(depths, noise)
        # The last step's weights, unless a test is about the choice.
        given = {"micro_batch_tokens": LONGEST, "validate_every": 5, "checkpoint_every": 6, "select": "last", **config}

        def save_bundle(path: Path) -> None:
            path.mkdir()
            save_file({k: v.contiguous() for k, v in drafter.state_dict().items()}, path / "model.safetensors")

        return Trainer(
            drafter, self.target.head, store or self.store, self.heldout, loss=LossConfig(),
            optim=OptimConfig(**{"lr": 1e-3, "clip": 1e9, **(optim or {})}), config=TrainingConfig(**given),
            folder=folder, save_bundle=save or save_bundle, settings=settings or {},
        )  # fmt: skip


class Killed(BaseException):
    """What no code handles."""


def stop_at(trainer: Trainer, stop: int) -> Trainer:
    step = trainer._step

    def dies(batches: Any, number: int) -> Any:
        if number == stop:
            raise Killed
        return step(batches, number)

    trainer._step = dies  # type: ignore[method-assign]
    return trainer


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name not in TIMES} for line in lines]


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.drafter.state_dict().items()}


def assert_bit_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def first_gradients(trainer: Trainer) -> tuple[torch.Tensor, dict[str, Any]]:
    """All gradients of the first optimizer step in one vector, and the step's metrics."""
    kept: list[torch.Tensor] = []
    step = trainer.optimizer.step

    def keeps() -> None:
        assert all(p.grad.dtype == p.dtype == torch.float32 for p in trainer.parameters)
        kept.append(torch.cat([p.grad.flatten() for p in trainer.parameters]).double())
        step()

    trainer.optimizer.step = keeps
    values = trainer._step(next(trainer.curriculum.steps(0)).batches, 1)
    return kept[0], values
