"""What every decoder checks and draws for a request, and the settings that its requests share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spectrain.decoding.stopping import Stopping, check_stop
from spectrain.decoding.verification import Verification
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler, forbid
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


@dataclass(frozen=True)
class Options:
    """How answers are sampled, verified and ended; and so the target's law, before anything is drafted."""

    target: Target
    sampler: Sampler
    max_new_tokens: int
    min_new_tokens: int
    eos: Tensor
    stop: tuple[str, ...]
    verification: Verification

    @classmethod
    def of(cls, target: Target, sampler: Sampler, max_new_tokens: int, eos_ids: Collection[int] | None,
           min_new_tokens: int, stop: str | Sequence[str],
           verification: Verification = "token") -> Options:  # fmt: skip
        if not 0 <= min_new_tokens <= max_new_tokens:
            raise SpectrainError(f"min_new_tokens is {min_new_tokens}; expected 0 to max_new_tokens, {max_new_tokens}")
        eos = sorted(set(target.eos_ids if eos_ids is None else eos_ids))
        return cls(target, sampler, max_new_tokens, min_new_tokens, torch.tensor(eos, dtype=torch.long),
                   check_stop(stop), verification)  # fmt: skip

    def stopping(self) -> Stopping:
        tokenizer = self.target.tokenizer if self.stop else None
        return Stopping(self.max_new_tokens, self.eos.tolist(), self.stop, self.min_new_tokens, tokenizer)

    def law(self, logits_BMV: Tensor, number_BM: Tensor) -> Tensor:
        """The target's law of answer tokens number ``number_BM`` (from 0): the sampler's, without EOS among the first
        ``min_new_tokens``."""
        if self.min_new_tokens and len(self.eos):
            early_BM = number_BM.to(logits_BMV.device) < self.min_new_tokens
            logits_BMV = forbid(logits_BMV, self.eos.to(logits_BMV.device), early_BM)
        return self.sampler.probabilities(logits_BMV)
