"""What every decoder checks and draws for one request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from spectrain.errors import SpectrainError
from spectrain.target import Target


def check_request(target: Target, prompt_ids: Sequence[int], max_new_tokens: int) -> None:
    """Refuse an empty prompt, ids that do not exist, and a request longer than the target's context."""
    if max_new_tokens < 0:
        raise SpectrainError(f"max_new_tokens is {max_new_tokens}; expected 0 or more")
    if len(prompt_ids) == 0:
        raise SpectrainError("the prompt has no tokens; a causal model needs at least one (BOS, for instance)")
    foreign = next((i for i in prompt_ids if not 0 <= i < target.tokenizer_size), None)
    if foreign is not None:
        raise SpectrainError(
            f"prompt id {foreign} does not exist; the tokenizer has ids 0 to {target.tokenizer_size - 1}"
        )
    limit = getattr(target.config, "max_position_embeddings", None)
    if limit is not None and len(prompt_ids) + max_new_tokens > limit:
        raise SpectrainError(
            f"a prompt of {len(prompt_ids)} tokens and {max_new_tokens} new ones exceed the target's context of "
            f"{limit} tokens; shorten the prompt or lower max_new_tokens"
        )


def uniform_stream(seed: int) -> Callable[[int], Tensor]:
    """A request's own stream of uniforms in [0, 1): float64 on the CPU, so that it is the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return lambda count: torch.rand(count, generator=generator, dtype=torch.float64)
