"""Variants of a recipe on a tiny target: trained once each, resumed, compared, and told apart where they differ."""

import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from spectrain import ablation as module
from spectrain.ablation import Ablation, Variant, parse_variant, run_ablation
from spectrain.bundle import read_bundle
from spectrain.cli import ablation
from spectrain.config import load_recipe
from spectrain.errors import SpectrainError
from spectrain.evaluation import variants
from spectrain.evaluation.variants import RowScores, compare, in_words, markdown
from spectrain.intervals import Interval, ratio_interval
from spectrain.pipeline import Run
from spectrain.training import Trainer

ROOT = Path(__file__).parents[1]
IDLE, GOOD = Variant("idle", ("optim.lr=1e-9",)), Variant("good", ("optim.lr=1e-2",))


@pytest.fixture(scope="module")
def prepared(make_recipe, finished_run, tmp_path_factory):
    """A recipe whose answers and features are there and whose drafter is not trained."""
    folder = tmp_path_factory.mktemp("ablation")
    recipe = make_recipe(folder)
    for name in ("data", "features"):
        shutil.copytree(finished_run / "run" / name, folder / "run" / name)
    return recipe


def asked(recipe, output, *chosen, seeds=(0, 1), overrides=("training.epochs=12",)):
    return Ablation(recipe, tuple(overrides), chosen, seeds, output, progress=False)


@pytest.fixture(scope="module")
def finished(prepared):
    """Two variants with two seeds; not to be written to."""
    return run_ablation(asked(prepared, prepared.parent / "rates", IDLE, GOOD)).parent


@pytest.fixture
def steps(monkeypatch):
    """Optimizer steps taken from here on; a test may set ``steps.stop`` to one that fails."""
    real, counter = Trainer._step, type("Counter", (), {"taken": 0, "stop": None})()

    def counted(*arguments):
        counter.taken += 1
        if counter.taken == counter.stop:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(Trainer, "_step", counted)
    return counter


def document_of(folder):
    return json.loads((folder / "ablation.json").read_text(encoding="utf-8"))


def entries(document, what="differences", **about):
    return [row for row in document[what] if all(row[key] == value for key, value in about.items())]


def refusal(call, *arguments):
    with pytest.raises(SpectrainError) as error:
        call(*arguments)
    return str(error.value)


# --- end to end ---------------------------------------------------------------------------------------------------


def test_every_variant_is_trained_with_every_seed(finished):
    names = {path.name for path in finished.iterdir()}
    assert names == {"idle-0", "idle-1", "good-0", "good-1", "ablation.json"}
    recipes = {name: read_bundle(finished / name / "bundle").manifest.recipe for name in names if "-" in name}
    assert {name: recipe["training"]["seed"] for name, recipe in recipes.items()} == {
        "idle-0": 0,
        "idle-1": 1,
        "good-0": 0,
        "good-1": 1,
    }
    assert {name: recipe["optim"]["lr"] for name, recipe in recipes.items()} == {
        "idle-0": 1e-9,
        "idle-1": 1e-9,
        "good-0": 1e-2,
        "good-1": 1e-2,
    }


def test_a_difference_that_is_there_is_found(finished):
    document = document_of(finished)
    for measure in ("alpha_depth_1", "alpha_mean_depth"):
        (row,) = entries(document, group="everything", measure=measure)
        assert (row["variant"], row["against"], row["verdict"]) == ("good", "idle", "better")
        assert 0 < row["low"] <= row["value"] <= row["high"]


def test_the_document_says_what_was_compared(finished):
    document = document_of(finished)
    assert document["variants"] == {"idle": ["optim.lr=1e-9"], "good": ["optim.lr=1e-2"]}
    assert (document["recipe"], document["overrides"], document["seeds"]) == (
        "recipe.yaml",
        ["training.epochs=12"],
        [0, 1],
    )
    assert document["conversations"] == {"sum": 4, "everything": 4}
    assert document["depths"] == 2
    measures = ["alpha_depth_1", "alpha_depth_2", "alpha_mean_depth", "tokens_per_round"]
    assert [row["measure"] for row in entries(document, "results", group="sum", variant="good")] == measures


def test_values_are_those_of_validation(finished):
    """The trainer scored the same held-out rows after its last step, in batches."""
    document = document_of(finished)
    for variant in ("idle", "good"):
        for number, seed in enumerate(document["seeds"]):
            lines = (finished / f"{variant}-{seed}" / "training" / "metrics.jsonl").read_text().splitlines()
            last = json.loads(lines[-1])
            assert last["step"] == document["steps"][number]
            wanted = [*last["validation"]["alpha"], np.mean(last["validation"]["alpha"])]
            wanted.append(last["validation"]["tokens_per_round"])
            rows = entries(document, "results", group="everything", variant=variant)
            assert [row["by_seed"][number] for row in rows] == pytest.approx(wanted, abs=1e-6)
            assert all(row["value"] == pytest.approx(np.mean(row["by_seed"])) for row in rows)


def test_prepared_rows_are_shared_and_not_made_again(prepared, finished):
    for run in ("idle-0", "good-1"):
        assert {path.name for path in (finished / run).iterdir()} == {"bundle", "training", "heldout_scores.json"}
    assert not (prepared.parent / "run" / "training").exists()


def test_finished_runs_are_not_repeated(prepared, finished, steps, monkeypatch, tmp_path):
    measured = []
    monkeypatch.setattr(module, "_measure", lambda *arguments: measured.append(arguments))
    before = document_of(finished)
    run_ablation(asked(prepared, finished, IDLE, GOOD))
    assert (steps.taken, measured) == (0, [])
    assert document_of(finished) == before


def test_an_interrupted_ablation_goes_on_and_gives_the_same(prepared, finished, steps):
    output = prepared.parent / "again"
    total = sum(document_of(finished)["steps"]) * 2
    steps.stop = total // 2 + 3
    with pytest.raises(KeyboardInterrupt):
        run_ablation(asked(prepared, output, IDLE, GOOD))
    assert not (output / "ablation.json").exists()
    run_ablation(asked(prepared, output, IDLE, GOOD))
    # A checkpoint lies at every second step: at most one step is taken twice, beside the one that failed.
    assert steps.taken in (total + 1, total + 2)
    assert document_of(output) == document_of(finished)


def test_another_bundle_is_measured_anew(prepared, finished, steps, monkeypatch, tmp_path):
    output = prepared.parent / "touched"
    shutil.copytree(finished, output, symlinks=True)
    one = asked(prepared, output, GOOD, seeds=(0,))
    run_ablation(one)  # its own output folder is part of a run's settings
    manifest = output / "good-0" / "bundle" / "spectrain.json"
    manifest.write_text(manifest.read_text() + "\n")
    measured, real = [], module._measure
    monkeypatch.setattr(module, "_measure", lambda *arguments: measured.append(1) or real(*arguments))
    run_ablation(one)
    assert (measured, steps.taken) == ([1], 0)


def test_equal_variants_differ_by_nothing(prepared):
    one, other = Variant("one", ("optim.lr=1e-3",)), Variant("other", ("optim.lr=0.001",))
    output = prepared.parent / "equal"
    run_ablation(asked(prepared, output, one, other, overrides=("training.epochs=1",)))
    rows = document_of(output)["differences"]
    assert len(rows) == 2 * 4
    for row in rows:
        assert (row["value"], row["low"], row["high"], row["verdict"]) == (0, 0, 0, "no difference found")


def test_one_variant_is_enough_and_prepares_what_is_missing(make_recipe, tmp_path, capsys):
    recipe = make_recipe(tmp_path)
    output = tmp_path / "out put"
    ablation([str(recipe), "--variant", "base:", "--seeds", "3", "--output", str(output), "training.epochs=1"])
    document = document_of(output)
    assert (document["variants"], document["differences"], document["seeds"]) == ({"base": []}, [], [3])
    assert (tmp_path / "run" / "features").is_dir()
    printed = capsys.readouterr().out
    assert markdown(document) in printed
    assert f"numbers: {output / 'ablation.json'}" in printed
    assert "With one seed" in printed


# --- what is refused, before anything is trained ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "named"),
    [
        ([IDLE, IDLE], "--variant: found idle, idle, expected one or more, each once"),
        ([], "--variant: found none"),
        ([IDLE, Variant("long", ("training.epochs=13",))], "'long' has training.epochs = 13, 'idle' has 12"),
        ([IDLE, Variant("big", ("training.micro_batch_tokens=256",))], "training.micro_batch_tokens = 256"),
        ([Variant("other", ("data.max_length=64",))], "variant 'other' changes data"),
        ([Variant("cold", ("regenerate.sampler.temperature=0",))], "variant 'cold' changes regenerate"),
        ([Variant("typo", ("optim.rl=1",))], "optim.rl"),
    ],
)
def test_a_mistake_is_told_first(prepared, steps, tmp_path, chosen, named):
    assert named in refusal(run_ablation, asked(prepared, tmp_path / "out", *chosen))
    assert steps.taken == 0
    assert not (tmp_path / "out").exists()


def test_seeds_given_twice_are_refused(prepared, tmp_path):
    assert "--seeds: found 1, 1" in refusal(run_ablation, asked(prepared, tmp_path / "out", GOOD, seeds=(1, 1)))


def test_the_recipes_own_output_is_not_trained_into(prepared):
    chosen = asked(prepared, prepared.parent, GOOD, overrides=(f"output={prepared.parent / 'good-0'}",))
    assert "is the recipe's own output" in refusal(run_ablation, chosen)


def test_several_processes_are_refused(prepared, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "processes", lambda: type("State", (), {"num_processes": 2}))
    assert "one process" in refusal(run_ablation, asked(prepared, tmp_path / "out", GOOD))


def test_a_run_begun_with_other_settings_is_refused_before_anything_is_prepared(prepared, finished, monkeypatch):
    monkeypatch.setattr(Run, "prepare", lambda *_: pytest.fail("the rows were prepared"))
    other = Variant("good", ("optim.lr=2e-2",))
    message = refusal(run_ablation, asked(prepared, finished, other))
    assert "optim.lr: 0.01 against 0.02" in message


def test_variants_that_took_unlike_steps_are_not_compared(prepared, tmp_path, monkeypatch):
    def trained(_, variant, *rest):
        return RowScores([[1.0, 2.0]] * 4, [[2, 1]] * 4, 5 if variant is GOOD else 6)

    monkeypatch.setattr(module, "_trained_and_measured", trained)
    message = refusal(run_ablation, asked(prepared, tmp_path / "out", IDLE, GOOD))
    assert "{'idle': [6, 6], 'good': [5, 5]}" in message
    assert not (tmp_path / "out" / "ablation.json").exists()


def test_damaged_scores_are_named(prepared, finished):
    output = prepared.parent / "damaged"
    shutil.copytree(finished, output, symlinks=True)
    (output / "good-0" / "heldout_scores.json").write_text("{}")
    message = refusal(run_ablation, asked(prepared, output, GOOD, seeds=(0,)))
    assert "heldout_scores.json is damaged" in message


# --- the command line ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "overrides"),
    [
        ("kl: loss.decay=0.7", "kl", ("loss.decay=0.7",)),
        ("base:", "base", ()),
        ("a.b-c_1 :optim.lr=1e-3  training.accumulation=2", "a.b-c_1", ("optim.lr=1e-3", "training.accumulation=2")),
        ("mix: 'loss.terms={lk_hybrid: 1, forward_kl: 2}'", "mix", ("loss.terms={lk_hybrid: 1, forward_kl: 2}",)),
    ],
)
def test_a_variant_is_a_name_and_overrides(text, name, overrides):
    assert parse_variant(text) == Variant(name, overrides)


@pytest.mark.parametrize("text", ["", "kl", ":optim.lr=1", "../up: optim.lr=1", "a b: optim.lr=1", "-x: optim.lr=1"])
def test_a_variant_without_a_name_is_refused(text):
    assert f"--variant {text!r}: expected NAME: key.path=value" in refusal(parse_variant, text)


def test_a_variant_with_broken_overrides_is_refused():
    assert "'1}' is no override" in refusal(parse_variant, "mix: loss.terms={lk_hybrid: 1}")
    assert "No closing quotation" in refusal(parse_variant, "mix: 'optim.lr=1")


@pytest.mark.parametrize("seeds", ["", "a", "0,", "-1", "0.5"])
def test_seeds_are_whole_numbers(seeds, tmp_path):
    message = refusal(ablation, ["recipe.yaml", "--variant", "a:", f"--seeds={seeds}", "--output", str(tmp_path)])
    assert f"--seeds {seeds!r}: expected whole numbers" in message


def test_overrides_may_stand_on_both_sides_of_the_options(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(module, "run_ablation", lambda what: seen.append(what) or tmp_path / "x.json")
    (tmp_path / "x.json").write_text("{}")
    monkeypatch.setattr(module, "markdown", lambda document: "")
    ablation(["r.yaml", "optim.lr=1", "--variant", "a: x=1", "--output", "out", "training.epochs=2"])
    (found,) = seen
    wanted = Ablation(
        Path("r.yaml"), ("optim.lr=1", "training.epochs=2"), (Variant("a", ("x=1",)),), (0, 1, 2), Path("out")
    )
    assert found == wanted


@pytest.mark.slow
def test_the_door_teaches():
    door = ROOT / "eval" / "ablation.py"
    told = subprocess.run([sys.executable, str(door), "--help"], capture_output=True, text=True, check=True).stdout
    for word in ("--variant", "--seeds", "example:", "finished runs are kept", "exit codes"):
        assert word in told
    missing = [str(door), "none.yaml", "--variant", "a:", "--output", "out"]
    failed = subprocess.run([sys.executable, *missing], capture_output=True, text=True)
    assert (failed.returncode, failed.stderr) == (
        2,
        "error: recipe none.yaml does not exist; spectrain recipe writes one to start from\n",
    )


# --- the comparison -----------------------------------------------------------------------------------------------


def drawn_scores(generator, seeds, chats, shift=0.0, seed_noise=0.0, chat_noise=0.05, depths=1):
    """Scores whose α is 0.5 plus a part of the chat, which every variant shares, one of the seed, and ``shift``."""
    chat_W = np.random.default_rng(7).normal(0, chat_noise, chats)
    found = []
    for _ in range(seeds):
        alpha_W = 0.5 + shift + chat_W + generator.normal(0, seed_noise)
        top = [[*[float(20 * a)] * depths, 15.0] for a in alpha_W]
        found.append(RowScores(top, [[20] * depths + [10]] * chats, 1))
    return found


def names_and_kinds(chats, kinds=("narrow/a", "open/b")):
    return [f"chat-{i}" for i in range(chats)], [kinds[i % len(kinds)] for i in range(chats)]


def difference(scores, chats=30, measure="alpha_depth_1", group="everything"):
    (row,) = entries(compare(scores, *names_and_kinds(chats)), group=group, measure=measure)
    return row


def test_groups_are_the_parents_of_kinds():
    scores = {"a": drawn_scores(np.random.default_rng(0), 2, 7)}
    names, _ = names_and_kinds(7)
    kinds = ["narrow/sql", "open/chat", "narrow/json", "open/code", "lonely/x", "plain", "plain"]
    document = compare(scores, names, kinds)
    assert document["conversations"] == {"narrow": 2, "open": 2, "plain": 2, "everything": 7}
    assert document["left_out"] == ["lonely"]
    (row,) = entries(document, "results", group="open", measure="alpha_depth_1")
    chosen = [scores["a"][0].top[i][0] / 20 for i in (1, 3)]
    assert row["by_seed"][0] == pytest.approx(np.mean(chosen))


def test_rows_of_one_conversation_are_resampled_together():
    """Twice the same rows under the same conversations say nothing new; under new ones they would."""
    scores = {"a": drawn_scores(np.random.default_rng(0), 1, 20)}
    twice = {"a": [RowScores(s.top * 2, s.bottom * 2, 1) for s in scores["a"]]}
    names, kinds = names_and_kinds(20)
    (one,) = entries(compare(scores, names, kinds), "results", group="everything", measure="alpha_depth_1")
    (same,) = entries(compare(twice, names * 2, kinds * 2), "results", group="everything", measure="alpha_depth_1")
    other_names = [*names, *(f"{name}-b" for name in names)]
    (new,) = entries(compare(twice, other_names, kinds * 2), "results", group="everything", measure="alpha_depth_1")
    assert (same["value"], same["low"], same["high"]) == pytest.approx((one["value"], one["low"], one["high"]))
    assert new["high"] - new["low"] < 0.85 * (one["high"] - one["low"])


def test_with_one_seed_the_interval_is_that_of_conversations():
    (found,) = drawn_scores(np.random.default_rng(0), 1, 40)
    wanted = ratio_interval([row[0] for row in found.top], [row[0] for row in found.bottom], resamples=4000)
    document = compare({"a": [found]}, *names_and_kinds(40))
    (row,) = entries(document, "results", group="everything", measure="alpha_depth_1")
    assert row["value"] == pytest.approx(wanted.value)
    assert (row["low"], row["high"]) == pytest.approx((wanted.low, wanted.high), abs=0.002)


def test_what_variants_share_cancels():
    generator = np.random.default_rng(0)
    scores = {"a": drawn_scores(generator, 3, 30, chat_noise=0.2), "b": drawn_scores(generator, 3, 30, 0.01, 0, 0.2)}
    row = difference(scores)
    assert (row["value"], row["low"], row["high"]) == pytest.approx((0.01, 0.01, 0.01))
    assert row["verdict"] == "better"
    backwards = difference(dict(reversed(scores.items())))
    assert (backwards["variant"], backwards["value"], backwards["verdict"]) == ("a", pytest.approx(-0.01), "worse")


def test_seeds_widen_an_interval():
    generator = np.random.default_rng(0)
    calm = {"a": drawn_scores(generator, 3, 30), "b": drawn_scores(generator, 3, 30)}
    wild = {"a": drawn_scores(generator, 3, 30, 0, 0.05), "b": drawn_scores(generator, 3, 30, 0, 0.05)}
    assert difference(calm)["high"] - difference(calm)["low"] < 1e-12
    assert difference(wild)["high"] - difference(wild)["low"] > 0.03


def test_an_interval_holds_the_truth_about_as_often_as_it_says(monkeypatch):
    """100 ablations of five seeds and no difference: at 95%, some 5 are found; five seeds are few, so more may be.

    Intervals over conversations alone would be exact here, chats being shared, and so find one in nearly all.
    """
    monkeypatch.setattr(variants, "RESAMPLES", 500)
    generator = np.random.default_rng(1)
    verdicts = []
    for _ in range(100):
        scores = {name: drawn_scores(generator, 5, 10, seed_noise=0.02) for name in ("a", "b")}
        verdicts.append(difference(scores, chats=10)["verdict"])
    assert 75 <= verdicts.count("no difference found") < 100


def test_unlike_depths_are_compared_as_far_as_both_go():
    generator = np.random.default_rng(0)
    document = compare(
        {"two": drawn_scores(generator, 1, 6, depths=2), "four": drawn_scores(generator, 1, 6, depths=4)},
        *names_and_kinds(6),
    )
    assert document["depths"] == 2
    assert {row["measure"] for row in document["results"]} == {
        "alpha_depth_1", "alpha_depth_2", "alpha_mean_depth", "tokens_per_round",
    }  # fmt: skip
    assert {row["value"] for row in entries(document, "results", measure="tokens_per_round")} == {1.5}


def test_a_depth_that_no_answer_reaches_has_no_number():
    top, bottom = [[1.0, 0.0, 3.0]] * 4, [[2, 0, 2]] * 4
    document = compare({"a": [RowScores(top, bottom, 1)]}, *names_and_kinds(4))
    measures = [row["measure"] for row in entries(document, "results", group="narrow")]
    assert measures == ["alpha_depth_1", "tokens_per_round"]


def test_a_single_conversation_has_no_interval():
    found = RowScores([[1.0, 2.0]], [[2, 1]], 1)
    assert "found 1 held-out conversation" in refusal(compare, {"a": [found]}, ["only"], ["kind"])


def test_resampling_in_parts_gives_the_same(monkeypatch):
    scores = {"a": drawn_scores(np.random.default_rng(0), 2, 9)}
    whole = compare(scores, *names_and_kinds(9))
    monkeypatch.setattr(variants, "RESAMPLE_CELLS", 100)
    assert compare(scores, *names_and_kinds(9)) == whole


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.1, 0.3, "better"), (-0.3, -0.1, "worse"), (-0.1, 0.1, "no difference found"), (0, 0, "no difference found")],
)
def test_a_difference_in_words(low, high, verdict):
    assert in_words(Interval((low + high) / 2, low, high)) == verdict


def test_the_tables_of_three_variants():
    generator = np.random.default_rng(0)
    scores = {name: drawn_scores(generator, 2, 5, shift) for name, shift in (("a", 0), ("b", 0.1), ("c", 0.2))}
    document = compare(scores, *names_and_kinds(5, ("narrow/a", "narrow/b")))
    text = markdown(document | {"variants": dict.fromkeys(scores), "seeds": [0, 1]})
    assert "| kinds | measure | a | b | c |\n| --- | --- | --- | --- | --- |" in text
    assert "| narrow | α, first depth | b − a | +0.1000 (+0.1000 to +0.1000) | better |" in text
    assert text.count("− a |") == 2 * text.count("c − b |")
    assert "α, mean of 1 depths" in text
    assert "alpha_depth" not in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in rows[:2]}) == 1


@pytest.mark.parametrize(
    ("value", "low", "high", "verdict"),
    [
        (-0.00004, -0.0002, -0.00001, "no difference at the printed precision"),
        (0.00004, 0.00001, 0.0002, "no difference at the printed precision"),
        (-0.00006, -0.0002, -0.00001, "worse"),
        (0.0, -0.1, 0.1, "no difference found"),
    ],
)
def test_a_verdict_does_not_contradict_what_is_printed(value, low, high, verdict):
    scores = {name: drawn_scores(np.random.default_rng(0), 2, 5) for name in "ab"}
    document = compare(scores, *names_and_kinds(5)) | {"variants": dict.fromkeys(scores), "seeds": [0, 1]}
    found = Interval(value, low, high)
    document["differences"] = [document["differences"][0] | asdict(found) | {"verdict": in_words(found)}]
    assert markdown(document).splitlines()[-1].endswith(f"| {verdict} |")


def test_the_recipe_of_a_run_keeps_odd_folders(prepared, tmp_path):
    output = tmp_path / "a: b #c"
    recipe = asked(prepared, output, GOOD).recipe_of(GOOD, 4)
    assert (recipe.output, recipe.training.seed) == (str(output / "good-4"), 4)
    assert Run(load_recipe(prepared), progress=False).folder != output
