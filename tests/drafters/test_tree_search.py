"""The best static tree for given accuracies, against every tree there is; and the accuracies, against a plain count."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from spectrain.decoding import generate, generate_plain
from spectrain.drafters.eagle3 import Eagle3Config
from spectrain.drafters.medusa import MedusaConfig
from spectrain.drafters.scoring import score_batch
from spectrain.drafters.tree_search import best_tree, expected_accepted, rank_accuracy
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler
from spectrain.shapes import StaticTree

GREEDY = Sampler()


# --- the search -----------------------------------------------------------------------------------------------------


def every_tree(depths: int, ranks: int, nodes: int) -> set[frozenset[tuple[int, ...]]]:
    """All sets of at most ``nodes`` paths in which every path has its parent and its elder sibling."""
    found: set[frozenset[tuple[int, ...]]] = set()
    growing = {frozenset({(0,)})}
    while growing:
        found |= growing
        grown = set()
        for tree in growing:
            if len(tree) == nodes:
                continue
            for path in tree:
                for following in ((*path[:-1], path[-1] + 1), (*path, 0)):
                    if len(following) <= depths and following[-1] < ranks and following not in tree:
                        grown.add(tree | {following})
        growing = grown
    return found


def value(tree: Any, accuracy: list[list[float]]) -> float:
    total = 0.0
    for path in tree:
        product = 1.0
        for depth, rank in enumerate(path):
            product *= accuracy[depth][rank]
        total += product
    return total


def test_the_enumeration_has_every_tree():
    """Of depth 1 one a number of nodes; of at most 3 nodes in 2 by 2 the root pairs, chains and what joins them."""
    assert len(every_tree(1, 5, 3)) == 3
    assert every_tree(2, 2, 3) == {
        frozenset({(0,)}), frozenset({(0,), (1,)}), frozenset({(0,), (0, 0)}), frozenset({(0,), (1,), (0, 0)}),
        frozenset({(0,), (0, 0), (0, 1)}), frozenset({(0,), (1,), (1, 0)}),
    }  # fmt: skip


@pytest.mark.parametrize(("depths", "ranks", "nodes"), [(2, 3, 6), (3, 2, 6), (3, 3, 5), (4, 1, 3), (1, 4, 3)])
def test_no_tree_is_better(depths, ranks, nodes):
    """Falling accuracies of every kind, sharp, flat, and with ties."""
    trees = every_tree(depths, ranks, nodes)
    dice = random.Random(0)
    for case in range(40):
        accuracy = []
        for _ in range(depths):
            row = sorted((dice.random() ** dice.choice([0.3, 1, 4]) for _ in range(ranks)), reverse=True)
            row = [round(x, 1) if case % 4 == 0 else x for x in row]
            accuracy.append([x / max(1.0, sum(row)) for x in row])
        if not accuracy[0][0]:
            continue
        for count in range(1, nodes + 1):
            best = max(value(tree, accuracy) for tree in trees if len(tree) <= count)
            found = best_tree(accuracy, count)
            assert found.nodes <= count
            assert found.children == "chosen"
            assert value(found.paths, accuracy) == pytest.approx(best, rel=1e-12)
            assert expected_accepted(found, accuracy) == pytest.approx(best, rel=1e-12)


def test_a_rank_that_was_right_more_often_than_the_one_before_counts_with_it():
    """0.1 and 0.3 are taken as 0.2 each; no tree is better for the accuracies thus mended."""
    measured, mended = [[0.4, 0.1, 0.3, 0.05], [0.5, 0.0, 0.2, 0.1]], [[0.4, 0.2, 0.2, 0.05], [0.5, 0.1, 0.1, 0.1]]
    trees = every_tree(2, 4, 6)
    for count in range(1, 7):
        best = max(value(tree, mended) for tree in trees if len(tree) <= count)
        assert value(best_tree(measured, count).paths, mended) == pytest.approx(best)
    assert best_tree(measured, 4).paths == ((0,), (1,), (2,), (0, 0))


def test_a_known_tree():
    """The five largest products are 0.6, 0.36, 0.3, 0.216, and 0.18 twice, of which the lower ranks come first."""
    accuracy = [[0.6, 0.3, 0.1]] * 3
    assert best_tree(accuracy, 5).paths == ((0,), (1,), (0, 0), (0, 1), (0, 0, 0))
    assert expected_accepted(best_tree(accuracy, 5), accuracy) == pytest.approx(0.6 + 0.3 + 0.36 + 0.18 + 0.216)


def test_more_nodes_only_add_to_a_tree():
    accuracy = [[0.5, 0.2, 0.1], [0.4, 0.3, 0.1], [0.3, 0.2, 0.2]]
    trees = [set(best_tree(accuracy, nodes).paths) for nodes in range(1, 30)]
    assert all(smaller < larger for smaller, larger in itertools.pairwise(trees))


def test_what_is_never_right_is_left_out():
    assert best_tree([[0.5, 0.0], [0.0, 0.0]], 9).paths == ((0,),)
    assert best_tree([[0.5], [0.2, 0.1]], 9).paths == ((0,), (0, 0), (0, 1))


@pytest.mark.parametrize(
    ("accuracy", "nodes", "match"),
    [
        ([[0.5]], 0, "nodes of the tree: found 0, expected a whole number of at least 1"),
        ([[0.5]], 2.0, r"nodes of the tree: found 2\.0"),
        ([[0.5], [1.5]], 2, r"accuracy at depth 2, rank 0: found 1\.5, expected 0 to 1"),
        ([[0.5, float("nan")]], 2, "accuracy at depth 1, rank 1: found nan"),
        ([[0.0], [0.5]], 2, "never the target's; train it first"),
        ([], 2, "no tree"),
    ],
)
def test_what_makes_no_tree_is_refused(accuracy, nodes, match):
    with pytest.raises(SpectrainError, match=match):
        best_tree(accuracy, nodes)


def test_a_tree_without_its_accuracies_is_refused():
    with pytest.raises(SpectrainError, match=r"tree path \[0, 1\]: there is no accuracy of its last rank at depth 2"):
        expected_accepted(StaticTree(((0,), (0, 0), (0, 1))), [[0.5], [0.4]])


# --- the accuracies -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", ids=["whole vocabulary", "reduced"],
                params=[MedusaConfig(heads=3, head="own"), Eagle3Config(depths=3, draft_vocab_size=16)])  # fmt: skip
def case(request, tools, tiny_target, make_rows):
    """A drafter that was trained a little, its target, and a few rows in two batches."""
    target = tiny_target("llama", padding=8, dtype=torch.float32)
    rows = make_rows(target, 6)
    drafter = tools.drafter(target, request.param, rows)
    tools.train(drafter, target, tools.batch(target, drafter, rows), 15)
    return target, drafter, [tools.batch(target, drafter, rows[:4]), tools.batch(target, drafter, rows[4:])]


@pytest.mark.parametrize("sampler", [GREEDY, Sampler(1.0), Sampler(0.7, top_k=5, top_p=0.9)], ids=Sampler.describe)
def test_accuracy_is_the_targets_mean_probability_of_each_rank(case, sampler):
    """Position by position, from the model itself."""
    target, drafter, batches = case
    want, counts = torch.zeros(3, 4), torch.zeros(3)
    with torch.no_grad():
        for batch in batches:
            logits_BTV = target.model(batch.ids_BT).logits[..., :24]
            output = drafter(batch)
            for d, depth in enumerate(output.depths):
                for b, t in depth.mask_BT.nonzero().tolist():
                    p_V = sampler.probabilities(logits_BTV[b, t + depth.shift - 1])
                    best_R = (depth.head_DH @ depth.hidden_BTH[b, t]).argsort(descending=True)[:4]
                    want[d] += p_V[best_R if output.columns_D is None else output.columns_D[best_R]]
                    counts[d] += 1
    got = rank_accuracy(drafter, batches, target.head, sampler, ranks=4, chunk=7)
    torch.testing.assert_close(torch.tensor(got), want / counts[:, None], rtol=1e-4, atol=1e-5)


def test_the_first_rank_at_t_0_is_greedy_accuracy(case):
    target, drafter, batches = case
    scores = score_batch(drafter, batches[0], target.head) + score_batch(drafter, batches[1], target.head)
    got = rank_accuracy(drafter, batches, target.head, GREEDY, ranks=2)
    assert [ranks[0] for ranks in got] == pytest.approx(
        [right / count for right, count in zip(scores.greedy, scores.positions, strict=True)]
    )


def test_there_are_as_many_ranks_and_depths_as_the_drafter_has(case):
    target, drafter, batches = case
    columns = len(drafter(batches[0]).depths[0].head_DH)
    got = rank_accuracy(drafter, batches, target.head, GREEDY, ranks=99, depths=2)
    assert [len(ranks) for ranks in got] == [columns] * 2
    if columns == 24:
        assert [sum(ranks) for ranks in got] == pytest.approx([1.0] * 2), "every token of the target has some rank"
    empty = replace(batches[0], answer_BT=torch.zeros_like(batches[0].answer_BT))
    assert rank_accuracy(drafter, [empty], target.head, GREEDY, ranks=2) == [[0.0, 0.0]] * 3
    with pytest.raises(SpectrainError, match="no rows to measure"):
        rank_accuracy(drafter, [], target.head, GREEDY)


def test_a_found_tree_decodes_to_the_targets_own_answer(case):
    target, drafter, batches = case
    tree = best_tree(rank_accuracy(drafter, batches, target.head, GREEDY), 9)
    assert tree.nodes == 9
    prompt = batches[0].ids_BT[0, :4].tolist()
    want = generate_plain(target, prompt, sampler=GREEDY, max_new_tokens=12, eos_ids=())
    got = generate(target, drafter, prompt, sampler=GREEDY, max_new_tokens=12, eos_ids=(), shape=tree)
    assert got.tokens == want.tokens
    assert sum(round_.accepted for round_ in got.rounds)
