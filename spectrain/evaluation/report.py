"""The acceptance report: one JSON document → a Markdown file, one self-contained page and a picture.

Reads the document alone and imports nothing of spectrain that could compute another number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from spectrain.evaluation.document import check_document, read_document
from spectrain.evaluation.learning import learning_curves, learning_plot, without_curve
from spectrain.evaluation.picture import draw_picture
from spectrain.evaluation.plots import cost_plot, sampler_plots, teacher_forced_plot
from spectrain.evaluation.svg import Plot
from spectrain.evaluation.wording import (
    DEFINITIONS,
    FILTERS,
    drafter_sentence,
    drift_sentence,
    headline,
    kind_sentence,
    law_sentence,
    percent,
    sentence,
)
from spectrain.files import atomic_file

LISTED_DIFFERENCES = 20
MARKDOWN, PAGE, PICTURE = "report.md", "report.html", "report.png"


def render_report(json_path: Path | str, output_dir: Path | str) -> list[Path]:
    """Write ``report.md``, ``report.html`` and ``report.png`` into ``output_dir``; returns their paths.

    Each file appears whole or not at all. Raises ``SpectrainError`` when the document at ``json_path`` cannot
    be read, has another schema or lacks a key (named by its path).
    """
    document, folder = read_document(json_path), Path(output_dir)
    texts = {folder / MARKDOWN: render_markdown(document), folder / PAGE: render_page(document)}
    for path, text in texts.items():
        with atomic_file(path) as partial:
            partial.write_text(text, encoding="utf-8")
    render_picture(document, folder / PICTURE)
    return [*texts, folder / PICTURE]


def render_markdown(document: Mapping[str, Any]) -> str:
    """The report as Markdown, tables only: for a pull request or a card."""
    check_document(document)
    return (
        template_environment(Path(__file__).parent, markdown=True).get_template("report.md.j2").render(_view(document))
    )


def render_page(document: Mapping[str, Any]) -> str:
    """The report as one HTML page: styles and plots inside, no scripts, nothing loaded from elsewhere."""
    check_document(document)
    view = _view(document)
    for index, sampler in enumerate(view["samplers"]):
        sampler["plots"] = sampler_plots(sampler["block"], f"s{index}")
        sampler["cost_plot"] = cost_plot(sampler["block"], f"s{index}")
    view["alpha_plot"] = _alpha_plot(document)
    view["learning_plot"] = learning_plot(view["curves"])
    return template_environment(Path(__file__).parent, markdown=False).get_template("report.html.j2").render(view)


def render_picture(document: Mapping[str, Any], path: Path | str) -> Path:
    """A compact PNG of the verdict (speedups by contender, first sampler), for a README."""
    check_document(document)
    block = document["samplers"][0]
    with atomic_file(path) as partial, partial.open("wb") as file:
        words = headline(block["verdict"]["overall"], changed=_changed(document))
        draw_picture(block, _title(document), words, file)
    return Path(path)


def template_environment(folder: Path, *, markdown: bool) -> jinja2.Environment:
    """Templates of ``folder`` with the filters of wording.py; names from data cannot break out of a Markdown cell."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        autoescape=not markdown,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_markdown_cell if markdown else None,
        keep_trailing_newline=True,
    )
    environment.filters.update(FILTERS, svg=Markup)
    return environment


def _markdown_cell(value: Any) -> Any:
    """Names come from data: none of them may end a table cell, start a tag or a new line."""
    if not isinstance(value, str):
        return value
    return " ".join(value.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|").split())


# The view: what the templates need besides the document itself.


def _view(document: Mapping[str, Any]) -> dict[str, Any]:
    confidence = percent(document["statistics"]["confidence"])
    return {
        "document": document,
        "context": document["context"],
        "title": _title(document),
        "samplers": [_sampler_view(block, confidence, document) for block in document["samplers"]],
        "confidence": confidence,
        "settings": _settings(document["context"]),
        "drift": [(name, drift_sentence(name, d), d) for name, d in (document.get("drift") or {}).items()],
        "left_out": document["context"].get("left_out") or [],
        "listed": LISTED_DIFFERENCES,
        "curves": learning_curves(document["context"]),
        "definitions": DEFINITIONS,
    }


def _title(document: Mapping[str, Any]) -> str:
    return f"{document['context']['target']['name']} on {document['context']['traffic']['name']}"


def _changed(document: Mapping[str, Any]) -> bool:
    """Whether the measured target is one that the bundle changed in training."""
    return document["context"]["target"].get("derived_from") is not None


def _sampler_view(block: Mapping[str, Any], confidence: str, document: Mapping[str, Any]) -> dict[str, Any]:
    overall, changed = block["verdict"]["overall"], _changed(document)
    drafters = [c for c in block["contenders"] if c["shape"] is not None]
    return {
        "block": block,
        "decision": overall["decision"],
        "headline": headline(overall, changed=changed),
        "sentence": sentence(overall, confidence, changed=changed),
        "kinds": kind_sentence(block["verdict"]["by_kind"]),
        "drafters": drafters,
        "law": law_sentence(drafters, changed=changed),
        "leaderboards": _leaderboards(block["leaderboard"]),
        "trained": drafter_sentence(block["verdict"], document["context"]["drafter"]["name"]),
        "by_drafter": [
            (drafter, kind, verdict)
            for drafter, verdicts in block["verdict"]["by_drafter"].items()
            for kind, verdict in [("everything", verdicts["overall"]), *verdicts["by_kind"].items()]
            if "/" not in kind
        ],
    }


def _leaderboards(board: Mapping[str, Any] | None) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Over everything, then by kind: each with its ranked rows, then those without a rank."""
    if not board:
        return []
    boards = {"Leaderboard": board} | {f"Leaderboard, {kind}": b for kind, b in (board.get("by_kind") or {}).items()}
    return [(heading, [*found["ranked"], *found["apart"]]) for heading, found in boards.items()]


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


def _alpha_plot(document: Mapping[str, Any]) -> Plot | None:
    """α at T = 1 when it was measured there, else at the highest temperature."""
    rows = document["teacher_forced"]
    if not rows:
        return None
    temperatures = {row["temperature"] for row in rows}
    chosen = 1 if 1 in temperatures else max(temperatures)
    # A kind inside another is in its parent's line; the table has it by itself.
    drawn = [row for row in rows if row["temperature"] == chosen and "/" not in row["kind"]]
    # Answers by another sampler are another measurement: the first's stand for them in the plot.
    drawn = [row for row in drawn if row.get("prefixes") == drawn[0].get("prefixes")]
    whole = [row for row in drawn if row["kind"] == "everything"]
    if len({row.get("drafter") for row in whole}) > 1:  # then the lines are drafters
        drawn = [{**row, "kind": row["drafter"]} for row in whole]
    return teacher_forced_plot(drawn, chosen)
