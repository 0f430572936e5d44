"""Estimates: counts equal what is really built and stored, every shipped recipe has one, and bad input is named."""

import json
from pathlib import Path

import pytest
import torch
from families import TRAINABLE, named
from transformers import AutoConfig

from spectrain import cli, interop
from spectrain.blueprint import Blueprint, blueprint_drafter, cache_bytes, parameters, training_step
from spectrain.config import load_recipe
from spectrain.data.features import FeatureStore
from spectrain.drafters import family_of
from spectrain.errors import SpectrainError
from spectrain.estimate import blueprint, bytes_per_token, estimate, load_config
from spectrain.estimate_table import GIB, duration, shortage, size, table
from spectrain.rates import Rates, rates
from spectrain.workload import Side, Workload, workload

RECIPES = Path(__file__).parents[1] / "recipes"
LARGE = sorted((*(RECIPES / "qwen3-8b").glob("*.yaml"), *(RECIPES / "llama-3.1-8b-instruct").glob("*.yaml")))
SPEED = Rates(989e12, 3350e9, 0.4, "as given")
GIVEN = ["--tokens", "1000000", "--answer-share", "0.4", "--tflops", "989", "--bandwidth", "3350"]


@pytest.mark.parametrize("kind", TRAINABLE, ids=named)
@pytest.mark.parametrize("shape", ["llama", "qwen3"])
def test_drafters_on_paper_hold_as_much_as_real_ones(kind, shape, tiny_target):
    fields = {"draft_vocab_size": 16} if "draft_vocab_size" in kind.model_fields else {}
    target, config = tiny_target(shape), kind(**fields)
    real = family_of(config).build(config, target, torch.ones(target.vocab_size, dtype=torch.long))
    paper = blueprint_drafter(config, Blueprint(target.model.config, torch.float32))
    assert {n: p.shape for n, p in paper.named_parameters()} == {n: p.shape for n, p in real.named_parameters()}
    assert all(p.is_meta for p in paper.parameters())
    assert parameters(paper) == sum(p.numel() for p in real.parameters())


def test_a_family_that_could_not_be_saved_has_no_estimate(make_recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(interop, "FORMATS", ())
    with pytest.raises(SpectrainError, match=r"Eagle3Drafter has no serving format.*add it to interop\.FORMATS"):
        small(make_recipe(tmp_path))


def test_heads_of_its_own_are_counted_and_take_no_memory(tiny_target):
    config = next(kind for kind in TRAINABLE if "head" in kind.model_fields)(head="own")
    target = tiny_target()
    drafter = blueprint_drafter(config, Blueprint(target.model.config, torch.float32))
    assert all(p.is_meta for p in drafter.parameters())
    assert parameters(drafter) >= config.heads * target.vocab_size * target.hidden_size


def test_a_target_that_is_trained_too_is_counted_with_its_drafter(tiny_target):
    kind = next(kind for kind in TRAINABLE if "joint" in kind.model_fields)
    target = Blueprint(tiny_target().model.config, torch.float32)
    alone = parameters(target.model)
    drafter = blueprint_drafter(kind(joint={"rank": 2}), target)
    shape = {"rows": 2, "length": 10, "answer": 4, "feature_dtype": torch.float32, "half": True}
    early, late = (training_step(drafter, target, **shape, progress=at) for at in (0.0, 1.0))
    assert (early.moves_target, late.moves_target) == (False, True)
    assert late.forward_flops > early.forward_flops + 2 * alone
    assert sum(head.rows for head in late.heads) > sum(head.rows for head in early.heads)  # those of the anchor


def test_a_target_on_paper_has_the_real_one_s_sizes(tiny_target, architecture):
    real = tiny_target(architecture, dtype=torch.float32)
    paper = Blueprint(real.model.config, torch.float32)
    assert parameters(paper.model) == sum(p.numel() for p in real.model.parameters())
    cache = real.new_cache()
    real.forward(torch.zeros(1, 4, dtype=torch.long), cache=cache)
    assert cache_bytes(paper) == cache.bytes() / 4


def test_a_step_is_counted_as_its_products_are(tiny_target):
    """One linear layer of a residual block: forward 2 H H a token, and as much for the weight's gradient."""
    config = next(kind for kind in TRAINABLE if "heads" in kind.model_fields)(heads=2)
    target = Blueprint(tiny_target().model.config, torch.float32)
    drafter = blueprint_drafter(config, target)
    step = training_step(drafter, target, rows=3, length=10, answer=4, feature_dtype=torch.float32, half=False)
    assert step.forward_flops == 2 * 2 * 32 * 32 * 30
    assert step.flops == 2 * step.forward_flops
    (head,) = step.heads
    # Of four answer tokens in a row the first head predicts the last three, the second the last two.
    assert (head.rows, head.places) == (3 * (3 + 2), 3 * 3)
    assert (head.flops, head.teacher_flops) == (2 * 24 * 32 * 2 * head.rows, 2 * 24 * 32 * head.places)


def test_bytes_of_a_token_are_those_of_a_real_store(finished_run, tmp_path):
    (folder,) = (finished_run / "run" / "features").glob("train*")
    key = json.loads((folder / "index.json").read_text(encoding="utf-8"))["key"]
    store = FeatureStore(folder, key)
    recipe = load_recipe(finished_run / "recipe.yaml")
    config = load_config(recipe, finished_run / "recipe.yaml")
    counted = bytes_per_token(recipe, blueprint(recipe, config))
    stored = store.bytes_per_token()
    header = 1200 * len(list(folder.glob("*.safetensors"))) / sum(store.length(i) for i in range(len(store)))
    assert counted <= stored <= counted + header


def test_a_prepared_run_says_its_own_counts_and_its_weights_the_bundle_s_size(finished_run):
    path = finished_run / "recipe.yaml"
    recipe = load_recipe(path)
    found = json.loads((finished_run / "run" / "data" / "counts.json").read_text(encoding="utf-8"))
    work = workload(recipe)
    assert (work.train.rows, work.train.tokens) == (found["train"]["rows"], found["train"]["tokens"])
    document = estimate(recipe, blueprint(recipe, load_config(recipe, path)), work, SPEED)
    weights = (finished_run / "run" / "bundle" / "model.safetensors").stat().st_size
    assert document["disk"]["bundle"] <= weights <= document["disk"]["bundle"] + 4096
    state = finished_run / "run" / "training" / "checkpoints"
    moments = next(state.glob("step-*/state/optimizer.bin")).stat().st_size
    assert document["memory"]["training"]["moments"] <= moments <= document["memory"]["training"]["moments"] + 16384


def test_files_are_counted_by_the_target_s_tokenizer(make_recipe, tmp_path):
    recipe = load_recipe(make_recipe(tmp_path))
    work = workload(recipe)
    assert work.train.rows == 8
    assert work.train.answer == 8 * 12  # each as long as max_new_tokens
    assert work.train.answer < work.train.tokens


def test_answers_in_the_files_are_counted_where_they_are_trained_on(make_recipe, tmp_path):
    path = make_recipe(tmp_path)
    chat = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    for name, count in (("train", 6), ("heldout", 2)):
        rows = [
            {"id": f"{name}-{i}", "messages": [{**chat[0], "content": f"{name} {i} + 1?"}, chat[1]]}
            for i in range(count)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    work = workload(load_recipe(path, ["regenerate=null"]))
    assert (work.train.rows, work.heldout.rows) == (6, 2)
    assert (work.train.answer, work.heldout.answer) == (6 * 2, 2 * 2)  # "2" and the end of the turn


# Of the second target one family: the others differ in its sizes alone, and each takes a quarter of a minute.
@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [path for path in LARGE if path.parent.name == "qwen3-8b" or path.stem == "eagle3"],
    ids=lambda path: f"{path.parent.name}/{path.name}",
)
def test_recipes_for_large_targets_fit_their_devices(path):
    recipe = load_recipe(path)
    target = blueprint(recipe, load_config(recipe, path))
    assert 7.9e9 < parameters(target.model) < 8.3e9
    work = workload(recipe, tokens=10_000 * 1024, answer_share=0.4)  # rows as long on both sides: each is computed once
    document = estimate(recipe, target, work, SPEED)
    assert shortage(document, 72 * GIB) is None
    assert f"{document['parameters']['trainable'] / 1e6:,.0f} million" in path.read_text(encoding="utf-8")
    assert "fits" in table(document, 72 * GIB)


@pytest.mark.parametrize("path", LARGE, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_recipes_for_large_targets_split_their_steps_over_eight(path):
    text = path.read_text(encoding="utf-8")
    assert load_recipe(path).training.accumulation == 8
    assert "training.accumulation=1" in text
    assert "gpu.yaml" in text
    assert "gpus.yaml" in text


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("qwen3-8b", (4096, 36, 151936, 1e6, "default")), ("llama-3.1-8b-instruct", (4096, 32, 128256, 5e5, "llama3"))],
)
def test_configs_that_ship_say_what_the_targets_are(name, sizes):
    config = AutoConfig.from_pretrained(RECIPES / name / "config.json")
    rope = config.rope_parameters
    found = (config.hidden_size, config.num_hidden_layers, config.vocab_size, rope["rope_theta"], rope["rope_type"])
    assert found == sizes
    assert not config.tie_word_embeddings


def small(path, *overrides, processes=1):
    recipe = load_recipe(path, overrides)
    work = Workload(Side(8, 400, 96), Side(4, 200, 48), "as given")
    return estimate(recipe, blueprint(recipe, load_config(recipe, path)), work, SPEED, processes)


@pytest.fixture(scope="module")
def one(make_recipe, tmp_path_factory):
    return small(make_recipe(tmp_path_factory.mktemp("one")))


def test_processes_share_the_training_and_each_adds_gradient_buckets(one, make_recipe, tmp_path):
    four = small(make_recipe(tmp_path), processes=4)
    assert four["memory"]["training"]["gradient_buckets"] == one["memory"]["training"]["gradients"]
    assert four["time"]["training"] < one["time"]["training"]
    assert four["time"]["features"] == one["time"]["features"]


def test_the_target_s_law_costs_where_it_is_learnt_and_not_stored(one, make_recipe, tmp_path):
    path = make_recipe(tmp_path)
    whole = one["time"]["training_flops_per_token"]
    assert small(path, "loss.teacher=answers")["time"]["training_flops_per_token"] < whole
    stored = small(path, "data.teacher_top_k=4")
    assert stored["time"]["training_flops_per_token"] < whole
    assert stored["disk"]["features"] == one["disk"]["features"] + 400 * 4 * 8  # of the training tokens alone


def test_a_run_that_stops_early_takes_its_share_of_the_time(make_recipe, tmp_path):
    path = make_recipe(tmp_path)
    whole = small(path)["time"]
    half = small(path, f"training.steps={int(whole['steps']) // 2}")["time"]
    assert half["steps"] == int(whole["steps"]) // 2
    assert half["training"] == pytest.approx(whole["training"] * half["steps"] / whole["steps"])


def test_live_features_take_no_disk_and_a_forward_of_the_target_in_every_step(one, make_recipe, tmp_path):
    path = make_recipe(tmp_path)
    live = small(path, "data.features=live")
    assert live["disk"]["features"] == live["disk"]["feature_bytes_per_token"] == 0
    assert live["disk"]["total"] == one["disk"]["total"] - one["disk"]["features"]
    assert "features" not in live["memory"]
    assert live["memory"]["training"]["live_features"] > 0 == one["memory"]["training"]["live_features"]
    assert live["memory"]["training"]["peak"] >= one["memory"]["training"]["peak"]
    assert live["time"]["features"] == 0 < one["time"]["features"]
    # Two epochs over 8 of 12 rows, and a validation of the 4 others.
    more = [live["time"][stage] - one["time"][stage] for stage in ("training", "validation")]
    assert more[0] == pytest.approx(one["time"]["features"] * 2 * 8 / 12)
    assert more[1] >= one["time"]["features"] * 4 / 12 * 0.999
    assert "live features" in table(live)


def test_what_does_not_fit_says_what_to_lower(one):
    document = dict(one)
    assert shortage(document, GIB) is None
    assert "target.dtype=bfloat16" in shortage(document, document["memory"]["answers"]["target"] / 2)
    document["memory"] = {"training": {"target": 5 * GIB, "activations": 9 * GIB, "moments": GIB, "peak": 15 * GIB}}
    assert "training needs 15.00 GiB" in shortage(document, 10 * GIB)
    assert "training.micro_batch_tokens" in shortage(document, 10 * GIB)
    assert "does not fit" in table(document, 10 * GIB)


def test_the_command_prints_and_tells_by_its_exit_code(make_recipe, tmp_path, capsys):
    arguments = [str(make_recipe(tmp_path)), *GIVEN, "--row-tokens", "100"]
    assert cli.guarded(cli.estimate, [*arguments, "--device-memory", "80", "training.epochs=1"], "estimate") == 0
    said = capsys.readouterr()
    assert "fits 80.00 GiB" in said.out
    assert "estimate: running a training step on shapes alone ..." in said.err
    assert cli.guarded(cli.estimate, [*arguments, "--device-memory", "0.0001", "--json"], "estimate") == 1
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert document["traffic"]["train"]["tokens"] == 1_000_000
    assert f"does not fit: {document['shortage']}" in said.err


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--tokens", "100"], "--answer-share"),
        (["--answer-share", "0.5"], "--tokens"),
        (["--tokens", "100", "--answer-share", "2"], "above 0 up to 1"),
        ([*GIVEN, "--row-tokens", "5000"], "data.max_length"),
        ([*GIVEN, "--processes", "0"], "--processes 0"),
        ([*GIVEN, "--utilisation", "0"], "--utilisation"),
        ([*GIVEN, "--device-memory", "-1"], "--device-memory"),
        ([*GIVEN, "--config", "nowhere.json"], "--config nowhere.json"),
        *[
            ([*GIVEN, flag, value], f"{flag} {float(value)}: expected a finite number above 0")
            for flag in ("--tflops", "--bandwidth", "--device-memory")
            for value in ("nan", "inf", "0", "-1")
        ],
        ([*GIVEN, "drafter={type: ngram}", "baselines=[]"], "nothing to train"),
        ([*GIVEN, "target.dtype=int8"], "not a torch dtype"),
    ],
)
def test_bad_input_is_named(extra, said, make_recipe, tmp_path, capsys):
    assert cli.guarded(cli.estimate, [str(make_recipe(tmp_path)), *extra], "estimate") == 2
    assert said in capsys.readouterr().err


def test_tokens_that_cannot_be_counted_are_asked_for():
    with pytest.raises(SpectrainError, match=r"chats\.jsonl is not here.*--tokens"):
        workload(load_recipe(LARGE[0]))


def test_rates_are_measured_where_they_are_not_given():
    found = rates(torch.float32, tflops=1.0, bandwidth=None, utilisation=0.5)
    assert found.flops == 1e12
    assert found.effective == 5e11
    assert 1e8 < found.bandwidth < 1e14
    assert "measured" in found.source


def test_sizes_and_times_read_well():
    assert (size(GIB), size(GIB / 1024)) == ("1.00 GiB", "1.0 MiB")
    assert (duration(7200), duration(600), duration(3)) == ("2.0 h", "10.0 min", "3.0 s")
