"""Plain decoding, one token a forward: the reference that every other decoder must equal in law, and beat in time."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from spectrain.decoding.requests import check_request, uniform_stream
from spectrain.decoding.trace import Clock, Generation, Round
from spectrain.exact.sampler import Sampler, draw
from spectrain.target import Target


@torch.inference_mode()
def generate_plain(
    target: Target,
    prompt_ids: Sequence[int],
    *,
    sampler: Sampler,
    max_new_tokens: int,
    eos_ids: Collection[int] | None = None,
    seed: int = 0,
) -> Generation:
    """Decode at most ``max_new_tokens`` tokens after ``prompt_ids``; stops with (and keeps) the first EOS.

    ``eos_ids`` defaults to the target's. The trace has a round with no proposal for every token after the first.
    """
    check_request(target, prompt_ids, max_new_tokens)
    eos = set(target.eos_ids if eos_ids is None else eos_ids)
    result, clock, uniforms = Generation(), Clock(target.device), uniform_stream(seed)
    cache, inputs = target.new_cache(), torch.tensor([list(prompt_ids)], device=target.device)
    while len(result.tokens) < max_new_tokens:
        clock.lap()
        logits_V = target.logits(target.forward(inputs, cache=cache).hidden_BTH[0, -1])
        token = draw(sampler.probabilities(logits_V), uniforms(1)[0].to(logits_V.device))
        inputs = token.view(1, 1)
        result.tokens.append(int(token))
        seconds = clock.lap()
        if len(result.tokens) == 1:
            result.prefill_s = seconds
        else:
            result.verify_s += seconds
            result.rounds.append(Round(proposed=0, accepted=0, committed=1))
        if result.tokens[-1] in eos:
            result.finished = "eos"
            break
    result.total_s = clock.total()
    return result
