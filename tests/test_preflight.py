"""What is wrong with a recipe is told at once, all of it, before the target's weights are loaded."""

import json
import shutil

import pytest
from tiny import save_chat_model

from spectrain import cli, dry_run, pipeline
from spectrain import rates as device_rates
from spectrain.audit import audit_recipe
from spectrain.config import load_recipe
from spectrain.errors import SpectrainError
from spectrain.pipeline import Run


@pytest.fixture(scope="module")
def shallow(tmp_path_factory):
    """The folder of a target of four layers, without weights."""
    folder = save_chat_model(tmp_path_factory.mktemp("shallow"), layers=4)
    (folder / "model.safetensors").unlink()
    return folder


@pytest.fixture
def recipe(make_recipe, chat_folder, shallow, tmp_path):
    path = make_recipe(tmp_path)
    path.write_text(path.read_text().replace(str(chat_folder), str(shallow)), encoding="utf-8")
    return path


@pytest.fixture
def no_weights(monkeypatch):
    monkeypatch.setattr(pipeline, "load_target", lambda *_, **__: pytest.fail("the target's weights were loaded"))


def refusal(call, *arguments, **keywords):
    with pytest.raises(SpectrainError) as error:
        call(*arguments, **keywords)
    return str(error.value)


@pytest.mark.parametrize("stage", ["prepare", "train"])
def test_everything_is_told_at_once_and_no_weights_are_loaded(recipe, tmp_path, no_weights, stage):
    (tmp_path / "train.jsonl").unlink()
    (tmp_path / "heldout.jsonl").write_text("")
    run = Run(load_recipe(recipe, ["data.chat_template_kwargs={thinking: false}"]), progress=False)
    lines = refusal(getattr(run, stage)).splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == ["data.train", "data.heldout", "data.chat_template_kwargs"]
    assert "train.jsonl: no such file" in lines[0]
    assert "heldout.jsonl is empty" in lines[1]
    assert (
        "this one has 4; give three distinct ascending layers as drafter.tap_layers, for instance [1, 2, 3]" in lines[3]
    )
    assert len(lines) == 4
    assert not (tmp_path / "run").exists()


def test_a_target_without_a_chat_template_is_told_before_its_weights_are_loaded(recipe, shallow, tmp_path, no_weights):
    bare = shutil.copytree(shallow, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    run = Run(load_recipe(recipe, [f"target.name={bare}", "drafter.tap_layers=[1,2,3]"]), progress=False)
    assert f"the chat template of {bare} is missing; set tokenizer.chat_template" in refusal(run.prepare)


@pytest.mark.parametrize(
    ("row", "named"), [("{", "train.jsonl:9: not valid JSON"), ('{"prompt": "51 + 51?"}', "leave data.heldout out")]
)
def test_chats_are_read_before_the_target_is_loaded(make_recipe, tmp_path, no_weights, row, named):
    recipe = make_recipe(tmp_path)
    with (tmp_path / "train.jsonl").open("a", encoding="utf-8") as file:
        file.write(row + "\n")
    assert named in refusal(Run(load_recipe(recipe), progress=False).prepare)


def test_two_settings_of_a_drafter_that_do_not_fit_are_both_told(recipe, no_weights):
    draft = "drafter={type: language_model, start: new, shape: {num_hidden_layers: 1, max_position_embeddings: 16}}"
    said = refusal(Run(load_recipe(recipe, [draft]), progress=False).prepare)
    assert said.startswith("data.max_length: found 128, but this recipe's drafter has a context of 16 tokens")
    said = refusal(Run(load_recipe(recipe, ["drafter={type: language_model, layers: [0, 4]}"]), progress=False).train)
    assert said.startswith("drafter.layers [0, 4]")
    assert "\n" not in said


def test_the_audit_shows_the_chats_beside_what_is_wrong_with_the_drafter(recipe, capsys):
    assert cli.guarded(cli.prepare, [str(recipe), "--audit"], "prepare") == 1
    out = capsys.readouterr().out
    assert "**prepare stops: the default taps [2, L//2, L-3] need" in out
    assert "| conversations | 8 | 4 |" in out
    assert audit_recipe(load_recipe(recipe, ["drafter.tap_layers=[1,2,3]"])).stops == []


def test_a_vocabulary_larger_than_the_tokenizer_s_stops_nothing(make_recipe, tmp_path):
    recipe = load_recipe(make_recipe(tmp_path), ["drafter.draft_vocab_size=32000", "regenerate=null"])
    for name in ("train", "heldout"):
        file = tmp_path / f"{name}.jsonl"
        rows = [json.loads(line) | {"completion": "yes."} for line in file.read_text(encoding="utf-8").splitlines()]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    found = audit_recipe(recipe)
    assert (found.stops, found.document["draft_vocabulary"]) == ([], 266)
    assert found.document["sides"]["heldout"]["coverage"] == 1


def test_a_dry_run_looks_before_it_measures(recipe, make_recipe, tmp_path, monkeypatch):
    for name in ("measure_flops", "measure_bandwidth"):
        monkeypatch.setattr(device_rates, name, lambda *_: pytest.fail("the machine was measured"))
    assert "drafter.tap_layers" in refusal(dry_run.dry_run, recipe, [])
    # What only making the drafter shows.
    rank = "drafter={type: language_model, lora: {rank: 1000}}"
    assert "drafter.lora.rank: found 1000" in refusal(dry_run.dry_run, recipe, [rank])
    # Rows that no micro-batch holds.
    (tmp_path / "more").mkdir()
    whole = make_recipe(tmp_path / "more")
    for name in ("train", "heldout"):
        shutil.copy(tmp_path / "more" / f"{name}.jsonl", tmp_path / "more" / f"{name}.copy")
        file = tmp_path / "more" / f"{name}.jsonl"
        rows = [json.loads(line) | {"completion": "yes."} for line in file.read_text(encoding="utf-8").splitlines()]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    said = refusal(dry_run.dry_run, whole, ["regenerate=null", "training.micro_batch_tokens=8"])
    assert "a micro-batch holds 8" in said
