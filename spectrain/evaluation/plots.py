"""Plots of the acceptance document as inline SVG: no colour of their own, so a page can be light or dark.

Colours are written as CSS variables (``--series-1`` … ``--series-6``, ``--part-1`` … ``--part-4``,
``--rule``) and ``currentColor``. Every series has its own marker and line style, every part its own hatch.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

PLAIN = "plain"
PARTS = ("prefill", "draft", "verify", "overhead")
HATCHES = ("", "////", "", "....")
# One marker more than colours, so that no pair of the two comes twice.
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))

# matplotlib takes no CSS: these stand for variables until the SVG is written.
INK, RULE = "#010101", "#010102"
SERIES = tuple(f"#01021{index}" for index in range(6))
PART_COLOURS = tuple(f"#01031{index}" for index in range(4))
_VARIABLES = {
    INK: "currentColor",
    RULE: "var(--rule)",
    **{colour: f"var(--series-{index + 1})" for index, colour in enumerate(SERIES)},
    **{colour: f"var(--part-{index + 1})" for index, colour in enumerate(PART_COLOURS)},
}
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: it can be selected, searched and read aloud
    "text.parse_math": False,  # a kind may be named "$"
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 9.0,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.0,
    "hatch.linewidth": 0.7,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}


@dataclass(frozen=True)
class Plot:
    """One plot of the page: what it shows, how to read it, and the ``<svg>`` element."""

    title: str
    caption: str
    svg: str


def sampler_plots(block: dict[str, Any], name: str) -> list[Plot]:
    """The plots of one sampler's block of the document; ``name`` makes the SVG ids unique on the page."""
    drafters = [c for c in block["contenders"] if c["contender"] != PLAIN]
    if not drafters:
        return []
    plots = [
        ("Speedup by contender", _SPEEDUP, _draw_speedup, drafters),
        ("Decode speedup by kind", _BY_KIND, _draw_kinds, drafters),
        ("Marginal survival by position", _SURVIVAL, _draw_survival, drafters),
        ("Conditional acceptance by position", _CONDITIONAL, _draw_conditional, drafters),
        ("Accepted prefix length", _PREFIX, _draw_prefixes, drafters),
        ("Where the time goes", _TIME, _draw_time, block["contenders"]),
    ]
    return [
        Plot(title, caption, _svg(draw, content, f"{name}-{number}", title))
        for number, (title, caption, draw, content) in enumerate(plots)
    ]


def cost_plot(block: dict[str, Any], name: str) -> Plot:
    """Predicted speedup by draft length beside the measured ones."""
    drafters = [c for c in block["contenders"] if c["contender"] != PLAIN]
    title = "Cost model and measurement"
    return Plot(title, _COST, _svg(_draw_cost, drafters, f"{name}-cost", title))


def teacher_forced_plot(rows: Sequence[dict[str, Any]], temperature: float) -> Plot:
    """Acceptance probability by depth, one line a kind, at one temperature."""
    caption = "Mean of Σ min(p, q) over given answers, each draft depth with the true tokens before it."
    title = f"Acceptance probability α at T={temperature:g}, teacher-forced"
    return Plot(title, caption, _svg(_draw_alpha, rows, "alpha", title))


_SPEEDUP = "Filled: decoding alone. Open: with prefill. Bars are intervals; right of the line at 1 is a gain."
_BY_KIND = "Decoding alone, each kind of conversation by itself, with its interval."
_SURVIVAL = "Share of full rounds in which at least the first i draft tokens were accepted."
_CONDITIONAL = "Share of accepted i-th tokens among rounds that proposed one and accepted all before it."
_PREFIX = "Share of full rounds by accepted draft tokens (the number in each block), without repair or bonus."
_TIME = "Milliseconds for each new token, by part. Shorter is faster."
_COST = "Lines: predicted from survival and costs at the largest measured k. Markers: measured, with interval."


def _svg(draw: Callable[[Figure, Any], None], content: Any, name: str, label: str) -> str:
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": name}):  # type: ignore[arg-type]
        figure = Figure(figsize=(4.5, 2.95), layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure, content)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata=dict.fromkeys(_METADATA))
    return _inline(buffer.getvalue(), name, label)


_METADATA = ("Date", "Creator", "Format", "Type")


def _inline(svg: str, name: str, label: str) -> str:
    """A stand-alone SVG → an element for a page: unique ids, CSS colours, no size of its own, a label."""
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg)
    svg = re.sub(r'xlink:href="#', f'href="#{name}-', svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    head, rest = svg.split(">", 1)
    head = re.sub(r' (width|height|version|xmlns|xmlns:xlink)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{label}">{rest}'


def _styled(contenders: Sequence[Any]) -> Iterator[tuple[Any, str, str, Any]]:
    """Each item with its colour, marker and line style: the same for the same place in every plot."""
    for index, item in enumerate(contenders):
        yield item, SERIES[index % 6], MARKERS[index % 7], LINES[index % 6]


def _legend(figure: Figure) -> None:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(3, len(labels)), handlelength=3)


def _error(interval: dict[str, Any]) -> list[list[float]] | None:
    """Error bars of an interval; none when a single conversation gave none."""
    if interval["low"] is None:
        return None
    return [[interval["value"] - interval["low"]], [interval["high"] - interval["value"]]]


def _end(interval: dict[str, Any]) -> float:
    return interval["value"] if interval["high"] is None else interval["high"]


def _rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)


def _draw_speedup(figure: Figure, contenders: Sequence[dict[str, Any]]) -> None:
    axes = figure.subplots()
    for row, (contender, colour, marker, _) in enumerate(_styled(contenders)):
        for offset, part, filled in ((-0.12, "decode", True), (0.12, "total", False)):
            speedup = contender["pooled"]["speedup"][part]
            axes.errorbar(
                speedup["value"], row + offset, xerr=_error(speedup), fmt=marker, color=colour, capsize=3,
                markerfacecolor=colour if filled else "none",
            )  # fmt: skip
        value = contender["pooled"]["speedup"]["decode"]
        axes.annotate(
            f"{value['value']:.2f}×",
            (_end(value), row - 0.12),
            (6, 0),
            textcoords="offset points",
            va="center",
        )
    axes.axvline(1, color=INK, linewidth=1)
    axes.margins(x=0.12)
    axes.set_xlabel("speedup over plain decoding (×)")
    _rows(axes, [contender["contender"] for contender in contenders])


def _draw_kinds(figure: Figure, contenders: Sequence[dict[str, Any]]) -> None:
    axes = figure.subplots()
    kinds = list(contenders[0]["by_kind"])
    for index, (contender, colour, marker, _) in enumerate(_styled(contenders)):
        shift = (index - (len(contenders) - 1) / 2) * 0.7 / len(contenders)
        for row, kind in enumerate(kinds):
            speedup = contender["by_kind"][kind]["speedup"]["decode"]
            axes.errorbar(
                speedup["value"], row + shift, xerr=_error(speedup), fmt=marker, color=colour, capsize=2,
                label=contender["contender"] if row == 0 else None,
            )  # fmt: skip
    axes.axvline(1, color=INK, linewidth=1)
    axes.set_xlabel("decode speedup over plain decoding (×)")
    _rows(axes, kinds)
    _legend(figure)


def _draw_positions(figure: Figure, contenders: Sequence[dict[str, Any]], key: str, label: str) -> None:
    axes = figure.subplots()
    longest = 1
    for contender, colour, marker, line in _styled(contenders):
        rows = [row for row in contender["pooled"][key] if row["rate"] is not None]
        places = [row["position"] for row in rows]
        longest = max([longest, *places])
        axes.plot(
            places, [row["rate"] for row in rows], color=colour, marker=marker, linestyle=line,
            label=contender["contender"],
        )  # fmt: skip
    axes.set(xlabel="draft position i", ylabel=label, ylim=(0, 1.02), xlim=(0.7, longest + 0.3))
    axes.set_xticks(range(1, longest + 1))
    _legend(figure)


def _draw_survival(figure: Figure, contenders: Sequence[dict[str, Any]]) -> None:
    _draw_positions(figure, contenders, "marginal_survival", "P(first i accepted)")


def _draw_conditional(figure: Figure, contenders: Sequence[dict[str, Any]]) -> None:
    _draw_positions(figure, contenders, "conditional_acceptance", "P(i-th accepted | first i−1)")


def _draw_prefixes(figure: Figure, contenders: Sequence[dict[str, Any]]) -> None:
    axes = figure.subplots()
    for row, (contender, colour, _, _) in enumerate(_styled(contenders)):
        histogram = contender["pooled"]["accepted_prefix"]["histogram"]
        left, total = 0.0, sum(histogram) or 1
        for length, count in enumerate(histogram):
            share = count / total
            fill = 0.06 + 0.5 * length / max(len(histogram) - 1, 1)
            axes.barh(row, share, left=left, height=0.6, color=colour, alpha=fill, linewidth=0)
            axes.barh(row, share, left=left, height=0.6, fill=False, edgecolor=colour, linewidth=0.8)
            if share > 0.035:
                axes.text(left + share / 2, row, str(length), ha="center", va="center")
            left += share
    axes.set(xlabel="share of full rounds", xlim=(0, 1))
    _rows(axes, [contender["contender"] for contender in contenders])


def _draw_time(figure: Figure, contenders: Sequence[dict[str, Any]]) -> None:
    axes = figure.subplots()
    for row, contender in enumerate(contenders):
        numbers = contender["pooled"]
        left = 0.0
        for part, colour, hatch in zip(PARTS, PART_COLOURS, HATCHES, strict=True):
            width = numbers["seconds"][part] / numbers["new_tokens"] * 1e3
            axes.barh(
                row, width, left=left, height=0.6, facecolor=colour, edgecolor=INK, linewidth=0.5,
                hatch=hatch, label=part if row == 0 else None,
            )  # fmt: skip
            left += width
        axes.annotate(f"{left:.1f}", (left, row), (4, 0), textcoords="offset points", va="center")
    axes.margins(x=0.1)
    axes.set_xlabel("milliseconds per new token")
    _rows(axes, [contender["contender"] for contender in contenders])
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)


def _draw_cost(figure: Figure, contenders: Sequence[dict[str, Any]]) -> None:
    axes = figure.subplots()
    largest: dict[str, dict[str, Any]] = {}
    for contender in contenders:
        if contender["k"] >= largest.get(contender["drafter"], contender)["k"]:
            largest[contender["drafter"]] = contender
    for index, (contender, colour, marker, line) in enumerate(_styled(contenders)):
        if largest[contender["drafter"]] is contender:
            rows = contender["pooled"]["cost"]["by_k"]
            axes.plot([r["k"] for r in rows], [r["speedup"] for r in rows], color=colour, linestyle=line)
        speedup = contender["pooled"]["speedup"]["decode"]
        axes.errorbar(
            contender["k"] + 0.06 * index, speedup["value"], yerr=_error(speedup), fmt=marker, color=colour,
            capsize=3, label=contender["contender"],
        )  # fmt: skip
    axes.axhline(1, color=INK, linewidth=1)
    axes.set(xlabel="draft length k", ylabel="decode speedup (×)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(figure)


def _draw_alpha(figure: Figure, rows: Sequence[dict[str, Any]]) -> None:
    axes = figure.subplots()
    for kind, colour, marker, line in _styled(sorted({str(row["kind"]) for row in rows})):
        own = sorted((row["depth"], row["alpha"]) for row in rows if str(row["kind"]) == kind)
        depths, alphas = zip(*own, strict=True)
        axes.plot(depths, alphas, color=colour, marker=marker, linestyle=line, label=kind)
    axes.set(xlabel="draft depth", ylabel="α", ylim=(0, 1.02))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(figure)
