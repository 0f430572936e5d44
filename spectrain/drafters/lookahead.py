"""Lookahead decoding (2402.02057): the target drafts for itself, in the same forwards that verify. Nothing is trained.

Beside every proposal the target evaluates a window of guesses at the positions ahead: W columns of n - 1 tokens, column
i standing i places behind the pending token, which heads column 0. The target's most likely token after each column
completes an n-gram for the pool; then every column drops its head and takes the answer, so it moves one place ahead
(a Jacobi iteration over several rounds at once). What is proposed is the pool's continuations of the pending token.

The guesses a window starts with are the request's own latest tokens, so that nothing is drawn at random. Until its
tokens are answers it gives no n-grams. Its columns go one place ahead a round however many tokens were committed: like
this they stay what the target said, where a jump would have to fill them with guesses again.

Shapes: B batch, P probes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import cycle, islice
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from spectrain.drafters.base import Committed, Drafter, DrafterConfig, Probes, Proposal
from spectrain.drafters.trie import point_masses
from spectrain.exact.sampler import Sampler
from spectrain.shapes import ABSENT, Shape


class LookaheadConfig(DrafterConfig):
    """Settings of lookahead decoding. Beside its proposal a round evaluates ``window * (ngram - 1) - 1`` probes."""

    type: Literal["lookahead"] = "lookahead"
    window: int = Field(5, ge=1, le=64, description="columns of the window: n-grams that a round brings")
    ngram: int = Field(4, ge=3, le=16, description="tokens of an n-gram; proposals are at most one less deep")
    pool: int = Field(5, ge=1, le=64, description="latest n-grams kept for each first token: branches of a tree")
    text: bool = Field(True, description="whether n-grams of the prompt and the answer are pooled too")

    @property
    def trainable(self) -> bool:
        return False


class Pool:
    """N-grams by their first token; of each first token the ``size`` that were met last."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._by_first: dict[int, dict[tuple[int, ...], None]] = {}

    def add(self, ngram: Sequence[int]) -> None:
        kept = self._by_first.setdefault(ngram[0], {})
        rest = tuple(ngram[1:])
        kept.pop(rest, None)  # met again: it becomes the latest
        kept[rest] = None
        if len(kept) > self.size:
            del kept[next(iter(kept))]

    def after(self, token: int) -> list[tuple[int, ...]]:
        """What may follow ``token``, the latest first."""
        return list(reversed(self._by_first.get(token, {})))


@dataclass
class LookaheadState:
    """A request's tokens and pool; the window's columns, how often they were answered, how many were asked last."""

    pool: Pool
    ids: list[int] = field(default_factory=list)
    columns: list[list[int]] = field(default_factory=list)
    answered: int = 0
    asked: int = 0


class LookaheadDrafter(Drafter):
    """Proposes n-grams that the target said in its window, or that stand in the request's own text."""

    trees = True

    def __init__(self, config: LookaheadConfig) -> None:
        self.config: LookaheadConfig = config

    def start(self, first: Sequence[int]) -> list[LookaheadState]:
        states = [LookaheadState(Pool(self.config.pool)) for _ in first]
        for state, token in zip(states, first, strict=True):
            self._read(state, [token])
        return states

    def observe(self, state: list[LookaheadState], committed: Committed) -> None:
        answers: Sequence[Sequence[int]] = committed.answers or [()] * len(state)
        for request, tokens, answered in zip(state, committed.tokens, answers, strict=True):
            self._advance(request, answered[: request.asked])
            self._read(request, tokens)

    def propose(
        self, state: list[LookaheadState], sampler: Sampler, shape: Shape, limits: Sequence[int], uniforms_BN: Tensor
    ) -> Proposal:
        found = []
        for request, limit in zip(state, limits, strict=True):
            paths = request.pool.after(request.ids[-1])
            found.append([path[: min(shape.depth, limit)] for path in paths])
            # Column i reaches i + n - 2 places ahead. Beyond the limit there are no more tokens to be had, and maybe no
            # positions: towards the budget's end the window narrows, and at last it closes.
            request.asked = max(0, min(len(request.columns), limit - self.config.ngram + 3))
        proposal = point_masses(found, shape, uniforms_BN.device)
        return replace(proposal, probes=self._probes(state, proposal.tokens_BN.shape[1], uniforms_BN.device))

    def select(self, state: list[LookaheadState], rows: Sequence[int]) -> None:
        state[:] = [state[row] for row in rows]

    def _read(self, state: LookaheadState, tokens: Sequence[int]) -> None:
        """Take committed tokens: into the pool, and the last at the head of the window, whose place it has reached."""
        n = self.config.ngram
        for token in tokens:
            state.ids.append(token)
            if self.config.text and len(state.ids) >= n:
                state.pool.add(state.ids[-n:])
        if not state.answered:
            state.columns = self._guesses(state.ids)
        state.columns[0][0] = state.ids[-1]

    def _guesses(self, ids: Sequence[int]) -> list[list[int]]:
        ahead = self.config.window + self.config.ngram - 3  # places of the window behind the pending token
        line = [ids[-1], *islice(cycle(ids[-ahead:]), ahead)]
        return [line[i : i + self.config.ngram - 1] for i in range(self.config.window)]

    def _advance(self, state: LookaheadState, answers: Sequence[int]) -> None:
        """Every column that was answered goes one place ahead; the others have left the budget for good."""
        if not answers:
            return
        for column, answer in zip(state.columns, answers, strict=False):
            if state.answered >= self.config.ngram - 2:
                state.pool.add([*column, answer])
            column[:] = [*column[1:], answer]
        state.answered += 1

    def _probes(self, state: Sequence[LookaheadState], behind: int, device: torch.device) -> Probes | None:
        """The windows behind this many proposed nodes, level by level; narrower ones lack columns on the right."""
        width = max(request.asked for request in state)
        if not width:
            return None
        places = _places(width, self.config.ngram - 1)
        tokens, parents = [], []
        for request in state:
            there = [column < request.asked for column, _, _ in places]
            tokens.append([request.columns[i][j] if here else 0 for (i, j, _), here in zip(places, there, strict=True)])
            parents.append([(up + behind if up >= 0 else up) if here else ABSENT
                            for (_, _, up), here in zip(places, there, strict=True)])  # fmt: skip
        tokens_BP, parents_BP = torch.tensor([tokens, parents], dtype=torch.long).to(device)
        return Probes(tokens_BP, parents_BP, answers=width, depth=width + self.config.ngram - 3)


@lru_cache(maxsize=64)
def _places(width: int, levels: int) -> list[tuple[int, int, int]]:
    """Column, level and parent of every probe, the last level last. The heads are a chain, each column hangs from its
    own; the first head is the pending token, which is not probed."""
    number = {(0, 0): -1}
    places = [(i, 0) for i in range(1, width)] + [(i, j) for j in range(1, levels) for i in range(width)]
    number.update({place: probe for probe, place in enumerate(places)})
    return [(i, j, number[i, j - 1] if j else number[i - 1, 0]) for i, j in places]
