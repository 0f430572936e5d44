"""Sampled speculative decoding has the target's law over whole sequences: goodness of fit, with its power shown.

Every sequence of a small vocabulary is enumerated, so the test sees any fault that moves probability: in verdicts,
repairs, bonus tokens, budget ends, caches, or alignment. What the same sample sizes would detect is shown on decoders
with known faults, whose exact laws are enumerated too: their samples fit their own law and not the target's.

Shapes: V vocabulary, K draft length.
"""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Cache

from spectrain.cache import BufferedLayer
from spectrain.decoding import decoder, generate, generate_plain
from spectrain.decoding.batched import generate_batch
from spectrain.drafters.base import Drafter, Proposal
from spectrain.drafters.ngram import NgramConfig, NgramDrafter
from spectrain.exact.law import chain_round, normalised, resampled, residual, sequence_law, target_law
from spectrain.exact.sampler import Sampler, draw
from spectrain.exact.verify.chain import ChainVerdict, verify_chain
from spectrain.target import Features

V = 4
PROMPT = [0, 1, 0]
NEW = 4  # tokens a run: the prefill's, a round of at most two drafts, what is left
RUNS = 1500
PASS, REJECT = 1e-4, 1e-8  # p-values: the right law must reach the first, a fault must stay below the second
SAMPLERS = [Sampler(1.0), Sampler(0.7, top_k=3, top_p=0.9)]


# --- the test -------------------------------------------------------------------------------------------------


def pooled(law, runs):
    """Cells of expected count 5 or more, the rest as one, and the cell of each sequence."""
    common = [x for x, p in law.items() if p * runs >= 5]
    rare = [x for x, p in law.items() if 0 < p * runs < 5]
    cells = [[x] for x in common] + ([rare] if rare else [])
    return {x: i for i, cell in enumerate(cells) for x in cell}, [float(sum(law[x] for x in cell)) for cell in cells]


def p_value(sequences, law):
    """Pearson's chi-square test that these sequences were drawn from this law."""
    runs, observed = len(sequences), Counter(sequences)
    cell_of, shares = pooled(law, runs)
    if any(x not in cell_of for x in observed):
        return 0.0  # a sequence that has no probability at all
    counts = [0] * len(shares)
    for x, count in observed.items():
        counts[cell_of[x]] += count
    statistic = sum((n - runs * p) ** 2 / (runs * p) for n, p in zip(counts, shares, strict=True))
    return chi_square_tail(statistic, len(shares) - 1)


def chi_square_tail(statistic, freedom):
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def certainty(law, other, runs):
    """How many of its standard deviations the statistic expected under ``other`` lies beyond rejection at REJECT.

    Above 4, the test misses such a law about once in 30,000 samples.
    """
    cell_of, shares = pooled(law, runs)
    theirs = [0.0] * len(shares)
    for x, p in other.items():
        if x in cell_of:
            theirs[cell_of[x]] += float(p)
    shift = runs * sum((b - p) ** 2 / p for b, p in zip(theirs, shares, strict=True))
    freedom = len(shares) - 1
    critical = next(x for x in itertools.count(freedom) if chi_square_tail(x, freedom) < REJECT)
    return (freedom + shift - critical) / (2 * freedom + 4 * shift) ** 0.5


def test_the_tail_of_the_chi_square_law():
    assert chi_square_tail(3.841459, 1) == pytest.approx(0.05, rel=1e-5)
    assert chi_square_tail(124.342113, 100) == pytest.approx(0.05, rel=1e-5)


# --- a target that is a table, and drafters over another ----------------------------------------------------------


class TableTarget:
    """The next token's logits depend on the last two tokens. It reads them back from the real cache."""

    name, tokenizer_size, vocab_size, eos_ids = "table", V, V, ()
    device, config = torch.device("cpu"), SimpleNamespace()

    def __init__(self, seed, sharpness=1.3):
        generator = torch.Generator().manual_seed(seed)
        self.table = sharpness * torch.randn(V, V, V, generator=generator, dtype=torch.float64)

    def tap(self, taps): ...

    def new_cache(self):
        return Cache(layer_class_to_replicate=BufferedLayer)

    def forward(self, ids_BT, *, cache, attention_mask=None, positions_BT=None):
        ids = ids_BT[:, None, :, None].double()
        seen_BT = cache.update(ids, ids, 0)[0][:, 0, :, 0].long()
        before_BT = torch.cat([torch.zeros_like(seen_BT[:, :1]), seen_BT], dim=1)
        new = ids_BT.shape[1]
        hidden = self.table[before_BT[:, -new - 1 : -1], seen_BT[:, -new:]]
        return Features(hidden, hidden[..., :0])

    def logits(self, hidden):
        return hidden

    def law_after(self, sampler):
        """The exact law of the next token, for the enumerations."""

        def law(prefix):
            before, last = [*PROMPT, *prefix][-2:]
            return normalised(map(Fraction, sampler.probabilities(self.table[before, last]).tolist()))

        return law


class TableDrafter(Drafter):
    """Samples from its own table through the request's sampler, and reports that law."""

    def __init__(self, seed=8):
        self.model = TableTarget(seed, sharpness=2.0)

    def start(self):
        return []

    def observe(self, state, ids, features):
        state.extend(ids)

    def logits_after(self, context):
        return self.model.table[context[-2], context[-1]]

    def length(self, state, length):
        return length

    def propose(self, state, sampler, length, uniforms_K):
        context, tokens, laws = list(state), [], []
        for step in range(self.length(state, length)):
            token, q_V = self.choose(self.logits_after(context), sampler, uniforms_K[step])
            context.append(token)
            tokens.append(token)
            laws.append(q_V)
        q_KV = torch.stack(laws) if laws and laws[0] is not None else None
        return Proposal(torch.tensor(tokens, dtype=torch.long), q_KV)

    def choose(self, logits_V, sampler, uniform):
        q_V = sampler.probabilities(logits_V)
        return int(draw(q_V, uniform)), q_V

    def proposal_law(self, sampler):
        return self.model.law_after(sampler)


class Uneven(TableDrafter):
    """Proposes none, one or two tokens, by the last token: lengths may depend on what is committed."""

    def length(self, state, length):
        return min(length, state[-1])


class Chosen(TableDrafter):
    """The table's argmax: a point mass."""

    def choose(self, logits_V, sampler, uniform):
        return int(logits_V.argmax()), None

    def proposal_law(self, sampler):
        return self.model.law_after(Sampler())


class ChosenButScoredAsDrawn(Chosen):
    """A known fault: the argmax, verified with the softmax."""

    def choose(self, logits_V, sampler, uniform):
        return int(logits_V.argmax()), sampler.probabilities(logits_V)

    def scored_law(self, sampler):
        return self.model.law_after(sampler)


class RawLaw(TableDrafter):
    """A known fault: drawn through temperature and truncation, verified without."""

    def choose(self, logits_V, sampler, uniform):
        return int(draw(sampler.probabilities(logits_V), uniform)), logits_V.softmax(-1)

    def scored_law(self, sampler):
        return self.model.law_after(Sampler(1.0))


def resample_from_p(p_BKV, q_BKV, tokens_BK, uniforms_BK, lengths_B=None):
    """A known fault: after a rejection the token is drawn from p again, not from what q left of it."""
    right = verify_chain(p_BKV, q_BKV, tokens_BK, uniforms_BK, lengths_B)
    rows = torch.arange(len(p_BKV))
    return ChainVerdict(right.accepted, draw(p_BKV[rows, right.accepted], uniforms_BK[:, -1]))


# --- laws of runs ---------------------------------------------------------------------------------------------


def exact_law(sampler):
    return target_law(TARGET.law_after(sampler), NEW)


def faulty_law(sampler, drafter, k, repair=residual):
    """The law of the decoder's whole schedule, whatever is wrong with its rounds."""
    p, q = TARGET.law_after(sampler), drafter.proposal_law(sampler)
    scored = drafter.scored_law(sampler) if hasattr(drafter, "scored_law") else None

    def round_at(prefix):
        length = min(k, NEW - len(prefix) - 1) if prefix else 0
        return chain_round(p, q, length, scored=scored, repair=repair, prefix=prefix)

    return sequence_law(round_at, NEW)


def runs_of(drafter, sampler, k=2, runs=RUNS, target=None, new=NEW, prompt=PROMPT):
    return [
        tuple(
            generate(
                target or TARGET,
                drafter,
                prompt,
                sampler=sampler,
                draft_length=k,
                max_new_tokens=new,
                eos_ids=(),
                seed=s,
            ).tokens
        )
        for s in range(runs)
    ]


TARGET: Any = TableTarget(seed=3)  # what a decoder asks of a Target
DRAFTERS = {
    "drawn": TableDrafter(),
    "drawn, uneven": Uneven(),
    "chosen": Chosen(),
    "ngram": NgramDrafter(NgramConfig(longest=2)),
}


@pytest.mark.parametrize(
    ("name", "sampler"),
    [*((name, SAMPLERS[0]) for name in DRAFTERS), ("drawn", SAMPLERS[1]), ("chosen", SAMPLERS[1])],
    ids=lambda value: value if isinstance(value, str) else value.describe(),
)
def test_speculative_decoding_has_the_targets_law(name, sampler):
    assert p_value(runs_of(DRAFTERS[name], sampler), exact_law(sampler)) > PASS


@pytest.mark.parametrize("sampler", SAMPLERS, ids=Sampler.describe)
def test_plain_decoding_has_the_targets_law(sampler):
    request = {"sampler": sampler, "max_new_tokens": NEW, "eos_ids": ()}
    singly = [tuple(generate_plain(TARGET, PROMPT, seed=seed, **request).tokens) for seed in range(RUNS)]
    batch = generate_batch(TARGET, [PROMPT] * RUNS, seeds=range(RUNS), **request)
    assert p_value(singly, exact_law(sampler)) > PASS
    assert [tuple(result.tokens) for result in batch] == singly


@pytest.mark.parametrize(
    ("drafter", "sampler", "kernel", "repair"),
    [
        (TableDrafter(), SAMPLERS[0], resample_from_p, resampled),
        (TableDrafter(), SAMPLERS[1], resample_from_p, resampled),
        (Chosen(), SAMPLERS[0], resample_from_p, resampled),
        (ChosenButScoredAsDrawn(), SAMPLERS[0], verify_chain, residual),
        (RawLaw(seed=10), Sampler(1.0, top_p=0.6), verify_chain, residual),
    ],
    ids=["resampled", "resampled, truncated", "resampled, chosen", "argmax scored as drawn", "raw q"],
)
def test_the_same_sample_rejects_known_faults(monkeypatch, drafter, sampler, kernel, repair):
    """Power: each fault's exact law lies over 4 standard deviations beyond rejection at 1e-8, and is found there."""
    right, wrong = exact_law(sampler), faulty_law(sampler, drafter, 2, repair)
    assert certainty(right, wrong, RUNS) > 4
    monkeypatch.setattr(decoder, "verify_chain", kernel)
    sequences = runs_of(drafter, sampler)
    assert p_value(sequences, right) < REJECT
    assert p_value(sequences, wrong) > PASS


def test_the_enumerated_schedule_without_a_fault_is_exact():
    for sampler in SAMPLERS:
        for drafter in (DRAFTERS["drawn"], DRAFTERS["chosen"]):
            assert faulty_law(sampler, drafter, 2) == exact_law(sampler)


# --- a real model and a real drafter --------------------------------------------------------------------------

WORDS, SHORT, MODEL_RUNS = 3, 4, 400


def model_law(target, sampler, prompt):
    """Every sequence of SHORT tokens with its probability, from forwards without a cache."""
    law = {}
    for sequence in itertools.product(range(WORDS), repeat=SHORT):
        rows = target.logits(target.forward(torch.tensor([[*prompt, *sequence[:-1]]])).hidden_BTH[0, -SHORT:])
        p = sampler.probabilities(rows)[range(SHORT), list(sequence)].prod()
        law[sequence] = float(p)
    assert sum(law.values()) == pytest.approx(1, abs=1e-6)
    return law


@pytest.fixture(scope="module")
def model_pair(tiny_target, make_eagle3_drafter):
    target = tiny_target("llama", layers=3, hidden=16, vocab=WORDS, padding=3, seed=1)
    with torch.no_grad():
        target.head_weight.mul_(0.4)
    drafter = make_eagle3_drafter(target, draft_vocab=3, tap_layers=(0, 1, 2), seed=1)
    with torch.no_grad():
        drafter.lm_head.weight.mul_(4.0)  # far from the target's law, so that a wrong repair shows
    return target, drafter


def eagle_runs(model_pair, sampler):
    return runs_of(model_pair[1], sampler, 2, MODEL_RUNS, model_pair[0], SHORT, [1, 2, 0])


@pytest.mark.slow
@pytest.mark.parametrize("sampler", SAMPLERS, ids=Sampler.describe)
def test_a_real_model_with_an_eagle_drafter_keeps_its_law(model_pair, sampler):
    assert p_value(eagle_runs(model_pair, sampler), model_law(model_pair[0], sampler, [1, 2, 0])) > PASS


@pytest.mark.slow
def test_the_same_sample_of_the_real_model_rejects_a_repair_from_p(model_pair, monkeypatch):
    monkeypatch.setattr(decoder, "verify_chain", resample_from_p)
    sequences = eagle_runs(model_pair, SAMPLERS[0])
    assert p_value(sequences, model_law(model_pair[0], SAMPLERS[0], [1, 2, 0])) < REJECT
