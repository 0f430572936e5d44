"""The drafter that knows the answers: right as often as it should be, at every depth and on every branch."""

import pytest
import torch

from spectrain.decoding import generate, generate_batch, generate_plain
from spectrain.drafters.base import Committed
from spectrain.evaluation.rehearsed import RehearsedDrafter
from spectrain.exact.sampler import Sampler
from spectrain.shapes import Chain, DynamicTree, StaticTree
from spectrain.target import Features

PROMPTS = [[3, 1, 4, 1, 5, 9], [7], [2, 7, 1, 8, 2, 8, 1, 8], [0, 0, 0]]
BUSHY = StaticTree(tuple((i,) for i in range(3)) + tuple((i, j) for i in range(3) for j in range(3)))
TOKENS = 40


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target(layers=2)


@pytest.fixture(scope="module")
def plain(target):
    return [generate_plain(target, p, sampler=Sampler(), max_new_tokens=TOKENS).tokens for p in PROMPTS]


@pytest.fixture
def drafter(target, plain):
    drafter = RehearsedDrafter(target)
    for prompt, answer in zip(PROMPTS, plain, strict=True):
        drafter.learn(prompt, answer)
    return drafter


def state_of(drafter, prompt, answered):
    """A state that has seen the prompt and this much of an answer."""
    state = drafter.start([prompt[0]])
    nothing = Features(torch.empty(1, 0, 1), torch.empty(1, 0, 0))
    for tokens in ([*prompt[1:], *answered[:1]], answered[1:]):
        if tokens:
            drafter.observe(state, Committed([tokens], torch.tensor([tokens]), nothing))
    return state


@pytest.mark.parametrize("shape", [Chain(4), BUSHY, DynamicTree(4, 3, 12)], ids=["chain", "static", "dynamic"])
def test_rounds_of_every_length_come_up_and_the_output_is_plain_decodings(target, plain, drafter, shape):
    settings = {"sampler": Sampler(), "max_new_tokens": TOKENS, "shape": shape}
    runs = generate_batch(target, drafter, PROMPTS, seeds=[0] * 4, **settings)
    assert [run.tokens for run in runs] == plain
    accepted = {r.accepted for run in runs for r in run.rounds if not r.clipped}
    assert accepted == set(range(shape.depth + 1))
    alone = [generate(target, drafter, prompt, **settings).rounds for prompt in PROMPTS]
    told = [[(r.proposed, r.accepted, r.committed, r.nodes) for r in rounds] for rounds in alone]
    assert told == [[(r.proposed, r.accepted, r.committed, r.nodes) for r in run.rounds] for run in runs]


def test_the_right_token_stands_at_every_rank(plain, drafter):
    ranks = []
    for prompt, answer in zip(PROMPTS, plain, strict=True):
        for read in range(1, TOKENS - 1):
            logits_V = drafter.root(state_of(drafter, prompt, answer[:read]))[0, 0]
            ranks.append(int((logits_V > logits_V[answer[read]]).sum()))
    share = [ranks.count(rank) / len(ranks) for rank in (0, 1, 2)]
    assert share == pytest.approx([0.7, 0.15, 0.05], abs=0.07)
    assert 0.03 < sum(rank >= 8 for rank in ranks) / len(ranks) < 0.2


def test_a_path_that_left_the_answer_is_not_followed_by_it(plain, drafter):
    """Beyond a wrong node nothing is known, and after a wrong committed token neither."""
    prompt, answer = PROMPTS[0], plain[0]
    for read in range(1, 30):
        state = state_of(drafter, prompt, answer[:read])
        drafter.root(state)
        wrong = (answer[read] + 1) % 24
        both_BWV = drafter.extend(state, torch.tensor([[answer[read], wrong]]), torch.tensor([[0, 0]]))
        assert drafter._right(state.lines[0], (answer[read],)) == answer[read + 1]
        assert drafter._right(state.lines[0], (wrong,)) is None
        assert both_BWV.shape == (1, 2, 24)
        astray = state_of(drafter, prompt, [*answer[: read - 1], (answer[read - 1] + 1) % 24])
        assert drafter._right(astray.lines[0], ()) is None


def test_prompts_that_were_not_learned_are_decoded_all_the_same(target, drafter):
    prompt = [11, 12]
    want = generate_plain(target, prompt, sampler=Sampler(), max_new_tokens=12).tokens
    assert generate(target, drafter, prompt, sampler=Sampler(), max_new_tokens=12, shape=Chain(3)).tokens == want


def test_it_drafts_the_same_for_a_seed_and_other_for_another(target, plain):
    def drafted(seed):
        drafter = RehearsedDrafter(target, seed)
        drafter.learn(PROMPTS[0], plain[0])
        logits = [drafter.root(state_of(drafter, PROMPTS[0], plain[0][:n])) for n in range(1, 9)]
        return torch.stack(logits).argmax(-1).flatten().tolist()

    assert drafted(0) == drafted(0)
    assert drafted(0) != drafted(1)
