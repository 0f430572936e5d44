"""Plain decoding, one token a forward: the reference that every other decoder must equal in law, and beat in time."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from spectrain.decoding.outcome import check_finite
from spectrain.decoding.requests import Options, check_request, uniform_stream
from spectrain.decoding.trace import Clock, Generation, Round
from spectrain.exact.penalties import Penalties
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
    min_new_tokens: int = 0,
    stop: str | Sequence[str] = (),
    penalties: Penalties | None = None,
    seed: int = 0,
) -> Generation:
    """Decode at most ``max_new_tokens`` tokens after ``prompt_ids``; stops with (and keeps) the first EOS, or with the
    token that completes a stop string.

    ``eos_ids`` defaults to the target's. The trace has a round with no proposal for every token after the first.
    """
    check_request(target, prompt_ids, max_new_tokens)
    options = Options.of(target, sampler, max_new_tokens, eos_ids, min_new_tokens, stop, penalties=penalties)
    history = options.history([prompt_ids])
    ending, result, uniforms = options.stopping(), Generation(), uniform_stream(seed)
    cache, inputs = target.new_cache(), torch.tensor([list(prompt_ids)], device=target.device)
    clock = Clock(target.device)
    while not ending.finished:
        logits_V = target.logits(target.forward(inputs, cache=cache).hidden_BTH[0, -1])
        behind = (history.prompt_BV[0], history.answer_BV[0]) if history else None
        p_V = options.law(logits_V, torch.tensor(ending.count), behind)
        token = draw(p_V, uniforms(1)[0].to(p_V.device))
        inputs = token.view(1, 1)
        check_finite(not bool(logits_V.isnan().any() | p_V.isnan().any()), target)
        result.tokens += ending.keep([int(token)])
        if history:
            history.add([[int(token)]])
        seconds = clock.lap()
        result.total_s += seconds
        if len(result.tokens) == 1:
            result.prefill_s = seconds
        else:
            clip = ending.finished if ending.finished == "stop" else None
            result.rounds.append(Round(0, 0, 1, clip, verify_s=seconds, total_s=seconds))
    result.finished, result.cache_bytes = ending.finished, cache.bytes()
    result.text = ending.text if ending.stop else None
    return result
