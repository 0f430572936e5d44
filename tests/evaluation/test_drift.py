"""Bundles that hold a target of their own: how far it has moved, and how they are measured beside others."""

import argparse
import html
import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from spectrain import commands
from spectrain.bundle import Belonging, save_drafter
from spectrain.config import load_recipe
from spectrain.data.conversations import load_conversations
from spectrain.drafters.joint import JointConfig
from spectrain.drafters.medusa import MedusaConfig, MedusaDrafter
from spectrain.drafters.ngram import NgramConfig
from spectrain.errors import SpectrainError
from spectrain.evaluation import drift as module
from spectrain.evaluation.bundles import Asked, compare_bundles, evaluate_bundle
from spectrain.evaluation.contenders import AcceptanceConfig
from spectrain.evaluation.document import read_document
from spectrain.evaluation.drift import ANSWERS, drift, drift_table, law_distances
from spectrain.evaluation.entrants import resolve_bundles, shared_target
from spectrain.evaluation.leaderboard import OWN_TARGET
from spectrain.evaluation.report import render_markdown
from spectrain.manifest import MANIFEST_FILE, read_manifest
from spectrain.pipeline import Run
from spectrain.target import load_target

CONFIG = AcceptanceConfig(k=(2,), max_new_tokens=5)
LAW = "Exact in the law of the bundle's own, changed target, which is not the original's"
JOINT = JointConfig(rank=2, alpha=8)
EXACT = {"value": 0.0, "low": 0.0, "high": 0.0}
ALL = {"value": 1.0, "low": 1.0, "high": 1.0}


def save(folder, chat_folder, joint, size=0.0, seed=0):
    """Heads of a frozen target, or of one that ``size`` moves."""
    target = load_target(str(chat_folder))
    torch.manual_seed(seed)
    drafter = MedusaDrafter.build(MedusaConfig(heads=2, joint=joint), target, torch.zeros(target.vocab_size))
    with torch.no_grad():
        for parameter in drafter.adapter.values() if joint else ():
            parameter.add_(size * torch.randn(parameter.shape))
    save_drafter(folder, drafter, Belonging.to(target))
    return folder


@pytest.fixture(scope="module")
def runs(chat_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    save(folder / "frozen" / "bundle", chat_folder, None)
    save(folder / "moved" / "bundle", chat_folder, JOINT, size=0.3)
    return folder


@pytest.fixture(scope="module")
def moved(runs):
    return runs / "moved" / "bundle"


@pytest.fixture(scope="module")
def own(moved):
    return load_target(str(moved / "target"))


@pytest.fixture(scope="module")
def chats(finished_run):
    return load_conversations([str(finished_run / "heldout.jsonl")])


# --- the numbers --------------------------------------------------------------------------------------------------


def test_an_unmoved_copy_has_not_drifted(chat_target, chat_folder, chats, tmp_path):
    found = drift("d", chat_target, load_target(str(chat_folder)), chats, 6, tmp_path / "drift.jsonl")
    assert (found["answers"], found["max_new_tokens"]) == (ANSWERS, 6)
    assert list(found["by_kind"]) == ["everything", "sum", "sum/even", "sum/odd"]
    for row in found["by_kind"].values():
        assert (row["kl"], row["total_variation"], row["same_argmax"]) == (EXACT, EXACT, ALL)


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_distances_are_those_of_the_laws_at_each_token(chat_target, own, chunk):
    prompt, answer = [5, 6, 7, 8], [9, 10, 11, 12, 13]
    want = {"tokens": 5, "kl": 0.0, "total_variation": 0.0, "same_argmax": 0}
    for at in range(len(answer)):
        ids = torch.tensor([prompt + answer[:at]])
        p, q = (
            t.model(input_ids=ids).logits[0, -1, : t.tokenizer_size].double().softmax(-1) for t in (chat_target, own)
        )
        want["kl"] += float((p * (p / q).log()).sum())
        want["total_variation"] += 1 - float(torch.minimum(p, q).sum())
        want["same_argmax"] += int(p.argmax() == q.argmax())
    found = law_distances(chat_target, own, prompt, answer, chunk)
    assert found == pytest.approx(want, rel=1e-4)
    assert found["kl"] > 0.01


def test_kinds_are_means_a_token_and_parents_are_unions():
    lines = [
        {"kind": "a/x", "tokens": 10, "kl": 1.0, "total_variation": 2.0, "same_argmax": 10},
        {"kind": "a/y", "tokens": 30, "kl": 5.0, "total_variation": 2.0, "same_argmax": 20},
        {"kind": "b", "tokens": 60, "kl": 0.0, "total_variation": 6.0, "same_argmax": 60},
    ]
    table = drift_table(lines)
    assert list(table) == ["everything", "a", "a/x", "a/y", "b"]
    assert {kind: row["kl"]["value"] for kind, row in table.items()} == pytest.approx(
        {"everything": 0.06, "a": 0.15, "a/x": 0.1, "a/y": 1 / 6, "b": 0}
    )
    assert (table["a"]["conversations"], table["a"]["tokens"]) == (2, 40)
    assert (table["a"]["kl"]["low"], table["a"]["kl"]["high"]) == pytest.approx((0.1, 1 / 6))
    assert table["a/x"]["kl"]["low"] is None
    assert table["everything"]["same_argmax"]["value"] == pytest.approx(0.9)


# --- in a document ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compared(runs, chat_target, chats, tmp_path_factory):
    folders = resolve_bundles([str(runs / name / "bundle") for name in ("frozen", "moved")])
    return compare_bundles(
        folders,
        chat_target,
        Asked(chats, CONFIG, tmp_path_factory.mktemp("out"), traffic="t", baselines=(NgramConfig(),), progress=False),
    )


def names(runs):
    return [f"medusa ({runs.name}/{side})" for side in ("frozen", "moved")]


def test_a_moved_target_decodes_beside_the_original_and_stands_apart(compared, runs):
    document = read_document(compared)
    (block,) = document["samplers"]
    frozen, moved = names(runs)
    by_name = {c["contender"]: c for c in block["contenders"]}
    assert list(by_name) == ["plain", "ngram k=2", f"{frozen} k=2", f"plain ({moved})", f"{moved} k=2"]
    assert by_name[f"{moved} k=2"]["baseline"] == f"plain ({moved})"
    assert by_name[f"plain ({moved})"]["pooled"]["speedup"] is None
    board = block["leaderboard"]
    assert {row["contender"]: row["why"] for row in board["apart"]} == dict.fromkeys(
        (f"plain ({moved})", f"{moved} k=2"), OWN_TARGET
    )
    assert {row["contender"] for row in board["ranked"]} == {"plain", "ngram k=2", f"{frozen} k=2"}
    assert {e["contender"]: e["equal"] for e in block["exactness"]} == dict.fromkeys(
        ("ngram k=2", f"{frozen} k=2", f"{moved} k=2"), 4
    )
    assert block["verdict"]["overall"]["best"]["contender"] in {"ngram k=2", f"{frozen} k=2"}
    assert block["verdict"]["by_drafter"][moved]["overall"]["best"]["contender"] == f"{moved} k=2"
    assert set(block["verdict"]["by_drafter"]) == {"ngram", frozen, moved}


def test_its_speed_is_set_against_its_own_plain_decoding(compared, runs):
    _, moved = names(runs)
    lines = [json.loads(x) for x in (compared.parent / "evaluation" / "samples.jsonl").read_text().splitlines()]
    seconds, tokens = ({}, {})
    for line in lines:
        name = line["contender"]
        seconds[name] = seconds.get(name, 0) + line["total_s"]
        tokens[name] = tokens.get(name, 0) + line["new_tokens"]
    rate = {name: tokens[name] / seconds[name] for name in seconds}
    contenders = {c["contender"]: c for c in read_document(compared)["samplers"][0]["contenders"]}
    total = contenders[f"{moved} k=2"]["pooled"]["speedup"]["total"]["value"]
    assert total == pytest.approx(rate[f"{moved} k=2"] / rate[f"plain ({moved})"])


def test_drift_is_in_the_document_and_in_the_reports(compared, runs, chat_target, own, chats, tmp_path):
    _, moved = names(runs)
    document = read_document(compared)
    assert document["drift"] == {moved: drift(moved, chat_target, own, chats, 5, tmp_path / "drift.jsonl")}
    assert "drift" not in document["context"]
    assert document["drift"][moved]["by_kind"]["everything"]["kl"]["value"] > 0
    for name in ("report.md", "report.html"):
        text = html.unescape((compared.parent / name).read_text(encoding="utf-8"))
        origin = document["drift"][moved]["original"]
        assert origin == document["context"]["target"]["name"]
        assert f"The target that was trained with {moved} is not the original, {origin}, which it derives from" in text
        assert "How far the target has moved" in text
        assert re.search(rf"Exact in law, whatever is drafted: [^.]*frozen\) k=2\. {LAW}: .*moved\) k=2\.", text)


def test_a_report_of_an_earlier_document_says_nothing_of_drift(compared):
    document = {key: value for key, value in read_document(compared).items() if key != "drift"}
    assert "How far the target has moved" not in render_markdown(document)


def test_measured_again_it_is_read_and_not_measured(compared, runs, chat_target, chats, monkeypatch):
    before = read_document(compared)
    monkeypatch.setattr(module, "law_distances", lambda *_: pytest.fail("measured again"))
    folders = resolve_bundles([str(runs / name / "bundle") for name in ("frozen", "moved")])
    path = compare_bundles(
        folders,
        chat_target,
        Asked(chats, CONFIG, compared.parent, traffic="t", baselines=(NgramConfig(),), progress=False),
    )
    assert read_document(path)["drift"] == before["drift"]


# --- one bundle by itself -----------------------------------------------------------------------------------------


def options(bundle, chats, output, **changes):
    values = {"bundle": str(bundle), "traffic": [str(chats)], "target": None, "dtype": "float32", "k": (2,),
              "tree": None, "verification": "token", "temperature": (0.0,), "bad_rows": "error", "top_k": None,
              "top_p": None, "conversations": None, "max_new_tokens": 5, "stop_at": None, "batch": None,
              "context": None, "batch_groups": None, "request_rate": None, "seed": 0, "output": str(output),
              **changes}  # fmt: skip
    return argparse.Namespace(**values)


@pytest.mark.parametrize("named", [False, True], ids=["by itself", "the original is named"])
def test_evaluate_takes_the_bundles_own_target(moved, chat_folder, finished_run, tmp_path, named):
    changes = {"target": str(chat_folder)} if named else {}
    document = read_document(commands.evaluate(options(moved, finished_run / "heldout.jsonl", tmp_path, **changes)))
    assert document["context"]["target"]["weights"] == read_manifest(moved).target.weights_digest
    (block,) = document["samplers"]
    assert [c["contender"] for c in block["contenders"]] == ["plain", "ngram k=2", "medusa k=2"]
    assert all(entry["equal"] == 4 for entry in block["exactness"])
    assert document["drift"]["medusa"]["by_kind"]["everything"]["kl"]["value"] > 0
    assert document["context"]["target"]["derived_from"]["weights"] == read_manifest(moved).derived_from.weights_digest
    for name in ("report.md", "report.html"):
        text = html.unescape((tmp_path / name).read_text())
        assert re.search(f"{LAW}: ngram k=2, medusa k=2\\. Plain decoding, .* is that target's", text)
        assert "Exact in law" not in text
        assert "as fast as plain decoding of the bundle's own, changed target" in text


def test_without_the_original_drift_is_not_measured_and_that_is_said(moved, finished_run, tmp_path, capsys):
    alone = Path(shutil.copytree(moved, tmp_path / "alone"))
    values = json.loads((alone / MANIFEST_FILE).read_text())
    values["derived_from"]["name"] = str(tmp_path / "gone")
    (alone / MANIFEST_FILE).write_text(json.dumps(values))
    document = read_document(commands.evaluate(options(alone, finished_run / "heldout.jsonl", tmp_path / "out")))
    assert document["drift"] == {}
    said = capsys.readouterr().out
    assert "note: drift is not measured" in said
    assert str(tmp_path / "gone") in said


def test_the_original_is_enough_for_a_run(moved, chat_target, chats, tmp_path):
    """A run holds the original alone."""
    path = evaluate_bundle(moved, chat_target, Asked(chats[:2], CONFIG, tmp_path, traffic="t", progress=False))
    document = read_document(path)
    assert document["context"]["target"]["weights"] == read_manifest(moved).target.weights_digest
    assert document["drift"]["medusa"]["by_kind"]["everything"]["conversations"] == 2


# --- which belong together ----------------------------------------------------------------------------------------


def stranger(moved, folder):
    """Derived from another original."""
    other = Path(shutil.copytree(moved, folder / "other"))
    values = json.loads((other / MANIFEST_FILE).read_text())
    values["derived_from"]["weights_digest"] = "0" * 64
    values["target"]["weights_digest"] = "1" * 64
    (other / MANIFEST_FILE).write_text(json.dumps(values))
    return other


def test_a_bundle_of_a_strangers_original_is_refused(runs, moved, chat_target, chats, tmp_path):
    other = stranger(moved, tmp_path)
    for first in (runs / "frozen" / "bundle", moved):
        with pytest.raises(SpectrainError, match=r"other does not belong to the target of .* weights_digest"):
            resolve_bundles([str(first), str(other)])
    with pytest.raises(SpectrainError, match="does not fit this target"):
        evaluate_bundle(other, chat_target, Asked(chats[:1], CONFIG, tmp_path / "out", traffic="t", progress=False))


def test_an_original_that_is_none_is_refused(moved, own, chats, tmp_path):
    with pytest.raises(SpectrainError, match="was not derived from"):
        evaluate_bundle(moved, own, Asked(chats[:1], CONFIG, tmp_path, traffic="t", progress=False), original=own)


def test_bundles_share_the_original_or_a_moved_target(runs, moved, own, chat_target, tmp_path):
    frozen = runs / "frozen" / "bundle"
    for folders in ({"f": frozen, "m": moved}, {"m": moved, "f": frozen}, {"m": moved}):
        assert shared_target(folders).identity == chat_target.identity()
    later = save(tmp_path / "later", moved / "target", None)
    found = shared_target({"m": moved, "l": later})
    assert found.weights_digest == own.identity().weights_digest
    assert found.name == str(moved / "target")


def test_a_target_derived_from_another_bundles_is_told_apart(moved, own, chats, tmp_path):
    """Both lie in a folder that is called target."""
    bundle = save(tmp_path / "again" / "bundle", moved / "target", JOINT, size=0.2, seed=1)
    path = evaluate_bundle(bundle, own, Asked(chats[:2], CONFIG, tmp_path / "out", traffic="t", progress=False))
    document = read_document(path)
    assert document["context"]["target"]["name"] == "again/bundle/target"
    assert document["context"]["target"]["derived_from"]["name"] == "moved/bundle/target"
    assert document["drift"]["medusa"]["original"] == "moved/bundle/target"
    assert "is not the original, moved/bundle/target, which it derives from" in render_markdown(document)


def test_a_run_measures_what_it_has_moved(make_recipe, tmp_path):
    changes = ["drafter={type: medusa, heads: 2, joint: {rank: 2, warmup: 0}}", "training={epochs: 1}"]
    run = Run(load_recipe(make_recipe(tmp_path), changes), progress=False)
    run.train()
    document = read_document(run.evaluate())
    assert document["context"]["target"]["weights"] == read_manifest(run.bundle).target.weights_digest
    assert document["drift"]["medusa"]["by_kind"]["everything"]["kl"]["value"] > 0
