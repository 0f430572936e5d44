"""``spectrain publish`` as a command, and a published bundle loaded by its id."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hub import FakeHub

from spectrain.cli import guarded
from spectrain.publishing import publish

COMMIT = "c" * 40


@pytest.fixture
def arguments(bundle):
    options = ["--license", "mit", "--target", "org/target", "--target-revision", COMMIT]
    return [str(bundle), "org/drafter", *options]


def test_a_dry_run_shows_files_and_card_and_sends_nothing(hub, arguments, run, capsys, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    assert guarded(publish, [*arguments, "--dry-run", "--traffic", str(run / "train.jsonl")], "publish") == 0
    said = capsys.readouterr().out
    assert "bytes  model.safetensors" in said
    assert "license: mit" in said
    assert "10 files for org/drafter; nothing was sent" in said
    assert not hub.requests


def test_published_is_said_with_its_address(hub, arguments, capsys):
    assert guarded(publish, [*arguments, "--private"], "publish") == 0
    said = capsys.readouterr()
    repo = hub.repos["org/drafter"]
    assert f"published: {hub.url}/org/drafter/tree/{repo.head}" in said.out
    assert repo.private
    assert guarded(publish, arguments, "publish") == 0
    assert "all of it was there already" in capsys.readouterr().out
    assert "hf_writer" not in said.out + said.err


def test_mistakes_are_one_message(hub, arguments, capsys):
    assert guarded(publish, ["nowhere", *arguments[1:]], "publish") == 2
    assert "error: nowhere is no folder" in capsys.readouterr().err
    assert guarded(publish, [*arguments, "--license", "beer"], "publish") == 2
    assert "'beer' is none that the Hub knows" in capsys.readouterr().err
    assert not hub.requests


PROGRAM = """
import sys
from spectrain import generate, load_bundle
from spectrain.cli import guarded
from spectrain.publishing import publish

assert guarded(publish, sys.argv[1:], "publish") == 0
speculator = load_bundle("org/drafter", revision="main")
print(repr(generate(speculator, "1 + 1?", max_new_tokens=4, k=2).tokens), speculator.target.name)
"""


@pytest.mark.slow
def test_a_bundle_is_published_and_loaded_by_its_id_with_its_target(bundle: Path, chat_folder: Path, tmp_path: Path):
    """In a process that knows the Hub by HF_ENDPOINT alone; the target comes from there too."""
    hub = FakeHub()
    try:
        hub.tokens["hf_secret"] = True
        target = hub.add("org/target", {path.name: path.read_bytes() for path in chat_folder.iterdir()})
        given = [str(bundle), "org/drafter", "--license", "mit", "--target", "org/target"]
        environment = {
            **os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_secret", "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_DISABLE_XET": "1",
        }  # fmt: skip
        found = subprocess.run(
            [sys.executable, "-c", PROGRAM, *given, "--target-revision", target.head],
            env=environment, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
    finally:
        hub.close()
    assert found.returncode == 0, found.stderr
    assert "published: " in found.stdout
    assert found.stdout.rstrip().endswith("org/target")
    assert "hf_secret" not in found.stdout + found.stderr
