"""audit.md: the numbers of an audit, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spectrain.data.dropped import REASONS

Document = Mapping[str, Any]

ORIGINS = {
    "given": "given in the files as text",
    "sampled_ids": "with the ids that the target sampled",
    "retokenized": "with ids made from their text",
    "none": "none yet",
    "truncated": "of them cut short by their budget",
}
CONTENTS = {
    "several_answers": "chats with several answers",
    "split": "chats that are split, a row for each answer",
    "tools": "chats with tools",
    "tool_calls": "chats with tool calls",
    "reasoning": "chats with a reasoning trace beside an answer",
    "reasoning_left_out": "chats whose trace the template leaves out of what is trained",
}


def table(document: Document) -> str:
    """The audit as Markdown."""
    parts = [_head(document), _overview(document), _dropped(document), _duplicates(document), _vocabulary(document)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(document: Document) -> str:
    template = document["template"]
    settings = ", ".join(f"{key}={value!r}" for key, value in template["kwargs"].items())
    lines = ["# Audit", "", f"{template['name']}, digest {template['digest'][:16]}{settings and f', with {settings}'}"]
    if document["split"]:
        lines.append(f"Held out by {document['split']}.")
    split = sum(side["with"]["split"] for side in document["sides"].values())
    if not_answered(document):
        lines.append("The target has not answered yet: answers and lengths below are those of the files. It will "
                     "answer the end of each chat, and then that answer alone is trained on.")  # fmt: skip
    elif split:
        lines.append(f"{split} conversations are split into a row for each answer, for the template rewrites history.")
    lines += [f"**prepare stops: {why}**" for why in document["stops"]]
    lines += [f"Note: {note}." for note in document["notes"]]
    return "\n".join(lines)


def not_answered(document: Document) -> bool:
    """Whether the target is yet to give the answers that are trained on."""
    made = all(side["answers"]["by_target"] for side in document["sides"].values())
    return bool(document["answers_by_target"]) and not made


def _overview(document: Document) -> str:
    sides = document["sides"]

    def row(name: str, *keys: str) -> list[str]:
        return [name, *(_shown(_at(side, keys)) for side in sides.values())]

    rows = [
        row("conversations", "conversations"),
        row("rows", "rows"),
        row("tokens", "tokens"),
        row("answer tokens", "answer_tokens"),
        ["supervised share", *(f"{side['supervised_share']:.1%}" for side in sides.values())],
        *(row(f"row length, {name}", "lengths", key) for key, name in (("p50", "median"), ("p95", "95th percentile"),
                                                                        ("max", "longest"))),
        row(f"rows near max_length ({document['max_length']})", "near_max_length"),
        *(row(f"answers {text}", "answers", key) for key, text in ORIGINS.items()),
        *(row(text, "with", key) for key, text in CONTENTS.items()),
        row("repeated conversations", "duplicates"),
    ]  # fmt: skip
    return _markdown(["", *sides], rows)


def _dropped(document: Document) -> str:
    reasons = [r for r in REASONS if any(side["dropped"].get(r) for side in document["sides"].values())]
    if not reasons:
        return "No rows are left out."
    rows = []
    for reason in reasons:
        counts = [str(side["dropped"].get(reason, 0)) for side in document["sides"].values()]
        places = [p for side in document["sides"].values() for p in side.get("dropped_at", {}).get(reason, ())]
        rows.append([REASONS[reason], *counts, ", ".join(places[:5])])
    return "## Left out\n\n" + _markdown(["rows", *document["sides"], "at"], rows)


def _duplicates(document: Document) -> str:
    near = document["near_duplicates"]
    lines = [f"## Held out and in training\n\n{len(document['leaks'])} held-out conversations are also in training."]
    lines += [f"- {leak}" for leak in document["leaks"][:20]]
    lines.append(f"\n{near['count']} resemble one there (word-shingle similarity of at least {near['threshold']:g}).")
    lines += [f"- {pair}" for pair in near["pairs"]]
    return "\n".join(lines)


def _vocabulary(document: Document) -> str:
    if document["draft_vocabulary"] is None:
        return ""
    sides = document["sides"]
    kinds = sorted({kind for side in sides.values() for kind in side["kinds"]})
    rows = [[kind, *(_share(side["kinds"].get(kind, {}).get("coverage")) for side in sides.values())]
            for kind in kinds]  # fmt: skip
    rows.append(["all", *(_share(side["coverage"]) for side in sides.values())])
    return (
        f"## Draft vocabulary\n\nShare of the answers' tokens among the {document['draft_vocabulary']} most frequent "
        "ones of training. It is a ceiling: the drafter proposes nothing else, so its acceptance probability α cannot "
        "exceed it.\n\n" + _markdown(["kind", *sides], rows)
    )


def _at(value: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        value = None if value is None else value[key]
    return value


def _shown(value: Any) -> str:
    return "-" if value is None else f"{value:,}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
