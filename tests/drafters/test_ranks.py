"""ranks.json: what it holds, and what is no such file."""

import json
from pathlib import Path

import pytest
import torch

from spectrain.drafters.eagle3 import Eagle3Config
from spectrain.drafters.ranks import accuracy_at, measure_ranks, measured_tree, read_ranks
from spectrain.drafters.tree_search import best_tree, rank_accuracy
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler
from spectrain.losses import supervised

WARM = Sampler(0.7, top_k=5)


@pytest.fixture(scope="module")
def case(tools, tiny_target, make_rows):
    target = tiny_target("llama", padding=8, dtype=torch.float32)
    rows = make_rows(target, 6)
    drafter = tools.drafter(target, Eagle3Config(depths=3, draft_vocab_size=16), rows)
    tools.train(drafter, target, tools.batch(target, drafter, rows), 15)
    return target, drafter, [tools.batch(target, drafter, rows[:4]), tools.batch(target, drafter, rows[4:])]


def test_one_pass_measures_every_sampler_and_t_0(case):
    target, drafter, batches = case
    drafter.train()
    ranks = measure_ranks(drafter, iter(batches), target.head, [WARM, Sampler()], ranks=4)
    assert drafter.training
    assert list(ranks["by_sampler"]) == ["greedy (T=0)", "T=0.7 top-k 5"]
    drafter.eval()
    for sampler in (Sampler(), WARM):
        want = rank_accuracy(drafter, batches, target.head, sampler, ranks=4)
        assert ranks["by_sampler"][sampler.describe()] == want
    assert ranks["by_sampler"]["greedy (T=0)"] != ranks["by_sampler"]["T=0.7 top-k 5"]
    assert ranks["positions"] == [sum(int(supervised(b.answer_BT, s).sum()) for b in batches) for s in drafter.shifts()]
    assert json.loads(json.dumps(ranks)) == ranks


def test_more_depths_than_it_was_trained_with(case):
    target, drafter, batches = case
    ranks = measure_ranks(drafter, batches, target.head, [], depths=4)
    assert [len(accuracy) for accuracy in ranks["by_sampler"].values()] == [4]
    assert len(ranks["positions"]) == 4


RANKS = {"positions": [9, 9], "by_sampler": {"greedy (T=0)": [[0.6, 0.2], [0.5, 0.1]], "T=1": [[0.3, 0.3], [0.1, 0.1]]}}


def test_another_sampler_has_the_tree_of_t_0():
    greedy, warm, unknown = (measured_tree(RANKS, sampler, 2) for sampler in (Sampler(), Sampler(1.0), WARM))
    assert (greedy.paths, warm.paths) == (((0,), (0, 0)), ((0,), (1,)))
    assert unknown == greedy == best_tree(accuracy_at(RANKS, WARM), 2)


def test_ranks_are_read_back(tmp_path):
    (tmp_path / "ranks.json").write_text(json.dumps(RANKS))
    assert read_ranks(tmp_path) == RANKS


def test_a_bundle_without_ranks_names_the_command(tmp_path):
    with pytest.raises(SpectrainError, match=rf"{tmp_path} has no ranks\.json.*: spectrain tree {tmp_path} --traffic"):
        read_ranks(tmp_path)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{", "Invalid JSON"),
        ("[]", "Input should be an object"),
        ("{}", "positions: Field required"),
        ('{"positions": [9], "by_sampler": {}}', "by_sampler: Value error, found no 'greedy (T=0)'"),
        ('{"positions": [9], "by_sampler": {"greedy (T=0)": 5}}', "by_sampler: greedy (T=0): Input should be a valid"),
        (
            '{"positions": [9], "by_sampler": {"greedy (T=0)": [[1.5]]}}',
            "(T=0): 0: 0: Input should be less than",
        ),
        ('{"positions": [9], "by_sampler": {"greedy (T=0)": [[NaN]]}}', "greedy (T=0): 0: 0: Input should be"),
    ],
)
def test_what_is_no_record_of_ranks_is_named(tmp_path, text, found):
    (tmp_path / "ranks.json").write_text(text)
    with pytest.raises(SpectrainError) as error:
        read_ranks(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / 'ranks.json'}: ")
    assert found in str(error.value)


def test_a_fault_of_our_own_is_not_taken_for_a_damaged_file(tmp_path, monkeypatch):
    (tmp_path / "ranks.json").write_text(json.dumps(RANKS))
    monkeypatch.setattr(Path, "read_bytes", lambda path: {}["fault"])
    with pytest.raises(KeyError, match="fault"):
        read_ranks(tmp_path)
