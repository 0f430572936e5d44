"""The acceptance report: one JSON document → Markdown, one self-contained page, a picture, a table and a profile.

Reads the document alone and imports nothing of spectrain that could compute another number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from spectrain.evaluation.acceptance_plots import alpha_plots, band_plots, calibration_plots, law_plot, visited_plot
from spectrain.evaluation.csv_tables import acceptance_csv
from spectrain.evaluation.document import check_document, read_document
from spectrain.evaluation.learning import learning_plot
from spectrain.evaluation.load_plots import load_plots
from spectrain.evaluation.picture import draw_picture
from spectrain.evaluation.plots import cost_plot, sampler_plots
from spectrain.evaluation.profile import speculation_profile
from spectrain.evaluation.view import changed, report_view, title
from spectrain.evaluation.wording import FILTERS, headline, interval
from spectrain.files import atomic_file

MARKDOWN, PAGE, PICTURE = "report.md", "report.html", "report.png"
TABLE, PROFILE = "acceptance.csv", "speculation_profile.json"


def render_report(json_path: Path | str, output_dir: Path | str) -> list[Path]:
    """Write the report of the document at ``json_path`` into ``output_dir``; returns the paths of its five files.

    Each file appears whole or not at all. Raises ``SpectrainError`` when the document cannot be read, has another
    schema or lacks a key (named by its path).
    """
    document, folder = read_document(json_path), Path(output_dir)
    profile = json.dumps(speculation_profile(document), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    texts = {
        folder / MARKDOWN: render_markdown(document),
        folder / PAGE: render_page(document),
        folder / TABLE: acceptance_csv(document),
        folder / PROFILE: profile,
    }
    render_picture(document, folder / PICTURE)  # first: whatever cannot be drawn leaves nothing behind
    write_texts(texts)
    return [*texts, folder / PICTURE]


def write_texts(texts: Mapping[Path, str]) -> None:
    """Write each file whole or not at all, with the line ends that its text has."""
    for path, text in texts.items():
        with atomic_file(path) as partial:
            partial.write_bytes(text.encode("utf-8"))


def render_markdown(document: Mapping[str, Any]) -> str:
    """The report as short Markdown: for a pull request. What is long is on the page and in the table."""
    check_document(document)
    folder = Path(__file__).parent
    return template_environment(folder, markdown=True).get_template("report.md.j2").render(report_view(document))


def render_page(document: Mapping[str, Any]) -> str:
    """The report as one HTML page: styles and plots inside, no scripts, nothing loaded from elsewhere."""
    check_document(document)
    view = report_view(document)
    for index, sampler in enumerate(view["samplers"]):
        block, name = sampler["block"], f"s{index}"
        sampler["plots"] = sampler_plots(block, name)
        sampler["cost_plot"] = cost_plot(block, name)
        sampler["visited_plot"] = visited_plot(sampler["visited"], sampler["drafters"], name)
        sampler["band_plots"] = band_plots(sampler["bands"], name)
        sampler["law_plot"] = law_plot(block["distribution"], name)
    view["load_plots"] = load_plots(document["load"])
    view["alpha_plots"] = alpha_plots(document["teacher_forced"])
    view["calibration_plots"] = calibration_plots(document["calibration"])
    view["learning_plot"] = learning_plot(view["curves"])
    return template_environment(Path(__file__).parent, markdown=False).get_template("report.html.j2").render(view)


def render_picture(document: Mapping[str, Any], path: Path | str) -> Path:
    """A compact PNG of the verdict (speedups by contender, first sampler), for a README."""
    check_document(document)
    block = document["samplers"][0]
    with atomic_file(path) as partial, partial.open("wb") as file:
        words = headline(block["verdict"]["overall"], changed=changed(document))
        draw_picture(block, title(document), words, file)
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
    if not markdown:
        environment.filters.update(interval=_breakable, rate=lambda row: _breakable(row, 3, "rate"))
    return environment


def _breakable(value: Mapping[str, Any] | None, digits: int = 2, key: str = "value") -> Markup:
    """An interval on a page: where a column is narrow the bracket goes below the number, whole."""
    estimate, bracket, bounds = interval(value, digits, key).partition(" (")
    return Markup('{} <span class="bounds">({}</span>').format(estimate, bounds) if bracket else Markup(estimate)


def _markdown_cell(value: Any) -> Any:
    """Names come from data: none of them may end a table cell, start a tag or a new line."""
    if not isinstance(value, str):
        return value
    return " ".join(value.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|").split())
