"""The benchmark commands: instant help, checked options, a table to read and JSON beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from spectrain.benchmarks import batching, decoding
from spectrain.errors import SpectrainError

ROOT = Path(__file__).parents[1]
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
    output = tmp_path / "out"
    bundle = finished_run / "run" / "bundle"
    decoding([str(chat_folder), "--bundle", str(bundle), "--traffic", str(traffic), "--conversations", "2", "--k", "2",
              "--max-new-tokens", "6", "--output", str(output)])  # fmt: skip
    document = json.loads((output / "decoding.json").read_text(encoding="utf-8"))
    assert document["benchmark"] == "decoding"
    assert document["settings"] | {"k": 2, "conversations": 2, "max_new_tokens": 6} == document["settings"]
    assert document["target"] == chat_folder.name  # and not where it lies
    names = [row["contender"] for row in document["rows"]]
    assert names[-2:] == ["spectrain eagle3 k=2", "spectrain eagle3 dynamic tree of 15"]
    assert len(document["samples"]) == 2 * len(names)
    assert all(row["identical"] == 2 for row in document["rows"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)
    assert f"measured: {output / 'decoding.json'}" in printed


def test_batching_writes_its_numbers_and_a_picture(chat_folder, traffic, tmp_path, capsys):
    batching([str(chat_folder), "--traffic", str(traffic), "--batch", "1,2", "--k", "2", "--batch-groups", "2",
              "--repeats", "1", "--context", "8", "--max-new-tokens", "5", "--output", str(tmp_path)])  # fmt: skip
    document = json.loads((tmp_path / "batching.json").read_text(encoding="utf-8"))
    assert [(c["batch"], c["k"]) for c in document["verification"]] == [(1, 0), (1, 2), (2, 0), (2, 2)]
    assert {row["contender"] for row in document["rows"]} == {"plain", "ngram k=2"}
    assert "ngram k=2: 2 batches of each size are too few to tell" in capsys.readouterr().out
    assert (tmp_path / "batching.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        (decoding, "--conversations 1", "--conversations 1: expected a whole number of at least 2: an interval"),
        (decoding, "--k 0", "--k: expected draft lengths from 1"),
        (decoding, "--k 1,2", "--k: expected one number (found 1,2)"),
        (decoding, "--memory --memory-tokens 0", "--memory-tokens 0: expected"),
        (decoding, "--tree-nodes -1", "--tree-nodes -1: expected"),
        (batching, "--batch 1,x", "--batch: expected whole numbers of at least 1 with commas"),
        (batching, "--k 0", "--k: expected draft lengths from 1"),
        (batching, "--batch-groups 1", "--batch-groups 1: expected a whole number of at least 2: an interval"),
        (batching, "--traffic none.jsonl", "none.jsonl"),
    ],
)
def test_a_wrong_option_is_named(command, options, message, chat_folder, tmp_path):
    with pytest.raises(SpectrainError) as error:
        command([str(chat_folder), *options.split(), "--output", str(tmp_path / "out")])
    assert message in str(error.value)
    assert not (tmp_path / "out").exists()
