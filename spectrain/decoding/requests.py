"""What every decoder checks and draws for a request, and the settings that its requests share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spectrain.attention import context
from spectrain.decoding.history import History
from spectrain.decoding.stopping import Stopping, check_stop
from spectrain.decoding.verification import Verification
from spectrain.errors import SpectrainError
from spectrain.exact.penalties import Penalties
from spectrain.exact.sampler import Sampler, forbid
from spectrain.target import Target


def check_request(target: Target, prompt_ids: Sequence[int], max_new_tokens: int) -> None:
    """Refuse an empty prompt, ids that do not exist, and a request longer than the target's context."""
    if type(max_new_tokens) is not int or max_new_tokens < 0:
        raise SpectrainError(f"max_new_tokens is {max_new_tokens!r}; expected 0 or more")
    if len(prompt_ids) == 0:
        raise SpectrainError("the prompt has no tokens; a causal model needs at least one (BOS, for instance)")
    odd = next((i for i in prompt_ids if type(i) is not int), None)
    if odd is not None:
        raise SpectrainError(f"the prompt holds {odd!r}; expected token ids, whole numbers")
    foreign = next((i for i in prompt_ids if not 0 <= i < target.tokenizer_size), None)
    if foreign is not None:
        raise SpectrainError(
            f"prompt id {foreign} does not exist; the tokenizer has ids 0 to {target.tokenizer_size - 1}"
        )
    limit = context(target.config)
    if limit is not None and len(prompt_ids) + max_new_tokens > limit:
        raise SpectrainError(
            f"a prompt of {len(prompt_ids)} tokens and {max_new_tokens} new ones exceed the target's context of "
            f"{limit} tokens; shorten the prompt or lower max_new_tokens"
        )


def _known(target: Target, eos_ids: Collection[int]) -> list[int]:
    if not isinstance(eos_ids, Collection) or any(type(i) is not int for i in eos_ids):
        raise SpectrainError(f"eos_ids {eos_ids!r}: expected a list of token ids, for instance [2]")
    foreign = next((i for i in eos_ids if not 0 <= i < target.tokenizer_size), None)
    if foreign is not None:
        raise SpectrainError(f"EOS id {foreign} does not exist; the tokenizer has ids 0 to {target.tokenizer_size - 1}")
    return sorted(set(eos_ids))


def stream_seed(*parts: object) -> int:
    """The seed of a request's own stream, from what tells it apart: whatever else is answered, in whatever order."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:7], "big")


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
    penalties: Penalties

    @classmethod
    def of(cls, target: Target, sampler: Sampler, max_new_tokens: int, eos_ids: Collection[int] | None,
           min_new_tokens: int, stop: str | Sequence[str],
           verification: Verification = "token", penalties: Penalties | None = None) -> Options:  # fmt: skip
        if type(min_new_tokens) is not int or not 0 <= min_new_tokens <= max_new_tokens:
            raise SpectrainError(
                f"min_new_tokens is {min_new_tokens!r}; expected 0 to max_new_tokens, {max_new_tokens}"
            )
        if penalties is not None and not isinstance(penalties, Penalties):
            raise SpectrainError(f"penalties {penalties!r}: expected Penalties(repetition=1.1), for instance")
        eos = _known(target, target.eos_ids if eos_ids is None else eos_ids)
        if min_new_tokens and len(eos) == target.tokenizer_size:
            raise SpectrainError("min_new_tokens forbids EOS, and eos_ids names every id; leave one out")
        return cls(target, sampler, max_new_tokens, min_new_tokens, torch.tensor(eos, dtype=torch.long),
                   check_stop(stop), verification, penalties or Penalties())  # fmt: skip

    def stopping(self) -> Stopping:
        tokenizer = self.target.tokenizer if self.stop else None
        return Stopping(self.max_new_tokens, self.eos.tolist(), self.stop, self.min_new_tokens, tokenizer)

    def law(self, logits_BMV: Tensor, number_BM: Tensor, history: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """The target's law of answer tokens number ``number_BM`` (from 0).

        Penalties first, with their ``history`` (prompt [.., V], counts of the answer [.., V]); then no EOS among the
        first ``min_new_tokens``; then the sampler.
        """
        if history is not None:
            logits_BMV = self.penalties.apply(logits_BMV, *history)
        if self.min_new_tokens and len(self.eos):
            early_BM = number_BM.to(logits_BMV.device) < self.min_new_tokens
            logits_BMV = forbid(logits_BMV, self.eos.to(logits_BMV.device), early_BM)
        return self.sampler.probabilities(logits_BMV)

    def history(self, prompts: Sequence[Sequence[int]]) -> History | None:
        """What penalties need to remember; None without any."""
        if self.penalties.none:
            return None
        return History(prompts, self.target.vocab_size, self.target.device)
