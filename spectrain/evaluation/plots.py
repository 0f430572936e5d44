"""Plots of the acceptance document, each an inline SVG element (see svg.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from spectrain.evaluation.svg import HATCHES, INK, LINES, MARKERS, PART_COLOURS, SERIES, Plot, draw_svg

PARTS = ("prefill", "draft", "verify", "overhead")


def sampler_plots(block: dict[str, Any], name: str) -> list[Plot]:
    """The plots of one sampler's block of the document; ``name`` makes the SVG ids unique on the page."""
    drafters = [c for c in block["contenders"] if c["shape"] is not None]
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
        Plot(
            title, caption, draw_svg(draw, content, f"{name}-{number}", title, rows=len(content), lossy=_lossy(content))
        )
        for number, (title, caption, draw, content) in enumerate(plots)
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


def teacher_forced_plot(rows: Sequence[dict[str, Any]], temperature: float) -> Plot:
    """Acceptance probability by depth, one line a kind, at one temperature."""
    caption = "Mean of Σ min(p, q) over given answers, each draft depth with the true tokens before it."
    title = f"Acceptance probability α at T={temperature:g}, teacher-forced"
    return Plot(title, caption, draw_svg(_draw_alpha, rows, "alpha", title))


_SPEEDUP = "Filled: decoding alone. Open: with prefill. Bars are intervals; right of the line at 1 is a gain."
_BY_KIND = "Decoding alone, each kind of conversation by itself, with its interval."
_SURVIVAL = "Share of full rounds in which at least i draft tokens were accepted: of a tree, a path of i."
_CONDITIONAL = "Share of accepted i-th tokens among rounds that proposed one and accepted all before it."
_PREFIX = "Share of full rounds by accepted draft tokens (the number in each block), without repair or bonus."
_TIME = "Milliseconds for each new token, by part. Shorter is faster."
_COST = "Chains. Lines: predicted from survival and costs at the largest measured k. Markers: measured, with interval."


def styled(contenders: Sequence[Any]) -> Iterator[tuple[Any, str, str, Any]]:
    """Each item with its colour, marker and line style: the same for the same place in every plot."""
    for index, item in enumerate(contenders):
        yield item, SERIES[index % 6], MARKERS[index % 7], LINES[index % 6]


def legend(figure: Figure) -> None:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    columns = 3 if max(map(len, labels), default=0) <= 14 else 2
    figure.legend(handles, labels, loc="outside lower center", ncols=min(columns, len(labels)), handlelength=3)


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
    for row, (contender, colour, marker, _) in enumerate(styled(contenders)):
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
    for index, (contender, colour, marker, _) in enumerate(styled(contenders)):
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
    legend(figure)


def _draw_positions(figure: Figure, contenders: Sequence[dict[str, Any]], key: str, label: str) -> None:
    axes = figure.subplots()
    longest = 1
    for contender, colour, marker, line in styled(contenders):
        rows = [row for row in contender["pooled"][key] if row["rate"] is not None]
        places = [row["position"] for row in rows]
        longest = max([longest, *places])
        axes.plot(
            places, [row["rate"] for row in rows], color=colour, marker=marker, linestyle=line,
            label=contender["contender"],
        )  # fmt: skip
    axes.set(xlabel="draft position i", ylabel=label, ylim=(0, 1.02), xlim=(0.7, longest + 0.3))
    axes.set_xticks(range(1, longest + 1))
    legend(figure)


def _draw_survival(figure: Figure, contenders: Sequence[dict[str, Any]]) -> None:
    _draw_positions(figure, contenders, "marginal_survival", "P(first i accepted)")


def _draw_conditional(figure: Figure, contenders: Sequence[dict[str, Any]]) -> None:
    _draw_positions(figure, contenders, "conditional_acceptance", "P(i-th accepted | first i−1)")


def _draw_prefixes(figure: Figure, contenders: Sequence[dict[str, Any]]) -> None:
    axes = figure.subplots()
    for row, (contender, colour, _, _) in enumerate(styled(contenders)):
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
            contender["k"] + 0.06 * index, speedup["value"], yerr=_error(speedup), fmt=marker, color=colour,
            capsize=3, label=contender["contender"],
        )  # fmt: skip
    axes.axhline(1, color=INK, linewidth=1)
    axes.set(xlabel="draft length k", ylabel="decode speedup (×)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend(figure)


def _family(contender: dict[str, Any]) -> tuple[str, str]:
    """Chains that differ in their length alone."""
    return contender["drafter"], contender["verification"]


def _draw_alpha(figure: Figure, rows: Sequence[dict[str, Any]]) -> None:
    axes = figure.subplots()
    for kind, colour, marker, line in styled(sorted({str(row["kind"]) for row in rows})):
        own = sorted((row["depth"], row["alpha"]) for row in rows if str(row["kind"]) == kind)
        depths, alphas = zip(*own, strict=True)
        axes.plot(depths, alphas, color=colour, marker=marker, linestyle=line, label=kind)
    axes.set(xlabel="draft depth", ylabel="α", ylim=(0, 1.02))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend(figure)
