"""What the tests of the verification kernels share: rounds, and a kernel integrated over its uniforms.

The verdict is piecewise constant in each uniform, with known rational breakpoints; the kernel is called just inside
both ends of every piece, must answer the same at both, and the pieces are weighed in Fractions.
"""

import math
from fractions import Fraction
from itertools import pairwise, product

import torch
from hypothesis import strategies as st

from spectrain.exact.law import normalised
from spectrain.exact.sampler import Sampler, draw

V = 3
INSIDE = 1e-9  # the ends of a piece; pieces are wider than this by orders of magnitude


def tensor(rows):
    return torch.tensor([[float(value) for value in row] for row in rows], dtype=torch.float64)


def constant(law):
    return lambda prefix: law


def tables(depth):
    """A law for every prefix shorter than `depth`; zero weights are common."""
    prefixes = [prefix for n in range(depth) for prefix in product(range(V), repeat=n)]
    row = st.lists(st.integers(0, 4), min_size=V, max_size=V).filter(any).map(normalised)
    size = len(prefixes)
    return st.lists(row, min_size=size, max_size=size).map(lambda laws: dict(zip(prefixes, laws, strict=True)))


def random_round(batch, k, vocabulary, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(batch, k + 1, vocabulary, generator=generator, dtype=torch.float64)
    noise = torch.randn(batch, k, vocabulary, generator=generator, dtype=torch.float64)
    p, q = (Sampler(1.0).probabilities(x.to(dtype)) for x in (logits, logits[:, :k] + noise))
    uniforms = torch.rand(batch, k + 1, generator=generator, dtype=torch.float64)
    tokens = draw(q, torch.rand(batch, k, generator=generator, dtype=torch.float64))
    return p, q, tokens, uniforms


def cells(breakpoints):
    inner = {b for b in breakpoints if 0 < b < 1}
    return list(pairwise(sorted({Fraction(0), Fraction(1)} | inner)))


def inverse_cdf_breakpoints(weights):
    total, running, points = sum(weights), Fraction(0), []
    for weight in weights:
        running += weight
        points.append(running / total if total else Fraction(0))
    return points


def chain_law(kernel, pieces, target, proposal, k, *, scored=None, points=False):
    """Outcomes of a round of k tokens by a torch kernel. `pieces(p_rows, q_rows, tokens)`: the cells of every uniform.
    `points`: tell the kernel that the tokens were chosen (q None)."""
    score = proposal if scored is None else scored
    weights, all_tokens, p_all, q_all, low, high = [], [], [], [], [], []
    size = len(target(()))
    for tokens in product(range(size), repeat=k):
        drawn = math.prod((proposal(tokens[:i])[x] for i, x in enumerate(tokens)), start=Fraction(1))
        if not drawn:
            continue
        p_rows = [target(tokens[:i]) for i in range(k + 1)]
        q_rows = [score(tokens[:i]) for i in range(k)]
        for piece in pieces(p_rows, q_rows, tokens):
            weights.append(drawn * math.prod((b - a for a, b in piece), start=Fraction(1)))
            all_tokens.append(tokens)
            p_all.append(tensor(p_rows))
            q_all.append(tensor(q_rows).reshape(k, size))
            low.append([float(a) + INSIDE for a, _ in piece])
            high.append([float(b) - INSIDE for _, b in piece])
    p, q = torch.stack(p_all), None if points else torch.stack(q_all)
    tokens_NK = torch.tensor(all_tokens, dtype=torch.int64).reshape(len(weights), k)
    ends = [kernel(p, q, tokens_NK, torch.tensor(u, dtype=torch.float64)) for u in (low, high)]
    assert torch.equal(ends[0].accepted, ends[1].accepted)
    assert torch.equal(ends[0].token, ends[1].token)
    outcomes = {}
    for weight, tokens, accepted, token in zip(
        weights, all_tokens, ends[0].accepted.tolist(), ends[0].token.tolist(), strict=True
    ):
        committed = (*tokens[:accepted], token)
        outcomes[committed] = outcomes.get(committed, 0) + weight
    return outcomes


def check_rows_alone(kernel, padded, round_, lengths):
    """Each row of a padded verdict is that of the row by itself, without its padding."""
    p, q, tokens, uniforms = round_
    for row, length in enumerate(lengths.tolist()):
        columns = [*range(length), tokens.shape[1]]
        alone = kernel(
            p[row : row + 1, : length + 1],
            None if q is None else q[row : row + 1, :length],
            tokens[row : row + 1, :length],
            uniforms[row : row + 1, columns],
        )
        assert padded.accepted[row] == alone.accepted.item()
        assert padded.token[row] == alone.token.item()
    assert (padded.accepted <= lengths).all()
    assert padded.accepted.unique().numel() > 2  # the case is not a trivial one


def check_on_meta(kernel):
    """Meta tensors hold no values: whatever reads one, or has a shape that depends on one, raises."""
    p, q = torch.empty(2, 6, 100, device="meta"), torch.empty(2, 5, 100, device="meta")
    tokens = torch.empty(2, 5, device="meta", dtype=torch.int64)
    uniforms = torch.empty(2, 6, device="meta", dtype=torch.float64)
    lengths = torch.empty(2, device="meta", dtype=torch.int64)
    for case in ((q, None), (None, None), (q, lengths), (None, lengths)):
        verdict = kernel(p, case[0], tokens, uniforms, case[1])
        assert verdict.accepted.shape == verdict.token.shape == (2,)
