"""What training a bundle took, from the run that it lies in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spectrain.checkpoints import PROGRESS_FILE, Metrics, read_progress
from spectrain.errors import SpectrainError
from spectrain.manifest import MANIFEST_FILE, Manifest, read_manifest


def training_cost(bundle: Path, manifest: Manifest) -> dict[str, Any] | None:
    """Wall seconds and answer tokens up to the checkpoint that the bundle is; None where no record of it lies near.

    A bundle is in its run's folder, or in a checkpoint. A run beside it that made other files is not its own.
    ``answer_tokens`` counts what the first draft depth was trained on, every epoch anew. ``curve`` holds a point for
    every validation on the way: ``seconds``, ``step``, ``answer_tokens`` so far (None where a step before it left no
    record), ``tokens_per_round`` (T=0, teacher-forced) and ``alpha`` of the first depth (T=1).
    """
    folders = [bundle.parent, *sorted((bundle.parent / "training" / "checkpoints").glob("step-*"))]
    for folder in folders:
        held = folder / "bundle"
        if (
            (folder / PROGRESS_FILE).is_file()
            and (held / MANIFEST_FILE).is_file()
            and read_manifest(held).files == manifest.files
        ):
            return _recorded(read_progress(folder), folder.parent.parent / "metrics.jsonl")
    return None


def _recorded(found: Mapping[str, Any], metrics: Path) -> dict[str, Any]:
    try:
        steps = [row for row in Metrics(metrics).read() if row["step"] <= found["step"]]
        tokens = sum(row["supervised"] for row in steps)
        return {
            "seconds": found["seconds"],
            "answer_tokens": tokens if len(steps) == found["step"] else None,
            "curve": _curve(steps),
        }
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise SpectrainError(
            f"{metrics}: found {error!r}, expected the record of the bundle's training; to leave that out, copy the "
            "bundle to a place of its own"
        ) from error


def _curve(steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    points, tokens = [], 0
    for count, row in enumerate(steps, start=1):
        tokens += row["supervised"]
        validation = row.get("validation")
        if validation is not None:
            points.append(
                {
                    "seconds": row["seconds"],
                    "step": row["step"],
                    "answer_tokens": tokens if count == row["step"] else None,
                    "tokens_per_round": validation["tokens_per_round"],
                    "alpha": validation["alpha"][0],
                }
            )
    return points
