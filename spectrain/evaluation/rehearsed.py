"""A drafter that knows the answers: it drafts chains and trees in which every way a round can go comes up, for any
target and without training.

Shapes: B batch, W nodes of a level, C candidates, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spectrain.drafters.base import Committed, DrafterConfig
from spectrain.drafters.growth import GrowingDrafter
from spectrain.target import Target

CANDIDATES = 8  # tokens that stand out in each law; wider trees take what comes after them
# How often the right token is the most likely one, the second or the third; else it is not among the candidates.
RANKS = {0: 0.7, 1: 0.15, 2: 0.05}
FLOOR = -30.0


@dataclass
class Line:
    """A request: its tokens so far, the known answer and which one that is, and how much of it is committed."""

    ids: list[int]
    answer: list[int] = field(default_factory=list)
    number: int = -1
    read: int = 0


@dataclass
class RehearsedState:
    """The requests, and the paths of the nodes drafted last: of each request as many."""

    lines: list[Line]
    paths: list[list[tuple[int, ...]]] = field(default_factory=list)


class RehearsedDrafter(GrowingDrafter):
    """Right at a rank drawn for each position, from the same seed always the same. A request whose tokens have left
    the known answer gets wrong drafts only, and so decodes on as if nothing were drafted."""

    def __init__(self, target: Target, seed: int = 0) -> None:
        self.config = DrafterConfig(type="rehearsed")
        self.seed, self._device = seed, target.device
        self._size, self._words = target.vocab_size, target.tokenizer_size
        self._answers: dict[tuple[int, ...], tuple[int, list[int]]] = {}

    def learn(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """What the target answers to a prompt."""
        self._answers[tuple(prompt)] = len(self._answers), list(answer)

    def start(self, first: Sequence[int]) -> RehearsedState:
        return RehearsedState([Line([token]) for token in first])

    def observe(self, state: RehearsedState, committed: Committed) -> None:
        for line, tokens in zip(state.lines, committed.tokens, strict=True):
            if line.number < 0:  # the first time: the prompt and one token more
                prompt = (*line.ids, *tokens[:-1])
                line.ids, (line.number, line.answer) = list(prompt), self._answers.get(prompt, (0, []))
                tokens = tokens[-1:]
            line.ids += tokens
            line.read += len(tokens)

    def root(self, state: RehearsedState) -> Tensor:
        state.paths = [[()] for _ in state.lines]
        return self._logits(state)

    def extend(self, state: RehearsedState, tokens_BW: Tensor, parents_BW: Tensor) -> Tensor:
        drafted = zip(state.paths, tokens_BW.tolist(), parents_BW.tolist(), strict=True)
        state.paths = [
            [(*paths[parent], token) for token, parent in zip(tokens, parents, strict=True)]
            for paths, tokens, parents in drafted
        ]
        return self._logits(state)

    def select(self, state: RehearsedState, rows: Sequence[int]) -> None:
        state.lines = [state.lines[row] for row in rows]

    def vocabulary(self) -> tuple[int, Tensor | None]:
        return self._size, None

    def _logits(self, state: RehearsedState) -> Tensor:
        candidates = [
            [self._candidates(line, path) for path in paths]
            for line, paths in zip(state.lines, state.paths, strict=True)
        ]
        token_BWC = torch.tensor(candidates, device=self._device)
        score_C = torch.arange(token_BWC.shape[-1], 0.0, -1.0, device=self._device)
        logits_BWV = torch.full((*token_BWC.shape[:2], self._size), FLOOR, device=self._device)
        return logits_BWV.scatter_(-1, token_BWC, score_C.expand(token_BWC.shape))

    def _candidates(self, line: Line, path: tuple[int, ...]) -> list[int]:
        """Distinct tokens, the most likely first."""
        dice = random.Random(f"{self.seed}/{line.number}/{line.read}/{path}")
        right = self._right(line, path)
        count = min(CANDIDATES, self._words - 1)
        tokens = [token for token in dice.sample(range(self._words), count + 1) if token != right][:count]
        rank = dice.choices([*RANKS, count], [*RANKS.values(), 1 - sum(RANKS.values())])[0]
        if right is not None and rank < count:
            tokens[rank] = right
        return tokens

    def _right(self, line: Line, path: tuple[int, ...]) -> int | None:
        so_far = [*line.ids[len(line.ids) - line.read :], *path]
        following = line.answer[len(so_far) : len(so_far) + 1]
        return following[0] if following and line.answer[: len(so_far)] == so_far else None
