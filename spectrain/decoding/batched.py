"""Plain decoding of many requests at once, for rewriting traffic: left-padded, finished requests leave the batch.

Shapes: B requests still running, T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from spectrain.cache import select_rows
from spectrain.decoding.requests import check_request, uniform_stream
from spectrain.decoding.trace import Generation
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler, draw
from spectrain.target import Target


@torch.inference_mode()
def generate_batch(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    sampler: Sampler,
    max_new_tokens: int,
    seeds: Sequence[int],
    eos_ids: Collection[int] | None = None,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> list[Generation]:
    """Decode every prompt, in order. A request has its own seeded stream, whoever shares the batch.

    ``on_tokens`` hears of every step's new tokens. Only ``tokens`` and ``finished`` of the results are filled.
    """
    if len(seeds) != len(prompts):
        raise SpectrainError(f"{len(prompts)} prompts and {len(seeds)} seeds; expected one seed for each prompt")
    for prompt in prompts:
        check_request(target, prompt, max_new_tokens)
    results = [Generation() for _ in prompts]
    if max_new_tokens == 0 or not prompts:
        return results
    eos = torch.tensor(sorted(target.eos_ids if eos_ids is None else eos_ids), device=target.device)
    streams = [uniform_stream(seed) for seed in seeds]
    running = list(range(len(prompts)))
    inputs_BT, mask_BT = _left_padded(prompts, target.device)
    positions_BT = (mask_BT.cumsum(-1) - 1).clamp(min=0)
    cache = target.new_cache()
    for step in range(max_new_tokens):
        hidden_BTH = target.forward(
            inputs_BT, cache=cache, attention_mask=mask_BT, positions_BT=positions_BT
        ).hidden_BTH
        if step == 0:
            _check_finite(hidden_BTH[:, -1], target)
        p_BV = sampler.probabilities(target.logits(hidden_BTH[:, -1]))
        uniforms_B = torch.stack([streams[i](1)[0] for i in running]).to(target.device)
        tokens_B = draw(p_BV, uniforms_B)
        for i, token in zip(running, tokens_B.tolist(), strict=True):
            results[i].tokens.append(token)
        on_tokens(len(running))
        ended_B = torch.isin(tokens_B, eos)
        if bool(ended_B.any()):
            for row in ended_B.nonzero()[:, 0].tolist():
                results[running[row]].finished = "eos"
            kept = (~ended_B).nonzero()[:, 0]
            if not len(kept):
                break
            running = [running[row] for row in kept.tolist()]
            tokens_B, mask_BT, positions_BT = tokens_B[kept], mask_BT[kept], positions_BT[kept]
            select_rows(cache, kept)
        inputs_BT = tokens_B[:, None]
        positions_BT = positions_BT[:, -1:] + 1
        mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(running), 1)], dim=1)
    return results


def _check_finite(hidden_BH: Tensor, target: Target) -> None:
    """Padding attends to nothing; where that makes NaN (0/0), every shorter prompt would decode to id 0."""
    if not bool(hidden_BH.isfinite().all()):
        raise SpectrainError(
            f"the states after the prompts of a padded batch are not finite with {target.dtype} and "
            f"{target.config._attn_implementation!r} attention; load the target with sdpa attention or in float32"
        )


def _left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and mask [B, T], prompts ending together."""
    width = max(len(prompt) for prompt in prompts)
    ids_BT = torch.zeros(len(prompts), width, dtype=torch.long)
    mask_BT = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids_BT[row, width - len(prompt) :] = torch.tensor(list(prompt))
        mask_BT[row, width - len(prompt) :] = 1
    return ids_BT.to(device), mask_BT.to(device)
