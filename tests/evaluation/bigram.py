"""A drafter that knows the last token only: quick, wrong often enough, and with laws that a test can look up.

Shapes: V vocabulary.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from spectrain.drafters.base import Proposal
from spectrain.drafters.growth import GrowingDrafter
from spectrain.exact.sampler import Sampler
from spectrain.target import Target


class Bigram(GrowingDrafter):
    """What the target says after each token alone, ``sharpness`` times as sure of it.

    ``chosen``: the likeliest is proposed, none is drawn.
    """

    def __init__(self, target: Target, *, sharpness: float = 1.0, chosen: bool = False) -> None:
        self.columns, self.chosen = target.vocab_size, chosen
        alone_VH = target.forward(torch.arange(self.columns)[:, None]).hidden_BTH[:, 0]
        self.table_VV = sharpness * target.logits(alone_VH).float()

    def start(self, first):
        return SimpleNamespace(last_B=torch.tensor(first))

    def observe(self, state, committed):
        state.last_B = torch.tensor([tokens[-1] for tokens in committed.tokens])

    def select(self, state, rows):
        state.last_B = state.last_B[list(rows)]

    def vocabulary(self):
        return self.columns, None

    def root(self, state):
        return self.table_VV[state.last_B][:, None]

    def extend(self, state, tokens_BW, parents_BW):
        return self.table_VV[tokens_BW]

    def propose(self, state, sampler, shape, limits, uniforms_BN) -> Proposal:
        return super().propose(state, Sampler() if self.chosen else sampler, shape, limits, uniforms_BN)
