"""The numbers of the document as one table in long form: a line for each number, for spreadsheets and data frames.

Columns: sampler, contender, kind ("everything" is all kinds together), band (empty: all answers), measure, position
(draft position, accepted prefix length or, of α teacher-forced, draft depth from 1; empty elsewhere), value, low, high
(empty without an interval), n: how many the value is taken over, in the unit that ``UNITS`` names for the measure.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from typing import Any

from spectrain.evaluation.kinds import measured_kinds
from spectrain.evaluation.leaves import EVERYTHING

COLUMNS = ("sampler", "contender", "kind", "band", "measure", "position", "value", "low", "high", "n")

# Unit of n. Measures that are not listed count conversations.
UNITS = {
    "marginal_survival": "full rounds",
    "conditional_acceptance": "full rounds that proposed a token there and accepted all before it",
    "accepted_prefix_share": "full rounds",
    "visited_alpha": "positions tested while decoding",
    "teacher_forced_alpha": "positions of given answers",
}
_RATES = ("tokens_per_second", "decode_tokens_per_second", "accepted_draft_tokens_per_second")
_INTERVALS = ("tokens_per_round", "tokens_per_full_round", *_RATES, "energy_j_per_token")
Row = dict[str, Any]


def acceptance_csv(document: Mapping[str, Any]) -> str:
    """The table as text, with the line ends of RFC 4180."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, COLUMNS, restval="")
    writer.writeheader()
    writer.writerows(acceptance_rows(document))
    return buffer.getvalue()


def acceptance_rows(document: Mapping[str, Any]) -> Iterator[Row]:
    """The rows of the table, by sampler, contender, kind; those of given answers last."""
    for block in document["samplers"]:
        for contender in block["contenders"]:
            where = {"sampler": block["name"], "contender": contender["contender"]}
            for kind, numbers in ((EVERYTHING, contender["pooled"]), *measured_kinds(contender).items()):
                for row in _numbers(numbers):
                    yield where | {"kind": kind} | row
            for row in _bands(contender["by_band"]):
                yield where | {"kind": EVERYTHING} | row
    for row in document["teacher_forced"]:
        yield {
            "sampler": f"T={row['temperature']:g}",
            "contender": row.get("drafter", ""),
            "kind": row["kind"],
            "band": f"answers by {row['prefixes']}" if "prefixes" in row else "",
            **_row("teacher_forced_alpha", row["interval"], row["positions"], row["depth"] + 1),
        }


def _numbers(numbers: Mapping[str, Any]) -> Iterator[Row]:
    conversations = numbers["conversations"]
    for name in _INTERVALS:
        if numbers[name] is not None:
            yield _row(name, numbers[name], conversations)
    if numbers["speedup"] is not None:
        for part in ("decode", "total"):
            yield _row(f"{part}_speedup", numbers["speedup"][part], conversations)
    if numbers["accepted_prefix"]["interval"] is not None:
        yield _row("accepted_prefix", numbers["accepted_prefix"]["interval"], conversations)
    yield from _by_position(numbers)
    for name, value in numbers["latency_ms"].items():
        yield _row(f"latency_ms_{name}", _alone(value), conversations)
    for part, value in numbers["seconds"].items():
        yield _row(f"seconds_{part}", _alone(value), conversations)
    for reason, value in numbers["clipped"].items():
        yield _row(f"clipped_rounds_{reason}", _alone(value), conversations)
    for name, value in numbers["memory"].items():
        yield _row(f"memory_{name}", _alone(value), conversations)
    for name, value in (numbers["cost"] or {}).items():
        if isinstance(value, int | float):
            yield _row(f"cost_{name}", _alone(value), conversations)


def _by_position(numbers: Mapping[str, Any]) -> Iterator[Row]:
    for row in numbers["marginal_survival"]:
        yield _row("marginal_survival", row, row["rounds"], row["position"], key="rate")
    for row in numbers["conditional_acceptance"]:
        yield _row("conditional_acceptance", row, row["proposed"], row["position"], key="rate")
    full = sum(numbers["accepted_prefix"]["histogram"])
    for row in numbers["accepted_prefix"]["shares"]:
        yield _row("accepted_prefix_share", row, full, row["accepted"], key="share")
    for row in numbers["visited_alpha"] or ():
        yield _row("visited_alpha", row, row["positions"], row["position"])


def _bands(bands: Mapping[str, Any]) -> Iterator[Row]:
    for cut, found in bands.items():
        for band in found:
            label = {"band": f"{cut}: {band['label']}"}
            yield label | _row("tokens_per_round", band["tokens_per_round"], band["conversations"])
            if band["decode_speedup"] is not None:
                yield label | _row("decode_speedup", band["decode_speedup"], band["conversations"])


def _row(measure: str, found: Mapping[str, Any], n: int, position: int | None = None, *, key: str = "value") -> Row:
    return {"measure": measure, "position": position, "value": found[key], "low": found["low"], "high": found["high"],
            "n": n}  # fmt: skip


def _alone(value: float | None) -> dict[str, Any]:
    return {"value": value, "low": None, "high": None}
