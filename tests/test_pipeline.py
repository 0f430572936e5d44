"""From chats to a report on a tiny target: whole, repeated, and interrupted at every stage."""

import errno
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from families import TRAINABLE, named
from safetensors.torch import load_file, save_file

from spectrain import bundle as bundles
from spectrain import checkpoints, cli, config, interop, pipeline, preflight
from spectrain.bundle import Belonging, load_drafter, read_bundle, save_drafter
from spectrain.config import load_recipe
from spectrain.data import features
from spectrain.drafters import FAMILIES
from spectrain.drafters.medusa import MedusaConfig
from spectrain.errors import SpectrainError
from spectrain.evaluation import acceptance
from spectrain.evaluation.document import read_document
from spectrain.pipeline import Run
from spectrain.regenerate import local
from spectrain.speculator import _ids, load_bundle
from spectrain.target import load_target
from spectrain.training import Trainer

WORK = {  # what a stage must not do twice: the module and the function that does it
    "answer": (local, "generate_batch"),
    "extract": (features, "row_features"),
    "step": (Trainer, "_step"),
    "checkpoint": (checkpoints.Checkpoints, "save"),
    "measure": (acceptance, "generate_plain"),
}


class Counter:
    """Counts calls of the WORK; ``stop(what, call)`` makes one of them fail."""

    def __init__(self, monkeypatch):
        self.calls, self.failing = dict.fromkeys(WORK, 0), {}
        for what, (owner, name) in WORK.items():
            monkeypatch.setattr(owner, name, self._counted(what, getattr(owner, name)))

    def _counted(self, what, real):
        def call(*arguments, **keywords):
            self.calls[what] += 1
            if self.calls[what] == self.failing.get(what):
                raise KeyboardInterrupt
            return real(*arguments, **keywords)

        return call

    def stop(self, what, call):
        self.failing[what] = self.calls[what] + call


@pytest.fixture
def counter(monkeypatch):
    return Counter(monkeypatch)


@pytest.fixture
def recipe(make_recipe, tmp_path):
    return make_recipe(tmp_path)


@pytest.fixture
def again(finished_run, recipe, tmp_path):
    """The recipe of ``tmp_path`` after its run, copied; its chats and settings are those of ``finished_run``."""
    shutil.copytree(finished_run / "run", tmp_path / "run")
    return recipe


def fresh(recipe, *overrides):
    return Run(load_recipe(recipe, overrides), progress=False)


def files(folder):
    """Every file with its content and time."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in found}


def leftovers(folder):
    return [str(path) for path in folder.rglob("*") if ".partial" in path.name or path.name.startswith(".")]


def tensors(run_folder):
    return read_bundle(run_folder / "bundle").tensors


def same_tensors(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


LONGEST = 37  # tokens of the longest training row


def refusal(call, *arguments, **keywords):
    with pytest.raises(SpectrainError) as error:
        call(*arguments, **keywords)
    return str(error.value)


def test_a_run_leaves_a_bundle_and_reports(finished_run, chat_target):
    folder = finished_run / "run"
    reports = {
        "acceptance.json",
        "acceptance.csv",
        "speculation_profile.json",
        "report.html",
        "report.md",
        "report.png",
    }
    assert {path.name for path in folder.iterdir()} == reports | {
        "bundle",
        "data",
        "evaluation",
        "features",
        "training",
    }
    assert leftovers(folder) == []
    drafter, contents, notes = load_drafter(folder / "bundle", chat_target)
    assert notes == ()
    assert contents.manifest.recipe == load_recipe(finished_run / "recipe.yaml").model_dump(mode="json")
    assert contents.manifest.sampler == {"temperature": 1.0, "top_k": None, "top_p": None}
    assert set(contents.manifest.data_digests) == {"train", "heldout", "heldout_asked"}
    assert drafter.lm_head.weight.shape[0] == 64
    document = read_document(folder / "acceptance.json")
    assert json.loads((folder / "bundle" / "acceptance.json").read_text()) == document
    (block,) = document["samplers"]
    assert [c["contender"] for c in block["contenders"]] == ["plain", "ngram k=2", "eagle3 k=2"]
    assert block["kinds"] == ["sum", "sum/even", "sum/odd"]
    assert [entry["equal"] for entry in block["exactness"]] == [4, 4]
    context = document["context"]
    assert context["traffic"]["name"] == "heldout.jsonl"
    assert context["traffic"]["conversations"] == 4
    assert context["traffic"]["chose_the_step"] is True
    assert str(chat_target.folder) not in json.dumps(document)  # a path says nothing, and tells of the machine
    assert context["device"]["name"]
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert "eagle3 k=2" in text
    assert "The held-out conversations also chose the training step" in text


def test_rows_and_answers_are_counted(finished_run):
    counts = json.loads((finished_run / "run" / "data" / "counts.json").read_text())
    assert len(counts["train"].pop("digest")) == 64
    lines = [json.loads(line) for line in (finished_run / "run" / "data" / "train.jsonl").read_text().splitlines()]
    assert counts["train"] == {
        "conversations": 8,
        "rows": 8,
        "dropped": {"too_long": 0, "nothing_supervised": 0},
        "tokens": sum(len(line["prompt_ids"] + line["answer_ids"]) for line in lines),
        "answer_tokens": sum(len(line["answer_ids"]) for line in lines),
    }


def test_a_second_call_repeats_nothing_and_gives_the_same(again, counter, tmp_path):
    before = files(tmp_path / "run")
    run = fresh(again)
    run.train()
    run.evaluate()
    assert counter.calls == dict.fromkeys(WORK, 0)
    after = files(tmp_path / "run")
    assert {name: content for name, (content, _) in after.items()} == {n: c for n, (c, _) in before.items()}
    expensive = ("bundle/model", "bundle/spectrain", "features", "data/train", "training/checkpoints")
    untouched = [name for name in after if name.startswith(expensive)]
    assert untouched
    assert all(after[name] == before[name] for name in untouched)


def test_training_again_keeps_the_measurement_in_the_bundle(again, tmp_path):
    fresh(again).train()
    assert (tmp_path / "run" / "bundle" / "acceptance.json").is_file()


def test_ranks_are_measured_on_training_rows_when_the_bundle_is_put_in_place(again, monkeypatch, tmp_path):
    path, run = tmp_path / "run" / "bundle" / "ranks.json", fresh(again)
    ranks = json.loads(path.read_text())
    answers = sum(sum(row.mask) for row in run.prepare().train_rows)
    assert 0 < ranks["positions"][0] <= answers
    assert list(ranks["by_sampler"]) == ["greedy (T=0)"]
    calls, real = [], pipeline.measure_ranks
    monkeypatch.setattr(pipeline, "measure_ranks", lambda *a, **k: calls.append(a) or real(*a, **k))
    path.write_text("{}")
    fresh(again).train()
    assert (calls, path.read_text()) == ([], "{}")  # what lies beside a whole bundle is left alone
    (path.parent / "model.safetensors").unlink()
    fresh(again, "evaluation.samplers=[{temperature: 1}]").train()
    assert len(calls) == 1
    found = json.loads(path.read_text())
    assert list(found["by_sampler"]) == ["greedy (T=0)", "T=1"]
    assert found["by_sampler"]["greedy (T=0)"] == ranks["by_sampler"]["greedy (T=0)"]
    read_bundle(path.parent)


def test_a_damaged_bundle_is_replaced_from_the_checkpoint(again, tmp_path, finished_run):
    (tmp_path / "run" / "bundle" / "model.safetensors").unlink()
    fresh(again).train()
    same_tensors(tensors(tmp_path / "run"), tensors(finished_run / "run"))


@pytest.mark.parametrize(
    ("what", "call"),
    [("answer", 2), ("answer", 4), ("extract", 2), ("step", 1), ("step", 4), ("checkpoint", 1), ("checkpoint", 2)],
)
def test_an_interrupted_run_gives_the_same_drafter(recipe, finished_run, counter, tmp_path, what, call):
    counter.stop(what, call)
    with pytest.raises(KeyboardInterrupt):
        fresh(recipe).train()
    assert not (tmp_path / "run" / "bundle").exists()
    counter.failing.clear()
    done = dict(counter.calls)
    fresh(recipe).train()
    same_tensors(tensors(tmp_path / "run"), tensors(finished_run / "run"))
    assert leftovers(tmp_path / "run") == []
    if what in ("step", "checkpoint"):
        assert (counter.calls["answer"], counter.calls["extract"]) == (done["answer"], done["extract"])


def test_an_interrupted_evaluation_goes_on(again, counter, tmp_path):
    shutil.rmtree(tmp_path / "run" / "evaluation")
    (tmp_path / "run" / "acceptance.json").unlink()
    counter.stop("measure", 1 + 2 + 1)  # one to warm up, two conversations, and the third
    with pytest.raises(KeyboardInterrupt):
        fresh(again).evaluate()
    assert not (tmp_path / "run" / "acceptance.json").exists()
    counter.failing.clear()
    before = counter.calls["measure"]
    document = read_document(fresh(again).evaluate())
    assert counter.calls["measure"] - before == 1 + 2
    assert document["samplers"][0]["conversations"] == 4
    assert counter.calls["step"] == 0


def full_disk(*_arguments, **_keywords):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("where", ["state", "bundle", "progress"])
def test_a_checkpoint_that_fails_leaves_the_one_before(recipe, finished_run, monkeypatch, tmp_path, where, failure):
    """In the middle of the second checkpoint: while the state, the bundle or the last file is written."""
    seen = []
    owner, name = {
        "state": (checkpoints.Accelerator, "save_state"),
        "bundle": (bundles.interop, "write_checkpoint"),
        "progress": (checkpoints, "write_json"),
    }[where]
    real = getattr(owner, name)

    def second_fails(*arguments, **keywords):
        seen.append(name)
        if len(seen) == 2:
            raise failure
        return real(*arguments, **keywords)

    with monkeypatch.context() as context:
        context.setattr(owner, name, second_fails)
        with pytest.raises(type(failure)):
            fresh(recipe).train()
    folder = tmp_path / "run" / "training" / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["step-000002"]
    assert leftovers(tmp_path / "run") == []
    read_bundle(folder / "step-000002" / "bundle")
    assert not (tmp_path / "run" / "bundle").exists()
    fresh(recipe).train()
    same_tensors(tensors(tmp_path / "run"), tensors(finished_run / "run"))


def test_a_bundle_that_cannot_be_put_in_place_leaves_the_old_one(again, monkeypatch, tmp_path):
    (tmp_path / "run" / "bundle" / "tokenizer.json").write_text("{}")  # so that it is written again
    before = files(tmp_path / "run" / "bundle")
    monkeypatch.setattr(pipeline.shutil, "copytree", full_disk)
    with pytest.raises(OSError, match="No space left"):
        fresh(again).train()
    assert files(tmp_path / "run" / "bundle") == before
    assert leftovers(tmp_path / "run") == []


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["regenerate.max_new_tokens=11"], " regenerate.max_new_tokens: 12 against 11"),
        (["regenerate.sampler.temperature=0"], " regenerate.sampler.temperature: 1.0 against 0.0"),
        (["data.feature_dtype=float32"], "data.feature_dtype, "),
        ([f"data.max_length={LONGEST - 1}"], "prepared from other rows"),
        (["training.epochs=3"], "training.epochs: 2 against 3"),
        (["optim.lr=1e-3"], "optim.lr: 5e-05 against 0.001"),
        (["regenerate=null"], "nothing to train on"),
    ],
)
def test_an_output_begun_with_other_settings_is_refused(again, tmp_path, overrides, named):
    before = files(tmp_path / "run")
    message = refusal(fresh(again, *overrides).train)
    assert named in message
    assert {n: c for n, (c, _) in files(tmp_path / "run").items()} == {n: c for n, (c, _) in before.items()}


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["drafter.tap_layers=[1,2,3]"], "drafter.tap_layers: None against [1, 2, 3]; choose another output"),
        (["training.accumulation=2"], "training.accumulation times the processes: 1 against 2"),
        (["training.tracker=wandb"], "training.tracker: wandb is not installed"),
        (["optim.name=adamw_8bit"], "optim.name: None against 'adamw_8bit'"),
    ],
)
def test_a_run_that_cannot_go_on_is_refused_before_the_target_is_loaded(again, tmp_path, monkeypatch, overrides, named):
    """It was told when all features had been extracted anew."""
    monkeypatch.setattr(pipeline, "load_target", lambda *_, **__: pytest.fail("the target's weights were loaded"))
    monkeypatch.setattr(preflight, "get_available_trackers", list)
    before = files(tmp_path / "run")
    assert named in refusal(fresh(again, *overrides).train)
    assert named in refusal(fresh(again, *overrides).run)
    assert files(tmp_path / "run") == before


def test_a_tracker_that_is_here_is_not_asked_for(again):
    preflight.check_training(fresh(again, "training.tracker=wandb").recipe)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("data.teacher_top_k=4", "another run, its settings against these: what is trained on (data.train"),
        (f"training.micro_batch_tokens={LONGEST - 1}", f"a micro-batch holds {LONGEST - 1}"),
    ],
)
def test_rows_that_cannot_be_trained_on_are_refused_before_their_features_are_extracted(
    finished_run, recipe, tmp_path, counter, override, named
):
    shutil.copytree(finished_run / "run" / "data", tmp_path / "run" / "data")
    if "teacher" in override:
        shutil.copytree(finished_run / "run" / "training", tmp_path / "run" / "training")
    assert named in refusal(fresh(recipe, override).train)
    assert (counter.calls["extract"], (tmp_path / "run" / "features").exists()) == (0, False)


def test_what_evaluating_would_stop_for_is_told_before_training(recipe, tmp_path, counter):
    with (tmp_path / "heldout.jsonl").open("a") as file:
        file.write(json.dumps({"id": "held", "kind": "sum/odd", "prompt": "9 " * 300, "completion": "hello"}) + "\n")
    message = refusal(fresh(recipe).run)
    assert "conversation 'held'" in message
    assert "data.bad_rows=drop" in message
    assert counter.calls == dict.fromkeys(WORK, 0)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("evaluation.k=[3]", "--k, in a recipe evaluation.k"),
        ("baselines=[]", "--baselines, in a recipe baselines"),
        ("baselines=[{type: ngram, longest: 2}]", "--baselines, in a recipe baselines["),
        ("evaluation.seed=1", "--seed, in a recipe evaluation.seed: 0 against 1"),
    ],
)
def test_a_measurement_begun_with_other_settings_is_refused(again, tmp_path, override, named):
    before = files(tmp_path / "run")
    message = refusal(fresh(again, override).evaluate)
    assert f"measured with other settings, its own against these: {named}" in message
    assert files(tmp_path / "run") == before


def test_evaluate_before_training_says_so(recipe, tmp_path):
    message = refusal(fresh(recipe).evaluate)
    assert str(tmp_path / "run" / "bundle") in message
    assert "train first" in message


def test_a_drafter_without_weights_is_not_trained(recipe, tmp_path):
    message = refusal(fresh(recipe, "drafter={type: ngram}").train)
    assert "'ngram' has nothing to train" in message
    assert not (tmp_path / "run").exists()


def test_without_heldout_files_a_share_is_set_aside(recipe):
    train, heldout = fresh(recipe, "data.heldout=[]", "data.heldout_fraction=0.25").conversations()
    assert (len(train), len(heldout)) == (6, 2)
    assert {c.id for c in train}.isdisjoint(c.id for c in heldout)


def test_a_leak_is_refused_before_anything_is_written(recipe, tmp_path):
    shutil.copy(tmp_path / "train.jsonl", tmp_path / "heldout.jsonl")
    message = refusal(fresh(recipe).train)
    assert "also in training" in message
    assert not (tmp_path / "run").exists()


def test_answers_in_the_files_are_trained_on_without_regeneration(recipe, tmp_path, counter):
    for name in ("train", "heldout"):
        path = tmp_path / f"{name}.jsonl"
        rows = [json.loads(line) | {"completion": "hello hello hello"} for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = fresh(recipe, "regenerate=null", "training.epochs=1")
    run.train()
    assert counter.calls["answer"] == 0
    assert read_bundle(run.bundle).manifest.sampler == {}


def test_answers_that_are_not_there_are_asked_for(recipe):
    assert "nothing to train on: of 8 conversations" in refusal(fresh(recipe, "regenerate=null").train)


def test_rows_beyond_max_length_are_left_out_and_counted(recipe, tmp_path, capsys):
    long = {"id": "long", "kind": "sum/odd", "prompt": "7 " * 40}
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write(json.dumps(long) + "\n")
    prepared = Run(load_recipe(recipe, ["data.max_length=64"])).prepare()
    assert {row.conversation for row in prepared.train_rows}.isdisjoint({"long"})
    counts = json.loads((tmp_path / "run" / "data" / "counts.json").read_text())
    assert counts["train"]["dropped"] == {"too_long": 1, "nothing_supervised": 0}
    assert "1 longer than max_length" in capsys.readouterr().out


def bad_rows(folder):
    """Adds a line that is no JSON, a turn of an unknown role, and a prompt beyond the target's context."""
    long = {"id": "long", "kind": "sum/odd", "prompt": "7 " * 300}
    odd = {"messages": [{"role": "owner", "content": "a"}]}
    with (folder / "train.jsonl").open("a") as file:
        file.write(f"{{\n{json.dumps(odd)}\n{json.dumps(long)}\n")
    with (folder / "heldout.jsonl").open("a") as file:
        file.write(json.dumps(long | {"id": "held", "prompt": "9 " * 300}) + "\n")


def test_bad_rows_stop_a_run_unless_they_may_be_dropped(recipe, tmp_path, capsys):
    bad_rows(tmp_path)
    message = refusal(fresh(recipe).prepare)
    assert "train.jsonl:9: not valid JSON" in message
    assert "data.bad_rows=drop" in message
    prepared = Run(load_recipe(recipe, ["data.bad_rows=drop", "training.epochs=1"]))
    assert len(prepared.prepare().train_rows) == 8
    counts = json.loads((tmp_path / "run" / "data" / "counts.json").read_text())
    assert counts["train"]["dropped"] == {
        "too_long": 1, "nothing_supervised": 0, "broken_json": 1, "unknown_role": 1,
    }  # fmt: skip
    assert counts["heldout"]["dropped"] == {"too_long": 0, "nothing_supervised": 0, "no_room": 1}
    assert counts["train"]["dropped_at"]["unknown_role"] == [f"{tmp_path / 'train.jsonl'}:10"]
    out = capsys.readouterr().out
    assert "1 with an unknown role" in out
    assert f"with an unknown role: {tmp_path / 'train.jsonl'}:10" in out
    assert [chat.id for chat in prepared.conversations()[1]][-1] != "held"  # nor is it measured on
    before = files(tmp_path / "run")
    Run(load_recipe(recipe, ["data.bad_rows=drop"]), progress=False).prepare()
    assert files(tmp_path / "run").keys() == before.keys()


def test_template_settings_change_the_prompts_and_are_found_again_in_the_bundle(recipe, tmp_path, chat_folder):
    copy = tmp_path / "target"
    shutil.copytree(chat_folder, copy)
    template = (copy / "chat_template.jinja").read_text()
    added = "{% if shout and add_generation_prompt %}hello{% endif %}"
    (copy / "chat_template.jinja").write_text(template + added)
    run = fresh(recipe, f"target.name={copy}", "training.epochs=1", "data.chat_template_kwargs.shout=true")
    run.train()
    ids = json.loads((tmp_path / "run" / "data" / "train.jsonl").read_text().splitlines()[0])["prompt_ids"]
    assert run.target.tokenizer.decode(ids).endswith("assistant\nhello")
    chat = [{"role": "user", "content": "1"}]
    rendered = _ids(chat, load_bundle(run.bundle).target)
    assert run.target.tokenizer.decode(rendered).endswith("assistant\nhello")
    assert "was made with other settings" in refusal(fresh(recipe, f"target.name={copy}").prepare)


def test_the_split_that_was_made_is_told_in_the_bundle(recipe, tmp_path):
    run = fresh(recipe, "data.heldout=[]", "data.heldout_fraction=0.25", "data.seed=3", "training.epochs=1")
    run.train()
    assert read_bundle(run.bundle).manifest.data_digests["split"] == "heldout_fraction 0.25, seed 3"


def test_near_duplicates_stop_a_run_where_that_is_asked_for(recipe, tmp_path):
    words = "one two three four five six seven eight nine ten eleven twelve"
    for name, extra in (("train", "x"), ("heldout", "y")):
        with (tmp_path / f"{name}.jsonl").open("a") as file:
            file.write(json.dumps({"id": f"near-{name}", "prompt": f"{words} {extra}"}) + "\n")
    assert len(fresh(recipe).conversations()[1]) == 5
    message = refusal(fresh(recipe, "data.near_duplicates=error").conversations)
    assert "heldout.jsonl:5 and 'near-train' at" in message


def test_a_bundle_of_another_target_is_refused(again, tmp_path, chat_folder):
    other = tmp_path / "other"
    shutil.copytree(chat_folder, other)
    settings = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(settings | {"rms_norm_eps": 1e-3}))
    message = refusal(fresh(again, f"target.name={other}").evaluate)
    assert "does not fit this target" in message
    assert "config_digest" in message


def test_a_hub_cache_is_not_written_to(again, tmp_path, chat_target):
    snapshot = tmp_path / "models--org--draft" / "snapshots" / "abc"
    shutil.copytree(tmp_path / "run" / "bundle", snapshot)
    (snapshot / "acceptance.json").unlink()
    run = fresh(again)
    _, heldout = run.conversations()
    settings = config.AcceptanceConfig(k=(1,), max_new_tokens=2, conversations=1)
    path = pipeline.evaluate_bundle(
        snapshot, chat_target, pipeline.Asked(heldout, settings, tmp_path / "report", traffic="t", progress=False)
    )
    assert path.is_file()
    assert not (snapshot / "acceptance.json").exists()


# --- shared preparation -------------------------------------------------------------------------------------------


def apart(tmp_path, name, **drafter):
    """Overrides for a second run that shares its answers and features: its own output, perhaps another drafter."""
    settings = [f"drafter={json.dumps(drafter)}"] if drafter else []
    return [f"output={tmp_path / name}", f"prepared={tmp_path / 'shared'}", *settings]


def test_recipes_share_answers_and_features(recipe, finished_run, counter, tmp_path):
    """Answers are given once; features lie by side and taps, so that drafters that read other streams get along."""
    fresh(recipe, *apart(tmp_path, "one")).train()
    same_tensors(tensors(tmp_path / "one"), tensors(finished_run / "run"))
    shared = files(tmp_path / "shared")
    answered, extracted = counter.calls["answer"], counter.calls["extract"]
    assert answered
    heads = {"type": "medusa", "heads": 2}
    fresh(recipe, *apart(tmp_path, "two", **heads)).train()
    assert counter.calls["answer"] == answered
    assert counter.calls["extract"] > extracted
    assert {path.name for path in (tmp_path / "shared").iterdir()} == {"data", "features"}
    stores = {path.name for path in (tmp_path / "shared" / "features").iterdir()}
    assert stores == {"train", "heldout", "train-2-4-5", "heldout-2-4-5"}
    after = files(tmp_path / "shared")
    assert {name: after[name][0] for name in shared} == {name: content for name, (content, _) in shared.items()}
    for name in ("one", "two"):
        assert {path.name for path in (tmp_path / name).iterdir()} == {"bundle", "training"}
    extracted = counter.calls["extract"]
    fresh(recipe, *apart(tmp_path, "three", **heads), "training.epochs=1").train()
    assert (counter.calls["answer"], counter.calls["extract"]) == (answered, extracted)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        (f"data.max_length={LONGEST - 1}", "prepared from other rows, its own against these: train.rows: 8 against"),
        ("regenerate.seed=1", " regenerate.seed: 0 against 1"),
        ("data.feature_dtype=float32", "data.feature_dtype = "),
    ],
)
def test_sharing_with_other_rows_is_refused(recipe, tmp_path, override, named):
    """Also where the other recipe's features would lie in a folder of their own."""
    prepared = fresh(recipe, *apart(tmp_path, "one")).prepare()
    assert (
        min(len(row.ids) for row in prepared.train_rows) < LONGEST == max(len(row.ids) for row in prepared.train_rows)
    )
    before = files(tmp_path / "shared")
    drafter = {} if "dtype" in override else {"type": "medusa", "heads": 2}
    assert named in refusal(fresh(recipe, *apart(tmp_path, "two", **drafter), override).prepare)
    assert {name: content for name, (content, _) in files(tmp_path / "shared").items()} == {
        name: content for name, (content, _) in before.items()
    }


def test_another_choice_of_taps_is_another_run(again):
    """Its features get a folder of their own; the checkpoints are what they do not go with."""
    message = refusal(fresh(again, "drafter.tap_layers=[1,2,3]").train)
    assert "drafter.tap_layers: None against [1, 2, 3]" in message


# --- warm start ---------------------------------------------------------------------------------------------------

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NEXT_TO_NOTHING = "optim={lr: 1e-12, weight_decay: 0}"
SMALL = {"depths": 2, "draft_vocab_size": 64, "heads": 2}


def warmed(recipe, tmp_path, bundle, *overrides, output="warm"):
    """A run that starts from a bundle's weights."""
    settings = {"bundle": str(bundle)}
    return fresh(recipe, f"output={tmp_path / output}", f"warm_start={json.dumps(settings)}", *overrides)


def small(kind, **settings):
    return kind(**{name: value for name, value in {**SMALL, **settings}.items() if name in kind.model_fields})


def saved(target, config, folder, seed=0):
    """A drafter with weights of its own, as a bundle."""
    torch.manual_seed(seed)
    counts = torch.arange(target.vocab_size)
    drafter = FAMILIES[type(config)].build(config, target, counts)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    save_drafter(folder, drafter, Belonging.to(target))
    return drafter


def fine_tuned(chat_folder, folder):
    """The chat target with other weights."""
    shutil.copytree(chat_folder, folder)
    weights = load_file(folder / "model.safetensors")
    save_file({name: 1.01 * value for name, value in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("stage", ["prepare", "train"])
def test_a_family_that_could_not_be_saved_stops_before_any_answer(recipe, counter, tmp_path, monkeypatch, stage):
    monkeypatch.setattr(interop, "FORMATS", [format_ for format_ in interop.FORMATS if "eagle3" not in format_.NAME])
    message = refusal(getattr(fresh(recipe), stage))
    assert "Eagle3Drafter has no serving format" in message
    assert "add it to interop.FORMATS" in message
    assert counter.calls == dict.fromkeys(WORK, 0)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", TRAINABLE, ids=named)
def test_every_family_starts_from_the_weights_of_a_bundle(chat_target, tmp_path, kind):
    config = small(kind)
    old = saved(chat_target, config, tmp_path / "old")
    torch.manual_seed(1)
    new = FAMILIES[kind].build(config, chat_target, torch.zeros(chat_target.vocab_size, dtype=torch.long))
    before = {name: value.clone() for name, value in new.state_dict().items()}
    assert pipeline.warm_start(new, tmp_path / "old", chat_target) == ()
    same_tensors(new.state_dict(), old.state_dict())
    assert any(not torch.equal(value, before[name]) for name, value in new.state_dict().items())
    theirs = {value.data_ptr() for value in old.state_dict().values()}
    assert not theirs & {value.data_ptr() for value in new.state_dict().values()}


@pytest.mark.parametrize("kind", TRAINABLE, ids=named)
def test_no_family_starts_from_another(chat_target, tmp_path, kind):
    other = next(candidate for candidate in TRAINABLE if candidate is not kind)
    saved(chat_target, small(other), tmp_path / "old")
    new = FAMILIES[kind].build(small(kind), chat_target, torch.zeros(chat_target.vocab_size, dtype=torch.long))
    message = refusal(pipeline.warm_start, new, tmp_path / "old", chat_target)
    found, expected = small(other).type, small(kind).type
    assert f"old: found drafter type {found!r}, expected {expected!r}" in message


def test_a_run_starts_from_a_bundle(recipe, finished_run, tmp_path):
    """With steps too small to matter it ends where the bundle was; its first loss is that of the bundle's drafter."""
    bundle = finished_run / "run" / "bundle"
    warmed(recipe, tmp_path, bundle, NEXT_TO_NOTHING).train()
    got, want = tensors(tmp_path / "warm"), tensors(finished_run / "run")
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=1e-8)
    assert read_bundle(tmp_path / "warm" / "bundle").manifest.recipe["warm_start"] == {
        "bundle": str(bundle), "revision": None, "remap": False,
    }  # fmt: skip
    fresh(recipe, f"output={tmp_path / 'cold'}", NEXT_TO_NOTHING).train()
    assert not torch.allclose(tensors(tmp_path / "cold")["fc.weight"], want["fc.weight"], atol=1e-8)


@pytest.mark.parametrize(("what", "call"), [("step", 1), ("step", 4), ("checkpoint", 2)])
def test_an_interrupted_warm_started_run_goes_on_from_its_checkpoint(
    recipe, finished_run, counter, tmp_path, what, call
):
    """And does not start over from the bundle."""
    bundle, fast = finished_run / "run" / "bundle", "optim={lr: 1e-2}"
    warmed(recipe, tmp_path, bundle, fast, output="unbroken").train()
    counter.stop(what, call)
    with pytest.raises(KeyboardInterrupt):
        warmed(recipe, tmp_path, bundle, fast).train()
    counter.failing.clear()
    warmed(recipe, tmp_path, bundle, fast).train()
    same_tensors(tensors(tmp_path / "warm"), tensors(tmp_path / "unbroken"))
    steps = counter.calls["step"]
    warmed(recipe, tmp_path, bundle, fast).train()  # finished: nothing is repeated
    assert counter.calls["step"] == steps
    same_tensors(tensors(tmp_path / "warm"), tensors(tmp_path / "unbroken"))


def test_the_weights_it_started_from_are_part_of_a_run(recipe, finished_run, chat_target, tmp_path):
    warmed(recipe, tmp_path, finished_run / "run" / "bundle").train()
    assert "belongs to another run" in refusal(fresh(recipe, f"output={tmp_path / 'warm'}").train)
    saved(chat_target, load_recipe(recipe).drafter, tmp_path / "other")
    assert "the weights of warm_start.bundle: " in refusal(warmed(recipe, tmp_path, tmp_path / "other").train)
    same = shutil.copytree(finished_run / "run" / "bundle", tmp_path / "moved")
    warmed(recipe, tmp_path, same).train()  # where it lies is not


def test_a_fine_tuned_target_goes_on_from_the_drafter_of_the_original(
    recipe, finished_run, chat_folder, tmp_path, capsys
):
    target = fine_tuned(chat_folder, tmp_path / "tuned")
    run = warmed(recipe, tmp_path, finished_run / "run" / "bundle", f"target.name={target}", NEXT_TO_NOTHING)
    run.progress = True
    run.train()
    assert f"note: warm_start.bundle {finished_run / 'run' / 'bundle'}: it was trained for another target" in (
        capsys.readouterr().out
    )
    torch.testing.assert_close(
        tensors(tmp_path / "warm")["fc.weight"], tensors(finished_run / "run")["fc.weight"], rtol=0, atol=1e-8
    )
    load_drafter(run.bundle, load_target(str(target)))  # the new bundle belongs to the new target


def test_a_bundle_of_another_tokenizer_is_no_start(recipe, finished_run, chat_folder, tmp_path, make_tokenizer):
    other = Path(shutil.copytree(chat_folder, tmp_path / "other"))
    make_tokenizer(swap=("a", "b"), template=CHAT).save_pretrained(other)
    message = refusal(warmed(recipe, tmp_path, finished_run / "run" / "bundle", f"target.name={other}").train)
    assert f"warm_start.bundle {finished_run / 'run' / 'bundle'}: its ids mean other tokens" in message
    assert "vocabulary: token" in message


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("warm_start={bundle: nowhere at all}", "warm_start.bundle nowhere at all: "),
        ("warm_start={bundle: .}", "warm_start.bundle .: . is no bundle: it has no spectrain.json"),
        ("drafter={type: medusa}", "found drafter type 'eagle3', expected 'medusa'"),
        ("drafter={type: language_model, start: new, shape: {max_position_embeddings: 16}}",
         "data.max_length: found 64, but this recipe's drafter has a context of 16 tokens"),
    ],
)  # fmt: skip
def test_what_training_could_not_use_shows_before_anything_is_prepared(
    recipe, finished_run, tmp_path, monkeypatch, override, named
):
    for stage in ("regenerate", "extract_features", "load_conversations"):
        monkeypatch.setattr(pipeline, stage, lambda *_, **__: pytest.fail("preparation began"))
    start = [] if "shape" in override else [f"warm_start={{bundle: {finished_run / 'run' / 'bundle'}}}"]
    changes = [f"output={tmp_path / 'new'}", f"prepared={tmp_path / 'new'}", "data.max_length=64", *start, override]
    assert named in refusal(fresh(recipe, *changes).train)
    assert not (tmp_path / "new").exists()


def test_a_place_that_cannot_be_written_is_named_at_once(recipe, tmp_path):
    (tmp_path / "file").write_text("")
    for key in ("output", "prepared"):
        for place in (tmp_path / "file", tmp_path / "file" / "deeper"):
            message = refusal(fresh, recipe, f"{key}={place}")
            assert f"{key} {place}: {tmp_path / 'file'} is a file, expected a folder" in message


@pytest.mark.parametrize(
    ("bundle", "named"),
    [("warm/bundle", "is what this run will write"), ("nowhere at all", "neither a folder nor a Hub id")],
)
def test_what_is_no_bundle_to_start_from_is_named(recipe, tmp_path, bundle, named):
    name = tmp_path / bundle if "/" in bundle else bundle
    message = refusal(warmed(recipe, tmp_path, name).train)
    assert named in message
    assert not (tmp_path / "warm" / "training").exists()


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("drafter.intermediate_size=48", "mlp.gate_proj.weight is [64, 32] in the bundle, [48, 32]"),
        ("drafter.tap_layers=[1,2,3]", "the bundle reads the target's layers [2, 4, 5]"),
        ("drafter.draft_vocab_size=48", "draft vocabulary has 64 tokens, this recipe asks for 48"),
        ("drafter={type: medusa}", "found drafter type 'eagle3', expected 'medusa'"),
        ("warm_start.remp=true", "did you mean 'warm_start.remap'?"),
    ],
)
def test_a_bundle_of_other_sizes_is_no_start(recipe, finished_run, tmp_path, override, named):
    def run():
        warmed(recipe, tmp_path, finished_run / "run" / "bundle", override).train()

    assert named in refusal(run)
    assert not (tmp_path / "warm" / "training").exists()


def test_a_draft_vocabulary_is_counted_anew_when_that_is_asked_for(recipe, finished_run, tmp_path, capsys):
    bundle = finished_run / "run" / "bundle"
    run = warmed(recipe, tmp_path, bundle, "drafter.draft_vocab_size=48", "warm_start.remap=true", NEXT_TO_NOTHING)
    run.progress = True
    run.train()
    assert "tokens of the new draft vocabulary were not in the bundle's" in capsys.readouterr().out
    assert len(tensors(tmp_path / "warm")["d2t"]) == 48
    heads = ("drafter={type: medusa}", "warm_start.remap=true")
    assert "expected 'medusa'" in refusal(warmed(recipe, tmp_path, bundle, *heads, output="heads").train)


# --- trees that a drafter cannot fill -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ("0;0,0;0,0,0;0,0,0,0", "tree path [0, 0, 0, 0] has depth 4, medusa drafts at most 3 tokens ahead"),
        (";".join(str(rank) for rank in range(267)), "is beyond the 266 tokens that medusa can propose"),
        ("0;1,0", "tree path [1, 0]: its parent [1] is not in the tree; add it"),
    ],
    ids=["deeper than the heads", "a rank beyond the columns", "a prefix that is absent"],
)
def test_a_tree_that_the_bundle_cannot_fill_is_named_on_the_command_line(
    chat_target, finished_run, tmp_path, capsys, tree, message
):
    """Though a baseline could fill it: before anything is measured."""
    saved(chat_target, MedusaConfig(heads=3), tmp_path / "three")
    traffic, output = finished_run / "heldout.jsonl", tmp_path / "out"
    options = [tmp_path / "three", "--target", chat_target.folder, "--traffic", traffic, "--output", output, "--k", 2]
    assert cli.guarded(cli.evaluate, [str(part) for part in (*options, "--tree", tree)], "spectrain evaluate") == 2
    assert message in capsys.readouterr().err
    assert not output.exists()


# --- live features ------------------------------------------------------------------------------------------------


LIVE = "data.features=live"


def losses(folder):
    lines = (folder / "training" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_a_live_run_stores_nothing_and_trains_the_drafter_of_a_stored_one(recipe, counter, tmp_path):
    full = ["data.feature_dtype=float32", "data.teacher_top_k=8"]
    shared = f"prepared={tmp_path / 'shared'}"
    fresh(recipe, *full, shared, f"output={tmp_path / 'stored'}").train()
    answered = counter.calls["answer"]
    live = fresh(recipe, *full, shared, f"output={tmp_path / 'live'}", LIVE)
    shutil.rmtree(tmp_path / "shared" / "features")
    live.train()
    live.evaluate()
    assert counter.calls["answer"] == answered
    assert {path.name for path in (tmp_path / "shared").iterdir()} == {"data"}
    assert not (tmp_path / "live" / "features").exists()
    stored, found = losses(tmp_path / "stored"), losses(tmp_path / "live")
    assert found == pytest.approx(stored, rel=1e-4)
    one, other = tensors(tmp_path / "stored"), tensors(tmp_path / "live")
    assert one.keys() == other.keys()
    for name, value in one.items():
        if value.is_floating_point():
            assert (other[name] - value).norm() <= 1e-3 * value.norm(), name
    assert read_bundle(live.bundle).manifest.recipe["data"]["features"] == "live"
    counts = json.loads((tmp_path / "shared" / "data" / "counts.json").read_text())
    assert counts["train"]["rows"] == 8
    refused = refusal(fresh(recipe, *full, shared, f"output={tmp_path / 'stored'}", LIVE).train)
    assert "what is trained on (data.train, data.max_length, data.features, " in refused


def test_an_interrupted_live_run_gives_the_same_drafter(recipe, counter, tmp_path):
    fresh(recipe, LIVE, *apart(tmp_path, "whole")).train()
    counter.stop("step", 4)
    again = apart(tmp_path, "cut")
    with pytest.raises(KeyboardInterrupt):
        fresh(recipe, LIVE, *again).train()
    counter.failing.clear()
    fresh(recipe, LIVE, *again).train()
    same_tensors(tensors(tmp_path / "cut"), tensors(tmp_path / "whole"))


def test_preparation_says_bytes_and_speed(recipe, capsys):
    Run(load_recipe(recipe)).prepare()
    printed = capsys.readouterr().out
    said = r" features: [\d,]+ bytes a token, extracted at [\d,]+ tokens a second$"
    assert all(re.search(f"^{side}{said}", printed, re.M) for side in ("train", "heldout"))


def test_a_target_elsewhere_than_training_is_refused():
    preflight.check_device(torch.device("cuda"), torch.device("cuda", 0))
    with pytest.raises(
        SpectrainError, match=r"target\.device is cuda:1, but training runs on cuda:0.*CUDA_VISIBLE_DEV"
    ):
        preflight.check_device(torch.device("cuda", 1), torch.device("cuda", 0))


def test_a_spread_target_is_for_one_process(recipe, monkeypatch):
    run = fresh(recipe, "target.device_map=auto")
    monkeypatch.setattr(pipeline, "processes", lambda: SimpleNamespace(num_processes=2, device=torch.device("cpu")))
    with pytest.raises(SpectrainError, match=r"target\.device_map .* 2 processes"):
        run.target  # noqa: B018 (loads it)


def test_processes_that_do_not_see_each_other_are_refused_before_anything_is_prepared(recipe, counter, monkeypatch):
    run = fresh(recipe)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SpectrainError, match=r"WORLD_SIZE is 2 but Accelerate sees 1 process"):
        run.train()
    assert not counter.calls["answer"]
    assert not run.folder.exists()
