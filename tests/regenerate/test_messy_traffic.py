"""A thousand rows as they come, from the file to a trained drafter, with a server for the answers and nobody near."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
import yaml
from messy_chats import ROWS, write_messy_chats
from serving import Serving, running
from templates import CHATML, byte_tokenizer
from tiny import build_model

from spectrain import cli
from spectrain.regenerate import client
from spectrain.target import load_target

LENGTH = 420


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A tiny target of 8 layers whose template has tools, as a folder."""
    folder = tmp_path_factory.mktemp("target")
    tokenizer = byte_tokenizer(CHATML, eos="<|im_end|>")
    model = build_model("llama", rows=272, context=512, dtype=torch.float32)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def recipe(folder, target, url):
    values = {
        "target": {"name": str(target)},
        "data": {"train": [str(write_messy_chats(folder / "chats.jsonl"))], "heldout_fraction": 0.05,
                 "max_length": LENGTH, "bad_rows": "drop", "duplicates": "drop"},
        "regenerate": {"max_new_tokens": 2, "server": {"url": url, "model": "tiny", "concurrency": 4}},
        "drafter": {"type": "eagle3", "depths": 1, "draft_vocab_size": 64},
        "training": {"epochs": 1, "steps": 3, "micro_batch_tokens": 2048, "validate_every": 3},
        "output": str(folder / "run"),
    }  # fmt: skip
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


@pytest.mark.slow
def test_a_thousand_messy_rows_become_a_drafter_without_a_hand(target, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(client, "FIRST_WAIT", 0.01)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with running(Serving(load_target(str(target)))) as url:
        path = recipe(tmp_path, target, url)
        assert cli.guarded(cli.prepare, [str(path), "--audit"], "prepare") == 0
        audited = json.loads((tmp_path / "run/data/audit.json").read_text(encoding="utf-8"))
        capsys.readouterr()
        assert cli.guarded(cli.train, [str(path)], "train") == 0
    counts = json.loads((tmp_path / "run/data/counts.json").read_text(encoding="utf-8"))
    total: Counter[str] = Counter()
    for side in counts.values():
        total.update({reason: count for reason, count in side["dropped"].items() if count})
    told = {
        "broken_json": ROWS["broken"],
        "bad_row": ROWS["no object"] + ROWS["no messages"],
        "unknown_role": ROWS["unknown role"],
        "empty_turn": ROWS["empty turn"],
        "duplicate_id": ROWS["same id"],
    }
    assert {reason: total[reason] for reason in told} == told
    # Endless prompts are too long to train on, or held out and beyond the target's context.
    assert total["too_long"] + total["no_room"] == ROWS["endless"]
    # A twin is dropped in training only: pairs lie on one side, and held-out answers are measured, not learnt.
    assert ROWS["duplicate"] - 10 <= total["duplicate"] <= ROWS["duplicate"]
    assert total.keys() - told.keys() <= {"too_long", "no_room", "duplicate"}
    kept = sum(side["rows"] for side in counts.values())
    assert kept == sum(ROWS.values()) - sum(total.values()) == 1000 - total.total()
    assert sum(side["conversations"] for side in audited["sides"].values()) >= kept
    answers = [json.loads(line) for line in (tmp_path / "run/data/train.jsonl").read_text("utf-8").splitlines()]
    assert len({row["id"] for row in answers}) == len(answers)
    assert any(row.get("tools") for row in answers)
    assert (tmp_path / "run/bundle/spectrain.json").is_file()
