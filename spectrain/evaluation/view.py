"""What the templates of the report need besides the document itself: its parts in the order they are read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from spectrain.evaluation.cautions import cautions
from spectrain.evaluation.faults import departures
from spectrain.evaluation.glossary import DEFINITIONS
from spectrain.evaluation.learning import learning_curves, without_curve
from spectrain.evaluation.leaves import EVERYTHING
from spectrain.evaluation.steadiness import batches_of_one
from spectrain.evaluation.trained import fastest_trained
from spectrain.evaluation.wording import (
    change_sentence,
    drafter_sentence,
    drift_sentence,
    exactness_sentence,
    headline,
    kind_sentence,
    law_sentence,
    law_test_sentence,
    not_measured,
    percent,
    sentence,
)

LISTED_DIFFERENCES = 20


def report_view(document: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that both forms of the report show, without the plots."""
    confidence = percent(document["statistics"]["confidence"])
    return {
        "document": document,
        "context": document["context"],
        "statistics": document["statistics"],
        "title": title(document),
        "samplers": [_sampler_view(block, confidence, document) for block in document["samplers"]],
        "confidence": confidence,
        "cautions": cautions(document),
        "batches_of_one": batches_of_one(document),
        "not_measured": not_measured(document),
        "settings": _settings(document["context"]),
        "drift": [(name, drift_sentence(name, d), d) for name, d in (document.get("drift") or {}).items()],
        "left_out": document["context"].get("left_out") or [],
        "listed": LISTED_DIFFERENCES,
        "curves": learning_curves(document["context"]),
        "definitions": DEFINITIONS,
    }


def title(document: Mapping[str, Any]) -> str:
    return f"{document['context']['target']['name']} on {document['context']['traffic']['name']}"


def changed(document: Mapping[str, Any]) -> bool:
    """Whether the measured target is one that the bundle changed in training."""
    return document["context"]["target"].get("derived_from") is not None


def _sampler_view(block: Mapping[str, Any], confidence: str, document: Mapping[str, Any]) -> dict[str, Any]:
    overall, own_target = block["verdict"]["overall"], changed(document)
    trained = fastest_trained(document, block)
    drafters = [c for c in block["contenders"] if c["shape"] is not None]
    return {
        "block": block,
        "decision": overall["decision"],
        "headline": headline(overall, changed=own_target),
        "sentence": sentence(overall, confidence, changed=own_target),
        "would_change": change_sentence(block["verdict"], trained),
        "kinds": kind_sentence(block["verdict"]["by_kind"]),
        "drafters": drafters,
        "law": law_sentence(drafters, changed=own_target, faulty=departures(document["samplers"])),
        "exactness": exactness_sentence(block["exactness"]),
        "law_test": law_test_sentence(block["distribution"]),
        "rows": _ranked(block),
        "leaderboards": _leaderboards(block["leaderboard"]),
        "trained": drafter_sentence(block["verdict"], trained),
        "by_drafter": [
            (drafter, kind, verdict)
            for drafter, verdicts in block["verdict"]["by_drafter"].items()
            for kind, verdict in [(EVERYTHING, verdicts["overall"]), *verdicts["by_kind"].items()]
            if "/" not in kind
        ],
        "bands": _bands(block["contenders"]),
        "visited": visited_rows(block, document["teacher_forced"]),
    }


def _ranked(block: Mapping[str, Any]) -> list[tuple[Mapping[str, Any] | None, Mapping[str, Any]]]:
    """Each contender with its place on the leaderboard, in that order; without one, in the order of the document."""
    board = block["leaderboard"]
    if not board:
        return [(None, c) for c in block["contenders"]]
    places = {row["contender"]: row for row in [*board["ranked"], *board["apart"]]}
    by_name = {c["contender"]: c for c in block["contenders"]}
    return [(row, by_name[name]) for name, row in places.items()]


def _leaderboards(board: Mapping[str, Any] | None) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Over everything, then by kind: each with its ranked rows, then those without a rank."""
    if not board:
        return []
    boards = {"Leaderboard": board} | {f"Leaderboard, {kind}": b for kind, b in (board.get("by_kind") or {}).items()}
    return [(heading, [*found["ranked"], *found["apart"]]) for heading, found in boards.items()]


def _bands(contenders: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[Mapping[str, Any], Mapping[str, Any]]]]:
    """Of every way to cut the answers up: each contender with each of its bands, where there is more than one."""
    drafting = [c for c in contenders if c["shape"] is not None]
    names = contenders[0]["by_band"] if drafting else ()
    pairs = {name: [(c, band) for c in drafting for band in c["by_band"][name]] for name in names}
    return {name: found for name, found in pairs.items() if len({band["label"] for _, band in found}) > 1}


def visited_rows(block: Mapping[str, Any], forced: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """α where decoding went beside α where the target's own answers go, by contender and draft position."""
    temperature = block["sampler"]["temperature"]
    given = {
        (row.get("drafter"), row["depth"]): row
        for row in forced
        if row["kind"] == EVERYTHING
        and row["temperature"] == temperature
        and row.get("prefixes", block["name"]) == block["name"]
    }
    return [
        {
            "contender": c["contender"],
            "lossy": c["lossy"],
            "drafter": c["drafter"],
            "k": c["k"],
            **row,
            "given": given.get((c["drafter"], row["position"] - 1)),  # depth 0 is the first draft token
        }
        for c in block["contenders"]
        for row in c["pooled"]["visited_alpha"] or ()
    ]


def _settings(context: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Everything that was recorded about the measurement, as rows of names and values."""
    rows = []
    for section, value in context.items():
        if section == "left_out":  # said where the contenders are
            continue
        items = value.items() if isinstance(value, Mapping) else [("", value)]
        for key, item in items:
            item = without_curve(item) if section == "drafters" else item
            text = item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)
            rows.append((" ".join(filter(None, (section, key))).replace("_", " "), text))
    return rows
