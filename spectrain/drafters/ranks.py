"""How often a drafter's likeliest tokens are the target's, for static trees of its own.

``ranks.json`` of a bundle: ``positions``, the supervised positions that were measured by depth, and ``by_sampler``: a
sampler's name → ``accuracy[d][r]`` (see tree_search.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from spectrain.drafters.base import TrainableDrafter
from spectrain.drafters.tree_search import Accuracy, best_tree, rank_accuracies
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler
from spectrain.heads import OutputHead
from spectrain.shapes import StaticTree
from spectrain.target import FeatureBatch

RANKS_FILE = "ranks.json"
GREEDY = Sampler().describe()


def measure_ranks(drafter: TrainableDrafter, batches: Iterable[FeatureBatch], head: OutputHead,
                  samplers: Sequence[Sampler], ranks: int = 10, *,
                  depths: int | None = None) -> dict[str, Any]:  # fmt: skip
    """The content of ``ranks.json``: accuracies at T=0 and under each of ``samplers``, from one pass over ``batches``.

    ``depths`` overrides the drafter's configured number. SpectrainError when there are no batches.
    """
    asked = {sampler.describe(): sampler for sampler in (Sampler(), *samplers)}
    training = drafter.training
    drafter.eval()
    try:
        found, positions = rank_accuracies(drafter, batches, head, list(asked.values()), ranks=ranks, depths=depths)
    finally:
        drafter.train(training)
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
        found = json.loads(path.read_text(encoding="utf-8"))
        for accuracy in found["by_sampler"].values():
            best_tree(accuracy, 1)  # checks every number
        found["by_sampler"][GREEDY]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise SpectrainError(
            f"{path}: found {error!r}, expected what spectrain tree writes; delete it and measure again"
        ) from error
    except SpectrainError as error:
        raise SpectrainError(f"{path}: {error}") from error
    return found


def accuracy_at(ranks: dict[str, Any], sampler: Sampler) -> Accuracy:
    """The accuracies under this sampler where they were measured, else those at T=0."""
    by_sampler = ranks["by_sampler"]
    return by_sampler.get(sampler.describe(), by_sampler[GREEDY])


def measured_tree(ranks: dict[str, Any], sampler: Sampler, nodes: int) -> StaticTree:
    """The best tree of at most ``nodes`` nodes for a sampler."""
    return best_tree(accuracy_at(ranks, sampler), nodes)
