"""Running a batch step by step: what is heard on the way is what comes out, and a listener may stop at any time."""

import pytest
import torch

from spectrain.decoding import Decoding, Emitted, outcome
from spectrain.drafters.ngram import NgramConfig, NgramDrafter
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler
from spectrain.shapes import Chain

SAMPLERS = [Sampler(), Sampler(1.5)]
KINDS = ["none", "ngram", "eagle3", "noisy"]


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target(layers=3)


def decoding_of(target, tools, kind, shape, sampler=SAMPLERS[0], eos=(), prompts=None, **more):
    prompts = tools.PROMPTS if prompts is None else prompts
    drafter = None if kind == "none" else tools.drafter(kind, target)
    return Decoding(target, drafter, prompts, seeds=range(len(prompts)), sampler=sampler, max_new_tokens=10,
                    shape=shape, eos_ids=eos, **more)  # fmt: skip


@pytest.mark.parametrize("sampler", SAMPLERS, ids=Sampler.describe)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_heard_is_what_comes_out(target, tools, kind, sampler):
    eos = [tools.plain(target).tokens[2]]
    for shape in tools.SHAPES.values():
        want = [result.tokens for result in tools.batch(target, None if kind == "none" else tools.drafter(kind, target),
                                                        shape, count=10, sampler=sampler, eos=eos)]  # fmt: skip
        decoding = decoding_of(target, tools, kind, shape, sampler, eos)
        heard: list[list[int]] = [[] for _ in want]
        ended: set[int] = set()
        for events in decoding:
            assert [event.request for event in events] == sorted({event.request for event in events} - ended)
            for event in events:
                assert isinstance(event, Emitted)
                assert event.tokens, "a round gives every request at least a token"
                heard[event.request] += event.tokens
                assert decoding.results[event.request].tokens == heard[event.request]
                if event.finished:
                    ended.add(event.request)
                    assert decoding.results[event.request].finished == event.finished
        assert heard == [result.tokens for result in decoding.results] == want
        assert ended == set(range(5))


@pytest.mark.parametrize("kind", KINDS)
def test_a_consumer_may_stop_early_and_go_on_later(target, tools, kind):
    for shape in (tools.SHAPES["chain"], tools.SHAPES["dynamic"]):
        want = [result.tokens for result in decoding_run(target, tools, kind, shape)]
        for steps in (1, 3):
            decoding = decoding_of(target, tools, kind, shape)
            for _ in range(steps):
                for _ in decoding:
                    break
            part = [list(result.tokens) for result in decoding.results]
            assert all(len(tokens) >= steps for tokens in part)
            assert part == [tokens[: len(one)] for tokens, one in zip(want, part, strict=True)]
            assert [result.tokens for result in decoding_run(target, tools, kind, shape)] == want, "harm was done"
            for _ in decoding:
                pass
            assert [result.tokens for result in decoding.results] == want
            assert list(decoding) == []


def decoding_run(target, tools, kind, shape):
    decoding = decoding_of(target, tools, kind, shape)
    for _ in decoding:
        pass
    return decoding.results


def test_several_decodings_take_turns_on_one_target(tiny_target, tools):
    """Each has its own taps, cache and streams."""
    target = tiny_target(layers=4)
    other = tools.eagle3(target, tap_layers=(0, 1, 2), seed=5)
    ways = [("eagle3", tools.SHAPES["static"]), ("ngram", Chain(2)), ("none", None), ("noisy", tools.SHAPES["dynamic"])]
    decodings = [decoding_of(target, tools, kind, shape, SAMPLERS[1]) for kind, shape in ways]
    decodings.append(Decoding(target, other, tools.PROMPTS, seeds=range(5), sampler=SAMPLERS[1], max_new_tokens=10,
                              shape=Chain(3), eos_ids=()))  # fmt: skip
    want = [[result.tokens for result in tools.batch(target, decoding.drafter, decoding.shape, count=10,
                                                     sampler=SAMPLERS[1])] for decoding in decodings]  # fmt: skip
    assert decodings[0].drafter.tap_layers == (0, 1, 3)
    running = [iter(decoding) for decoding in decodings]
    while running:
        running = [one for one in running if next(one, None) is not None]
    assert [[result.tokens for result in decoding.results] for decoding in decodings] == want


def test_the_consumer_does_not_run_in_inference_mode(target, tools):
    weight = torch.ones(3, requires_grad=True)
    for _ in decoding_of(target, tools, "eagle3", Chain(2)):
        assert not torch.is_inference_mode_enabled()
        (weight * 2).sum().backward()
    assert weight.grad is not None


def test_not_waiting_for_the_device_changes_no_token(target, tools):
    for shape in tools.SHAPES.values():
        drafter = tools.eagle3(target)
        assert tools.told(tools.batch(target, drafter, shape, sampler=SAMPLERS[1], timed=False)) == tools.told(
            tools.batch(target, drafter, shape, sampler=SAMPLERS[1])
        )


def test_a_decoding_whose_round_was_interrupted_does_not_go_on(tiny_target, monkeypatch):
    """Its cache and its random stream stand somewhere inside the round."""
    target = tiny_target()
    decoding = Decoding(target, NgramDrafter(NgramConfig()), [[1, 2, 3, 1, 2]], seeds=[0], sampler=Sampler(),
                        shape=Chain(3), max_new_tokens=12)  # fmt: skip
    rounds = iter(decoding)
    next(rounds)

    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(outcome, "check_finite", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(rounds)
    with pytest.raises(SpectrainError, match="interrupted"):
        list(decoding)
