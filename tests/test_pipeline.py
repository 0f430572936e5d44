"""From chats to a report on a tiny target: whole, repeated, and interrupted at every stage."""

import errno
import json
import shutil

import pytest
import torch

from spectrain import bundle as bundles
from spectrain import checkpoints, config, pipeline, regenerate
from spectrain.bundle import load_drafter, read_bundle
from spectrain.config import load_recipe
from spectrain.data import features
from spectrain.errors import SpectrainError
from spectrain.evaluation import acceptance
from spectrain.evaluation.document import read_document
from spectrain.pipeline import Run
from spectrain.training import Trainer

WORK = {  # what a stage must not do twice: the module and the function that does it
    "answer": (regenerate, "generate_batch"),
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


def refusal(call, *arguments, **keywords):
    with pytest.raises(SpectrainError) as error:
        call(*arguments, **keywords)
    return str(error.value)


def test_a_run_leaves_a_bundle_and_reports(finished_run, chat_target):
    folder = finished_run / "run"
    reports = {"acceptance.json", "report.html", "report.md", "report.png"}
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
    assert set(contents.manifest.data_digests) == {"train", "heldout"}
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
    assert str(chat_target.folder) not in json.dumps(document)  # a path says nothing, and tells of the machine
    assert context["device"]["name"]
    assert "eagle3 k=2" in (folder / "report.md").read_text(encoding="utf-8")


def test_rows_and_answers_are_counted(finished_run):
    counts = json.loads((finished_run / "run" / "data" / "counts.json").read_text())
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
        (["regenerate.max_new_tokens=11"], "config.max_new_tokens: 12 against 11"),
        (["regenerate.sampler.temperature=0"], "sampler.temperature: 1.0 against 0.0"),
        (["data.feature_dtype=float32"], "store_dtype"),
        (["drafter.tap_layers=[1,2,3]"], "taps"),
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
    "override", ["evaluation.k=[3]", "baselines=[]", "baselines=[{type: ngram, longest: 2}]", "evaluation.seed=1"]
)
def test_a_measurement_begun_with_other_settings_is_refused(again, tmp_path, override):
    before = files(tmp_path / "run")
    message = refusal(fresh(again, override).evaluate)
    assert "measured with other settings" in message
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
        snapshot, chat_target, heldout, settings, tmp_path / "report", traffic="t", progress=False
    )
    assert path.is_file()
    assert not (snapshot / "acceptance.json").exists()
