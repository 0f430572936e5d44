"""Plots of speed: what is gained, where the time goes, what a round costs. Inline SVG elements (see svg.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from spectrain.evaluation.acceptance_plots import draw_conditional, draw_prefixes, draw_survival
from spectrain.evaluation.axes import end, error, legend, name_rows, points, shifts, styled
from spectrain.evaluation.kinds import measured_kinds
from spectrain.evaluation.svg import HATCHES, INK, PART_COLOURS, Plot, draw_svg

PARTS = ("prefill", "draft", "verify", "overhead")

_SPEEDUP = "Filled: decoding alone. Open: with prefill. Bars are intervals; right of the line at 1 is a gain."
_BY_KIND = "Decoding alone, each kind of conversation by itself, with its interval."
_SURVIVAL = (
    "Share of full rounds in which at least i draft tokens were accepted: of a tree, a path of i. Bands: intervals."
)
_CONDITIONAL = (
    "Share of accepted i-th tokens among rounds that proposed one and accepted all before it. Bands: intervals."
)
_PREFIX = "Share of full rounds by accepted draft tokens (the number in each block), without repair or bonus."
_TIME = "Milliseconds for each new token, by part. Shorter is faster."
_COST = "Chains. Lines: predicted from survival and costs at the largest measured k. Markers: measured, with interval."


def sampler_plots(block: dict[str, Any], name: str) -> list[Plot]:
    """The plots of one sampler's block of the document; ``name`` makes the SVG ids unique on the page."""
    drafters = [c for c in block["contenders"] if c["shape"] is not None]
    if not drafters:
        return []
    many, markers = len(drafters), len(drafters) * len(measured_kinds(drafters[0]))
    plots = [
        ("Speedup by contender", _SPEEDUP, _draw_speedup, drafters, many),
        ("Decode speedup by kind", _BY_KIND, _draw_kinds, drafters, max(many, markers // 2)),  # half as high as a bar
        ("Marginal survival by position", _SURVIVAL, draw_survival, drafters, many),
        ("Conditional acceptance by position", _CONDITIONAL, draw_conditional, drafters, many),
        ("Accepted prefix length", _PREFIX, draw_prefixes, drafters, many),
        ("Where the time goes", _TIME, _draw_time, block["contenders"], many + 1),
    ]
    return [
        Plot(title, caption, draw_svg(draw, content, f"{name}-{number}", title, rows=rows, lossy=_lossy(content)))
        for number, (title, caption, draw, content, rows) in enumerate(plots)
    ]


def cost_plot(block: dict[str, Any], name: str) -> Plot | None:
    """Predicted speedup by draft length beside the measured ones; None without chains, for a tree has no length."""
    drafters = [c for c in block["contenders"] if c["shape"] is not None]
    chains = [c for c in drafters if c["k"]]
    if not chains:
        return None
    title = "Cost model and measurement"
    svg = draw_svg(_draw_cost, drafters, f"{name}-cost", title, rows=len(chains), lossy=_lossy(chains))
    return Plot(title, _COST, svg)


def _lossy(contenders: Sequence[dict[str, Any]]) -> list[str]:
    return [c["contender"] for c in contenders if c["lossy"]]


def _draw_speedup(figure: Figure, contenders: Sequence[dict[str, Any]]) -> None:
    axes = figure.subplots()
    for row, (contender, colour, marker, _) in enumerate(styled(contenders)):
        for offset, part, filled in ((-0.12, "decode", True), (0.12, "total", False)):
            speedup = contender["pooled"]["speedup"][part]
            axes.errorbar(
                speedup["value"], row + offset, xerr=error(speedup), fmt=marker, color=colour, capsize=3,
                markerfacecolor=colour if filled else "none",
            )  # fmt: skip
        value = contender["pooled"]["speedup"]["decode"]
        axes.annotate(
            f"{value['value']:.2f}×",
            (end(value), row - 0.12),
            (6, 0),
            textcoords="offset points",
            va="center",
        )
    axes.axvline(1, color=INK, linewidth=1)
    axes.margins(x=0.12)
    axes.set_xlabel("speedup over plain decoding (×)")
    name_rows(axes, [contender["contender"] for contender in contenders])


def _draw_kinds(figure: Figure, contenders: Sequence[dict[str, Any]]) -> None:
    axes = figure.subplots()
    kinds = list(measured_kinds(contenders[0]))
    for shift, (contender, colour, marker, _) in zip(shifts(len(contenders)), styled(contenders), strict=True):
        for row, kind in enumerate(kinds):
            speedup = contender["by_kind"][kind]["speedup"]["decode"]
            points(axes, row + shift, speedup, colour, marker, None if row else contender["contender"])
    axes.axvline(1, color=INK, linewidth=1)
    axes.set_xlabel("decode speedup over plain decoding (×)")
    name_rows(axes, kinds)
    legend(figure)


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
    name_rows(axes, [contender["contender"] for contender in contenders])
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)


def _draw_cost(figure: Figure, contenders: Sequence[dict[str, Any]]) -> None:
    axes = figure.subplots()
    largest: dict[tuple[str, str], dict[str, Any]] = {}
    # All of them are styled, so that each looks as it does in the other plots.
    chains = [styled for styled in styled(contenders) if styled[0]["k"]]
    for contender, *_ in chains:
        if contender["k"] >= largest.get(_family(contender), contender)["k"]:
            largest[_family(contender)] = contender
    for index, (contender, colour, marker, line) in enumerate(chains):
        if largest[_family(contender)] is contender:
            rows = contender["pooled"]["cost"]["by_k"]
            axes.plot([r["k"] for r in rows], [r["speedup"] for r in rows], color=colour, linestyle=line)
        speedup = contender["pooled"]["speedup"]["decode"]
        axes.errorbar(
            contender["k"] + 0.06 * index, speedup["value"], yerr=error(speedup), fmt=marker, color=colour,
            capsize=3, label=contender["contender"],
        )  # fmt: skip
    axes.axhline(1, color=INK, linewidth=1)
    axes.set(xlabel="draft length k", ylabel="decode speedup (×)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend(figure)


def _family(contender: dict[str, Any]) -> tuple[str, str]:
    """Chains that differ in their length alone."""
    return contender["drafter"], contender["verification"]
