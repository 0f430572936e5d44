"""Visited states: what the observer adds up is what laws looked up afterwards, along the answers, say."""

import pytest
import torch
from bigram import Bigram

from spectrain.decoding import generate_batch
from spectrain.evaluation.visited import Visited, Watch
from spectrain.exact.sampler import Sampler
from spectrain.shapes import Chain, StaticTree

VOCABULARY, K, PROMPTS = 24, 3, [[3, 1, 4], [1, 5], [9, 2, 6, 5]]
SAMPLERS = [Sampler(1.0), Sampler(0.7, top_p=0.8)]


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target(layers=2, vocab=VOCABULARY, hidden=16)


def decoded(target, drafter, sampler, observer, *, shape=Chain(K), runs=20, rule="token"):  # noqa: B008
    prompts = PROMPTS * runs
    settings = {"sampler": sampler, "max_new_tokens": 16, "shape": shape, "eos_ids": (5,), "verification": rule}
    results = generate_batch(target, drafter, prompts, seeds=range(len(prompts)), observer=observer, **settings)
    return prompts, results


def looked_up(target, drafter, sampler, prompts, results):
    """[Σ α, states] by position, from the answers, the rounds and a forward over each answer."""
    sums = [[0.0, 0] for _ in range(K)]
    for prompt, result in zip(prompts, results, strict=True):
        row = [*prompt, *result.tokens]
        p_TV = sampler.probabilities(target.logits(target.forward(torch.tensor([row])).hidden_BTH[0]))
        place = len(prompt)  # of the pending token
        for round_ in result.rounds:
            for at in range(min(round_.proposed, round_.accepted + 1, round_.committed)):
                p_V, logits_V = p_TV[place + at], drafter.table_VV[row[place + at]]
                q_V = (Sampler() if drafter.chosen else sampler).probabilities(logits_V)
                sums[at] = [sums[at][0] + float(torch.minimum(p_V, q_V).sum()), sums[at][1] + 1]
            place += round_.committed
    return sums


@pytest.mark.parametrize("sampler", SAMPLERS, ids=Sampler.describe)
@pytest.mark.parametrize(("rule", "chosen"), [("token", False), ("block", False), ("token", True)])
def test_visited_alpha_is_that_of_the_states_along_the_answer(target, rule, chosen, sampler):
    drafter, visited = Bigram(target, chosen=chosen), Visited(K)
    prompts, results = decoded(target, drafter, sampler, visited, rule=rule)
    expected = looked_up(target, drafter, sampler, prompts, results)
    assert [count for _, count in visited.alpha] == [count for _, count in expected]
    assert [alpha for alpha, _ in visited.alpha] == pytest.approx([alpha for alpha, _ in expected], rel=1e-5)
    assert min(count for _, count in expected) > 10, "next to nothing was visited: nothing is tested"
    assert (visited.confidence is None) == chosen


@pytest.mark.parametrize("chosen", [False, True])
def test_acceptance_on_visited_states_is_what_alpha_says(target, chosen):
    """Accepted tokens less their probabilities add up to nothing but noise, ends of answers included."""
    visited = Visited(K)
    _, results = decoded(target, Bigram(target, chosen=chosen), SAMPLERS[0], visited, runs=100)
    accepted = sum(min(r.accepted, r.committed) for result in results for r in result.rounds)
    alpha, states = (sum(column) for column in zip(*visited.alpha, strict=True))
    assert abs(accepted - alpha) < 4 * (states / 4) ** 0.5
    assert abs(0.8 * accepted - alpha) > 4 * (states / 4) ** 0.5  # were a fifth of them lost


def test_confidence_is_what_the_drafter_gave_its_own_token(target):
    """A drafter that draws from a law which is flat on four tokens gives each a quarter."""
    drafter, visited = Bigram(target), Visited(K)
    drafter.table_VV = torch.full((VOCABULARY, VOCABULARY), -torch.inf)
    drafter.table_VV[:, :4] = 0.0
    _, results = decoded(target, drafter, SAMPLERS[0], visited)
    rounds = [r for result in results for r in result.rounds]
    total, tested, accepted = visited.confidence[2]
    assert total == tested / 4
    assert tested == sum(count for _, count in visited.alpha) > 50
    assert accepted == sum(min(r.accepted, r.committed) for r in rounds) > 0
    assert all(row == [0.0, 0, 0] for i, row in enumerate(visited.confidence) if i != 2)


def test_a_watch_asks_for_laws_only_where_there_are_states_to_see():
    cpu = torch.device("cpu")
    assert Watch(cpu, Sampler(), 3).observer is None
    assert Watch(cpu, Sampler(1.0), 0).observer is None  # plain decoding
    assert Watch(cpu, Sampler(1.0), None).observer is None  # a tree
    watch = Watch(cpu, Sampler(1.0), 2)
    assert watch.observer is not None
    assert watch.end() | {"energy_j": None} == {"visited_alpha": [[0.0, 0]] * 2, "confidence": None, "energy_j": None}


def test_a_tree_is_none_of_an_observers_chains(target):
    """What an observer is shown of a tree has the paths that were kept."""
    shown = []
    decoded(target, Bigram(target), SAMPLERS[0], shown.append, shape=StaticTree(((0,), (1,), (0, 0))), runs=1)
    assert all(judged.proposal.parents_BN is not None for judged in shown if judged.proposal.tokens_BN.shape[1])
