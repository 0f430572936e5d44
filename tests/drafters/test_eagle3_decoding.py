"""EAGLE-3 while decoding: the law it reports is the law it samples, its state a fresh prefill, its steps its training.

Shapes: T positions, K draft length, H hidden, F taps x H, V vocabulary, D draft vocabulary.
"""

from typing import Any

import pytest
import torch

from spectrain.cache import cached_length
from spectrain.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler
from spectrain.target import FeatureBatch, Features

GREEDY = Sampler()
SAMPLERS = [Sampler(1.0), Sampler(0.7, top_k=5, top_p=0.9), Sampler(2.0, top_p=0.5)]
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
DRAFT_VOCABULARY = 16


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target(padding=4)


@pytest.fixture(scope="module")
def drafter(target):
    torch.manual_seed(0)
    counts = torch.randint(1, 100, (target.vocab_size,))
    drafter = Eagle3Drafter.build(Eagle3Config(draft_vocab_size=DRAFT_VOCABULARY), target, counts).double()
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.5 / parameter.shape[1] ** 0.5)
            else:
                parameter.add_(0.3 * torch.randn_like(parameter))
    target.tap(drafter.tap_layers)
    return drafter


def features_of(target, ids):
    return target.forward(torch.tensor([ids]))


def prefilled(target, drafter, ids=IDS, features=None):
    state = drafter.start()
    drafter.observe(state, ids, features or features_of(target, ids[:-1]))
    return state


def uniforms(count, seed=0):
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- proposals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS, ids=Sampler.describe)
def test_q_is_a_law_over_the_targets_vocabulary(target, drafter, sampler):
    proposal = drafter.propose(prefilled(target, drafter), sampler, 5, uniforms(5))
    assert proposal.tokens_K.shape == (5,)
    assert proposal.q_KV.shape == (5, target.vocab_size)
    assert (proposal.q_KV >= 0).all()
    torch.testing.assert_close(proposal.q_KV.double().sum(-1), torch.ones(5, dtype=torch.float64), rtol=0, atol=1e-6)
    assert (proposal.q_KV[range(5), proposal.tokens_K] > 0).all()
    assert not proposal.q_KV[:, ~drafter.t2d].any(), "an id that the head cannot name"
    if sampler.top_k:
        assert ((proposal.q_KV > 0).sum(-1) <= sampler.top_k).all()


@pytest.mark.parametrize("sampler", SAMPLERS, ids=Sampler.describe)
def test_q_is_the_law_that_is_sampled(target, drafter, sampler):
    """Over an even grid of uniforms every token comes up as often as q says, to within the ends of its interval."""
    grid, features = 200, features_of(target, IDS[:-1])
    later = uniforms(2, seed=3)
    counts = torch.zeros(target.vocab_size)
    law_V = drafter.propose(prefilled(target, drafter, features=features), sampler, 2, later).q_KV[1]
    for i in range(grid):
        later[1] = (i + 0.5) / grid  # the first token fixed, the second over the grid
        proposal = drafter.propose(prefilled(target, drafter, features=features), sampler, 2, later)
        assert torch.equal(proposal.q_KV[1], law_V)
        counts[proposal.tokens_K[1]] += 1
    assert ((counts / grid - law_V).abs() <= 1 / grid + 1e-6).all()
    assert (law_V > 0.02).sum() >= 2, "a point mass would show nothing"


def test_a_token_depends_on_its_own_uniform_and_those_before(target, drafter):
    base = uniforms(4, seed=1)
    want = drafter.propose(prefilled(target, drafter), SAMPLERS[0], 4, base)
    other = base.clone()
    other[2] = 1 - other[2]
    got = drafter.propose(prefilled(target, drafter), SAMPLERS[0], 4, other)
    assert got.tokens_K[:2].tolist() == want.tokens_K[:2].tolist()
    assert torch.equal(got.q_KV[:3], want.q_KV[:3])
    assert not torch.equal(got.q_KV[3], want.q_KV[3])
    again = drafter.propose(prefilled(target, drafter), SAMPLERS[0], 4, base)
    assert torch.equal(again.tokens_K, want.tokens_K)


def test_a_greedy_proposal_is_the_likeliest_chain_as_point_masses(target, drafter):
    proposal = drafter.propose(prefilled(target, drafter), GREEDY, 4, uniforms(4))
    assert proposal.q_KV is None
    near = drafter.propose(prefilled(target, drafter), Sampler(1.0, top_k=1), 4, uniforms(4))
    assert proposal.tokens_K.tolist() == near.tokens_K.tolist()


def test_shorter_proposals_are_the_beginning_of_longer_ones(target, drafter):
    whole = drafter.propose(prefilled(target, drafter), SAMPLERS[0], 5, uniforms(5))
    for length in (1, 2, 4):
        part = drafter.propose(prefilled(target, drafter), SAMPLERS[0], length, uniforms(5))
        assert part.tokens_K.tolist() == whole.tokens_K[:length].tolist()
        assert torch.equal(part.q_KV, whole.q_KV[:length])


def test_only_ids_that_exist_are_proposed(target, drafter):
    assert int(drafter._columns.max()) < target.tokenizer_size == 24
    seen = set()
    for seed in range(20):
        proposal = drafter.propose(prefilled(target, drafter), Sampler(5.0), 5, uniforms(5, seed))
        seen |= set(proposal.tokens_K.tolist())
    assert seen <= set(drafter._columns.tolist())
    assert len(seen) > 8


# --- state ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [[], [5], [3, 4, 5], [2, 7, 9], list(range(2, 12))])
@pytest.mark.parametrize("drafted", [1, 3])
def test_any_series_of_rounds_leaves_the_state_of_a_fresh_prefill(target, drafter, cuts, drafted):
    features = features_of(target, IDS[:-1])
    state, start = drafter.start(), 0
    for stop in [*cuts, len(IDS)]:
        drafter.observe(state, IDS[start:stop], features[max(0, start - 1) : stop - 1])
        start = stop
        if stop < len(IDS):  # drafted and rejected, or accepted: in neither case may it leave a trace
            drafter.propose(state, SAMPLERS[0], drafted, uniforms(drafted, seed=stop))
    fresh = prefilled(target, drafter)
    got, want = (drafter.propose(s, SAMPLERS[0], 3, uniforms(3)) for s in (state, fresh))
    assert got.tokens_K.tolist() == want.tokens_K.tolist()
    torch.testing.assert_close(got.q_KV, want.q_KV, rtol=1e-5, atol=1e-6)
    assert state.length == fresh.length == len(IDS) - 1
    assert cached_length(state.cache) == cached_length(fresh.cache) == len(IDS) - 1 + 2
    for mine, theirs in zip(state.cache.layers, fresh.cache.layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(mine.values, theirs.values, rtol=1e-5, atol=1e-6)


def test_rounds_without_a_proposal_leave_no_gap(target, drafter):
    features = features_of(target, IDS[:-1])
    state = drafter.start()
    for stop in range(4, len(IDS) + 1):
        start = 0 if stop == 4 else stop - 1
        drafter.observe(state, IDS[start:stop], features[max(0, start - 1) : stop - 1])
    got = drafter.propose(state, SAMPLERS[0], 3, uniforms(3))
    want = drafter.propose(prefilled(target, drafter), SAMPLERS[0], 3, uniforms(3))
    assert got.tokens_K.tolist() == want.tokens_K.tolist()
    torch.testing.assert_close(got.q_KV, want.q_KV, rtol=1e-5, atol=1e-6)


def test_a_prompt_of_one_token(target, drafter):
    state = prefilled(target, drafter, IDS[:2])
    assert drafter.propose(state, SAMPLERS[0], 2, uniforms(2)).tokens_K.shape == (2,)
    assert state.length == 1


def test_requests_do_not_see_each_other(target, drafter):
    one, two = prefilled(target, drafter), prefilled(target, drafter, [7, 7, 7])
    drafter.propose(two, SAMPLERS[0], 4, uniforms(4))
    got = drafter.propose(one, SAMPLERS[0], 3, uniforms(3))
    want = drafter.propose(prefilled(target, drafter), SAMPLERS[0], 3, uniforms(3))
    assert torch.equal(got.q_KV, want.q_KV)


def test_features_that_are_off_by_one_would_show(target, drafter):
    """What makes the tests above ones: the proposal depends on every feature and on which token stands beside it."""
    want = drafter.propose(prefilled(target, drafter), SAMPLERS[0], 1, uniforms(1)).q_KV
    for change in (0, 5, len(IDS) - 2):
        features = features_of(target, IDS[:-1])
        taps_BTF = features.taps_BTF.clone()
        taps_BTF[:, change] = taps_BTF[:, (change + 1) % (len(IDS) - 1)].clone()
        state = drafter.start()
        drafter.observe(state, IDS, Features(features.hidden_BTH, taps_BTF))
        got = drafter.propose(state, SAMPLERS[0], 1, uniforms(1)).q_KV
        assert not torch.allclose(got, want, rtol=1e-3, atol=1e-4)


# --- the same as in training ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", [GREEDY, SAMPLERS[0]], ids=Sampler.describe)
@pytest.mark.parametrize("end", [2, 5, len(IDS)])
def test_drafting_is_what_training_simulated(target, drafter, sampler, end):
    """Depth d of the training forward, at the last position with a feature, gives the law of draft token d."""
    K = 5
    proposal = drafter.propose(prefilled(target, drafter, IDS[:end]), sampler, K, uniforms(K))
    sequence = [*IDS[:end], *proposal.tokens_K.tolist(), 0]
    ids_1T = torch.tensor([sequence])
    taps_1TF = features_of(target, IDS[: end - 1]).taps_BTF
    padding = torch.zeros(1, len(sequence) - end + 1, taps_1TF.shape[-1], dtype=taps_1TF.dtype)
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
        output = drafter(batch, depths=K)
    at = end - 2  # the last position whose feature is known, beside the pending token
    for depth, step in enumerate(output.depths):
        assert step.shift == depth + 2
        assert sequence[at + step.shift] == proposal.tokens_K[depth]
        logits_D = step.hidden_BTH[0, at] @ step.head_DH.T
        if sampler.greedy:
            assert int(output.columns_D[logits_D.argmax()]) == proposal.tokens_K[depth]
        else:
            want_D = sampler.probabilities(logits_D).float()
            got_D = proposal.q_KV[depth, output.columns_D].float()
            torch.testing.assert_close(got_D, want_D, rtol=1e-4, atol=1e-6)


# --- binding ----------------------------------------------------------------------------------------------------


def test_a_drafter_without_a_target_says_so(target, drafter):
    loose: Any = Eagle3Drafter(drafter.config, drafter.layer_config, drafter.tap_layers, drafter._columns).double()
    state = prefilled(target, loose)
    with pytest.raises(SpectrainError, match=r"call bind\(target\) first"):
        loose.propose(state, GREEDY, 1, uniforms(1))
    loose.load_weights(drafter.state_dict())
    loose.bind(target)
    got = loose.propose(prefilled(target, loose), SAMPLERS[0], 3, uniforms(3))
    want = drafter.propose(prefilled(target, drafter), SAMPLERS[0], 3, uniforms(3))
    assert torch.equal(got.q_KV, want.q_KV)


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
    drafter.propose(prefilled(target, drafter), SAMPLERS[0], 2, uniforms(2))
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
