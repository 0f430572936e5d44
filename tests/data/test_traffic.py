"""The traffic that ships with the recipes: what the generator writes, and that its parts share nothing."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from spectrain.data.conversations import Conversation, load_conversations
from spectrain.data.split import check_leaks, normalised

TRAFFIC = Path(__file__).parents[2] / "recipes" / "traffic"
NAMES = ("narrow_train", "narrow_heldout", "open_train", "open_heldout")


@pytest.fixture(scope="module")
def traffic() -> dict[str, list[Conversation]]:
    return {name: load_conversations(TRAFFIC / f"{name}.jsonl") for name in NAMES}


def test_the_generator_writes_the_shipped_bytes(tmp_path: Path) -> None:
    command = [sys.executable, "-B", str(TRAFFIC / "generate.py"), str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    for name in NAMES:
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (TRAFFIC / f"{name}.jsonl").read_bytes(), name


def test_kinds_and_counts(traffic: dict[str, list[Conversation]]) -> None:
    narrow = [f"narrow/{kind}" for kind in ("fields_to_json", "formal_rewrite", "step_amount", "sql")]
    assert Counter(one.kind for one in traffic["narrow_train"]) == dict.fromkeys(narrow, 105)
    assert Counter(one.kind for one in traffic["narrow_heldout"]) == dict.fromkeys(narrow, 8)
    assert all(one.template and one.slots for one in traffic["narrow_train"] + traffic["narrow_heldout"])
    general = {f"open/{kind}" for kind in ("chat", "code", "summarise", "grounded_qa", "translate")}
    assert {one.kind for one in traffic["open_train"]} == {one.kind for one in traffic["open_heldout"]} == general
    assert len(traffic["open_train"]) >= 80
    assert len(traffic["narrow_heldout"] + traffic["open_heldout"]) >= 50


def test_every_row_is_a_prompt_and_some_have_several_turns(traffic: dict[str, list[Conversation]]) -> None:
    for name, rows in traffic.items():
        assert all(one.messages[-1].role == "user" for one in rows), name
    for name in ("open_train", "open_heldout"):
        assert any(len(one.messages) > 1 for one in traffic[name])
        assert any(len(one.messages) == 1 for one in traffic[name])


def test_heldout_shares_nothing_with_training(traffic: dict[str, list[Conversation]]) -> None:
    train = traffic["narrow_train"] + traffic["open_train"]
    heldout = traffic["narrow_heldout"] + traffic["open_heldout"]
    report = check_leaks(train, heldout)
    general = {one.id for one in traffic["open_heldout"]}
    assert general.isdisjoint(pair.heldout for pair in report.near_duplicates)


def test_no_row_occurs_twice(traffic: dict[str, list[Conversation]]) -> None:
    everything = [one for rows in traffic.values() for one in rows]
    assert len({one.id for one in everything}) == len(everything)
    assert len({normalised(one) for one in everything}) == len(everything)
