"""A request decoded in a batch gives what it gives alone, whoever shares the batch and whenever they leave."""

import pytest
import torch

from spectrain.decoding import generate_plain
from spectrain.decoding.batched import generate_batch
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler

GREEDY = Sampler()
SAMPLERS = [GREEDY, Sampler(1.0), Sampler(0.7, top_k=8, top_p=0.9)]
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9], [0, 0, 0], [23, 22, 21, 20, 19]]
SEEDS = [11, 12, 13, 14, 15]
NO_EOS: tuple[int, ...] = ()


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target(layers=3)


def alone(target, prompts=PROMPTS, seeds=SEEDS, sampler=GREEDY, count=8, eos=NO_EOS):
    return [
        generate_plain(target, prompt, sampler=sampler, max_new_tokens=count, eos_ids=eos, seed=seed)
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]


def together(target, prompts=PROMPTS, seeds=SEEDS, sampler=GREEDY, count=8, eos=NO_EOS, **more):
    return generate_batch(target, prompts, sampler=sampler, max_new_tokens=count, seeds=seeds, eos_ids=eos, **more)


def batchable(tiny_target, architecture):
    """Eager attention (Gemma-2) leaves NaN at padding in float64."""
    return tiny_target(architecture, layers=3, dtype=torch.float32 if architecture == "gemma2" else torch.float64)


def told(results):
    return [(result.tokens, result.finished) for result in results]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=Sampler.describe)
def test_every_request_gets_what_it_gets_alone(tiny_target, architecture, sampler):
    target = batchable(tiny_target, architecture)
    assert told(together(target, sampler=sampler, count=12)) == told(alone(target, sampler=sampler, count=12))


@pytest.mark.parametrize("sampler", SAMPLERS, ids=Sampler.describe)
def test_companions_and_their_order_do_not_matter(target, sampler):
    want = dict(enumerate(told(together(target, sampler=sampler))))
    for chosen in ([0], [2, 1], [4, 3, 2, 1, 0], [1, 1, 1, 3]):
        got = together(target, [PROMPTS[i] for i in chosen], [SEEDS[i] for i in chosen], sampler)
        assert told(got) == [want[i] for i in chosen]


def test_each_request_has_its_own_stream(target):
    same = together(target, [PROMPTS[0]] * 4, [1, 2, 1, 3], SAMPLERS[1])
    answers = [tuple(result.tokens) for result in same]
    assert answers[0] == answers[2]
    assert len(set(answers)) == 3


@pytest.mark.parametrize("sampler", SAMPLERS, ids=Sampler.describe)
def test_each_request_ends_at_its_own_eos(tiny_target, architecture, sampler):
    target = batchable(tiny_target, architecture)
    free = alone(target, sampler=sampler)
    for eos in ([free[0].tokens[2]], [free[1].tokens[0], free[3].tokens[4]]):
        got = together(target, sampler=sampler, eos=eos)
        assert told(got) == told(alone(target, sampler=sampler, eos=eos))
        assert any(result.finished == "eos" for result in got)


def test_a_finished_request_leaves_the_batch(target, monkeypatch):
    free = [result.tokens for result in alone(target)]
    eos = [free[0][2]]
    want = told(alone(target, eos=eos))
    running = [sum(len(tokens) > step for tokens, _ in want) for step in range(8)]
    assert running[0] == 5 > running[-1], "nobody ended early: nothing is tested"
    widths: list[int] = []
    heard: list[int] = []
    forward = target.forward

    def spy(ids, **rest):
        widths.append(len(ids))
        return forward(ids, **rest)

    monkeypatch.setattr(target, "forward", spy)
    assert told(together(target, eos=eos, on_tokens=heard.append)) == want
    assert widths == heard == [count for count in running if count]
    assert sum(heard) == sum(len(tokens) for tokens, _ in want)


def test_it_stops_when_the_last_request_ends(target):
    first = [result.tokens[0] for result in alone(target, count=1)]
    heard: list[int] = []
    results = together(target, eos=first, on_tokens=heard.append)
    assert told(results) == [([token], "eos") for token in first]
    assert heard == [5]


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_the_budget_is_met_and_never_exceeded(target, count):
    results = together(target, count=count)
    assert told(results) == told(alone(target, count=count))
    assert {len(result.tokens) for result in results} == {count}


def test_nothing_asked_is_nothing_given(target):
    assert together(target, [], []) == []


def test_eos_ids_default_to_the_targets(tiny_target, target):
    eos = alone(target)[0].tokens[2]
    with_eos = tiny_target(layers=3, eos=eos)
    got = generate_batch(with_eos, PROMPTS, sampler=GREEDY, max_new_tokens=8, seeds=SEEDS)
    assert told(got) == told(alone(target, eos=[eos]))


@pytest.mark.parametrize("sampler", SAMPLERS, ids=Sampler.describe)
def test_no_id_beyond_the_tokenizer_is_ever_emitted(tiny_target, sampler):
    target = tiny_target(layers=3, padding=12)
    with torch.no_grad():
        target.head_weight[24:] = 40 * target.head_weight[:12]
    for result in together(target, sampler=sampler, count=30):
        assert max(result.tokens) < 24


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1], []], "the prompt has no tokens"),
        ([[1], [24]], "prompt id 24 does not exist"),
        ([[1], [1] * 121], "a prompt of 121 tokens and 8 new ones exceed the target's context of 128"),
    ],
)
def test_one_bad_request_is_refused_before_anything_runs(target, monkeypatch, prompts, message):
    monkeypatch.setattr(target, "forward", None)
    with pytest.raises(SpectrainError, match=message):
        together(target, prompts, [1, 2])


@pytest.mark.parametrize("seeds", [[], [1], [1, 2, 3]])
def test_every_request_needs_a_seed(target, seeds):
    with pytest.raises(SpectrainError, match=f"2 prompts and {len(seeds)} seeds; expected one seed for each prompt"):
        together(target, PROMPTS[:2], seeds)


def test_padding_that_poisons_its_row_is_an_error_not_an_answer(tiny_target):
    target = tiny_target("gemma2", layers=3)
    with pytest.raises(SpectrainError, match=r"not finite with torch\.float64 and 'eager' attention"):
        together(target)
    assert told(together(target, PROMPTS[:1], SEEDS[:1])) == told(alone(target, PROMPTS[:1], SEEDS[:1]))
