"""A request decoded in a batch gives what it gives alone, whoever shares the batch and whenever they leave."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrain.decoding import Decoding, generate_batch
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler
from spectrain.shapes import Chain, DynamicTree, StaticTree

GREEDY = Sampler()
SAMPLERS = [GREEDY, Sampler(1.0), Sampler(0.7, top_k=8, top_p=0.9)]
SEEDS = [11, 12, 13, 14, 15]
WIDE = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
SCHEMES = {  # drafter, shape, verification
    "plain": ("none", None, "token"),
    "ngram": ("ngram", Chain(4), "block"),
    "chain": ("eagle3", Chain(3), "token"),
    "block": ("eagle3", Chain(3), "block"),
    "distinct": ("eagle3", StaticTree(WIDE), "token"),
    "independent": ("noisy", StaticTree(WIDE, "independent"), "token"),
    "chosen": ("noisy", StaticTree(WIDE, "chosen"), "token"),
    "dynamic": ("noisy", DynamicTree(3, 2, 6), "token"),
}


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target("mistral", layers=3)


@pytest.fixture(scope="module")
def drafters(target, tools):
    return {"none": None, **{kind: tools.drafter(kind, target) for kind in ("ngram", "eagle3", "noisy")}}


# --- plain decoding in a batch ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS, ids=Sampler.describe)
def test_a_plain_batch_is_plain_decoding_of_each(tiny_target, architecture, tools, sampler):
    """Ragged prompts are padded on the right, where no position of any kind of attention sees the padding."""
    target = tiny_target(architecture, layers=3)
    free = [tools.plain(target, p, 10, sampler, seed=s) for p, s in zip(tools.PROMPTS, SEEDS, strict=True)]
    for eos in ([], [free[0].tokens[2]], [free[1].tokens[0], free[3].tokens[4]]):
        got = tools.batch(target, None, None, count=10, sampler=sampler, seeds=SEEDS, eos=eos)
        ends = [next((i + 1 for i, t in enumerate(one.tokens) if t in eos), 10) for one in free]
        assert [one.tokens for one in got] == [one.tokens[:end] for one, end in zip(free, ends, strict=True)]
        assert [one.finished == "eos" for one in got] == [one.tokens[-1] in eos for one in got]


def test_plain_decoding_itself_stops_where_the_batch_does(target, tools):
    free = tools.plain(target).tokens
    want = tools.plain(target, eos=[free[3]])
    assert tools.told(tools.batch(target, None, None, tools.PROMPTS[:1], eos=[free[3]])) == tools.told([want])


# --- companions -------------------------------------------------------------------------------------------------


POOL = [([3, 1, 4, 1, 5, 9, 2, 6], 1), ([7], 2), ([2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9], 3), ([0, 0, 0], 4),
        ([7], 5), ([5] * 9, 6)]  # fmt: skip


@pytest.fixture(scope="module")
def alone(target, drafters, tools):
    """What each request of the pool gets on its own, without an EOS."""
    known = {}

    def alone(scheme, sampler, count, number):
        key = (scheme, sampler, count, number)
        if key not in known:
            (kind, shape, rule), (prompt, seed) = SCHEMES[scheme], POOL[number]
            known[key] = tools.one(target, drafters[kind], shape, prompt, count, sampler, seed=seed, verification=rule)
        return known[key]

    return alone


@pytest.mark.parametrize("scheme", SCHEMES)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, len(POOL) - 1), min_size=1, max_size=6),
    st.sets(st.integers(0, 23), max_size=3),
    st.sampled_from([(GREEDY, 9), (Sampler(2.0), 9), (Sampler(2.0), 4), (Sampler(1.5, top_k=5), 9)]),
)
def test_what_a_request_gets_does_not_depend_on_its_companions(target, drafters, alone, scheme, numbers, eos, how):
    """In any company and order, twice in one batch, and beside requests that end early: the same tokens and rounds,
    not just the same law."""
    (kind, shape, rule), (sampler, count) = SCHEMES[scheme], how
    got = generate_batch(target, drafters[kind], [POOL[i][0] for i in numbers], seeds=[POOL[i][1] for i in numbers],
                         sampler=sampler, max_new_tokens=count, shape=shape, verification=rule,
                         eos_ids=eos)  # fmt: skip
    for number, result in zip(numbers, got, strict=True):
        free = alone(scheme, sampler, count, number)
        end = next((i + 1 for i, token in enumerate(free.tokens) if token in eos), count)
        assert result.tokens == free.tokens[:end]
        proposed = [(r.proposed, r.nodes) for r in result.rounds]
        assert proposed == [(r.proposed, r.nodes) for r in free.rounds[: len(proposed)]]
        kept = [r.accepted for r in result.rounds[:-1]]  # the last one may be cut by the EOS
        assert kept == [r.accepted for r in free.rounds[: len(kept)]]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_request_has_its_own_stream(target, drafters, tools, scheme):
    kind, shape, rule = SCHEMES[scheme]
    same = tools.batch(target, drafters[kind], shape, tools.PROMPTS[:1] * 4, 10, SAMPLERS[1], seeds=[1, 2, 1, 3],
                       verification=rule)  # fmt: skip
    answers = [tuple(result.tokens) for result in same]
    assert answers[0] == answers[2]
    assert len(set(answers)) == 3


# --- leaving ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_finished_request_leaves_the_batch(target, drafters, tools, monkeypatch, scheme):
    kind, shape, rule = SCHEMES[scheme]
    free = [tools.plain(target, prompt, 12).tokens for prompt in tools.PROMPTS]
    eos = [free[0][2]]
    ends = [tokens.index(eos[0]) + 1 if eos[0] in tokens else 12 for tokens in free]
    assert len(set(ends)) > 1, "nobody ended early: nothing is tested"
    widths: list[int] = []
    forward = target.forward

    def spy(ids_BT, *, cache=None, layout=None):
        if cache is decoding._cache:  # not the drafter's own
            widths.append(len(ids_BT))
        return forward(ids_BT, cache=cache, layout=layout)

    monkeypatch.setattr(target, "forward", spy)
    decoding = Decoding(target, drafters[kind], tools.PROMPTS, seeds=SEEDS, sampler=GREEDY, max_new_tokens=12,
                        shape=shape, verification=rule, eos_ids=eos)  # fmt: skip
    heard = list(decoding)
    assert [result.tokens for result in decoding.results] == [t[:end] for t, end in zip(free, ends, strict=True)]
    rounds = [1 + len(result.rounds) for result in decoding.results]
    assert widths == [len(events) for events in heard] == [sum(n > i for n in rounds) for i in range(max(rounds))]
    assert widths[0] == 5 > widths[-1]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_stops_when_the_last_request_ends(target, drafters, tools, scheme):
    kind, shape, rule = SCHEMES[scheme]
    first = [tools.plain(target, prompt, 1).tokens[0] for prompt in tools.PROMPTS]
    results = tools.batch(target, drafters[kind], shape, eos=first, verification=rule)
    assert tools.told(results) == [([token], "eos") for token in first]
    assert all(result.rounds == [] for result in results)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_the_budget_is_met_and_never_exceeded(target, drafters, tools, scheme, count):
    kind, shape, rule = SCHEMES[scheme]
    results = tools.batch(target, drafters[kind], shape, count=count, sampler=SAMPLERS[1], verification=rule)
    assert [(len(result.tokens), result.finished) for result in results] == [(count, "budget")] * 5
    for result in results:
        tools.check_books(result, shape, count)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_nothing_asked_is_nothing_given(target, drafters, scheme):
    kind, shape, rule = SCHEMES[scheme]
    decoding = Decoding(target, drafters[kind], [], seeds=[], sampler=GREEDY, max_new_tokens=4, shape=shape,
                        verification=rule)  # fmt: skip
    assert list(decoding) == decoding.results == []


# --- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1], []], "the prompt has no tokens"),
        ([[1], [24]], "prompt id 24 does not exist"),
        ([[1], [1] * 121], "a prompt of 121 tokens and 8 new ones exceed the target's context of 128"),
    ],
)
def test_one_bad_request_is_refused_before_anything_runs(target, drafters, tools, monkeypatch, prompts, message):
    monkeypatch.setattr(target, "forward", None)
    for kind, shape, rule in SCHEMES.values():
        with pytest.raises(SpectrainError, match=message):
            tools.batch(target, drafters[kind], shape, prompts, 8, verification=rule)


@pytest.mark.parametrize("seeds", [[], [1], [1, 2, 3]])
def test_every_request_needs_a_seed(target, tools, seeds):
    with pytest.raises(SpectrainError, match=f"2 prompts and {len(seeds)} seeds; expected one seed for each prompt"):
        generate_batch(target, None, tools.PROMPTS[:2], seeds=seeds, sampler=GREEDY, max_new_tokens=2)


def test_no_id_beyond_the_tokenizer_is_ever_emitted(tiny_target, tools):
    target = tiny_target(layers=3, padding=12)
    with torch.no_grad():
        target.head_weight[24:] = 40 * target.head_weight[:12]
    for sampler in SAMPLERS:
        for result in tools.batch(target, None, None, count=20, sampler=sampler):
            assert max(result.tokens) < 24
