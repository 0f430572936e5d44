"""What forwards take by themselves, by the tokens of each request and those cached behind it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spectrain.evaluation.workbench import Stopwatch
from spectrain.target import Target


class Forwards:
    """Seconds of forwards of ``rows`` tokens a request, of batches whose requests have so many ``cached`` tokens each,
    by context."""

    def __init__(self, target: Target, rows: Sequence[int], cached: Mapping[int, Sequence[int]], seed: int) -> None:
        self._target, self._rows, self._cached, self._seed, self._repeats = target, rows, cached, seed, 0
        self._seconds: dict[tuple[int, int], list[float]] = {}

    def time(self, repeats: int) -> None:
        """As many of each as are missing from ``repeats``."""
        missing, self._repeats = repeats - self._repeats, repeats
        if not missing:
            return
        for context, cached in self._cached.items():
            costs = verification_seconds(self._target, cached, self._rows, missing, self._seed)
            for rows, seconds in costs.items():
                self._seconds.setdefault((context, rows), []).extend(seconds)

    def found(self) -> list[dict[str, Any]]:
        """Rows of ``context``, ``rows`` and ``seconds``, those of every repeat."""
        return [{"context": key[0], "rows": key[1], "seconds": seconds} for key, seconds in self._seconds.items()]


@torch.inference_mode()
def verification_seconds(target: Target, cached: Sequence[int], rows: Sequence[int], repeats: int,
                         seed: int) -> dict[int, list[float]]:  # fmt: skip
    """By ``rows``: seconds of every one of ``repeats`` forwards of so many tokens a request, head included.

    Requests have ``cached`` tokens each: unlike lengths need a mask, and are as wide as the longest. Forwards take
    turns; the text is random tokens, which does not matter to the time.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    cache = target.new_cache()
    target.tap(())
    target.forward(_ids(target, 1, max(cached), generator), cache=cache)
    cache.select([0] * len(cached))
    cache.rollback(cached)
    seconds: dict[int, list[float]] = {count: [] for count in rows}
    for repeat in range(repeats + 1):
        for count in rng.sample(list(seconds), len(seconds)):
            ids_BT = _ids(target, len(cached), count, generator)
            with Stopwatch(target.device) as watch:
                target.logits(target.forward(ids_BT, cache=cache).hidden_BTH)
            cache.rollback(cached)
            if repeat:  # the first is the warm-up
                seconds[count].append(watch.seconds)
    return seconds


def _ids(target: Target, batch: int, count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(target.tokenizer_size, (batch, count), generator=generator).to(target.device)
