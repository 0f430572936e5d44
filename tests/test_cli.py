"""The commands: instant help, and one clear message for every mistake, with nothing half-written."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from spectrain import checkpoints, cli, commands, measuring_commands, pipeline, places
from spectrain.bundle import MANIFEST_FILE
from spectrain.drafters.ranks import measured_tree
from spectrain.drafters.tree_search import expected_accepted
from spectrain.errors import SpectrainError
from spectrain.evaluation import acceptance, exactness
from spectrain.evaluation.document import read_document
from spectrain.evaluation.measured_trees import MeasuredTree
from spectrain.exact.sampler import Sampler
from spectrain.files import file_digest
from spectrain.shapes import DynamicTree, StaticTree
from spectrain.tree_options import parse_tree

ROOT = Path(__file__).parents[1]
DOORS = sorted([*ROOT.glob("scripts/*.py"), *ROOT.glob("eval/*.py")])


@pytest.fixture
def fails(capsys):
    """Run a command that must fail: its message. Exactly one, on stderr, without a traceback."""

    def fails(command, *arguments, code=2):
        assert cli.guarded(command, [str(a) for a in arguments], "spectrain x") == code
        error = capsys.readouterr().err
        assert "Traceback" not in error
        (start,) = (match.start() for match in re.finditer("^error: ", error, re.MULTILINE))
        return error[start:].strip()

    return fails


@pytest.fixture
def recipe(make_recipe, tmp_path):
    return make_recipe(tmp_path)


@pytest.fixture
def bundle(finished_run, tmp_path):
    return Path(shutil.copytree(finished_run / "run" / "bundle", tmp_path / "bundle"))


@pytest.fixture
def evaluate(bundle, finished_run, chat_folder, tmp_path):
    """Arguments of an evaluation; keywords replace them (``None`` leaves one out)."""

    def evaluate(**changes):
        options = {"traffic": finished_run / "heldout.jsonl", "target": chat_folder, "output": tmp_path / "out"}
        options |= {"k": 1, "max-new-tokens": 4} | {name.replace("_", "-"): value for name, value in changes.items()}
        where = options.pop("bundle", bundle)
        return [where, *(part for name, value in options.items() if value is not None for part in (f"--{name}", value))]

    return evaluate


def python(*arguments, **keywords):
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, cwd=ROOT, **keywords)


# --- help ---------------------------------------------------------------------------------------------------------


def test_the_commands_are_listed_without_importing_torch():
    code = "import sys, spectrain.cli; print(sorted({'torch', 'transformers', 'numpy', 'pydantic'} & set(sys.modules)))"
    assert python("-c", code).stdout == "[]\n"


@pytest.mark.parametrize("name", [*cli.COMMANDS, ""])
def test_help_of_the_command_line(capsys, monkeypatch, name):
    monkeypatch.setattr(sys, "argv", ["spectrain", *filter(None, [name]), "--help"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: spectrain {name}".strip())
    if name:
        assert "example:\n" in text
        assert "exit codes: 0 " in text
    else:
        assert all(command in text for command in cli.COMMANDS)


@pytest.mark.parametrize("path", DOORS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_help_of_every_door_imports_nothing_heavy(path):
    done = python("-X", "importtime", path, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: python {path.parent.name}/{path.name}")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "spectrain.cli" in imported
    assert not {"torch", "transformers", "numpy", "pydantic"} & imported


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "the following arguments are required: COMMAND; spectrain --help tells more"),
        ("nonsense", "COMMAND: invalid choice: 'nonsense' (choose from "),
        ("train", "the following arguments are required: recipe, key.path=value; spectrain train --help tells more"),
        ("report", "the following arguments are required: FILE.json; spectrain report --help tells more"),
        ("train a.yaml --lr=1", "unrecognized arguments: --lr=1; spectrain train --help tells more"),
        ("evaluate bundle --k", "--k: expected one argument; spectrain evaluate --help tells more"),
    ],
)
def test_wrong_usage_is_exit_code_2(capsys, monkeypatch, line, message):
    monkeypatch.setattr(sys, "argv", ["spectrain", *line.split()])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


# --- recipes and chats --------------------------------------------------------------------------------------------

USER = {"role": "user", "content": "hello"}
CHATS = {
    "not valid JSON": '{"prompt": "hel',
    "unknown role 'robot'": json.dumps({"messages": [{"role": "robot", "content": "x"}]}),
    "messages is []": json.dumps({"messages": []}),
    "empty content": json.dumps({"messages": [{"role": "user", "content": " "}]}),
    "found a JSON list": "[1]",
    "no user turn comes before it": json.dumps({"messages": [{"role": "assistant", "content": "a"}, USER]}),
}


@pytest.mark.parametrize("message", CHATS)
def test_a_broken_chat_is_named_by_file_and_line(fails, recipe, evaluate, tmp_path, message):
    path = tmp_path / "train.jsonl"
    path.write_text(path.read_text() + CHATS[message] + "\n")
    for found in (fails(cli.train, recipe), fails(cli.evaluate, *evaluate(traffic=path))):
        assert f"{path}:9" in found
        assert message in found
        assert "\n" not in found
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "out").exists()


def test_a_prompt_longer_than_the_context_is_named(fails, recipe, evaluate, tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text(path.read_text() + json.dumps({"id": "long", "prompt": "x" * 300}) + "\n")
    for found in (fails(cli.train, recipe), fails(cli.evaluate, *evaluate(traffic=path))):
        assert "conversation 'long'" in found
        assert "context of 256" in found
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "out").exists()


def test_bad_rows_of_an_evaluation_are_dropped_where_that_is_asked_for(fails, evaluate, finished_run, tmp_path, capsys):
    chats = (finished_run / "heldout.jsonl").read_text()
    path = tmp_path / "chats.jsonl"
    long = json.dumps({"id": "long", "prompt": "x" * 300})
    for bad, named in (("{broken", f"{path}:1"), (long, "conversation 'long'")):
        path.write_text(f"{bad}\n{chats}")
        found = fails(cli.evaluate, *evaluate(traffic=path))
        assert named in found
        assert found.endswith("(or leave such rows out, counted: --bad-rows drop)")
    path.write_text(f"{{broken\n{long}\n{chats}")
    assert cli.guarded(cli.evaluate, list(map(str, evaluate(traffic=path, bad_rows="drop"))), "x") == 0
    said = capsys.readouterr().out
    assert f"not valid JSON: {path}:1" in said
    document = read_document(tmp_path / "out" / "acceptance.json")
    assert document["context"]["dropped"] == {"broken_json": 1, "no_room": 1}
    report = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "Left out: 2 rows of the traffic that could not be used (1 broken json, 1 no room)" in report
    # What was found is told at the end, before where it lies.
    assert "greedy (T=0): Leave it off" in said
    assert re.search(r"eagle3 k=1 +\d", said)
    path.write_text("{broken\n")
    assert "no conversations in" in fails(cli.evaluate, *evaluate(traffic=path, bad_rows="drop"))


def test_chats_are_read_before_a_target_is_loaded(fails, recipe, monkeypatch, tmp_path):
    monkeypatch.setattr(pipeline, "load_target", lambda *_, **__: pytest.fail("a target was loaded"))
    (tmp_path / "empty.jsonl").write_text("")
    for command in (cli.prepare, cli.train, cli.run):
        for name in ("nothere.jsonl", "empty.jsonl"):
            assert name in fails(command, recipe, f"data.train=[{tmp_path / name}]")
    assert not (tmp_path / "run").exists()


def test_a_row_longer_than_the_context_is_named(fails, recipe, tmp_path):
    for name in ("train", "heldout"):
        row = {"id": f"{name}-long", "prompt": f"{name}?", "completion": "x" * 300}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    found = fails(cli.train, recipe, "regenerate=null", "data.max_length=1000")
    assert "conversation 'train-long'" in found
    assert "the target's context is 256; lower data.max_length" in found
    assert not list((tmp_path / "run").rglob("*.*"))


def test_a_misspelt_key_is_named_with_a_suggestion(fails, recipe, tmp_path):
    recipe.write_text(recipe.read_text() + "learing_rate: 1\n")
    for command in (cli.prepare, cli.train, cli.run):
        assert "unknown key 'learing_rate'; did you mean 'optim.lr'?" in fails(command, recipe)
    assert not (tmp_path / "run").exists()


def test_a_file_where_a_target_is_due_is_named(fails, recipe, evaluate, tmp_path):
    name = tmp_path / "train.jsonl"
    for found in (fails(cli.train, recipe, f"target.name={name}"), fails(cli.evaluate, *evaluate(target=name)),
                  fails(cli.prepare, recipe, f"target.name={name}", "--audit"),
                  fails(cli.estimate, recipe, f"target.name={name}")):  # fmt: skip
        assert found.startswith(f"error: target '{name}' is a file, not a folder with a model")


@pytest.mark.parametrize("name", ["/no/such/folder", "./none", "a/b/c"])
def test_a_target_that_does_not_exist_is_named(fails, recipe, evaluate, tmp_path, name):
    for found in (fails(cli.train, recipe, f"target.name={name}"), fails(cli.evaluate, *evaluate(target=name))):
        assert found.startswith(f"error: target folder {name!r} does not exist; give a model folder, or a Hub id")
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_no_model_is_named(fails, recipe, tmp_path):
    (tmp_path / "empty").mkdir()
    found = fails(cli.train, recipe, f"target.name={tmp_path / 'empty'}")
    assert "has no config.json" in found


def test_an_output_begun_with_other_settings_is_named(fails, recipe, finished_run, tmp_path):
    shutil.copytree(finished_run / "run", tmp_path / "run")
    assert "training.epochs: 2 against 1" in fails(cli.train, recipe, "training.epochs=1")
    assert "max_new_tokens: 12 against 5" in fails(cli.prepare, recipe, "regenerate.max_new_tokens=5")


def test_a_run_through_the_command_line_tells_where_things_are(recipe, tmp_path, capsys):
    assert cli.guarded(cli.run, [str(recipe), "training.epochs=1"], "spectrain run") == 0
    out = capsys.readouterr().out
    assert f"bundle: {tmp_path / 'run' / 'bundle'}" in out
    assert f"measured: {tmp_path / 'run' / 'acceptance.json'}" in out
    assert "train: 8 rows" in out
    arguments = [str(tmp_path / "run" / "acceptance.json"), "--output", str(tmp_path / "r")]
    assert cli.guarded(cli.report, arguments, "spectrain report") == 0
    made = (tmp_path / "r" / "report.md").read_bytes()
    assert made == (tmp_path / "run" / "report.md").read_bytes()
    (tmp_path / "run" / "report.md").unlink()
    assert cli.guarded(cli.report, arguments[:1], "spectrain report") == 0  # beside the document
    assert (tmp_path / "run" / "report.md").read_bytes() == made


# --- bundles ------------------------------------------------------------------------------------------------------


def record(bundle, name):
    """Make the manifest agree with a file that was changed."""
    manifest = json.loads((bundle / MANIFEST_FILE).read_text())
    manifest["files"][name] = file_digest(bundle / name)
    (bundle / MANIFEST_FILE).write_text(json.dumps(manifest))


def test_a_bundle_without_its_weights_is_named(fails, evaluate, bundle, tmp_path):
    (bundle / "model.safetensors").unlink()
    assert "model.safetensors is missing; spectrain.json lists it" in fails(cli.evaluate, *evaluate())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("recorded", [False, True])
def test_a_bundle_with_one_tensor_removed_is_named(fails, evaluate, bundle, tmp_path, recorded):
    path = bundle / "model.safetensors"
    tensors = load_file(path)
    del tensors["fc.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    if recorded:
        record(bundle, path.name)
    message = "tensor fc.weight is missing" if recorded else "model.safetensors was changed after it was written"
    assert message in fails(cli.evaluate, *evaluate())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("recorded", [False, True])
def test_a_bundle_whose_tokenizer_has_two_ids_swapped_is_named(fails, evaluate, bundle, tmp_path, recorded):
    path = bundle / "tokenizer.json"
    settings = json.loads(path.read_text())
    vocabulary = settings["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(settings))
    if recorded:
        record(bundle, path.name)
    found = fails(cli.evaluate, *evaluate())
    assert ("the tokenizer's vocabulary is not" if recorded else "tokenizer.json was changed") in found
    assert not (tmp_path / "out").exists()


def test_a_target_whose_tokenizer_has_two_ids_swapped_is_named(fails, evaluate, chat_folder, tmp_path):
    """Case C05: the sizes are equal, the ids are not."""
    other = Path(shutil.copytree(chat_folder, tmp_path / "other"))
    settings = json.loads((other / "tokenizer.json").read_text())
    vocabulary = settings["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(settings))
    found = fails(cli.evaluate, *evaluate(target=other))
    assert "does not fit this target" in found
    assert "token 'a': id" in found


def test_an_architecture_key_nobody_knows_is_named(fails, evaluate, bundle):
    """Case C27."""
    path = bundle / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"flux": 1}))
    record(bundle, path.name)
    assert "unknown key 'flux'" in fails(cli.evaluate, *evaluate())


@pytest.mark.parametrize("name", ["/no/such/bundle", "a/b/bundle"])
def test_a_bundle_that_does_not_exist_is_named(fails, evaluate, tmp_path, name):
    assert f"{name} is neither a folder nor a Hub id" in fails(cli.evaluate, *evaluate(bundle=name))
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_no_bundle_is_named(fails, evaluate, chat_folder):
    assert f"{chat_folder} is no bundle: it has no spectrain.json" in fails(cli.evaluate, *evaluate(bundle=chat_folder))


def test_a_bundle_that_names_no_target_asks_for_one(fails, evaluate, bundle):
    path = bundle / MANIFEST_FILE
    manifest = json.loads(path.read_text())
    manifest["target"]["name"] = None
    path.write_text(json.dumps(manifest))
    assert "name it with --target" in fails(cli.evaluate, *evaluate(target=None))


# --- evaluation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("k", "0", "--k: expected draft lengths from 1 to 64, for instance 5, 1,3,5 or 1..8 (found '0')"),
        ("k", "99", "--k: expected draft lengths from 1 to 64, for instance 5, 1,3,5 or 1..8 (found '99')"),
        ("k", "a", "--k: expected draft lengths"),
        ("k", "1,,3", "--k: expected draft lengths"),
        ("k", "1.5", "--k: expected draft lengths"),
        ("tree", "5", "tree path [5]: its elder sibling [4] is not in the tree"),
        ("tree", "0;0,1", "--tree '0;0,1': tree path [0, 1]: its elder sibling [0, 0] is not in the tree"),
        ("tree", "0;1,0", "--tree '0;1,0': tree path [1, 0]: its parent [1] is not in the tree; add it"),
        ("tree", "0;0", "--tree '0;0': tree path [0] is there twice"),
        ("tree", "0;-1", "--tree '0;-1': tree path [-1]: expected ranks of 0 or more"),
        ("tree", "wide", "--tree 'wide': expected dynamic:DEPTH,TOP_K,NODES, for instance dynamic:5,4,16, measured:"),
        ("tree", "measured:0", "--tree 'measured:0': nodes of a measured tree: found 0, expected a whole number"),
        ("tree", "measured:4,4", "--tree 'measured:4,4': expected dynamic:DEPTH,TOP_K,NODES"),
        ("tree", "dynamic:5,4", "--tree 'dynamic:5,4': expected dynamic:DEPTH,TOP_K,NODES"),
        ("tree", "dynamik:5,4,16", "--tree 'dynamik:5,4,16': expected dynamic:DEPTH,TOP_K,NODES"),
        ("tree", "dynamic:0,4,16", "--tree 'dynamic:0,4,16': the dynamic tree's depth is 0"),
        ("tree", "dynamic:2,2,16", "a dynamic tree of depth 2 and top_k 2 grows 6 nodes, fewer than the 16 to keep"),
        ("verification", "blok", "--verification: Input should be 'token', 'block' or 'typical_lossy' (found 'blok')"),
        ("verification", "", "--verification: Input should be"),
        ("temperature", "-1", "temperature: found -1.0, expected 0 (greedy) or a finite number"),
        ("temperature", "warm", "--temperature: expected numbers with commas, for instance 0,0.7 (found 'warm')"),
        ("seed", "a", "--seed: invalid int value: 'a'; spectrain x --help tells more"),
        ("temperature", "nan", "temperature: found nan"),
        ("temperature", "1,1.0", "--temperature: the same sampler twice: T=1, T=1"),
        ("max-new-tokens", "1", "--max-new-tokens: Input should be greater than or equal to 2 (found 1)"),
        ("conversations", "0", "--conversations: Input should be greater than or equal to 1 (found 0)"),
        ("traffic", "none.jsonl", "none.jsonl: no such file"),
        ("traffic", "chats.csv", "chats.csv: no such file"),
        ("dtype", "float33", "'float33' is not a torch dtype"),
    ],
)
def test_a_wrong_option_is_named(fails, evaluate, tmp_path, flag, value, message):
    assert message in fails(cli.evaluate, *evaluate(**{flag: value}))
    assert not (tmp_path / "out").exists()


def test_the_same_tree_twice_is_named(fails, evaluate, exact, tmp_path):
    twice, message = ("--tree", "dynamic:2,2,4"), "error: --tree: the same tree twice: dynamic tree of 4, dynamic tree"
    assert fails(cli.evaluate, *evaluate(), *twice, *twice).startswith(message)
    assert fails(measuring_commands.exactness, *exact(tree=None), *twice, *twice).startswith(message)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("dynamic:5,4,16", DynamicTree(5, 4, 16)),
        ("measured:16", MeasuredTree(16)),
        ("0", StaticTree(((0,),))),
        ("0;1;0,0", StaticTree(((0,), (1,), (0, 0)))),
        ("distinct:0;1", StaticTree(((0,), (1,)), "distinct")),
        ("chosen:0;1;0,0", StaticTree(((0,), (1,), (0, 0)), "chosen")),
        ("independent: 0; 1; 0, 0", StaticTree(((0,), (1,), (0, 0)), "independent")),
    ],
)
def test_trees_are_written_as_paths_or_as_a_size(text, tree):
    assert parse_tree(text) == tree


def test_trees_and_rules_are_measured_and_reported(evaluate, tmp_path):
    options = evaluate(tree="dynamic:2,2,4", verification="token,block,typical_lossy", max_new_tokens=6)
    assert cli.guarded(cli.evaluate, [*map(str, options), "--tree", "chosen:0;1;0,0"], "x") == 0
    document = read_document(tmp_path / "out" / "acceptance.json")
    names = [c["contender"] for c in document["samplers"][0]["contenders"]]
    drafts = ["k=1", "k=1 block", "k=1 LOSSY typical", "dynamic tree of 4", "tree of 3"]
    assert names == ["plain", *(f"{drafter} {draft}" for drafter in ("ngram", "eagle3") for draft in drafts)]
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "Not exact: ngram k=1 LOSSY typical, eagle3 k=1 LOSSY typical have another law" in text


@pytest.fixture
def tree(bundle, finished_run, chat_folder):
    def tree(*more, traffic=finished_run / "run" / "data" / "train.jsonl"):
        return [str(a) for a in (bundle, "--traffic", traffic, "--target", chat_folder, "--nodes", 4, *more)]

    return tree


def test_a_tree_is_found_on_answers_and_its_ranks_are_kept(tree, evaluate, exact, bundle, tmp_path, capsys):
    (bundle / "ranks.json").unlink()
    assert cli.guarded(measuring_commands.tree, tree("--temperature", "0,1"), "x") == 0
    out = capsys.readouterr().out
    ranks = json.loads((bundle / "ranks.json").read_text())
    assert list(ranks["by_sampler"]) == ["greedy (T=0)", "T=1"]
    first = ranks["by_sampler"]["greedy (T=0)"][0]
    row = f"    1 {ranks['positions'][0]:>9}" + "".join(f"{100 * value:>7.1f}" for value in first)
    assert row in out.splitlines()
    assert f"ranks: {bundle / 'ranks.json'}" in out
    tree_of_t_0 = measured_tree(ranks, Sampler(), 4)
    accepted = expected_accepted(tree_of_t_0, ranks["by_sampler"]["greedy (T=0)"])
    assert f"best tree of {tree_of_t_0.nodes} nodes, depth {tree_of_t_0.depth}: {accepted:.2f} draft tokens" in out
    shown = re.findall("--tree '(.*)'", out)[0]
    assert parse_tree(shown) == tree_of_t_0  # it can be given to evaluate as it is
    assert cli.guarded(cli.evaluate, [*map(str, evaluate(tree="measured:4"))], "x") == 0
    block = read_document(tmp_path / "out" / "acceptance.json")["samplers"][0]
    (contender,) = [c for c in block["contenders"] if c["contender"] == "eagle3 tree 4 nodes (measured)"]
    assert contender["shape"]["paths"] == [list(path) for path in tree_of_t_0.paths]
    assert cli.guarded(measuring_commands.exactness, [*map(str, exact(bundle=bundle, tree="measured:4"))], "x") == 0


def test_what_no_tree_can_be_found_on_is_named(tree, fails, finished_run):
    message = fails(measuring_commands.tree, *tree(traffic=finished_run / "heldout.jsonl"))
    assert "has no answer to measure the drafter's tokens on" in message
    assert "the run's data/train.jsonl" in message
    assert "--nodes 0: expected a whole number of at least 1" in fails(measuring_commands.tree, *tree("--nodes", "0"))
    assert "--temperature: expected numbers" in fails(measuring_commands.tree, *tree("--temperature", "warm"))


def test_bad_rows_are_dropped_wherever_chats_are_read(fails, tree, exact, finished_run, tmp_path, capsys):
    """With one flag, counted and told by file and line."""
    path = tmp_path / "chats.jsonl"
    exact = partial(exact, conversations=5)
    for command, options, chats, bad in (
        (measuring_commands.tree, tree, "run/data/train.jsonl", "{broken"),
        (measuring_commands.exactness, exact, "heldout.jsonl", json.dumps({"id": "long", "prompt": "x" * 300})),
    ):
        path.write_text(f"{bad}\n{(finished_run / chats).read_text()}")
        asked = options(traffic=path)
        assert fails(command, *asked).endswith("(or leave such rows out, counted: --bad-rows drop)")
        assert cli.guarded(command, [*map(str, asked), "--bad-rows", "drop"], "x") == 0
        assert f": {path}:1" in capsys.readouterr().out


def test_a_measured_tree_needs_ranks_and_a_bundle(fails, evaluate, exact, bundle, tmp_path):
    (bundle / "ranks.json").unlink()
    message = fails(cli.evaluate, *evaluate(tree="measured:4"))
    assert f"spectrain tree {bundle} --traffic" in message
    assert "give one with --bundle" in fails(measuring_commands.exactness, *exact(bundle=None, tree="measured:4"))


def test_top_k_and_top_p_are_checked(fails, evaluate):
    assert "top_k: found 0" in fails(cli.evaluate, *evaluate(temperature="1", top_k="0"))
    assert "top_p: found 2.0" in fails(cli.evaluate, *evaluate(temperature="1", top_p="2"))


def test_an_evaluation_begun_with_other_settings_is_named(fails, evaluate, tmp_path, capsys):
    assert cli.guarded(cli.evaluate, list(map(str, evaluate(temperature="0,1"))), "x") == 0
    capsys.readouterr()
    document = read_document(tmp_path / "out" / "acceptance.json")
    assert [block["name"] for block in document["samplers"]] == ["greedy (T=0)", "T=1"]
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    found = fails(cli.evaluate, *evaluate(temperature="0,1", k=2))
    assert "--k, in a recipe evaluation.k[0]: 1 against 2" in found
    assert str(tmp_path / "out" / "evaluation") in found
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before


# --- comparison ---------------------------------------------------------------------------------------------------


@pytest.fixture
def compare(evaluate, bundle, tmp_path):
    """Arguments of a comparison of a bundle with its copy; keywords as for ``evaluate``."""
    copy = shutil.copytree(bundle, tmp_path / "copy")

    def compare(*more, **changes):
        first, *options = evaluate(**changes)
        return [str(part) for part in (first, *(more or (copy,)), *options)]

    return compare


def test_bundles_are_ranked_beside_the_baselines(compare, tmp_path, capsys):
    assert cli.guarded(cli.compare, compare(max_new_tokens=6, temperature="0,1"), "x") == 0
    assert f"measured: {tmp_path / 'out' / 'acceptance.json'}" in capsys.readouterr().out
    document = read_document(tmp_path / "out" / "acceptance.json")
    own = [f"eagle3 ({tmp_path.name}/{folder})" for folder in ("bundle", "copy")]
    for block in document["samplers"]:
        drafters = [c["drafter"] for c in block["contenders"]]
        assert drafters == ["plain", "ngram", "lookahead", *own]
        assert {row["drafter"] for row in block["leaderboard"]["ranked"]} == set(drafters)
    assert {p.name for p in (tmp_path / "out").glob("report.*")} == {"report.html", "report.md", "report.png"}
    assert "| rank | contender |" in (tmp_path / "out" / "report.md").read_text(encoding="utf-8")


def test_baselines_are_chosen(compare, fails, tmp_path):
    found = fails(cli.compare, *compare(baselines="ngram,eagle3"))
    assert found == "error: --baselines 'ngram,eagle3': 'eagle3' is none; expected some of lookahead, ngram, or none"
    assert cli.guarded(cli.compare, compare(baselines="none"), "x") == 0
    (block,) = read_document(tmp_path / "out" / "acceptance.json")["samplers"]
    assert len(block["contenders"]) == 1 + 2


def test_bundles_that_cannot_be_compared_are_named(compare, fails, bundle, chat_folder, tmp_path):
    manifest = json.loads((tmp_path / "copy" / MANIFEST_FILE).read_text())
    manifest["target"]["config_digest"] = "x"
    (tmp_path / "copy" / MANIFEST_FILE).write_text(json.dumps(manifest))
    for arguments, message in (
        (compare(), f"{tmp_path / 'copy'} does not belong to the target of {bundle} (target config_digest: "),
        (compare(bundle), f"bundle {bundle} is given twice"),
        (compare(chat_folder), f"{chat_folder} is no bundle: it has no spectrain.json"),
        (compare("/no/such/bundle"), "/no/such/bundle is neither a folder nor a Hub id"),
        (compare(k=0), "--k: expected draft lengths from 1 to 64"),
        (compare(traffic="none.jsonl"), "none.jsonl: no such file"),
    ):
        assert message in fails(cli.compare, *arguments)
    assert not (tmp_path / "out").exists()


def test_an_interrupted_comparison_says_what_the_same_command_does(compare, monkeypatch, capsys):
    def stopped(*arguments, **keywords):
        raise KeyboardInterrupt

    monkeypatch.setattr(acceptance, "generate_plain", stopped)
    assert cli.guarded(cli.compare, compare(), "x") == 130
    assert "the same command keeps what is finished and does the rest" in capsys.readouterr().err


# --- exactness ----------------------------------------------------------------------------------------------------


@pytest.fixture
def exact(chat_folder, finished_run):
    """Arguments of a small comparison; keywords replace them (``None`` leaves one out)."""

    def exact(**changes):
        options = {"traffic": finished_run / "heldout.jsonl", "target": chat_folder}
        options |= {"conversations": 2, "max_new_tokens": 4, "batch": "1,2", "k": 2, "tree": "0;1;0,0"} | changes
        parts = ((f"--{name.replace('_', '-')}", value) for name, value in options.items() if value is not None)
        return [str(part) for pair in parts for part in pair]

    return exact


def test_exactness_of_a_bundle_is_a_table_and_a_document(exact, bundle, capsys):
    assert cli.guarded(measuring_commands.exactness, [*exact(bundle=bundle), "--json"], "x") == 0
    said = capsys.readouterr()
    document, out = json.loads(said.out), said.err
    drafts = ("k=2", "k=2 block", "tree of 3")
    schemes = ["plain", *(f"{drafter} {draft}" for drafter in ("ngram", "eagle3", "rehearsed") for draft in drafts)]
    rows = [line for line in out.splitlines() if line.startswith("| ") and "2/2" in line]
    assert [re.match(r"\| (.+?) +\|", row).group(1) for row in rows] == schemes
    assert "exact: all outputs are plain decoding's, token by token; 2 prompts, 8 tokens, float32" in out
    assert (document["faults"], len(document["cells"])) == (0, 2 * len(schemes))
    assert document["target"] == Path(exact()[3]).name


def test_exactness_needs_no_bundle(exact, capsys):
    assert cli.guarded(measuring_commands.exactness, exact(batch="1", verification="token"), "x") == 0
    assert "| rehearsed k=2 " in capsys.readouterr().out


def test_a_fault_is_exit_code_1(exact, monkeypatch, capsys):
    real = exactness.generate_batch

    def wrong(*arguments, **settings):
        results = real(*arguments, **settings)
        for result in results:
            result.tokens[1] = (result.tokens[1] + 1) % 250
        return results

    monkeypatch.setattr(exactness, "generate_batch", wrong)
    assert cli.guarded(measuring_commands.exactness, exact(batch="1", verification="token", tolerance=0), "x") == 1
    out = capsys.readouterr().out
    assert "FAULT: ngram k=2, batch 1, prompt" in out
    assert "NOT EXACT" in out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": None}, "there is no bundle to say the target; name it with --target"),
        ({"verification": "typical_lossy"}, "--verification: Input should be 'token' or 'block'"),
        ({"batch": "0"}, "--batch: expected whole numbers of at least 1 with commas, for instance 1,2,4 (found '0')"),
        ({"batch": "a"}, "--batch: expected whole numbers"),
        ({"conversations": 0}, "--conversations: Input should be greater than or equal to 1"),
        ({"tolerance": "nan"}, "--tolerance: Input should be a finite number"),
        ({"tree": "0;2"}, "--tree '0;2': tree path [2]: its elder sibling [1] is not in the tree"),
        ({"traffic": "none.jsonl"}, "none.jsonl: no such file"),
        ({"max_new_tokens": 400}, "conversation 'heldout-50': a prompt of"),
    ],
)
def test_a_wrong_option_of_exactness_is_named(fails, exact, changes, message):
    assert message in fails(measuring_commands.exactness, *exact(**changes))


def test_only_what_goes_on_says_so_when_interrupted(capsys):
    def stopped(arguments, name):
        raise KeyboardInterrupt

    assert cli.guarded(stopped, [], "x") == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_an_output_that_is_a_file_is_named(fails, evaluate, tmp_path):
    (tmp_path / "out").write_text("mine")
    found = fails(cli.evaluate, *evaluate())
    assert f"--output: folder {tmp_path / 'out'}: {tmp_path / 'out'} is a file, expected a folder" in found
    assert (tmp_path / "out").read_text() == "mine"


PLACES = {
    "ablation": "ablation {recipe} --variant base: --output {place}",
    "compare": "compare none --traffic none.jsonl --output {place}",
    "convert-gguf": "convert-gguf --file none.gguf {place}",
    "evaluate": "evaluate none --traffic none.jsonl --output {place}",
    "export": "export none sglang-eagle3 {place}",
    "import": "import none {place} --target none",
    "prepare": "prepare {recipe} output={place} data.train=[none.jsonl]",
    "report": "report none.json --output {place}",
    "run": "run {recipe} output={place} data.train=[none.jsonl]",
    "side by side": "compare none.json none.json --output {place}",
    "train": "train {recipe} prepared={place} data.train=[none.jsonl]",
}


@pytest.mark.parametrize("line", PLACES.values(), ids=PLACES)
def test_a_place_that_takes_nothing_is_named_before_anything_is_read(fails, recipe, tmp_path, line):
    """Nothing else that is named here is there, and nothing of it is asked for first."""
    (tmp_path / "file").write_text("mine")
    for place, code, why in ((tmp_path / "file" / "deeper", 2, "is a file, expected a folder"),
                             (Path("/proc/of/mine"), 1, "/proc cannot be written into (")):  # fmt: skip
        name, *arguments = line.format(recipe=recipe, place=place).split()
        found = fails(cli.COMMANDS[name], *arguments, code=code)
        assert f" {place}: " in found
        assert why in found
        assert "; choose another place" in found
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "heldout.jsonl", "recipe.yaml", "train.jsonl"]


def test_a_bundle_that_takes_no_ranks_is_named_before_its_target_is_loaded(fails, tree, monkeypatch):
    def refuse(key, folder):
        raise SpectrainError(f"{key} {folder}: cannot be written into")

    monkeypatch.setattr(commands, "check_writable", refuse)
    monkeypatch.setattr(commands, "load_target", lambda *_, **__: pytest.fail("a target was loaded"))
    assert "cannot be written into" in fails(cli.COMMANDS["tree"], *tree())


def test_a_full_disk_is_no_wrong_place(monkeypatch, tmp_path):
    def full(**keywords):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(places.tempfile, "TemporaryDirectory", full)
    with pytest.raises(OSError, match="No space left"):
        places.check_writable("output", tmp_path)


def test_a_report_needs_a_document(fails, tmp_path):
    (tmp_path / "a.json").write_text("{}")
    for name in ("a.json", "none.json"):
        assert name in fails(cli.report, tmp_path / name, "--output", tmp_path / "r")
    assert not (tmp_path / "r").exists()


# --- the system ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "failure",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.ENOSPC, "No space left on device", "/disk/a"),
        Exception("Error while serializing: I/O error: No space left on device (os error 28)"),  # safetensors
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"),  # torch.save
    ],
)
def test_a_full_disk_is_one_message(fails, recipe, monkeypatch, tmp_path, failure):
    real, calls = checkpoints.write_json, []

    def second_fails(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise failure
        real(*arguments)

    with monkeypatch.context() as context:
        context.setattr(checkpoints, "write_json", second_fails)
        found = fails(cli.train, recipe, code=1)
    assert "writing failed" in found
    assert "free some disk space, and give the same command again" in found
    folder = tmp_path / "run" / "training" / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["step-000002"]
    assert cli.guarded(cli.train, [str(recipe)], "x") == 0
    assert (tmp_path / "run" / "bundle" / MANIFEST_FILE).is_file()


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/root/x"), "error: /root/x: Permission denied"),
        (
            OSError(errno.EFBIG, "File too large", "/d/.x.partial"),
            "error: writing failed (File too large: /d/.x.partial); "
            "raise the limit on the size of files (ulimit -f unlimited), and give the same command again",
        ),
        (OSError("the Hub says no"), "error: the Hub says no"),
    ],
)
def test_what_the_system_refuses_is_one_message(fails, failure, message):
    def command(arguments, name):
        raise failure

    assert fails(command, code=1) == message


@pytest.mark.parametrize(
    "line",
    ["recipe medusa", "recipe medusa --json", "plan --alpha .7 --c .1 --k 1..64", "prove --cases 1"],
)  # fmt: skip
def test_a_reader_that_leaves_is_no_error(line):
    """As in ``spectrain ... | head -1``, however much there is to print."""
    running = subprocess.Popen([sys.executable, "-m", "spectrain", *line.split()], cwd=ROOT,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    running.stdout.close()
    errors = running.stderr.read().decode()
    assert running.wait() == 141
    assert "error" not in errors.lower()
    assert "Exception" not in errors


def test_a_connection_that_breaks_is_an_error(fails):
    def command(arguments, name):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    assert "Broken pipe" in fails(command, code=1)


def test_a_fault_of_our_own_keeps_its_traceback():
    def command(arguments, name):
        raise KeyError("ours")

    with pytest.raises(KeyError, match="ours"):
        cli.guarded(command, [], "x")


def test_an_interruption_says_what_the_same_command_does(capsys, evaluate, monkeypatch):
    real, calls = acceptance.generate_plain, []

    def third_fails(*arguments, **keywords):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments, **keywords)

    with monkeypatch.context() as context:
        context.setattr(acceptance, "generate_plain", third_fails)
        assert cli.guarded(cli.evaluate, list(map(str, evaluate())), "x") == 130
    assert "the same command keeps what is finished and does the rest" in capsys.readouterr().err
    assert cli.guarded(cli.evaluate, list(map(str, evaluate())), "x") == 0


# --- as a user would ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_bundle_is_measured_by_the_script(evaluate, tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = python(ROOT / "eval" / "acceptance.py", *evaluate(), env=environment)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert f"measured: {tmp_path / 'out' / 'acceptance.json'}" in done.stdout
    document = read_document(tmp_path / "out" / "acceptance.json")
    assert [c["contender"] for c in document["samplers"][0]["contenders"]] == ["plain", "ngram k=1", "eagle3 k=1"]
    assert {p.name for p in (tmp_path / "out").glob("report.*")} == {"report.html", "report.md", "report.png"}


@pytest.mark.slow
def test_a_mistake_in_a_script_is_exit_code_2(recipe, tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = python(ROOT / "scripts" / "train.py", recipe, "optim.lrr=1", env=environment)
    assert done.returncode == 2
    assert done.stderr == f"error: {recipe}: unknown key 'optim.lrr'; did you mean 'optim.lr'?\n"
    assert not (tmp_path / "run").exists()


# --- a run's folder in place of its bundle ------------------------------------------------------------------------

MISTAKEN = {
    "evaluate": "{run} --traffic x.jsonl --output {out}",
    "compare": "{run} {bundle} --traffic x.jsonl --output {out}",
    "tree": "{run} --traffic x.jsonl",
    "exactness": "--bundle {run} --traffic x.jsonl",
    "export": "{run} sglang-eagle3 {out}",
    "publish": "{run} org/name --license mit",
    "serve-command": "{run}",
    "check": "{run} {bundle}",
    "doctor": "{run}",
}


@pytest.mark.parametrize("name", MISTAKEN)
def test_the_folder_around_a_bundle_is_told_from_it(fails, finished_run, tmp_path, name):
    run = finished_run / "run"
    line = MISTAKEN[name].format(run=run, bundle=run / "bundle", out=tmp_path / "out")
    assert f"did you mean {run / 'bundle'}" in fails(cli.COMMANDS[name], *line.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("serve-command {run}", "is no bundle"),
        ("serve-command {bundle}", "nobody can tell whether"),
        ("serve-command {bundle} --report {bundle}/config.json", "schema is None"),
        ("publish {bundle} drafter", "has no owner"),
    ],
)
def test_cheap_refusals_come_before_anything_heavy_is_imported(bundle, tmp_path, line, said):
    """They took as long as loading torch."""
    (bundle / "acceptance.json").unlink()
    done = python("-X", "importtime", "-m", "spectrain", *line.format(run=tmp_path, bundle=bundle).split())
    assert done.returncode == 2
    assert said in done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not {"torch", "transformers", "numpy"} & imported
