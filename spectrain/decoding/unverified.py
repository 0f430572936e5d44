"""Text that a drafter writes by itself: every proposal is committed as it is, none is verified.

This is not the target's law, and nothing to serve: it shows where a drafter goes when it is left alone, which is what
on-policy training needs.

Shapes: B requests still running, K draft length.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spectrain.cache import KeyValueCache, right_padded
from spectrain.decoding.requests import check_request, uniform_stream
from spectrain.decoding.stopping import Stopping
from spectrain.drafters.base import Committed, Drafter
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler
from spectrain.shapes import Chain
from spectrain.target import Features, Target


@torch.inference_mode()
def draft_text(target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], *, sampler: Sampler, k: int,
               max_new_tokens: int, seeds: Sequence[int]) -> list[list[int]]:  # fmt: skip
    """What the drafter itself writes after each prompt (of two tokens or more), up to and with EOS or to the budget.

    Every round it proposes ``k`` tokens, all of which are committed; the target reads them only so that the drafter
    gets its features. Each request has its own stream of ``k`` uniforms a round. A request for which the drafter
    proposes nothing more, at the end of its context, ends there.
    """
    for prompt in prompts:
        check_request(target, prompt, max_new_tokens)
        if len(prompt) < 2:
            raise SpectrainError(
                f"a prompt has {len(prompt)} token: a drafter reads tokens along with the target's states before "
                "them, which takes two or more; use a chat template that opens with a token, or prefixes: rounds"
            )
    target.tap(drafter.tap_layers)
    texts: list[list[int]] = [[] for _ in prompts]
    endings = [Stopping(max_new_tokens, target.eos_ids) for _ in prompts]
    streams = [uniform_stream(seed) for seed in seeds]
    running, cache = list(range(len(prompts))), target.new_cache(len(prompts))
    state, shape = drafter.start([prompt[0] for prompt in prompts]), Chain(k)
    read, new = [list(prompt[:-1]) for prompt in prompts], [list(prompt[1:]) for prompt in prompts]
    while running:
        features = _read(target, cache, read)
        drafter.observe(state, Committed(new, right_padded(new, target.device), features))
        pending = [row[-1] for row in new]
        uniforms_BK = torch.stack([streams[i](k) for i in running]).to(target.device)
        limits = [endings[i].left for i in running]
        proposal = drafter.propose(state, sampler, shape, limits, uniforms_BK)
        counts = proposal.counts or [proposal.tokens_BN.shape[1]] * len(running)
        rows, new = [], []
        for row, (i, tokens) in enumerate(zip(running, proposal.tokens_BN.tolist(), strict=True)):
            kept = endings[i].keep(tokens[: counts[row]])
            texts[i] += kept
            if kept and not endings[i].finished:
                rows.append(row)
                new.append(kept)
        if rows and len(rows) < len(running):
            cache.select(rows)
            drafter.select(state, rows)
        running = [running[row] for row in rows]
        read = [[pending[row], *kept[:-1]] for row, kept in zip(rows, new, strict=True)]
    return texts


def _read(target: Target, cache: KeyValueCache, tokens: list[list[int]]) -> Features:
    """The target's states of these tokens, right-padded; ``cache`` then holds them and no padding."""
    before = list(cache.lengths)
    features = target.forward(right_padded(tokens, target.device), cache=cache)
    cache.rollback([length + len(row) for length, row in zip(before, tokens, strict=True)])
    return features
