"""How often a drafter's likeliest tokens are the target's, for static trees of its own.

``ranks.json`` of a bundle: ``positions``, the supervised positions that were measured by depth, and ``by_sampler``: a
sampler's name → ``accuracy[d][r]`` (see tree_search.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from spectrain.drafters.base import TrainableDrafter
from spectrain.drafters.scoring import evaluating
from spectrain.drafters.tree_search import Accuracy, best_tree, rank_accuracies
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler
from spectrain.heads import OutputHead
from spectrain.shapes import StaticTree
from spectrain.target import FeatureBatch

RANKS_FILE = "ranks.json"
GREEDY = Sampler().describe()


Share = Annotated[float, Field(ge=0, le=1)]


class _Ranks(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    positions: list[int]
    by_sampler: dict[str, list[list[Share]]]

    @field_validator("by_sampler")
    @classmethod
    def _has_greedy(cls, by_sampler: dict[str, Accuracy]) -> dict[str, Accuracy]:
        if GREEDY not in by_sampler:
            raise ValueError(f"found no {GREEDY!r}")
        return by_sampler


def measure_ranks(drafter: TrainableDrafter, batches: Iterable[FeatureBatch], head: OutputHead,
                  samplers: Sequence[Sampler], ranks: int = 10, *,
                  depths: int | None = None) -> dict[str, Any]:  # fmt: skip
    """The content of ``ranks.json``: accuracies at T=0 and under each of ``samplers``, from one pass over ``batches``.

    ``depths`` overrides the drafter's configured number. SpectrainError when there are no batches.
    """
    asked = {sampler.describe(): sampler for sampler in (Sampler(), *samplers)}
    with evaluating(drafter):
        found, positions = rank_accuracies(drafter, batches, head, list(asked.values()), ranks=ranks, depths=depths)
    return {"positions": positions, "by_sampler": dict(zip(asked, found, strict=True))}


def read_ranks(folder: Path | str) -> dict[str, Any]:
    """A bundle's ``ranks.json``; SpectrainError where there is none, or another thing."""
    path = Path(folder) / RANKS_FILE
    if not path.is_file():
        raise SpectrainError(
            f"{folder} has no {RANKS_FILE}, which a measured tree is made from; write it with: spectrain tree {folder} "
            "--traffic CHATS, where CHATS have answers (the run's data/train.jsonl)"
        )
    try:
        found = _Ranks.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"{part}: " for part in first["loc"])
        raise SpectrainError(
            f"{path}: {place}{first['msg']}, expected what spectrain tree writes; delete it and measure again"
        ) from error
    return found.model_dump()


def accuracy_at(ranks: dict[str, Any], sampler: Sampler) -> Accuracy:
    """The accuracies under this sampler where they were measured, else those at T=0."""
    by_sampler = ranks["by_sampler"]
    return by_sampler.get(sampler.describe(), by_sampler[GREEDY])


def measured_tree(ranks: dict[str, Any], sampler: Sampler, nodes: int) -> StaticTree:
    """The best tree of at most ``nodes`` nodes for a sampler."""
    return best_tree(accuracy_at(ranks, sampler), nodes)
