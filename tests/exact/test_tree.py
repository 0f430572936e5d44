"""Trees: the lossless kinds are exact in Fractions, the known shortcuts are not, and the kernel has these laws.

As in test_chain.py, the kernel is integrated over its uniforms.
"""

import math
from fractions import Fraction
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from integrated import INSIDE, V, cells, constant, inverse_cdf_breakpoints, tables, tensor

from spectrain.errors import SpectrainError
from spectrain.exact.biased import (
    by_confidence,
    chosen_scored_as_drawn,
    merged,
    not_renormalised,
    pruned,
    resorted,
)
from spectrain.exact.law import (
    as_law,
    chain_round,
    expected_accepted,
    first_token_law,
    point,
    residual,
    sequence_law,
    target_law,
    total_variation,
)
from spectrain.exact.sampler import Sampler, draw
from spectrain.exact.tree_law import (
    chain_shape,
    chosen,
    independent,
    stale,
    tree_round,
    without_replacement,
)
from spectrain.exact.verify.chain import verify_chain
from spectrain.exact.verify.check import check_tree
from spectrain.exact.verify.tree import verify_tree, walk_steps

TWO = ((), ())
SHAPES = [TWO, ((), (), ()), (TWO, ()), (((),), ((),)), ((TWO,), ()), chain_shape(3)]
KINDS = {
    "chosen": lambda q: chosen(by_confidence(q), V),
    "independent": independent,
    "without replacement": without_replacement,
}
P, Q = as_law([".1", ".2", ".3", ".4"]), as_law([".4", ".3", ".2", ".1"])
ACCEPTANCE = {"chosen": Fraction(3, 10), "independent": Fraction(72, 100), "without replacement": Fraction(107, 140)}


def kind_of(name, q, vocabulary):
    return chosen(by_confidence(q), vocabulary) if name == "chosen" else KINDS[name](q)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(tables(5), tables(5), st.sampled_from([(), TWO, (TWO, ()), (((),), ((),))]))
def test_whole_sequences_have_the_law_of_plain_decoding(kind, p, q, shape):
    length = 3  # a round that starts at length 2 may look two tokens further

    def round_at(prefix):
        return tree_round(p.__getitem__, KINDS[kind](q.__getitem__), shape, prefix=prefix)

    assert sequence_law(round_at, length) == target_law(p.__getitem__, length)


@settings(max_examples=20, deadline=None)
@given(tables(4), tables(4), st.integers(0, 3))
def test_a_tree_without_branches_is_a_chain(p, q, k):
    expected = chain_round(p.__getitem__, q.__getitem__, k)
    for siblings in (independent(q.__getitem__), without_replacement(q.__getitem__)):
        assert tree_round(p.__getitem__, siblings, chain_shape(k)) == expected


@settings(max_examples=20, deadline=None)
@given(tables(4), tables(4), st.sampled_from(SHAPES))
def test_point_masses_enter_the_child_that_equals_a_draw(p, q, shape):
    ranking = by_confidence(q.__getitem__)

    def walk(committed, node):
        outcomes = {}
        children = ranking(committed)[: len(node)]
        for token, weight in enumerate(p[committed]):
            ends = {(): Fraction(1)}
            if token in children:
                ends = walk((*committed, token), node[children.index(token)])
            outcomes |= {(token, *end): weight * share for end, share in ends.items() if weight * share}
        return outcomes

    assert tree_round(p.__getitem__, chosen(ranking, V), shape) == walk((), shape)


@pytest.mark.parametrize("kind", KINDS)
def test_two_children_accept_as_published(kind):
    siblings = kind_of(kind, constant(Q), 4)
    for outcomes in (tree_round(constant(P), siblings, TWO), kernel_law(constant(P), siblings, TWO, kind)):
        assert expected_accepted(outcomes) == ACCEPTANCE[kind]
        assert first_token_law(outcomes, 4) == P
    assert [round(float(x), 3) for x in ACCEPTANCE.values()] == [0.3, 0.72, 0.764]


def test_chosen_children_accept_their_target_probability():
    p = as_law([".5", ".3", ".2"])
    siblings = chosen(lambda prefix: [0, 1], 3)
    for outcomes in (tree_round(constant(p), siblings, TWO), kernel_law(constant(p), siblings, TWO, "chosen")):
        assert expected_accepted(outcomes) == Fraction(8, 10)
        assert first_token_law(outcomes, 3) == p


WRONG = {  # name: (siblings, the kind that the kernel takes them for, the first-token law for P, Q, two children)
    "chosen, scored as drawn": (
        chosen_scored_as_drawn(constant(Q), 4), "independent", ["1/4", "0", "3/56", "39/56"]
    ),
    "not renormalised": (not_renormalised(constant(Q)), "independent", ["1/10", "1/5", "673/1960", "699/1960"]),
    "resorted": (
        resorted(constant(Q)), "without replacement", ["451/2520", "199/1260", "649/2880", "1765/4032"]
    ),
    "pruned": (pruned(constant(Q)), "independent", ["139/1000", "139/500", "107/1000", "119/250"]),
    "merged": (merged(constant(Q)), "independent", ["1/10", "1/5", "183/560", "209/560"]),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_shortcuts_have_a_law_that_is_not_p(name):
    siblings, kind, law = WRONG[name]
    for outcomes in (
        tree_round(constant(P), siblings, TWO),
        kernel_law(constant(P), siblings, TWO, kind, q=constant(Q)),
    ):
        assert first_token_law(outcomes, 4) == as_law(law) != P


def test_shortcuts_go_by_confidence_and_not_by_id():
    q = constant(as_law([".2", ".3", ".5"]))
    assert by_confidence(q)(()) == [2, 1, 0]
    assert by_confidence(constant(as_law([".2", ".4", ".4"])))(()) == [1, 2, 0]
    assert resorted(q).drawn((), 2) == {
        (1, 0): Fraction(3, 10) * Fraction(2, 7) + Fraction(2, 10) * Fraction(3, 8),
        (2, 0): Fraction(5, 10) * Fraction(2, 5) + Fraction(2, 10) * Fraction(5, 8),
        (2, 1): Fraction(5, 10) * Fraction(3, 5) + Fraction(3, 10) * Fraction(5, 7),
    }
    even = constant(as_law(["1/3"] * 3))
    assert pruned(even).drawn((), 2) == independent(even).drawn((), 2)  # the average itself stays


def test_a_residual_that_goes_on_as_the_law_of_a_child_is_biased():
    def wrong(p_BMV, q_BMV, *arguments, **options):
        p_BMV = p_BMV.clone()
        left = (p_BMV[:, 0] - q_BMV[:, 0]).clamp(min=0)
        p_BMV[:, 2] = left / left.sum(-1, keepdim=True)  # the second child is entered when the first failed
        return verify_tree(p_BMV, q_BMV, *arguments, **options)

    siblings = independent(constant(Q))
    outcomes = tree_round(constant(P), siblings, TWO, descent=stale)
    assert kernel_law(constant(P), siblings, TWO, "independent", kernel=wrong) == outcomes
    assert first_token_law(outcomes, 4) == P  # it shows in the second token only
    right = tree_round(constant(P), siblings, TWO)
    assert (outcomes[2, 2], right[2, 2]) == (Fraction(80, 1000), Fraction(84, 1000))
    assert total_variation(outcomes, right) == Fraction(21, 500)


# The kernel.


def parents_of(shape):
    """Parents of the nodes in the order of their depth, and each node's place among its siblings."""
    parents, level = [], [(-1, shape)]
    while level:
        following = []
        for node, children in level:
            for child in children:
                parents.append(node)
                following.append((len(parents) - 1, child))
        level = following
    return parents


def trees(siblings, shape):
    """Every tree that may be proposed: (weight, tokens, parents, prefixes), in the order of depth."""

    def grow(frontier):
        if not frontier:
            yield Fraction(1), {}
            return
        (key, prefix, node), *rest = frontier
        for tokens, weight in siblings.drawn(prefix, len(node)).items():
            children = [((*key, i), (*prefix, token), node[i]) for i, token in enumerate(tokens)]
            for more, nodes in grow(rest + children):
                yield weight * more, {child[0]: child[1] for child in children} | nodes

    for weight, nodes in grow([((), (), shape)]):
        keys = sorted(nodes, key=lambda key: (len(key), key))
        ids = {(): -1} | {key: n for n, key in enumerate(keys)}
        yield weight, [nodes[key][-1] for key in keys], [ids[key[:-1]] for key in keys], [nodes[key] for key in keys]


def pieces(target, siblings, tokens, parents, prefixes, points):
    """The cells of every uniform: each node's threshold, then the steps of every law that may end the round."""
    if points:
        return product(*(cells(inverse_cdf_breakpoints(target(prefix))) for prefix in [(), *prefixes]))
    thresholds, lasts = [], [target(prefix) for prefix in [(), *prefixes]]
    left, earlier = dict(enumerate(lasts, start=-1)), {}
    for token, parent in zip(tokens, parents, strict=True):
        before = earlier.get(parent, ())
        q = siblings.scored(prefixes[parent] if parent >= 0 else (), before)
        thresholds.append(left[parent][token] / q[token])
        left[parent] = residual(left[parent], q)
        lasts.append(left[parent])
        earlier[parent] = (*before, token)
    last = [b for law in lasts for b in inverse_cdf_breakpoints(law)]
    return product(*(cells([threshold]) for threshold in thresholds), cells(last))


def kernel_law(target, siblings, shape, kind, *, q=None, kernel=verify_tree, steps=None):
    """Outcomes of a round by the torch kernel; rows of fewer nodes than others are padded."""
    points, size = kind == "chosen", len(target(()))
    score = q or (lambda prefix: siblings.scored(prefix, ()))
    cases, rows = [], []
    for weight, tokens, parents, prefixes in trees(siblings, shape):
        laws = [tensor([law(prefix) for prefix in [(), *prefixes]]) for law in (target, score)]
        for piece in pieces(target, siblings, tokens, parents, prefixes, points):
            cases.append((weight * math.prod((b - a for a, b in piece), start=Fraction(1)), tokens))
            rows.append((*laws, tokens, parents, piece))
    N = max(len(tokens) for _, tokens in cases)
    B = len(cases)
    p_BMV, q_BMV = (torch.full((B, N + 1, size), math.nan, dtype=torch.float64) for _ in range(2))
    tokens_BN, parents_BN = torch.full((B, N), -100), torch.full((B, N), -100)
    ends = [torch.zeros(B, N + 1, dtype=torch.float64) for _ in range(2)]
    for b, (p, q_rows, tokens, parents, piece) in enumerate(rows):
        n = len(tokens)
        p_BMV[b, : n + 1], q_BMV[b, : n + 1] = p, q_rows
        tokens_BN[b, :n], parents_BN[b, :n] = torch.tensor(tokens), torch.tensor(parents)
        columns = [*range(n), n if points else N]
        for end, inside in zip(ends, ([a for a, _ in piece], [-b for _, b in piece]), strict=True):
            end[b, columns] = torch.tensor([abs(float(u) + INSIDE) for u in inside], dtype=torch.float64)
    lengths = torch.tensor([len(tokens) for _, tokens in cases])
    arguments = (p_BMV, None if points else q_BMV, tokens_BN, parents_BN)
    options = {"replacement": kind != "without replacement", "steps": steps}
    low, high = (kernel(*arguments, end, lengths, **options) for end in ends)
    assert torch.equal(low.path, high.path)
    assert torch.equal(low.token, high.token)
    outcomes = {}
    for (weight, tokens), path, accepted, token in zip(
        cases, low.path.tolist(), low.accepted.tolist(), low.token.tolist(), strict=True
    ):
        assert all(node == -1 for node in path[accepted:])
        committed = (*(tokens[node] for node in path[:accepted]), token)
        outcomes[committed] = outcomes.get(committed, 0) + weight
    return outcomes


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None)
@given(tables(3), tables(3), st.sampled_from([TWO, ((), (), ()), (((),), ()), ((), ((),))]))
def test_the_kernel_has_the_enumerated_law(kind, p, q, shape):
    siblings = KINDS[kind](q.__getitem__)
    steps = walk_steps(parents_of(shape), drawn=kind != "chosen")
    outcomes = kernel_law(p.__getitem__, siblings, shape, kind, steps=steps)
    assert outcomes == tree_round(p.__getitem__, siblings, shape)


def test_a_chain_is_verified_as_by_verify_chain():
    p, q, tokens, uniforms = random_round(batch=256, nodes=4, vocabulary=6, seed=1, parents=[-1, 0, 1, 2])
    parents = torch.arange(-1, 3).expand(256, 4)
    tree, chain = verify_tree(p, q, tokens, parents, uniforms), verify_chain(p, q[:, :4], tokens, uniforms)
    assert torch.equal(tree.accepted, chain.accepted)
    assert torch.equal(tree.token, chain.token)
    assert torch.equal(tree.path, torch.where(torch.arange(4) < chain.accepted[:, None], torch.arange(4), -1))
    assert tree.accepted.unique().numel() == 5


PARENTS = [-1, -1, -1, 0, 1, 1, 4]


def random_round(batch, nodes, vocabulary, seed, parents, replacement=True):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(batch, nodes + 1, vocabulary, generator=generator, dtype=torch.float64)
    noise = torch.randn(logits.shape, generator=generator, dtype=torch.float64)
    p, q = Sampler(1.0).probabilities(logits), Sampler(1.0).probabilities(logits + noise)
    columns, undrawn = [], q.clone()
    for parent in parents:
        law = undrawn[:, parent + 1]
        columns.append(draw(law, torch.rand(batch, generator=generator, dtype=torch.float64)))
        if not replacement:
            law.scatter_(1, columns[-1][:, None], 0.0)
    return p, q, torch.stack(columns, 1), torch.rand(batch, nodes + 1, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_never_entered_and_rows_do_not_touch(kind):
    replacement = kind != "without replacement"
    p, q, tokens, uniforms = random_round(64, 7, 6, seed=2, parents=PARENTS, replacement=replacement)
    q = None if kind == "chosen" else q
    parents, lengths = torch.tensor(PARENTS).expand(64, 7), torch.arange(64) % 8
    padding = torch.arange(7) >= lengths[:, None]
    laws = [None if x is None else x.clone() for x in (p, q)]
    for law in laws:
        if law is not None:
            law[:, 1:].masked_fill_(padding[..., None], math.nan)
    padded = verify_tree(
        *laws, tokens.masked_fill(padding, -100), parents.masked_fill(padding, -1), uniforms, lengths,
        replacement=replacement,
    )  # fmt: skip
    for row, length in enumerate(lengths.tolist()):
        columns = [*range(length), length if q is None else 7]
        alone = verify_tree(
            p[row : row + 1, : length + 1],
            None if q is None else q[row : row + 1, : length + 1],
            tokens[row : row + 1, :length],
            parents[row : row + 1, :length],
            uniforms[row : row + 1, columns],
            replacement=replacement,
        )
        assert padded.accepted[row] == alone.accepted.item()
        assert padded.token[row] == alone.token.item()
        assert padded.path[row, :length].tolist() == alone.path[0].tolist()
        path = alone.path[0, : alone.accepted].tolist()
        assert [PARENTS[node] for node in path] == [-1, *path][: len(path)]
    assert padded.accepted.unique().numel() > 2  # the case is not a trivial one


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_steps_suffice_when_the_shape_is_known(kind):
    replacement, drawn = kind != "without replacement", kind != "chosen"
    p, q, tokens, uniforms = random_round(512, 7, 6, seed=3, parents=PARENTS, replacement=replacement)
    arguments = (p, q if drawn else None, tokens, torch.tensor(PARENTS).expand(512, 7), uniforms)
    steps = walk_steps(PARENTS, drawn=drawn)
    assert steps == (4 if drawn else 3)  # tests of nodes 0, 1, 4, 5 or 0, 1, 4, 6; levels 1, 4, 6
    whole, short = (verify_tree(*arguments, replacement=replacement, steps=n) for n in (None, steps))
    assert all(torch.equal(getattr(whole, x), getattr(short, x)) for x in ("path", "accepted", "token"))


def test_steps_of_a_walk():
    assert walk_steps([], drawn=True) == walk_steps([], drawn=False) == 0
    assert walk_steps([-1, 0, 1], drawn=True) == walk_steps([-1, 0, 1], drawn=False) == 3
    assert (walk_steps([-1, -1, -1], drawn=True), walk_steps([-1, -1, -1], drawn=False)) == (3, 1)


@pytest.mark.parametrize("law", [point(1, 4), as_law(["1/4"] * 4)], ids=["one-hot", "uniform"])
def test_equal_laws_always_enter_the_first_child(law):
    uniforms = torch.tensor([[0.0] * 3, [0.5] * 3, [1 - 2**-53] * 3], dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        p = tensor([law] * 3).to(dtype).expand(3, 3, 4)
        verdict = verify_tree(p, p, torch.ones(3, 2, dtype=torch.int64), torch.full((3, 2), -1), uniforms)
        assert verdict.path.tolist() == [[0, -1]] * 3
        assert verdict.token.tolist() == draw(p[:, 1], uniforms[:, 2]).tolist()


def test_nothing_left_after_a_forced_rejection_goes_on_with_p():
    # Rounding left q a little above p: the residual is zero, and normalising it would give NaN.
    p = torch.tensor([[[0.5, 0.499999, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 1.0]]])
    q = torch.tensor([[[0.500001, 0.499999, 0.0]] * 3])
    before = p.clone()
    uniforms = torch.tensor([[1 - 1e-9, 1 - 1e-9, 0.75]], dtype=torch.float64)
    root = torch.tensor([[-1, -1]])
    verdict = verify_tree(p, q, torch.tensor([[0, 0]]), root, uniforms)
    assert (verdict.accepted.item(), verdict.token.item()) == (0, 1)
    # Drawn without replacement the second child was certain: refused as well, it leaves the other token.
    verdict = verify_tree(p, q, torch.tensor([[0, 1]]), root, uniforms, replacement=False)
    assert (verdict.accepted.item(), verdict.token.item()) == (0, 0)
    assert torch.equal(p, before)


def test_a_token_of_target_probability_zero_is_never_entered():
    p = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]])
    for q in (None, torch.tensor([[[1.0, 0.0], [0.5, 0.5]]]), torch.tensor([[[0.0, 1.0], [0.5, 0.5]]])):
        zeros = torch.zeros(1, 2, dtype=torch.float64)
        verdict = verify_tree(p, q, torch.tensor([[0]]), torch.tensor([[-1]]), zeros)
        assert (verdict.accepted.item(), verdict.token.item()) == (0, 1)


def test_greedy_laws_keep_the_path_of_the_target():
    one_hot = torch.eye(5)
    tokens, parents = torch.tensor([[4, 1, 2, 2, 3]]), torch.tensor([[-1, -1, 0, 1, 3]])
    p = one_hot[torch.tensor([[1, 0, 2, 0, 3, 4]])]  # after the root 1, after node 1 (token 1) 2, then 3, then 4
    for q in (None, one_hot[torch.tensor([[1, 2, 2, 2, 3, 3]])]):
        uniforms = torch.rand(1, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        verdict = verify_tree(p, q, tokens, parents, uniforms)
        assert verdict.path.tolist() == [[1, 3, 4, -1, -1]]
        assert verdict.token.item() == 4


def test_float32_rows_are_tested_in_float64():
    """Undrawn tokens are renormalised once a sibling failed: in float32 that would move the threshold by more."""
    p, q, _, _ = random_round(1, 4, 6, seed=10, parents=[-1, -1, 0, 0])
    p, q = p.float(), q.float()
    for parents, row in (([-1, -1], 0), ([-1, 0, 0], 1)):
        for first, second in ((a, b) for a in range(6) for b in range(6) if a != b):
            left, law = p[0, row].double(), q[0, row].double()
            undrawn = law.clone()
            undrawn[first] = 0
            undrawn = undrawn / undrawn.sum()
            left = (left - law).clamp(min=0)
            threshold = (left[second] / left.sum() / undrawn[second]).item()
            if not (0 < threshold < 1 and p[0, row, first] < q[0, row, first]):
                continue
            tokens = torch.tensor([[first, second] if row == 0 else [0, first, second]])
            for u, passes in ((threshold * (1 - 1e-11), True), (threshold * (1 + 1e-11), False)):
                n = len(parents)
                uniforms = torch.full((1, 5), 1 - 1e-12, dtype=torch.float64)
                uniforms[0, 0] = 0.0 if row else 1 - 1e-12
                uniforms[0, n - 1] = u
                verdict = verify_tree(
                    p[:, : n + 1], q[:, : n + 1], tokens, torch.tensor([parents]), uniforms[:, : n + 1],
                    replacement=False,
                )  # fmt: skip
                assert (n - 1 in verdict.path.tolist()[0]) == passes


def test_no_nodes_draw_from_p():
    generator = torch.Generator().manual_seed(4)
    p = torch.rand(5, 1, 6, generator=generator, dtype=torch.float64)
    p, uniforms = p / p.sum(-1, keepdim=True), torch.rand(5, 1, generator=generator, dtype=torch.float64)
    empty = torch.empty(5, 0, dtype=torch.int64)
    for q in (None, p):
        verdict = verify_tree(p, q, empty, empty, uniforms)
        check_tree(p, q, empty, empty, uniforms)
        assert verdict.accepted.tolist() == [0] * 5
        assert torch.equal(verdict.token, draw(p[:, 0], uniforms[:, 0]))


@pytest.mark.parametrize("kind", KINDS)
def test_float32_rows_over_a_real_vocabulary(kind):
    generator = torch.Generator().manual_seed(5)
    logits = 2 * torch.randn(2, 5, 49152, generator=generator)
    p = Sampler(1.0).probabilities(logits)
    q = Sampler(1.0).probabilities(logits + 1e-6 * torch.randn(logits.shape, generator=generator))
    parents = torch.tensor([[-1, -1, 0, 0]] * 2)
    tokens = torch.stack(
        [draw(q[:, m], torch.rand(2, generator=generator, dtype=torch.float64)) for m in (0, 0, 1, 1)], 1
    )
    uniforms = torch.rand(2, 5, generator=generator, dtype=torch.float64)
    arguments = (p, None if kind == "chosen" else q, tokens, parents)
    options = {"replacement": kind != "without replacement"}
    verdict = verify_tree(*arguments, uniforms, **options)
    if kind != "chosen":
        assert verdict.path.tolist() == [[0, 2, -1, -1]] * 2  # p and q differ by rounding only
    forced = verify_tree(*arguments, torch.full_like(uniforms, 1 - 2**-53), **options)
    for result in (verdict, forced):
        rows = result.path.gather(1, (result.accepted - 1).clamp(min=0)[:, None]).squeeze(1) + 1
        assert (p[torch.arange(2), rows].gather(-1, result.token[:, None]) > 0).all()


def test_the_inputs_stay_as_they_were_and_ids_may_be_of_any_whole_type():
    inputs = random_round(8, 7, 6, seed=6, parents=PARENTS)
    before = [x.clone() for x in inputs]
    p, q, tokens, uniforms = inputs
    parents = torch.tensor(PARENTS).expand(8, 7)
    one, other = (verify_tree(p, q, *ids, uniforms) for ids in ((tokens, parents), (tokens.short(), parents.short())))
    verify_tree(p, None, tokens, parents, uniforms, torch.arange(8))
    check_tree(p, q, tokens.short(), parents.short(), uniforms)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))
    assert torch.equal(one.path, other.path)
    assert torch.equal(one.token, other.token)


def test_nothing_waits_for_the_device():
    """Meta tensors hold no values: whatever reads one, or has a shape that depends on one, raises."""
    p = torch.empty(2, 6, 100, device="meta")
    tokens = torch.empty(2, 5, device="meta", dtype=torch.int64)
    uniforms = torch.empty(2, 6, device="meta", dtype=torch.float64)
    lengths = torch.empty(2, device="meta", dtype=torch.int64)
    for q, replacement in ((p, True), (p, False), (None, True)):
        verdict = verify_tree(p, q, tokens, tokens, uniforms, lengths, replacement=replacement, steps=3)
        assert verdict.path.shape == (2, 5)
        assert verdict.accepted.shape == verdict.token.shape == (2,)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"p": lambda x: x[:, :3]}, r"p: found shape \[4, 3, 6\], expected \[4, 8, 6\]"),
        ({"p": lambda x: x[0]}, "p: found shape"),
        ({"p": lambda x: x * 0.9}, "p: found a row of sum"),
        ({"q": lambda x: x[:, 1:]}, "q: found shape"),
        ({"q": lambda x: -x}, "q: found .* expected no negative"),
        ({"q": lambda x: torch.eye(6, dtype=x.dtype)[5].expand_as(x)}, "q: found 0 for a proposed token"),
        ({"tokens": lambda x: x[0]}, r"tokens: found shape \[7\], expected \[B, N\]"),
        ({"tokens": lambda x: x + 6}, r"tokens: found an id outside 0\.\.5"),
        ({"tokens": lambda x: x * 0}, "tokens: found a token twice among siblings"),
        ({"tokens": lambda x: x.index_fill(1, torch.tensor(1), 0)}, "tokens: found a token twice among siblings"),
        ({"parents": lambda x: x[:, :6]}, "parents: found shape"),
        ({"parents": lambda x: x + 1}, "parents: found one that is no earlier node"),
        ({"parents": lambda x: x - 1}, "parents: found one that is no earlier node"),
        ({"tokens": lambda x: x * 0 - 1}, r"tokens: found an id outside 0\.\.5"),
        ({"tokens": lambda x: x * 0 + 6}, r"tokens: found an id outside 0\.\.5"),
        ({"uniforms": lambda x: x[:, 1:]}, "uniforms: found shape"),
        ({"uniforms": lambda x: x + 1}, r"uniforms: found a value outside \[0, 1\)"),
        ({"p": lambda x: x[0, 0, 0]}, r"p: found shape \[\], expected \[B, N\+1, V\]"),
        ({"uniforms": lambda x: x.index_fill(1, torch.tensor(3), 1.0)}, r"uniforms: found a value outside \[0, 1\)"),
        ({"lengths": lambda x: x + torch.arange(4) // 3}, r"lengths: found \[7, 7, 7, 8\], expected 0\.\.7"),
        ({"uniforms": torch.ones_like}, r"uniforms: found a value outside \[0, 1\)"),
        ({"uniforms": lambda x: x * 0 - 0.5}, r"uniforms: found a value outside \[0, 1\)"),
        ({"lengths": lambda x: x * 0 - 1}, r"lengths: found \[-1, -1, -1, -1\], expected 0\.\.7"),
        ({"lengths": lambda x: x + 1}, r"lengths: found \[8, 8, 8, 8\], expected 0\.\.7"),
        ({"lengths": lambda x: x[:2]}, "lengths: found shape"),
    ],
)
def test_calls_that_make_no_sense_are_refused_by_name(change, complaint):
    p, q, tokens, uniforms = random_round(4, 7, 6, seed=7, parents=PARENTS, replacement=False)
    # token 5 is never proposed here, so that a q which is certain of it cannot have drawn these
    tokens = torch.tensor([[0, 1, 2, 3, 4, 0, 1]] * 4)
    call = {"p": p, "q": q, "tokens": tokens, "parents": torch.tensor([PARENTS] * 4), "uniforms": uniforms}
    call["lengths"] = torch.full((4,), 7)
    check_tree(*call.values(), replacement=False)
    ((name, wrong),) = change.items()
    call[name] = wrong(call[name])
    with pytest.raises(SpectrainError, match=complaint):
        check_tree(*call.values(), replacement=False)


@pytest.mark.parametrize("token", [0, 5])
def test_calls_are_refused_where_q_is_zero_at_the_very_id_of_a_child(token):
    p, _, _, uniforms = random_round(2, 2, 6, seed=9, parents=[-1, 0])
    rows, tokens, parents = torch.eye(6, dtype=torch.float64), torch.full((2, 2), token), torch.tensor([[-1, 0]] * 2)
    ids = torch.tensor([[token, token, (token - 1) % 6]] * 2)  # row 2 is that of a leaf, which nobody reads
    check_tree(p, rows[ids], tokens, parents, uniforms)
    for row in (0, 1):
        wrong = rows[ids]
        wrong[:, row] = rows[abs(token - 1)]
        with pytest.raises(SpectrainError, match="q: found 0 for a proposed token"):
            check_tree(p, wrong, tokens, parents, uniforms)


def test_padding_is_not_checked():
    p, q, tokens, uniforms = random_round(4, 7, 6, seed=8, parents=PARENTS)
    lengths = torch.tensor([0, 2, 5, 7])
    padding = torch.arange(7) >= lengths[:, None]
    p[:, 1:].masked_fill_(padding[..., None], math.nan)
    for anything in (-5, 99):
        parents = torch.tensor(PARENTS).expand(4, 7).masked_fill(padding, anything)
        check_tree(p, q, tokens.masked_fill(padding, anything), parents, uniforms * 0, lengths)
