"""What the plots of the report share: a series looks the same everywhere, intervals are bars or bands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spectrain.evaluation.leaves import EVERYTHING, PLAIN
from spectrain.evaluation.svg import INK, LINES, MARKERS, SERIES

BAND_OPACITY = 0.16


def styled(contenders: Sequence[Any]) -> Iterator[tuple[Any, str, str, Any]]:
    """Each item with its colour, marker and line style: the same for the same place in every plot, and in none twice.

    When the colours begin anew the line styles are one further on. Plain decoding and the total of all kinds are solid
    lines in the colour of the text, and take no place.
    """
    index = 0
    for item in contenders:
        if (item.get("contender") if isinstance(item, Mapping) else item) in (PLAIN, EVERYTHING):
            yield item, INK, "*", "-"
            continue
        yield item, SERIES[index % 6], MARKERS[index % 7], LINES[(index + index // 6) % 6]
        index += 1


def legend(figure: Figure) -> None:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    columns = 3 if max(map(len, labels), default=0) <= 14 else 2
    figure.legend(handles, labels, loc="outside lower center", ncols=min(columns, len(labels)), handlelength=3)


def error(interval: Mapping[str, Any]) -> list[list[float]] | None:
    """Error bars of an interval; none when a single conversation gave none."""
    if interval["low"] is None:
        return None
    return [[interval["value"] - interval["low"]], [interval["high"] - interval["value"]]]


def end(interval: Mapping[str, Any]) -> float:
    return interval["value"] if interval["high"] is None else interval["high"]


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)


def points(axes: Axes, row: float, interval: Mapping[str, Any], colour: str, marker: str, label: str | None) -> None:
    """One number with its interval, lying."""
    axes.errorbar(interval["value"], row, xerr=error(interval), fmt=marker, color=colour, capsize=2, label=label)


def shifts(count: int) -> list[float]:
    """How far each of ``count`` series stands off the middle of a row, so that none hides another."""
    return [(index - (count - 1) / 2) * 0.7 / count for index in range(count)]


def band(axes: Axes, places: Sequence[float], rows: Sequence[Mapping[str, Any]], colour: str) -> None:
    """The intervals of rows that have one, as a band behind their line."""
    known = [(x, row["low"], row["high"]) for x, row in zip(places, rows, strict=True) if row["low"] is not None]
    if known:
        x, low, high = zip(*known, strict=True)
        axes.fill_between(x, low, high, color=colour, alpha=BAND_OPACITY, linewidth=0)
