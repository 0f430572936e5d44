"""The verdict as one small picture, for a README: decode speedups by contender with their intervals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, BinaryIO

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

_GAIN, _LOSS, _INK, _SOFT, _LOSSY = "#0b6b45", "#9a3412", "#1b1d21", "#5b616b", "#c00018"
_MARGIN = 0.01  # left of both titles, of the width
_STYLE: dict[str, Any] = {
    "text.parse_math": False,
    "font.size": 10.0,
    "text.color": _INK,
    "axes.edgecolor": _SOFT,
    "xtick.color": _SOFT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
}


def draw_picture(block: Mapping[str, Any], title: str, headline: str, file: BinaryIO) -> None:
    """Write a PNG of one sampler's block of the document to ``file``."""
    contenders = [c for c in block["contenders"] if c["pooled"]["speedup"]]
    with matplotlib.rc_context(_STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(7.2, 1.35 + 0.38 * max(len(contenders), 1)), dpi=160, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        for row, contender in enumerate(contenders):
            _draw(axes, row, contender["pooled"])
        axes.axvline(1, color=_INK, linewidth=1)
        axes.set_yticks(range(len(contenders)), [c["contender"] for c in contenders])
        for label, contender in zip(axes.get_yticklabels(), contenders, strict=True):
            if contender["lossy"]:
                label.set_color(_LOSSY)
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(max(len(contenders), 1) - 0.5, -0.5)
        axes.margins(x=0.3)
        axes.set_xlabel(f"decode speedup over plain decoding (×, with interval), {block['name']}", color=_SOFT)
        heading = figure.suptitle(headline, x=_MARGIN, ha="left", fontsize=13, fontweight="bold")
        below = axes.set_title(title, loc="left", fontsize=9, color=_SOFT)
        _align(figure, below, heading)
        figure.savefig(file, format="png", metadata={"Software": None})


def _align(figure: Figure, below: Text, heading: Text) -> None:
    """Start a title of the axes, which the layout gives its height, where the heading of the figure starts; both are
    made smaller where they would run out of the picture."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for text in (heading, below):
        while text.get_window_extent().width > (1 - 2 * _MARGIN) * figure.bbox.width:
            text.set_fontsize(0.95 * float(text.get_fontsize()))
    left = heading.get_window_extent().x0 - below.get_window_extent().x0
    across, up = below.get_position()
    below.set_position((across + left / figure.axes[0].bbox.width, up))


def _draw(axes: Any, row: int, numbers: Mapping[str, Any]) -> None:
    speedup = numbers["speedup"]["decode"]
    low, high = (speedup[side] if speedup[side] is not None else speedup["value"] for side in ("low", "high"))
    colour = _GAIN if low > 1 else _LOSS if high < 1 else _SOFT
    error = [[speedup["value"] - low], [high - speedup["value"]]]
    axes.errorbar(speedup["value"], row, xerr=error, fmt="o", color=colour, capsize=4, markersize=7, linewidth=2)
    label = f"{speedup['value']:.2f}×   τ {numbers['tokens_per_round']['value']:.2f}"
    axes.annotate(label, (high, row), (9, 0), textcoords="offset points", va="center")
