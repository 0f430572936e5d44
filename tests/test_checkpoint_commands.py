"""Export, import and serve-command as they are typed; what comes in is a bundle like any other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from reloading import Here
from safetensors.torch import load_file

from spectrain import cli, reload
from spectrain.checkpoint_commands import export_bundle, import_checkpoint, serve_command
from spectrain.config import load_recipe
from spectrain.manifest import read_manifest
from spectrain.pipeline import Run


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.setattr(reload, "_start", Here)


@pytest.fixture
def bundle(finished_run):
    return finished_run / "run" / "bundle"


@pytest.fixture
def call(capsys):
    """Run a command: its exit code and all that it said."""

    def call(command, *words):
        code = cli.guarded(command, [str(word) for word in words], "spectrain x")
        said = capsys.readouterr()
        return code, said.out + said.err

    return call


@pytest.fixture
def imported(bundle, chat_folder, tmp_path, call):
    """A bundle made of a checkpoint as published: a pickle without a tokenizer."""
    call(export_bundle, bundle, "sglang-eagle3", tmp_path / "published")
    tensors = load_file(tmp_path / "published/model.safetensors")
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / "published" / name).unlink()
    torch.save(tensors, tmp_path / "published/pytorch_model.bin")
    code, said = call(import_checkpoint, tmp_path / "published", tmp_path / "imported", "--target", chat_folder)
    assert code == 0, said
    assert "note: it has no tokenizer files: of its vocabulary only the size was compared" in said
    assert f"bundle: {tmp_path / 'imported'} (eagle3)" in said
    return tmp_path / "imported"


def test_formats_are_listed_and_mistakes_are_one_message(call, bundle, tmp_path):
    code, said = call(export_bundle, "--list")
    assert code == 0
    assert said.count("\n") == 7
    assert "sglang-eagle3  EAGLE-3 as SGLang" in said
    assert call(export_bundle, bundle) == (
        2, "error: expected a bundle, a format and a folder; for instance spectrain x BUNDLE sglang-eagle3 DIR\n"
    )  # fmt: skip
    assert "there is no format 'onnx'" in call(export_bundle, bundle, "onnx", tmp_path / "x")[1]
    code, said = call(import_checkpoint, tmp_path, tmp_path / "x", "--target", "t", "--set", "bias")
    assert code == 2
    assert "--set 'bias': there is no KEY=; expected KEY=VALUE with a JSON value" in said


def test_a_folder_that_holds_something_else_is_left_alone(call, bundle, chat_folder, tmp_path):
    call(export_bundle, bundle, "vllm-eagle3", tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    code, said = call(import_checkpoint, tmp_path / "out", tmp_path / "mine", "--target", chat_folder)
    assert code == 2
    assert "exists and is no bundle" in said
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_a_target_that_drafts_for_itself_is_remarked_on(call, chat_folder, tmp_path):
    code, said = call(import_checkpoint, chat_folder, tmp_path / "itself", "--target", chat_folder)
    assert code == 0, said
    assert "note: its weights are the target's own: it drafts for itself" in said


def test_an_import_is_measured_beside_the_bundle_it_came_from(call, imported, bundle, finished_run, tmp_path):
    code, said = call(cli.compare, bundle, imported, "--traffic", finished_run / "heldout.jsonl", "--k", "2",
                      "--max-new-tokens", "6", "--baselines", "none", "--output", tmp_path / "report")  # fmt: skip
    assert code == 0, said
    assert "note: imported from sglang-eagle3: it has no tokenizer files" in said
    document = json.loads((tmp_path / "report/acceptance.json").read_text())
    ours, theirs = document["context"]["drafters"].values()
    assert theirs["imported_from"] == "sglang-eagle3"
    assert len(theirs["not_checked"]) == 2
    assert "imported_from" not in ours
    drafts = {c["drafter"]: c["pooled"]["rounds"] for c in document["samplers"][0]["contenders"] if c["shape"]}
    assert len(drafts) == 2
    assert len(set(drafts.values())) == 1  # the same drafter


def test_training_starts_from_an_import(imported, make_recipe, tmp_path):
    (tmp_path / "run2").mkdir()
    recipe = load_recipe(make_recipe(tmp_path / "run2"), [f"warm_start.bundle={imported}", "training.epochs=1"])
    assert read_manifest(Run(recipe, progress=False).train()).drafter["type"] == "eagle3"


def test_serve_command(call, imported, bundle):
    code, said = call(serve_command, imported)
    assert code == 2
    assert "acceptance.json is not there, so nobody can tell whether" in said
    code, said = call(serve_command, imported, "--k", "2")
    assert code == 0
    assert '"num_speculative_tokens": 2' in said
    code, said = call(serve_command, bundle)
    assert code in (0, 1)  # whatever the clock said of a tiny model
    assert "# SGLang" in said or "give --k" in said


def test_a_folder_without_a_manifest_says_how_to_make_one(call, bundle, finished_run, tmp_path):
    folder = Path(shutil.copytree(bundle, tmp_path / "plain"))
    (folder / "spectrain.json").unlink()
    code, said = call(cli.evaluate, folder, "--traffic", finished_run / "heldout.jsonl", "--output", tmp_path / "x")
    assert code == 2
    assert "it has no spectrain.json; spectrain import makes one of other checkpoints" in said
