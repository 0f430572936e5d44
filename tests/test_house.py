"""The diagram of CONTRIBUTING.md is the contract that import-linter checks, floor by floor."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLOOR = re.compile(r" {4}([a-z_]+(?: \| [a-z_]+)*)(?: |$)")


def floors(text: str) -> list[set[str]]:
    """The modules of each line of the diagram, from above."""
    found = (FLOOR.match(line) for line in text.splitlines())
    return [set(floor[1].split(" | ")) for floor in found if floor]


def test_the_diagram_is_the_contract():
    house = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## The house")[1].split("\n## ")[0]
    (contract,) = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    assert floors(house) == [set(layer.split(" | ")) for layer in contract["layers"]]


def test_floors_are_read_from_a_diagram():
    assert floors("text\n    one | two   what they are\n    three\n      a continuation\n") == [
        {"one", "two"},
        {"three"},
    ]
