"""Prompt lookup: propose what followed the latest earlier occurrence of the longest matching suffix.

Costs no training and no device time; the baseline every trained drafter has to beat. (Prompt lookup decoding, Saxena
2023; the same idea as LLMA, 2304.04487.) Its proposals are point masses. A tree also holds what followed shorter
suffixes elsewhere, the longest suffix first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field, model_validator
from torch import Tensor

from spectrain.drafters.base import Committed, Drafter, DrafterConfig, Proposal
from spectrain.drafters.trie import point_masses
from spectrain.exact.sampler import Sampler
from spectrain.shapes import Shape


class NgramConfig(DrafterConfig):
    """Settings of the prompt-lookup drafter."""

    type: Literal["ngram"] = "ngram"
    longest: int = Field(8, ge=1, description="longest suffix to look for, in tokens")
    shortest: int = Field(1, ge=1, description="shortest suffix worth a proposal, in tokens")

    @model_validator(mode="after")
    def _has_a_length(self) -> NgramConfig:
        if self.shortest > self.longest:
            raise ValueError(f"the shortest suffix {self.shortest} is longer than the longest, {self.longest}")
        return self

    @property
    def trainable(self) -> bool:
        return False


@dataclass
class NgramState:
    """A request's committed tokens, and for every n-gram that has a follower the index of its latest one."""

    ids: list[int] = field(default_factory=list)
    follower: dict[tuple[int, ...], int] = field(default_factory=dict)


class NgramDrafter(Drafter):
    """Looks the longest suffix up in the request's own tokens."""

    trees = True

    def __init__(self, config: NgramConfig) -> None:
        self.config: NgramConfig = config

    def start(self, first: Sequence[int]) -> list[NgramState]:
        states = [NgramState() for _ in first]
        for state, token in zip(states, first, strict=True):
            self._read(state, [token])
        return states

    def observe(self, state: list[NgramState], committed: Committed) -> None:
        for request, tokens in zip(state, committed.tokens, strict=True):
            self._read(request, tokens)

    def propose(
        self, state: list[NgramState], sampler: Sampler, shape: Shape, limits: Sequence[int], uniforms_BN: Tensor
    ) -> Proposal:
        found = [
            list(self._continuations(request, min(shape.depth, limit)))
            for request, limit in zip(state, limits, strict=True)
        ]
        return point_masses(found, shape, uniforms_BN.device)

    def select(self, state: list[NgramState], rows: Sequence[int]) -> None:
        state[:] = [state[row] for row in rows]

    def _read(self, state: NgramState, tokens: Sequence[int]) -> None:
        for token in tokens:
            here = len(state.ids)
            for n in range(self.config.shortest, min(self.config.longest, here) + 1):
                state.follower[tuple(state.ids[here - n :])] = here
            state.ids.append(token)

    def _continuations(self, state: NgramState, length: int) -> Iterator[list[int]]:
        """What followed the latest match of every suffix, the longest first; where it runs into the end it goes on
        through the proposal itself, so a repetition keeps repeating."""
        text = state.ids
        for source in self._lookup(state):
            tokens: list[int] = []
            for at in range(source, source + length):
                tokens.append(text[at] if at < len(text) else tokens[at - len(text)])
            yield tokens

    def _lookup(self, state: NgramState) -> Iterator[int]:
        for n in range(min(self.config.longest, len(state.ids)), self.config.shortest - 1, -1):
            found = state.follower.get(tuple(state.ids[len(state.ids) - n :]))
            if found is not None:
                yield found
