"""Trees by size: each bundle has its own, for each sampler, made from its ranks."""

import json
from pathlib import Path

import pytest
import torch

from spectrain.bundle import Belonging, save_drafter
from spectrain.data.conversations import load_conversations
from spectrain.drafters import family_of
from spectrain.drafters.eagle3 import Eagle3Config
from spectrain.drafters.medusa import MedusaConfig
from spectrain.drafters.ngram import NgramConfig
from spectrain.errors import SpectrainError
from spectrain.evaluation.bundles import Asked, compare_bundles, evaluate_bundle
from spectrain.evaluation.contenders import AcceptanceConfig, contenders
from spectrain.evaluation.document import read_document
from spectrain.evaluation.entrants import resolve_bundles
from spectrain.evaluation.exactness import ExactnessConfig
from spectrain.evaluation.measured_trees import MeasuredTree
from spectrain.exact.sampler import Sampler

RANKS = {
    "eagle3": {"greedy (T=0)": [[0.6, 0.2], [0.5, 0.1], [0.4, 0.1]], "T=1": [[0.3, 0.3], [0.1, 0.1], [0.1, 0.1]]},
    "medusa": {"greedy (T=0)": [[0.4, 0.39], [0.1, 0.1]]},
}
PATHS = {  # the best trees of two nodes, by drafter and temperature
    ("eagle3", 0.0): [[0], [0, 0]],
    ("eagle3", 1.0): [[0], [1]],
    ("medusa", 0.0): [[0], [1]],
    ("medusa", 1.0): [[0], [1]],  # not measured at T=1: as at T=0
}
CONFIG = AcceptanceConfig(
    k=(2,), trees=(MeasuredTree(2),), samplers=(Sampler(), Sampler(1.0)), max_new_tokens=5, seeds=1
)
NAME = "tree 2 nodes (measured)"


@pytest.fixture
def chats(finished_run):
    return load_conversations([str(finished_run / "heldout.jsonl")])[:2]


@pytest.fixture
def bundles(chat_target, tmp_path):
    found = []
    for config in (Eagle3Config(depths=2, draft_vocab_size=64), MedusaConfig(heads=2)):
        torch.manual_seed(0)
        drafter = family_of(config).build(config, chat_target, torch.arange(chat_target.vocab_size))
        folder = tmp_path / config.type / "bundle"
        save_drafter(folder, drafter, Belonging.to(chat_target))
        write(folder, RANKS[config.type])
        found.append(str(folder))
    return found


def write(folder, by_sampler):
    (Path(folder) / "ranks.json").write_text(json.dumps({"positions": [9] * 3, "by_sampler": by_sampler}))


@pytest.fixture
def compare(bundles, chat_target, chats, tmp_path):
    def compare(config=CONFIG):
        return compare_bundles(
            resolve_bundles(bundles),
            chat_target,
            Asked(chats, config, tmp_path / "out", traffic="t", baselines=(NgramConfig(),), progress=False),
        )

    return compare


def test_each_bundle_has_its_own_tree_for_each_sampler(compare):
    path = compare()
    blocks = read_document(path)["samplers"]
    found = {}
    for block in blocks:
        names = [c["contender"] for c in block["contenders"]]
        assert names == ["plain", "ngram k=2", "eagle3 k=2", f"eagle3 {NAME}", "medusa k=2", f"medusa {NAME}"]
        for contender in block["contenders"]:
            if contender["contender"].endswith(NAME):
                shape = contender["shape"]
                assert shape["children"] == "chosen"
                found[contender["drafter"], block["sampler"]["temperature"]] = shape["paths"]
    assert found == PATHS
    assert all(entry["equal"] == 2 for entry in blocks[0]["exactness"])
    for report in ("report.md", "report.html"):
        assert f"eagle3 {NAME}" in (path.parent / report).read_text(encoding="utf-8")


def test_a_drafter_without_a_bundle_is_left_out_with_a_note(compare, capsys):
    path = compare()
    reason = "it has no bundle, so its ranks are not measured"
    assert read_document(path)["context"]["left_out"] == [{"drafter": "ngram", "draft": NAME, "reason": reason}]
    assert f"note: ngram {NAME} is left out: {reason}" in capsys.readouterr().out
    assert f"Left out: ngram {NAME}: {reason}." in (path.parent / "report.md").read_text(encoding="utf-8")


def test_a_finished_measurement_is_taken_as_it_is_unless_ranks_have_changed(compare, bundles):
    first = compare().read_bytes()
    assert compare().read_bytes() == first
    write(bundles[0], {"greedy (T=0)": [[0.5, 0.4], [0.1, 0.1]]})
    with pytest.raises(SpectrainError, match=r"other settings, .*measured_trees\.eagle3\.greedy \(T=0\)"):
        compare()


def test_a_bundle_without_ranks_is_refused_before_anything_is_measured(compare, bundles, tmp_path):
    (Path(bundles[1]) / "ranks.json").unlink()
    with pytest.raises(SpectrainError, match=f"spectrain tree {bundles[1]} --traffic"):
        compare()
    assert not (tmp_path / "out").exists()


NEVER_RIGHT = {"greedy (T=0)": [[0.0, 0.0]]}


def test_a_bundle_whose_ranks_give_no_tree_is_left_out_of_it(compare, bundles, capsys):
    write(bundles[1], NEVER_RIGHT)
    document = read_document(compare())
    names = [c["contender"] for c in document["samplers"][0]["contenders"]]
    assert names == ["plain", "ngram k=2", "eagle3 k=2", f"eagle3 {NAME}", "medusa k=2"]
    reason = next(left["reason"] for left in document["context"]["left_out"] if left["drafter"] == "medusa")
    assert "are never the target's; train it first" in reason
    assert f"note: medusa {NAME} is left out: {reason}" in capsys.readouterr().out


def test_where_no_bundle_has_a_tree_it_is_refused(compare, bundles, tmp_path):
    for folder in bundles:
        write(folder, NEVER_RIGHT)
    with pytest.raises(SpectrainError, match="are never the target's; train it first"):
        compare()
    assert not (tmp_path / "out").exists()


def test_a_bundle_by_itself(bundles, chat_target, chats, tmp_path):
    path = evaluate_bundle(
        Path(bundles[1]),
        chat_target,
        Asked(
            chats, CONFIG.model_copy(update={"samplers": (Sampler(),)}), tmp_path / "out", traffic="t", progress=False
        ),
    )
    (block,) = read_document(path)["samplers"]
    assert [c["contender"] for c in block["contenders"]] == ["plain", "medusa k=2", f"medusa {NAME}"]


def test_without_any_bundle_that_fills_trees_it_is_refused(bundles, chat_target):
    drafters = {"ngram": family_of(NgramConfig())(NgramConfig())}
    with pytest.raises(SpectrainError, match=r"tree 2 nodes \(measured\): found no bundle whose drafter fills trees"):
        contenders(drafters, (2,), (MeasuredTree(2),), leave_out=True)


def test_a_recipe_and_a_record_write_it_by_its_own_key():
    config = AcceptanceConfig.model_validate({"trees": [{"measured": 16}, {"paths": [[0]]}, {"depth": 2, "nodes": 3}]})
    assert config.trees[0] == MeasuredTree(nodes=16)
    written = config.model_dump(mode="json")
    assert written["trees"][0] == {"measured": 16}
    assert AcceptanceConfig.model_validate(written) == config


@pytest.mark.parametrize(
    ("trees", "message"),
    [
        ([{"measured": 0}], "nodes of a measured tree: found 0, expected a whole number, 1 to 1024"),
        ([{"measured": "x"}], "valid integer"),
        ([{"measured": 3, "nodes": 3}], "Unexpected keyword argument"),
        ([{"measured": 3}, {"measured": 3}], "the same tree twice: tree 3 nodes"),
        ([5], "or {measured: 16}"),
    ],
)
def test_what_is_no_measured_tree_is_refused(trees, message):
    with pytest.raises(ValueError, match=message):
        AcceptanceConfig.model_validate({"trees": trees})


def test_exactness_takes_trees_as_they_are():
    with pytest.raises(ValueError, match="expected a tree"):
        ExactnessConfig.model_validate({"trees": [{"measured": 3}]})
