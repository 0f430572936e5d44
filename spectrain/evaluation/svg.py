"""A plot as an inline SVG element: no colour of its own, so a page can be light or dark.

Colours are written as CSS variables (``--series-1`` … ``--series-6``, ``--part-1`` … ``--part-4``, ``--rule``,
``--lossy``) and ``currentColor``. Every series has its own marker and line style, every part its own hatch.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.text import Text

HATCHES = ("", "////", "", "....")
# One marker more than colours, so that no pair of the two comes twice.
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))

# matplotlib takes no CSS: these stand for variables until the SVG is written.
INK, RULE, LOSSY_INK = "#010101", "#010102", "#010103"
SERIES = tuple(f"#01021{index}" for index in range(6))
PART_COLOURS = tuple(f"#01031{index}" for index in range(4))
_VARIABLES = {
    INK: "currentColor",
    RULE: "var(--rule)",
    LOSSY_INK: "var(--lossy)",
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


def draw_svg(draw: Callable[[Figure, Any], None], content: Any, name: str, label: str, *, rows: int = 0,
             lossy: Collection[str] = ()) -> str:  # fmt: skip
    """The element that ``draw(figure, content)`` makes.

    Args:
        name: opens all of its ids, so that they are unique on the page.
        label: read aloud in its place.
        rows: how many series or bars it shows; beyond six it grows taller.
        lossy: names that are written in the colour of a warning wherever they stand.
    """
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": name}):  # type: ignore[arg-type]
        figure = Figure(figsize=(4.5, 2.95 + 0.22 * max(0, rows - 6)), layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure, content)
        for text in figure.findobj(Text):
            if text.get_text() in lossy:
                text.set_color(LOSSY_INK)
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
