"""The card: what it says, and that the Hub's own reader finds every number in it."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from test_gather import edit

from spectrain.bundle import read_bundle
from spectrain.evaluation.report import render_markdown
from spectrain.exchange import export_checkpoint, import_checkpoint
from spectrain.files import file_digest
from spectrain.hub.card import serving
from spectrain.hub.contents import gather
from spectrain.identity import target_identity
from spectrain.interop import Served, speculators_eagle3
from spectrain.manifest import MANIFEST_FILE, read_manifest
from spectrain.target import load_target


@pytest.fixture
def changed(run, bundle, chat_folder):
    """The bundle as if its target had been trained with it: that one lies in it, and was measured."""
    shutil.copytree(chat_folder, bundle / "target")
    own = target_identity(bundle / "target", "target")
    before = read_manifest(bundle).target.model_dump(mode="json")
    files = {f"target/{path.name}": file_digest(path) for path in (bundle / "target").iterdir()}

    def move(manifest):
        manifest.update(target=asdict(own), derived_from=before)
        manifest["files"].update(files)

    edit(bundle / MANIFEST_FILE, move)
    origin = {"name": "target", "weights": before["weights_digest"]}
    record = {"name": "run/bundle/target", "weights": own.weights_digest, "derived_from": origin}
    edit(bundle / "acceptance.json", lambda document: document["context"]["target"].update(record))
    read_bundle(bundle)
    return bundle


def test_the_hub_reads_the_metadata_and_every_number_with_its_interval(request_of, bundle):
    given = {
        "license": "other",
        "license_name": "house",
        "license_link": "https://example.com/l",
        "datasets": ["org/d"],
    }
    card = ModelCard(gather(request_of(metadata=given)).card)
    data = card.data
    assert (data.base_model, data.base_model_relation) == ("org/target", "adapter")
    assert (data.license, data.license_name, data.datasets) == ("other", "house", ["org/d"])
    assert (data.library_name, data.pipeline_tag) == ("spectrain", "text-generation")
    assert {"speculative-decoding", "eagle3", "vllm"} <= set(data.tags)
    contender = json.loads((bundle / "acceptance.json").read_text())["samplers"][0]["contenders"][-1]["pooled"]
    numbers = {"tokens_per_round": contender["tokens_per_round"], "decode_speedup": contender["speedup"]["decode"]}
    assert {result.metric_type for result in data.eval_results} == set(numbers)
    for result in data.eval_results:
        number = numbers[result.metric_type]
        assert result.metric_value == pytest.approx(number["value"], abs=1e-4)
        assert result.metric_args["low"] == pytest.approx(number["low"], abs=1e-4)
        assert result.metric_args["high"] == pytest.approx(number["high"], abs=1e-4)
        assert result.metric_args["confidence"] == 0.95
        assert result.metric_name.endswith("eagle3 k=2")


def test_the_text_tells_what_a_stranger_needs(publication, bundle):
    text = publication.card
    serve = {"method": "eagle3", "model": "org/drafter", "num_speculative_tokens": 2}
    assert f"    vllm serve org/target --revision {'c' * 40} --speculative-config '{json.dumps(serve)}'" in text
    assert "](report.png)" in text
    assert "**Leave it off.**" in text  # four conversations are too few
    assert "Exact in law, whatever is drafted: eagle3 k=2." in text
    assert "4 greedy outputs compared with plain decoding, 4 equal" in text
    assert "seconds on the trainer's machine" in text
    assert "| optim.lr | 5e-05 |" in text
    assert '| data.train.0 | "train.jsonl" |' in text
    assert "reduced vocabulary" in text
    assert "evaluation.k" not in text
    assert read_manifest(bundle).data_digests["train"] in text


@pytest.mark.parametrize("chose", [True, False])
def test_traffic_that_also_chose_the_step_is_said_to_have(request_of, bundle, chose):
    path = bundle / "acceptance.json"
    document = json.loads(path.read_text())
    document["context"]["traffic"]["chose_the_step"] = chose
    path.write_text(json.dumps(document))
    card = gather(request_of()).card
    assert ("The held-out conversations also chose the training step" in card) is chose
    assert "\n\n\n" not in card
    assert ("The held-out conversations also chose the training step" in render_markdown(document)) is chose


def test_a_clock_that_was_disturbed_is_said_to_have_been(request_of, monkeypatch):
    cautions = ["Hard to believe: x.", "Batches of 1 disagree."]
    monkeypatch.setattr("spectrain.hub.card.unsteady", lambda document: cautions)
    card = gather(request_of()).card
    assert "\n\n".join(cautions) in card
    assert "\n\n\n" not in card


def test_notes_bring_metadata_and_end_the_card(request_of, tmp_path):
    notes = tmp_path / "notes.md"
    notes.write_text("---\nlanguage: [en]\ntags: [desk, vllm]\nlicense: mit\n---\n\n## Thanks\n\nto all\n")
    publication = gather(request_of(notes=notes))
    data = ModelCard(publication.card).data
    assert (data.language, data.license) == (["en"], "apache-2.0")  # an option comes first
    assert data.tags.count("vllm") == 1
    assert "desk" in data.tags
    assert publication.card.endswith("## Thanks\n\nto all\n")


def test_a_target_that_was_trained_too_is_another_model(request_of, changed):
    publication = gather(request_of(bundle=changed))
    text, data = publication.card, ModelCard(publication.card).data
    assert (data.base_model, data.base_model_relation) == ("org/target", "finetune")
    assert "target/model.safetensors" in publication.files
    assert "it is another\nmodel than org/target" in text
    assert "Exact in the law of the bundle's own, changed target, which is not the original's: eagle3 k=2." in text
    assert "    hf download org/drafter --local-dir drafter" in text
    assert "    vllm serve ./drafter/target --speculative-config" in text
    document = json.loads(publication.files["acceptance.json"])
    assert document["context"]["target"]["name"] == "org/target, changed"


def test_a_bundle_made_of_a_checkpoint_from_elsewhere_says_so(request_of, bundle, chat_folder, tmp_path):
    """It has no recipe and no data, and what nobody could check is among its limits."""
    target = load_target(str(chat_folder), device="cpu")
    export_checkpoint(bundle, "vllm-eagle3", tmp_path / "out", target, verify=False)
    imported = tmp_path / "imported"
    import_checkpoint(tmp_path / "out", imported, target, verify=False)
    shutil.copyfile(bundle / "acceptance.json", imported / "acceptance.json")
    publication = gather(request_of(bundle=imported))
    text = publication.card.split("## How it was trained")[1]
    assert "in the layout `vllm-eagle3`" in text
    assert read_manifest(imported).imported_from.weights in text
    assert "| setting | value |" not in text
    assert "Data, by SHA-256" not in text
    assert "nobody could check this: it does not say which target it was trained for" in text.split("## Limits")[1]
    assert ModelCard(publication.card).data.base_model == "org/target"
    assert str(chat_folder) not in publication.card + publication.files[MANIFEST_FILE].decode()


def test_a_bundle_without_a_recipe_has_no_empty_table(request_of, bundle):
    edit(bundle / MANIFEST_FILE, lambda manifest: manifest.update(recipe={}, data_digests={}))
    text = gather(request_of()).card.split("## How it was trained")[1]
    assert "No recipe was recorded." in text
    assert "| setting | value |" not in text
    assert "Data, by SHA-256" not in text


def test_what_serves_each_format():
    (line,) = serving("org/d", "org/t", "c" * 40, False, "draft_model", 5)
    assert line.endswith("""'{"method": "draft_model", "model": "org/d", "num_speculative_tokens": 5}'""")


def test_what_no_server_takes_is_not_said_to_be_served(request_of, monkeypatch):
    monkeypatch.setattr(speculators_eagle3, "SERVED", Served(None, None))
    card = gather(request_of()).card
    assert "vllm serve" not in card
    assert "vLLM has no such drafters." in card
    assert "vllm" not in ModelCard(card).data.tags


def test_a_faster_baseline_is_not_hidden(request_of, bundle):
    def slower(document):
        block = document["samplers"][0]
        ngram = next(c for c in block["contenders"] if c["contender"] == "ngram k=2")
        numbers, best = ngram["pooled"], block["verdict"]["overall"]["best"]
        best.update({key: ngram[key] for key in ("contender", "drafter", "k", "depth", "nodes", "verification")})
        best.update(tokens_per_round=numbers["tokens_per_round"], decode_speedup=numbers["speedup"]["decode"],
                    total_speedup=numbers["speedup"]["total"])  # fmt: skip

    edit(bundle / "acceptance.json", slower)
    assert "On the same chats ngram k=2 was faster." in gather(request_of()).card


def test_a_card_from_elsewhere_has_no_training_time(request_of, bundle, tmp_path):
    away = Path(shutil.copytree(bundle, tmp_path / "away" / "copy"))
    assert "trainer's machine" not in gather(request_of(bundle=away)).card
