"""Output that is not the target's though the rule keeps its law: by whom, how it was found, what follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NOT_EXACT = "not exact"


def departures(samplers: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Contenders that are not lossy and whose output differs, and how: found greedily, beyond rounding, or in what was
    sampled.

    ``samplers``: of each its ``name``, ``exactness`` and ``distribution``.
    """
    found: dict[str, list[str]] = {}
    for block in samplers:
        for row in block["exactness"]:
            if row["unexplained"] and not row["lossy"]:
                found.setdefault(row["contender"], []).append("changes the greedy output")
        for test in block["distribution"] or ():
            if not test["agrees"] and not test["lossy"]:
                how = f"samples from another law than the target's at {block['name']}"
                found.setdefault(test["contender"], []).append(how)
    return {name: " and ".join(ways) for name, ways in found.items()}


def not_exact(inexact: Mapping[str, str]) -> str:
    """Why nothing is on in a document that has departures: all of them, by how they differ.

    What keeps the target's law and does not give its output is a fault of decoding, which all contenders share; that
    the checks of the others, or of another sampler, did not meet it makes none of them fit for use.
    """
    ways = dict.fromkeys(inexact.values())
    named = (f"{', '.join(name for name in inexact if inexact[name] == way)} ({way})" for way in ways)
    return f"{NOT_EXACT}: {'; '.join(named)}"
