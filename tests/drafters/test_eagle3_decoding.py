"""EAGLE-3 while decoding: the law it reports is the law it samples, its state a fresh prefill, its steps its training.

Shapes: B requests, T positions, K draft length, N nodes of a tree, V vocabulary, D draft vocabulary.
"""

from typing import Any

import pytest
import torch

from spectrain.drafters.base import Committed
from spectrain.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler
from spectrain.shapes import Chain, DynamicTree, StaticTree
from spectrain.target import FeatureBatch, Features

GREEDY = Sampler()
SAMPLERS = [Sampler(1.0), Sampler(0.7, top_k=5, top_p=0.9), Sampler(2.0, top_p=0.5)]
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
DRAFT_VOCABULARY = 16


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target(padding=4)


@pytest.fixture(scope="module")
def drafter(target, tools):
    return tools.ready(Eagle3Config, target, draft_vocab_size=DRAFT_VOCABULARY)


def features_of(target, ids):
    return target.forward(torch.tensor([ids]))


def tell(drafter, state, tokens, features):
    """Commit tokens of one request; ``features`` are the target's states of the tokens before each."""
    drafter.observe(state, Committed([list(tokens)], torch.tensor([list(tokens)]), features))


def prefilled(target, drafter, ids=IDS, features=None):
    state = drafter.start(ids[:1])
    tell(drafter, state, ids[1:], features or features_of(target, ids[:-1]))
    return state


def uniforms(count, seed=0):
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def chain(drafter, state, sampler, length, uniforms_K):
    """Tokens [K] and laws [K, V] of one request's chain."""
    proposal = drafter.propose(state, sampler, Chain(length), [length], uniforms_K[None])
    assert proposal.parents_BN is None
    assert proposal.counts is None
    return proposal.tokens_BN[0], None if proposal.q is None else proposal.q[0]


# --- proposals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS, ids=Sampler.describe)
def test_q_is_a_law_over_the_targets_vocabulary(target, drafter, sampler):
    tokens_K, q_KV = chain(drafter, prefilled(target, drafter), sampler, 5, uniforms(5))
    assert tokens_K.shape == (5,)
    assert q_KV.shape == (5, target.vocab_size)
    assert (q_KV >= 0).all()
    torch.testing.assert_close(q_KV.double().sum(-1), torch.ones(5, dtype=torch.float64), rtol=0, atol=1e-6)
    assert (q_KV[range(5), tokens_K] > 0).all()
    assert not q_KV[:, ~drafter.t2d].any(), "an id that the head cannot name"
    if sampler.top_k:
        assert ((q_KV > 0).sum(-1) <= sampler.top_k).all()


@pytest.mark.parametrize("sampler", SAMPLERS, ids=Sampler.describe)
def test_q_is_the_law_that_is_sampled(target, drafter, sampler):
    """Over an even grid of uniforms every token comes up as often as q says, to within the ends of its interval."""
    grid, features = 200, features_of(target, IDS[:-1])
    later = uniforms(2, seed=3)
    counts = torch.zeros(target.vocab_size)
    law_V = chain(drafter, prefilled(target, drafter, features=features), sampler, 2, later)[1][1]
    for i in range(grid):
        later[1] = (i + 0.5) / grid  # the first token fixed, the second over the grid
        tokens_K, q_KV = chain(drafter, prefilled(target, drafter, features=features), sampler, 2, later)
        assert torch.equal(q_KV[1], law_V)
        counts[tokens_K[1]] += 1
    assert ((counts / grid - law_V).abs() <= 1 / grid + 1e-6).all()
    assert (law_V > 0.02).sum() >= 2, "a point mass would show nothing"


def test_a_token_depends_on_its_own_uniform_and_those_before(target, drafter):
    base = uniforms(4, seed=1)
    tokens_K, q_KV = chain(drafter, prefilled(target, drafter), SAMPLERS[0], 4, base)
    other = base.clone()
    other[2] = 1 - other[2]
    got_K, law_KV = chain(drafter, prefilled(target, drafter), SAMPLERS[0], 4, other)
    assert got_K[:2].tolist() == tokens_K[:2].tolist()
    assert torch.equal(law_KV[:3], q_KV[:3])
    assert not torch.equal(law_KV[3], q_KV[3])
    assert torch.equal(chain(drafter, prefilled(target, drafter), SAMPLERS[0], 4, base)[0], tokens_K)


def test_a_greedy_proposal_is_the_likeliest_chain_as_point_masses(target, drafter):
    tokens_K, q_KV = chain(drafter, prefilled(target, drafter), GREEDY, 4, uniforms(4))
    assert q_KV is None
    near_K, _ = chain(drafter, prefilled(target, drafter), Sampler(1.0, top_k=1), 4, uniforms(4))
    assert tokens_K.tolist() == near_K.tolist()


def test_shorter_proposals_are_the_beginning_of_longer_ones(target, drafter):
    tokens_K, q_KV = chain(drafter, prefilled(target, drafter), SAMPLERS[0], 5, uniforms(5))
    for length in (1, 2, 4):
        part_K, law_KV = chain(drafter, prefilled(target, drafter), SAMPLERS[0], length, uniforms(5))
        assert part_K.tolist() == tokens_K[:length].tolist()
        assert torch.equal(law_KV, q_KV[:length])


def test_only_ids_that_exist_are_proposed(target, drafter):
    assert int(drafter._columns.max()) < target.tokenizer_size == 24
    seen = set()
    for seed in range(20):
        tokens_K, _ = chain(drafter, prefilled(target, drafter), Sampler(5.0), 5, uniforms(5, seed))
        seen |= set(tokens_K.tolist())
    assert seen <= set(drafter._columns.tolist())
    assert len(seen) > 8


# --- state ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [[], [5], [3, 4, 5], [2, 7, 9], list(range(2, 12))])
@pytest.mark.parametrize("drafted", [Chain(1), Chain(3), StaticTree(((0,), (1,), (0, 0), (1, 0), (1, 1)))])
def test_any_series_of_rounds_leaves_the_state_of_a_fresh_prefill(target, drafter, cuts, drafted):
    """Case C22, down to the keys and values: the target's features replace the drafter's own."""
    features = features_of(target, IDS[:-1])
    state, start = drafter.start(IDS[:1]), 1
    for stop in [*cuts, len(IDS)]:
        tell(drafter, state, IDS[start:stop], features[start - 1 : stop - 1])
        start = stop
        if stop < len(IDS):  # drafted and rejected, or accepted: in neither case may it leave a trace
            drafter.propose(state, SAMPLERS[0], drafted, [9], uniforms(drafted.nodes, seed=stop)[None])
    fresh = prefilled(target, drafter)
    (got_K, got_KV), (want_K, want_KV) = (chain(drafter, s, SAMPLERS[0], 3, uniforms(3)) for s in (state, fresh))
    assert got_K.tolist() == want_K.tolist()
    torch.testing.assert_close(got_KV, want_KV, rtol=1e-5, atol=1e-6)
    assert state.lengths == fresh.lengths == [len(IDS) - 1]
    assert state.cache.lengths == fresh.cache.lengths == [len(IDS) - 1 + 2]
    for mine, theirs in zip(state.cache.layers, fresh.cache.layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(mine.values, theirs.values, rtol=1e-5, atol=1e-6)


def test_rounds_without_a_proposal_leave_no_gap(target, drafter):
    features = features_of(target, IDS[:-1])
    state, start = drafter.start(IDS[:1]), 1
    for stop in range(4, len(IDS) + 1):
        tell(drafter, state, IDS[start:stop], features[start - 1 : stop - 1])
        start = stop
    got_K, got_KV = chain(drafter, state, SAMPLERS[0], 3, uniforms(3))
    want_K, want_KV = chain(drafter, prefilled(target, drafter), SAMPLERS[0], 3, uniforms(3))
    assert got_K.tolist() == want_K.tolist()
    torch.testing.assert_close(got_KV, want_KV, rtol=1e-5, atol=1e-6)


def test_a_prompt_of_one_token(target, drafter):
    state = prefilled(target, drafter, IDS[:2])
    assert chain(drafter, state, SAMPLERS[0], 2, uniforms(2))[0].shape == (2,)
    assert state.lengths == [1]


def test_requests_do_not_see_each_other(target, drafter):
    one, two = prefilled(target, drafter), prefilled(target, drafter, [7, 7, 7])
    chain(drafter, two, SAMPLERS[0], 4, uniforms(4))
    _, got_KV = chain(drafter, one, SAMPLERS[0], 3, uniforms(3))
    _, want_KV = chain(drafter, prefilled(target, drafter), SAMPLERS[0], 3, uniforms(3))
    assert torch.equal(got_KV, want_KV)


def test_features_that_are_off_by_one_would_show(target, drafter):
    """What makes the tests above ones: the proposal depends on every feature and on which token stands beside it."""
    _, want_KV = chain(drafter, prefilled(target, drafter), SAMPLERS[0], 1, uniforms(1))
    for change in (0, 5, len(IDS) - 2):
        features = features_of(target, IDS[:-1])
        taps_BTF = features.taps_BTF.clone()
        taps_BTF[:, change] = taps_BTF[:, (change + 1) % (len(IDS) - 1)].clone()
        state = prefilled(target, drafter, features=Features(features.hidden_BTH, taps_BTF))
        _, got_KV = chain(drafter, state, SAMPLERS[0], 1, uniforms(1))
        assert not torch.allclose(got_KV, want_KV, rtol=1e-3, atol=1e-4)


def test_a_drafter_that_was_told_nothing_says_so(drafter):
    with pytest.raises(SpectrainError, match="nothing was observed yet"):
        chain(drafter, drafter.start([3]), GREEDY, 1, uniforms(1))


# --- the same as in training ------------------------------------------------------------------------------------


def simulated(target, drafter, ids, drafted):
    """What the training forward says of the tokens after ``ids`` if ``drafted`` follows them: at each depth the logits
    at the last position whose feature is known, beside the pending token."""
    sequence = [*ids, *drafted, 0]
    ids_1T = torch.tensor([sequence])
    taps_1TF = features_of(target, ids[:-1]).taps_BTF
    padding = torch.zeros(1, len(sequence) - len(ids) + 1, taps_1TF.shape[-1], dtype=taps_1TF.dtype)
    empty_1T = torch.zeros(1, len(sequence))
    batch = FeatureBatch(
        ids_BT=ids_1T,
        answer_BT=torch.ones_like(ids_1T, dtype=torch.bool),
        hidden_BTH=torch.zeros(1, len(sequence), 32),
        taps_BTF=torch.cat([taps_1TF, padding], dim=1).clone(),
        log_normaliser_BT=empty_1T,
        greedy_BT=empty_1T,
    )
    with torch.no_grad():
        output = drafter(batch, depths=len(drafted))
    at = len(ids) - 2
    for depth, step in enumerate(output.depths):
        assert step.shift == depth + 2
        assert sequence[at + step.shift] == drafted[depth]
    return [step.hidden_BTH[0, at] @ step.head_DH.T for step in output.depths], output.columns_D


@pytest.mark.parametrize("sampler", [GREEDY, SAMPLERS[0]], ids=Sampler.describe)
@pytest.mark.parametrize("end", [2, 5, len(IDS)])
def test_drafting_is_what_training_simulated(target, drafter, sampler, end):
    """Depth d of the training forward gives the law of draft token d."""
    tokens_K, q_KV = chain(drafter, prefilled(target, drafter, IDS[:end]), sampler, 5, uniforms(5))
    logits, columns_D = simulated(target, drafter, IDS[:end], tokens_K.tolist())
    for depth, logits_D in enumerate(logits):
        if sampler.greedy:
            assert int(columns_D[logits_D.argmax()]) == tokens_K[depth]
        else:
            want_D = sampler.probabilities(logits_D).float()
            torch.testing.assert_close(q_KV[depth, columns_D].float(), want_D, rtol=1e-4, atol=1e-6)


def test_every_node_of_a_drawn_tree_has_the_law_that_training_simulated(target, drafter):
    """Along its own path, whatever its siblings are: each path is a chain that training could have met."""
    tree = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (0, 0, 0), (0, 1, 0), (2, 0, 0)))
    proposal = drafter.propose(prefilled(target, drafter), SAMPLERS[0], tree, [9], uniforms(tree.nodes)[None])
    node_of = {path: node for node, path in enumerate(tree.paths)}
    for path in tree.paths:
        nodes = [node_of[path[: depth + 1]] for depth in range(len(path))]
        tokens = [int(proposal.tokens_BN[0, node]) for node in nodes]
        logits, columns_D = simulated(target, drafter, IDS, tokens)
        for node, logits_D in zip([-1, *nodes], logits, strict=False):  # the law that its child was drawn from
            got_D = proposal.q[0, node + 1, columns_D].float()
            torch.testing.assert_close(got_D, SAMPLERS[0].probabilities(logits_D).float(), rtol=1e-4, atol=1e-6)


def test_a_dynamic_tree_holds_the_likeliest_chain(target, drafter):
    """Behind a prompt, with nodes of every level in one cache: the confidence is the simulated one, so the greedy chain
    is there as long as it is among the best."""
    shape = DynamicTree(3, 4, 30)
    tokens_K, _ = chain(drafter, prefilled(target, drafter), GREEDY, 3, uniforms(3))
    proposal = drafter.propose(prefilled(target, drafter), GREEDY, shape, [9], uniforms(shape.nodes)[None])
    tokens, parents = proposal.tokens_BN[0].tolist(), proposal.parents_BN[0].tolist()
    at = -1
    for token in tokens_K.tolist():
        at = next(n for n, (t, parent) in enumerate(zip(tokens, parents, strict=True)) if (t, parent) == (token, at))
    for parent in {p for p in parents if p >= 0}:
        path, node = [], parent
        while node >= 0:
            path, node = [tokens[node], *path], parents[node]
        logits, columns_D = simulated(target, drafter, IDS, [*path, 0])
        ranked = [int(columns_D[c]) for c in logits[len(path)].argsort(descending=True)]
        children = [tokens[n] for n, p in enumerate(parents) if p == parent]
        assert sorted(children) == sorted(ranked[: len(children)])


# --- binding ----------------------------------------------------------------------------------------------------


def test_a_drafter_without_a_target_says_so(target, drafter):
    loose: Any = Eagle3Drafter(drafter.config, drafter.layer_config, drafter.tap_layers, drafter._columns).double()
    with pytest.raises(SpectrainError, match=r"call bind\(target\) first"):
        prefilled(target, loose)
    loose.load_weights(drafter.state_dict())
    loose.bind(target)
    _, got_KV = chain(loose, prefilled(target, loose), SAMPLERS[0], 3, uniforms(3))
    _, want_KV = chain(drafter, prefilled(target, drafter), SAMPLERS[0], 3, uniforms(3))
    assert torch.equal(got_KV, want_KV)


@pytest.mark.parametrize(("change", "found"), [({"hidden": 16}, "16 and 28"), ({"padding": 3}, "32 and 27")])
def test_a_drafter_for_other_sizes_is_refused(tiny_target, drafter, change, found):
    other = tiny_target(layers=2, **{"padding": 4, **change})
    with pytest.raises(SpectrainError, match=f"hidden size 32 and 28 vocabulary rows, target has {found}"):
        drafter.bind(other)


def test_a_start_from_the_targets_layer_drafts_and_is_kept_by_reference_nowhere(tiny_target):
    target = tiny_target(dtype=torch.float32)
    counts = torch.ones(24, dtype=torch.long)
    drafter = Eagle3Drafter.build(Eagle3Config(draft_vocab_size=8, start="target_layer"), target, counts)
    target.tap(drafter.tap_layers)
    before = target.head_weight.clone()
    chain(drafter, prefilled(target, drafter), SAMPLERS[0], 2, uniforms(2))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.zero_()
    assert torch.equal(target.head_weight, before)
    assert not any(name.startswith("_") or "embed" in name for name in drafter.state_dict())


def test_a_start_from_a_layer_of_another_shape_is_refused(tiny_target):
    target = tiny_target("gpt2")
    with pytest.raises(SpectrainError, match=r"GPT2LMHeadModel is not .*use drafter\.start=random"):
        Eagle3Drafter.build(
            Eagle3Config(draft_vocab_size=8, start="target_layer"), target, torch.ones(24, dtype=torch.long)
        )
