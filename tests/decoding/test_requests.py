"""Requests that cannot be served are refused before anything is computed, by what is wrong with them."""

import pytest

from spectrain.decoding import generate, generate_plain
from spectrain.decoding.requests import stream_seed
from spectrain.drafters.base import Drafter, Proposal
from spectrain.drafters.growth import GrowingDrafter
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler
from spectrain.shapes import Chain, DynamicTree, StaticTree

GREEDY = Sampler()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": []}, "the prompt has no tokens"),
        ({"prompt": [1, 24]}, "prompt id 24 does not exist; the tokenizer has ids 0 to 23"),
        ({"prompt": [-1]}, "prompt id -1 does not exist"),
        ({"prompt": [1, "2"]}, "the prompt holds '2'; expected token ids, whole numbers"),
        ({"prompt": [1, 2.0]}, "the prompt holds 2.0; expected token ids"),
        ({"eos": "2"}, "eos_ids '2': expected a list of token ids"),
        ({"eos": 2}, "eos_ids 2: expected a list of token ids"),
        ({"penalties": {"repetition": 1.1}}, r"penalties .*: expected Penalties\(repetition=1.1\)"),
        ({"count": 121}, "a prompt of 8 tokens and 121 new ones exceed the target's context of 128"),
    ],
)
def test_requests_that_cannot_be_met_are_refused(tiny_target, tools, change, message):
    target = tiny_target(layers=2, padding=8)
    with pytest.raises(SpectrainError, match=message):
        tools.plain(target, **change)
    for shape in tools.SHAPES.values():
        with pytest.raises(SpectrainError, match=message):
            tools.one(target, tools.SelfDrafter(target), shape, **change)


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, True, "7"])
def test_seeds_that_no_stream_can_have_are_refused(tiny_target, tools, seed):
    target = tiny_target(layers=2)
    with pytest.raises(SpectrainError, match=f"seed {seed!r}: expected a whole number from 0"):
        tools.batch(target, None, None, [[1]], 2, seeds=[seed])
    with pytest.raises(SpectrainError, match="1 prompts and 2 seeds; expected one seed for each prompt"):
        tools.batch(target, None, None, [[1]], 2, seeds=[0, 1])
    assert len(tools.batch(target, None, None, [[1]], 2, seeds=[2**63 - 1])[0].tokens) == 2


def test_seeds_of_requests_depend_on_every_part_and_fit_a_stream():
    seeds = {stream_seed(*parts) for parts in ((0, "a", 1), (0, "a", 2), (1, "a", 1), (0, "b", 1), (0,), ())}
    assert len(seeds) == 6
    assert all(0 <= seed < 2**56 for seed in seeds)
    assert stream_seed(0, "a", 1) == stream_seed("0", "a", "1") == 29730136457841292


LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 20,
            "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}  # fmt: skip


def test_rotary_embeddings_that_depend_on_the_longest_row_keep_to_their_short_range(tiny_target, tools):
    """Beyond it all keys would turn another way as soon as one companion, or one drafted token, is that long."""
    target = tiny_target(layers=3, context=80, rope_parameters=LONGROPE)
    prompts = [list(range(12)), [7], [5, 3]]
    want = [tools.plain(target, prompt, 8).tokens for prompt in prompts]
    scripts = [[*prompts[0], *want[0]], *([*prompt, *[23] * 8] for prompt in prompts[1:])]
    for seed in range(3):
        got = tools.batch(target, tools.ScriptDrafter(scripts, seed=seed), Chain(5), prompts, 8)
        assert [result.tokens for result in got] == want
    for call in (lambda: tools.plain(target, prompts[0], 9), lambda: tools.batch(target, None, None, prompts, 9)):
        with pytest.raises(SpectrainError, match="12 tokens and 9 new ones exceed the target's context of 20"):
            call()


# --- shapes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, -3])
def test_a_draft_length_below_one_is_refused(k):
    with pytest.raises(SpectrainError, match=f"the draft length k is {k}; expected a whole number from 1 to 4096"):
        Chain(k)


class Heads(GrowingDrafter):
    """Two tokens ahead, of three columns each."""

    deepest, columns = 2, 3

    def start(self, first): ...

    def observe(self, state, committed): ...

    def select(self, state, rows): ...

    def root(self, state): ...

    def extend(self, state, tokens_BW, parents_BW): ...

    def vocabulary(self):
        return 24, None


class ChainsOnly(Heads):
    trees, deepest, columns = False, None, None


@pytest.mark.parametrize(
    ("drafter", "shape", "message"),
    [
        (Heads(), None, "a drafter needs a shape to fill; give shape="),
        (Heads(), 5, "shape 5: expected a Chain, a StaticTree or a DynamicTree"),
        (Heads(), Chain(3), "k=3 has depth 3, Heads drafts at most 2 tokens ahead"),
        (Heads(), DynamicTree(3, 2, 4), "dynamic tree of 4 has depth 3, Heads drafts at most 2 tokens ahead"),
        (Heads(), StaticTree(((0,), (0, 0), (0, 0, 0))), r"tree path \[0, 0, 0\] has depth 3"),
        (
            Heads(),
            DynamicTree(2, 4, 4),
            "^the top_k 4 of a dynamic tree of 4 is beyond the 3 tokens that Heads can propose",
        ),
        (
            Heads(),
            StaticTree(((0,), (1,), (2,), (3,))),
            r"tree path \[3\] is beyond the 3 tokens that Heads can propose",
        ),
        (ChainsOnly(), StaticTree(((0,), (1,))), "ChainsOnly proposes chains, not a tree of 2"),
        (ChainsOnly(), DynamicTree(2, 2, 2), "ChainsOnly proposes chains, not a dynamic tree of 2"),
    ],
)
def test_shapes_that_a_drafter_cannot_fill_are_refused_before_anything_runs(
    tiny_target, monkeypatch, drafter, shape, message
):
    target = tiny_target(layers=2)
    monkeypatch.setattr(target, "forward", None)
    with pytest.raises(SpectrainError, match=message):
        generate(target, drafter, [1, 2], sampler=GREEDY, max_new_tokens=4, shape=shape)


def test_plain_decoding_needs_no_shape(tiny_target):
    target = tiny_target(layers=2)
    request = {"sampler": GREEDY, "max_new_tokens": 5, "eos_ids": ()}
    want = generate_plain(target, [1, 2], **request).tokens
    for shape in (None, Chain(3), StaticTree(((0,), (1,)))):
        assert generate(target, None, [1, 2], shape=shape, **request).tokens == want


class Silent(Drafter):
    """Has nothing to propose, ever."""

    trees = True

    def start(self, first): ...

    def observe(self, state, committed): ...

    def select(self, state, rows): ...

    def propose(self, state, sampler, shape, limits, uniforms_BN):
        empty_B0 = uniforms_BN[:, :0].long()
        return Proposal(empty_B0, None if isinstance(shape, Chain) else empty_B0)


@pytest.mark.parametrize("sampler", [GREEDY, Sampler(1.0)], ids=Sampler.describe)
def test_a_drafter_may_have_nothing_to_say(tiny_target, tools, sampler):
    target = tiny_target(layers=2)
    for shape in tools.SHAPES.values():
        for result in tools.batch(target, Silent(), shape, count=6, sampler=sampler):
            assert [(r.proposed, r.accepted, r.committed, r.nodes) for r in result.rounds] == [(0, 0, 1, 0)] * 5
            if sampler.greedy:
                tools.check_books(result, shape, 6)
    got = tools.batch(target, Silent(), tools.SHAPES["static"], count=6)
    assert [result.tokens for result in got] == [tools.plain(target, p, 6).tokens for p in tools.PROMPTS]
