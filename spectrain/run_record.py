"""What the numbers of a training run depend on: only a run with the same goes on from its checkpoints.

All of it is settings, but for what the rows are: so a run that cannot go on is told before anything is prepared.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from spectrain.checkpoints import check_run
from spectrain.drafters.base import DrafterConfig
from spectrain.drafters.objective import LossConfig
from spectrain.schedule import OptimConfig, TrainingConfig

LATER = ("features", "prompts")  # what ``run_record`` lacks: digests of the rows, known once they are prepared


def run_record(drafter: DrafterConfig, loss: LossConfig, optim: OptimConfig, config: TrainingConfig, processes: int,
               origin: Mapping[str, Any] | None) -> dict[str, Any]:  # fmt: skip
    """The settings of a run, in JSON values; ``origin`` identifies the weights that it starts from, if it has any."""
    ours = {"epochs", "micro_batch_tokens", "precision", "seed", "on_policy"}
    ours |= {"steps"} if config.steps is not None else set()  # runs of before it could be set go on
    return {
        "drafter": drafter.model_dump(mode="json"),
        "loss": loss.model_dump(mode="json"),
        # A setting that came later is told where it is not what every run had before.
        "optim": optim.model_dump(mode="json", exclude={"name"} if optim.name == "adamw" else None),
        "training": config.model_dump(mode="json", include=ours),
        "micro_batches_per_step": config.accumulation * processes,
        **({} if origin is None else {"warm_start": dict(origin)}),
    }


def check_same_run(training: Path, record: Mapping[str, Any], unknown: Collection[str] = LATER) -> None:
    """SpectrainError where the run in the folder ``training`` could not go on with these settings.

    ``unknown`` are parts of a record that nobody can say yet.
    """
    check_run(training / "checkpoints", record, unknown)
