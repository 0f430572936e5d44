"""Throughput by batch size as one small picture: plain decoding beside each drafter's draft lengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, BinaryIO

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

_INK, _SOFT = "#1b1d21", "#5b616b"
_SERIES = ("#0b6b45", "#1d4ed8", "#9a3412", "#7c3aed", "#0e7490", "#a16207")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_STYLE: dict[str, Any] = {
    "text.parse_math": False,
    "font.size": 9.0,
    "text.color": _INK,
    "axes.edgecolor": _SOFT,
    "xtick.color": _SOFT,
    "ytick.color": _SOFT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


def draw_load(document: Mapping[str, Any], file: BinaryIO) -> None:
    """Write a PNG of a batching document to ``file``; a filled marker is a speedup whose interval lies above 1."""
    drafters = list(dict.fromkeys(row["drafter"] for row in document["rows"] if row["k"]))
    with matplotlib.rc_context(_STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(0.6 + 3.6 * len(drafters), 3.4), dpi=160, layout="constrained")
        FigureCanvasAgg(figure)
        for axes, drafter in zip(
            figure.subplots(1, len(drafters), sharey=True, squeeze=False)[0], drafters, strict=True
        ):
            _draw(axes, [row for row in document["rows"] if not row["k"] or row["drafter"] == drafter], drafter)
        figure.supxlabel("requests in a batch; filled: faster than plain beyond its interval", fontsize=9, color=_SOFT)
        figure.axes[0].set_ylabel("tokens per second", color=_SOFT)
        figure.suptitle(document["title"], x=0.01, ha="left", fontsize=10)
        figure.savefig(file, format="png", metadata={"Software": None})


def _draw(axes: Any, rows: list[dict[str, Any]], drafter: str) -> None:
    lengths = sorted({row["k"] for row in rows})
    for number, k in enumerate(lengths):
        own = sorted((row for row in rows if row["k"] == k), key=lambda row: row["batch"])
        colour, marker = (_SERIES[(number - 1) % 6], _MARKERS[(number - 1) % 6]) if k else (_INK, "")
        batches, rates = [row["batch"] for row in own], [row["tokens_per_second"] for row in own]
        axes.plot(batches, rates, color=colour, linewidth=1.4 if k else 2.4, label=f"k={k}" if k else "plain")
        for row in own if k else ():
            fill = colour if row["pays"] else "white"
            axes.plot(row["batch"], row["tokens_per_second"], marker, color=colour, markerfacecolor=fill)
    ticks = sorted({row["batch"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(batch) for batch in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(bottom=0)
    axes.set_title(drafter, loc="left", fontsize=9)
    axes.legend(fontsize=8)
