"""The benchmark commands: instant help, checked options, a table to read and JSON beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from spectrain.errors import SpectrainError
from spectrain.evaluation.benchmarks import batching, decoding

ROOT = Path(__file__).parents[2]
DOORS = sorted((ROOT / "eval" / "benchmarks").glob("*.py"))


@pytest.fixture
def traffic(tmp_path):
    path = tmp_path / "chats.jsonl"
    texts = ("hello hello", "ab")
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.mark.parametrize("path", DOORS, ids=lambda path: path.stem)
def test_help_comes_without_importing_torch(path):
    run = f"import sys, runpy; sys.argv = ['x', '--help']; sys.path.insert(0, {str(ROOT)!r})\n"
    run += f"try:\n runpy.run_path({str(path)!r}, run_name='__main__')\nexcept SystemExit as stop:\n"
    run += " print('stopped', stop.code, sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.startswith(f"usage: python eval/benchmarks/{path.name} ")
    assert done.stdout.endswith("stopped 0 []\n")


def test_there_is_a_door_for_each():
    assert [path.name for path in DOORS] == ["batching.py", "decoding.py", "training.py"]


def test_decoding_writes_its_numbers_and_prints_a_table(chat_folder, finished_run, traffic, tmp_path, capsys):
    output = tmp_path / "out" / "d.json"
    bundle = finished_run / "run" / "bundle"
    decoding([str(chat_folder), "--bundle", str(bundle), "--traffic", str(traffic), "--prompts", "2", "--k", "2",
              "--max-new-tokens", "6", "--output", str(output)])  # fmt: skip
    document = json.loads(output.read_text(encoding="utf-8"))
    assert document["benchmark"] == "decoding"
    assert document["settings"] | {"k": 2, "prompts": 2, "max_new_tokens": 6} == document["settings"]
    assert document["target"] == chat_folder.name  # and not where it lies
    names = [row["contender"] for row in document["rows"]]
    assert names[-2:] == ["spectrain eagle3 k=2", "spectrain eagle3 dynamic tree of 15"]
    assert len(document["samples"]) == 2 * len(names)
    assert all(row["identical"] == 2 for row in document["rows"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)
    assert f"measured: {output}" in printed


def test_batching_writes_its_numbers_and_a_picture(chat_folder, traffic, tmp_path, capsys):
    output = tmp_path / "b.json"
    batching([str(chat_folder), "--traffic", str(traffic), "--batch", "1,2", "--k", "2", "--groups", "2", "--repeats",
              "1", "--context", "8", "--max-new-tokens", "5", "--output", str(output)])  # fmt: skip
    document = json.loads(output.read_text(encoding="utf-8"))
    assert [(c["batch"], c["k"]) for c in document["verification"]] == [(1, 0), (1, 2), (2, 0), (2, 2)]
    assert {row["contender"] for row in document["rows"]} == {"plain", "ngram k=2"}
    assert "ngram k=2: 2 batches of each size are too few to tell" in capsys.readouterr().out
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        (decoding, "--prompts 1", "--prompts 1: an interval over prompts needs at least 2"),
        (decoding, "--k 0", "--k 0: expected a whole number of at least 1"),
        (decoding, "--memory --memory-tokens 0", "--memory-tokens 0: expected"),
        (decoding, "--tree-nodes -1", "--tree-nodes -1: expected"),
        (batching, "--batch 1,x", "--batch '1,x': expected whole numbers of at least 1 with commas"),
        (batching, "--k 0", "--k '0': expected whole numbers"),
        (batching, "--groups 1", "--groups 1: an interval over batches needs at least 2"),
        (batching, "--traffic none.jsonl", "none.jsonl"),
    ],
)
def test_a_wrong_option_is_named(command, options, message, chat_folder, tmp_path):
    with pytest.raises(SpectrainError) as error:
        command([str(chat_folder), *options.split(), "--output", str(tmp_path / "x.json")])
    assert message in str(error.value)
    assert not (tmp_path / "x.json").exists()
