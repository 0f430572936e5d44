"""Plots of speculation under load: speedup and what a verification costs, by batch size (see svg.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from spectrain.evaluation.axes import error, legend, styled
from spectrain.evaluation.leaves import LOSSY
from spectrain.evaluation.svg import INK, Plot, draw_svg

_SPEED = "Filled: faster than plain decoding of the same batch, beyond the interval. Above the line at 1 is a gain."
_COSTS = (
    "Forwards timed by themselves: k + 1 tokens a request beside a single one, of the same batch. At 1, verification "
    "is as cheap as decoding. What a verification took in decoding stands in the cost model."
)


def load_plots(load: Mapping[str, Any] | None) -> list[Plot]:
    """Speedup against batch size, and v against it; nothing when no load was measured."""
    if load is None:
        return []
    names = {row["contender"] for row in load["rows"] if row["speedup"]}
    lossy = [name for name in names if LOSSY in name]
    speed, costs = "Speedup by batch size", "Verification cost v by batch size"
    return [Plot(speed, _SPEED, draw_svg(_draw_speed, load, "load", speed, rows=len(names), lossy=lossy)),
            Plot(costs, _COSTS, draw_svg(_draw_costs, load, "load-v", costs))]  # fmt: skip


def _batches(axes: Axes, batches: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("requests in a batch")


def _draw_speed(figure: Figure, load: Mapping[str, Any]) -> None:
    axes = figure.subplots()
    names = dict.fromkeys(row["contender"] for row in load["rows"] if row["speedup"])
    for name, colour, marker, line in styled(list(names)):
        rows = sorted((r for r in load["rows"] if r["contender"] == name), key=lambda row: row["batch"])
        axes.plot([r["batch"] for r in rows], [r["speedup"]["value"] for r in rows], color=colour, linestyle=line,
                  marker=marker, markerfacecolor="none", label=name)  # fmt: skip
        for row in rows:
            axes.errorbar(row["batch"], row["speedup"]["value"], yerr=error(row["speedup"]), fmt=marker, color=colour,
                          capsize=2, markerfacecolor=colour if row["pays"] else "none")  # fmt: skip
    axes.axhline(1, color=INK, linewidth=1)
    axes.set_ylabel("speedup (×)")
    _batches(axes, sorted({row["batch"] for row in load["rows"]}))
    legend(figure)


def _draw_costs(figure: Figure, load: Mapping[str, Any]) -> None:
    axes = figure.subplots()
    costs = load["verification"]
    series = sorted({(cost["context"], cost["k"]) for cost in costs if cost["k"]})
    several = len({context for context, _ in series}) > 1
    for (context, k), colour, marker, line in styled(series):
        own = [c for c in costs if (c["context"], c["k"]) == (context, k)]
        own.sort(key=lambda cost: cost["batch"])
        label = f"k={k}" + (f", {context} cached" if several else "")
        axes.plot([c["batch"] for c in own], [c["v"] for c in own], color=colour, linestyle=line, marker=marker,
                  label=label)  # fmt: skip
    axes.axhline(1, color=INK, linewidth=1)
    axes.set_ylabel("plain steps")
    axes.set_ylim(bottom=0)
    _batches(axes, sorted({cost["batch"] for cost in costs}))
    legend(figure)
