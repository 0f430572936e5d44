"""A target that is a table, drafters over another table, and a goodness-of-fit test for whole sequences.

Shapes: B batch, T positions, M rows of a forward, W nodes of a level, N nodes, C columns of the cache, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch

from spectrain.cache import KeyValueCache
from spectrain.decoding import generate_batch
from spectrain.drafters.base import Proposal
from spectrain.drafters.growth import GrowingDrafter
from spectrain.exact.law import Conditional, Outcomes, normalised
from spectrain.exact.sampler import Sampler
from spectrain.shapes import Layout
from spectrain.target import Features

V = 4
PROMPT = [0, 1, 0]
REJECT, PASS = 1e-8, 1e-4  # p-values: the right law must reach the second, a fault must stay below the first


# --- the test -------------------------------------------------------------------------------------------------


def pooled(law, runs):
    """Cells of expected count 5 or more, the rest as one, and the cell of each outcome."""
    common = [x for x, p in law.items() if p * runs >= 5]
    rare = [x for x, p in law.items() if 0 < p * runs < 5]
    cells = [[x] for x in common] + ([rare] if rare else [])
    return {x: i for i, cell in enumerate(cells) for x in cell}, [float(sum(law[x] for x in cell)) for cell in cells]


def p_value(found: Sequence[Any], law: Mapping[Any, Any]) -> float:
    """Pearson's chi-square test that these outcomes were drawn from this law."""
    runs, observed = len(found), Counter(found)
    cell_of, shares = pooled(law, runs)
    if any(x not in cell_of for x in observed):
        return 0.0  # an outcome that has no probability at all
    if len(shares) == 1:
        return 1.0
    counts = [0] * len(shares)
    for x, count in observed.items():
        counts[cell_of[x]] += count
    statistic = sum((n - runs * p) ** 2 / (runs * p) for n, p in zip(counts, shares, strict=True))
    return chi_square_tail(statistic, len(shares) - 1)


def chi_square_tail(statistic: float, freedom: int) -> float:
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def certainty(law, other, runs: int) -> float:
    """How many of its standard deviations the statistic expected under ``other`` lies beyond rejection at REJECT.

    Above 4, the test misses such a law about once in 30,000 samples. Outcomes that cannot be reject at once.
    """
    cell_of, shares = pooled(law, runs)
    if sum(p for x, p in other.items() if not law.get(x)) * runs > 30:
        return float("inf")
    theirs = [0.0] * len(shares)
    for x, p in other.items():
        if x in cell_of:
            theirs[cell_of[x]] += float(p)
    shift = runs * sum((b - p) ** 2 / p for b, p in zip(theirs, shares, strict=True))
    freedom = len(shares) - 1
    critical = next(x for x in itertools.count(freedom) if chi_square_tail(x, freedom) < REJECT)
    return (freedom + shift - critical) / (2 * freedom + 4 * shift) ** 0.5


# --- a target that is a table -----------------------------------------------------------------------------------


class TableTarget:
    """The next token's logits depend on the last two tokens that a row sees: it reads them back from the real cache,
    through the layout of the round."""

    name, tokenizer, tokenizer_size, vocab_size, eos_ids = "table", None, V, V, ()
    device, dtype = torch.device("cpu"), torch.float64
    config = SimpleNamespace(_attn_implementation="table")

    def __init__(self, seed: int, sharpness: float = 1.3) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = sharpness * torch.randn(V, V, V, generator=generator, dtype=torch.float64)

    def tap(self, taps): ...

    def new_cache(self, batch=1):
        return KeyValueCache(batch)

    def seen(self, ids_BT, cache, layout):
        """Ids [B, C] of the cache after these, and its columns [B, M, C] in the order in which each row sees them: 1
        and on for those on its own path, itself the last; 0 for the others."""
        layout = layout or Layout.row(ids_BT.shape[1], ids_BT.device)
        lengths_B = torch.tensor(cache.lengths) - layout.earlier
        cache.prepare(ids_BT.shape[1], ids_BT.device)
        kept_BC = cache.update(*[ids_BT[:, None, :, None].double()] * 2, 0)[0][:, 0, :, 0].long()
        cache.advance(ids_BT.shape[1])
        sees_BMC = layout.seen(lengths_B, kept_BC.shape[1])
        return kept_BC, torch.where(sees_BMC, torch.arange(1, kept_BC.shape[1] + 1), 0)

    def forward(self, ids_BT, *, cache, layout=None):
        kept_BC, seen_BMC = self.seen(ids_BT, cache, layout)
        at_BM2 = torch.nn.functional.pad(seen_BMC, (1, 0)).topk(2, dim=-1).values
        token_BC = torch.nn.functional.pad(kept_BC, (1, 0))  # before the first token stands a 0
        last, before = (token_BC.gather(1, at_BM2[..., i]) for i in range(2))
        hidden = self.table[before, last]
        return Features(hidden, hidden[..., :0])

    def logits(self, hidden):
        return hidden

    def law(self, sampler: Sampler, forbidden: Callable[[int], Sequence[int]] = lambda _: ()) -> Conditional:
        """The exact law of the next token after a prefix of the answer, for the enumerations."""

        @lru_cache
        def at(before, last, forbidden):
            logits = self.table[before, last].clone()
            logits[list(forbidden)] = -torch.inf
            return normalised(map(Fraction, sampler.probabilities(logits).tolist()))

        return lambda prefix: at(*[*PROMPT, *prefix][-2:], tuple(forbidden(len(prefix))))


class TableDrafter(GrowingDrafter):
    """Draws from its own table, through the request's sampler where it draws."""

    columns = V

    def __init__(self, seed: int = 8, ids: Sequence[int] | None = None) -> None:
        self.model = TableTarget(seed, sharpness=2.0)
        self.ids_D = None if ids is None else torch.tensor(ids)

    def start(self, first):
        last = torch.tensor(first)
        return SimpleNamespace(behind_B2=torch.stack([torch.zeros_like(last), last], 1))

    def observe(self, state, committed):
        both = torch.cat([state.behind_B2, committed.tokens_BT], 1)
        at_B1 = torch.tensor(committed.counts)[:, None]
        state.behind_B2 = both.gather(1, at_B1 + torch.arange(2))

    def select(self, state, rows):
        state.behind_B2 = state.behind_B2[list(rows)]

    def vocabulary(self):
        return V, self.ids_D

    def root(self, state):
        state.level_BW = state.behind_B2[:, 1:]
        return self.logits(state.behind_B2[:, :1], state.level_BW)

    def extend(self, state, tokens_BW, parents_BW):
        above_BW, state.level_BW = state.level_BW.gather(1, parents_BW), tokens_BW
        return self.logits(above_BW, tokens_BW)

    def logits(self, before, last):
        logits = self.model.table[before, last]
        return logits if self.ids_D is None else logits[..., self.ids_D]

    def laws(self, state, proposal: Proposal, sampler: Sampler) -> torch.Tensor:
        """The law of what follows the pending token and every node, [B, N + 1, V]."""
        before, last = state.behind_B2.unbind(1)
        parents = range(-1, proposal.tokens_BN.shape[1] - 1)
        tokens_BM = torch.cat([last[:, None], proposal.tokens_BN], 1)
        row_BM = torch.tensor(list(parents)).expand_as(proposal.tokens_BN)
        row_BM = (row_BM if proposal.parents_BN is None else proposal.parents_BN.clamp(min=-1)) + 1
        above_BM = torch.cat([before[:, None], tokens_BM.gather(1, row_BM)], 1)
        return sampler.probabilities(self.model.table[above_BM, tokens_BM])

    def law(self, sampler: Sampler) -> Conditional:
        return self.model.law(sampler)


class Uneven(TableDrafter):
    """None, one or two tokens of a chain, by the last token: lengths may depend on what is committed."""

    def propose(self, state, sampler, shape, limits, uniforms_BN):
        proposal = super().propose(state, sampler, shape, limits, uniforms_BN)
        counts = [min(limit, last) for limit, last in zip(limits, state.behind_B2[:, 1].tolist(), strict=True)]
        return Proposal(proposal.tokens_BN, q=proposal.q, counts=counts)


class Chosen(TableDrafter):
    """A chain of the table's argmaxes: point masses."""

    def propose(self, state, sampler, shape, limits, uniforms_BN):
        return super().propose(state, Sampler(), shape, limits, uniforms_BN)

    def law(self, sampler):
        return self.model.law(Sampler())


TARGET: Any = TableTarget(seed=3)  # what a decoder asks of a Target


def results_of(drafter, shape, sampler, *, new, runs, verification="token", prompt=PROMPT, target=TARGET, **more):
    """``runs`` answers to one prompt, in one batch, each from its own stream."""
    settings = {"sampler": sampler, "max_new_tokens": new, "eos_ids": (), "shape": shape, "verification": verification}
    return generate_batch(target, drafter, [prompt] * runs, seeds=range(runs), **{**settings, **more})


def sequences_of(*arguments, **more) -> list[tuple[int, ...]]:
    return [tuple(result.tokens) for result in results_of(*arguments, **more)]


def until_eos(law: Outcomes, eos: Sequence[int], early: int = 0) -> Outcomes:
    """The law of answers that end with their first EOS."""
    ended: dict[tuple[int, ...], Fraction] = {}
    for sequence, weight in law.items():
        end = next((i + 1 for i, token in enumerate(sequence) if token in eos), len(sequence))
        assert end > early
        ended[sequence[:end]] = ended.get(sequence[:end], Fraction(0)) + weight
    return ended
