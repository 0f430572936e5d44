"""What a forward takes by itself, by the requests in it and the tokens of each."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from spectrain.evaluation.workbench import Stopwatch
from spectrain.target import Target


@torch.inference_mode()
def verification_seconds(target: Target, cached: Sequence[int], rows: Sequence[int], repeats: int,
                         seed: int) -> list[dict[str, Any]]:  # fmt: skip
    """Seconds of every one of ``repeats`` forwards of ``rows`` tokens a request, head included, of requests with so
    many ``cached`` tokens each: unlike lengths need a mask, and are as wide as the longest. Forwards take turns; the
    text is random tokens, which does not matter to the time."""
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
    return [{"rows": count, "seconds": taken} for count, taken in seconds.items()]


def _ids(target: Target, batch: int, count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(target.tokenizer_size, (batch, count), generator=generator).to(target.device)
