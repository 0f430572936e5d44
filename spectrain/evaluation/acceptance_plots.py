"""Plots of acceptance: by draft position, by kind, by band, and what the drafter's confidence is worth (see svg.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from spectrain.evaluation.axes import band, error, legend, name_rows, points, shifts, styled
from spectrain.evaluation.leaves import EVERYTHING
from spectrain.evaluation.svg import INK, Plot, draw_svg

_DEPTHS = (
    "Mean of Σ min(p, q) over given answers, each draft position with the true tokens before it. Bands: intervals."
)
_KINDS = "The first draft token of each kind of conversation, with its interval. Without decoding, over given answers."
_VISITED = (
    "Solid: mean α at positions that decoding tested. Dashed, open: at all positions of the target's own answers, the "
    "true tokens before them. Bands: intervals. The longest chain of each drafter."
)
_BANDS = "Committed tokens, the target's own included, with intervals."
_CALIBRATION = (
    "Share accepted against the drafter's confidence, in ten bins. On the diagonal, confidence is what it says."
)
_LAW = (
    "Where sampled tokens fall in the target's law: 1 everywhere if they were drawn from it. The gray band is chance."
)
BAND_AXES = {"turn": "turn answered", "prompt tokens": "tokens of the prompt", "answer position": "place in the answer"}


# --- by position ------------------------------------------------------------------------------------------------------


def draw_survival(figure: Figure, contenders: Sequence[dict[str, Any]]) -> None:
    _draw_positions(figure, contenders, "marginal_survival", "P(first i accepted)")


def draw_conditional(figure: Figure, contenders: Sequence[dict[str, Any]]) -> None:
    _draw_positions(figure, contenders, "conditional_acceptance", "P(i-th accepted | first i−1)")


def _draw_positions(figure: Figure, contenders: Sequence[dict[str, Any]], key: str, label: str) -> None:
    axes = figure.subplots()
    longest = 1
    for contender, colour, marker, line in styled(contenders):
        rows = [row for row in contender["pooled"][key] if row["rate"] is not None]
        places = [row["position"] for row in rows]
        longest = max([longest, *places])
        band(axes, places, rows, colour)
        axes.plot(
            places, [row["rate"] for row in rows], color=colour, marker=marker, linestyle=line,
            label=contender["contender"],
        )  # fmt: skip
    axes.set(xlabel="draft position i", ylabel=label, ylim=(0, 1.02), xlim=(0.7, longest + 0.3))
    axes.set_xticks(range(1, longest + 1))
    legend(figure)


def draw_prefixes(figure: Figure, contenders: Sequence[dict[str, Any]]) -> None:
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
    name_rows(axes, [contender["contender"] for contender in contenders])


def visited_plot(rows: Sequence[dict[str, Any]], contenders: Sequence[dict[str, Any]], name: str) -> Plot | None:
    """α where decoding went and over given answers, by position; None where neither was recorded.

    ``contenders``: all that draft, so that each looks as it does in the other plots.
    """
    longest: dict[str, dict[str, Any]] = {}
    for row in rows:
        if not row["lossy"] and row["k"] > longest.setdefault(row["drafter"], row)["k"]:
            longest[row["drafter"]] = row
    if not longest:
        return None
    drawn = {row["contender"] for row in longest.values()}
    names = [c["contender"] for c in contenders]
    series = [(name, [row for row in rows if row["contender"] == name and name in drawn]) for name in names]
    title = "α where decoding went, and over given answers"
    return Plot(title, _VISITED, draw_svg(_draw_visited, series, f"{name}-visited", title, rows=len(drawn)))


def _draw_visited(figure: Figure, series: Sequence[tuple[str, Sequence[dict[str, Any]]]]) -> None:
    axes = figure.subplots()
    for (name, rows), colour, marker, _ in styled(series):
        rows = [row for row in rows if row["value"] is not None]
        if not rows:
            continue
        places = [row["position"] for row in rows]
        band(axes, places, rows, colour)
        axes.plot(places, [row["value"] for row in rows], color=colour, marker=marker, linestyle="-", label=name)
        given = [(row["position"], row["given"]["alpha"]) for row in rows if row["given"] is not None]
        if given:
            x, alpha = zip(*given, strict=True)
            axes.plot(x, alpha, color=colour, marker=marker, linestyle="--", markerfacecolor="none")
    axes.set(xlabel="draft position i", ylabel="α", ylim=(0, 1.02))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend(figure)


# --- over given answers -----------------------------------------------------------------------------------------------


def alpha_plots(rows: Sequence[dict[str, Any]]) -> list[Plot]:
    """α by kind and by draft position at one temperature: at T = 1 where it was measured, else at the highest."""
    if not rows:
        return []
    temperatures = {row["temperature"] for row in rows}
    chosen = 1 if 1 in temperatures else max(temperatures)
    # A kind inside another is in its parent's line; the table has it by itself.
    drawn = [row for row in rows if row["temperature"] == chosen and "/" not in row["kind"]]
    # Answers by another sampler are another measurement: the first's stand for them in the plots.
    drawn = [row for row in drawn if row.get("prefixes") == drawn[0].get("prefixes")]
    whole = [row for row in drawn if row["kind"] == EVERYTHING]
    several = len({row.get("drafter") for row in whole}) > 1
    lines = [{**row, "kind": row["drafter"]} for row in whole] if several else drawn  # then the lines are drafters
    return [_kinds_plot(drawn, chosen), _depths_plot(lines, chosen)]


def _kinds_plot(rows: Sequence[dict[str, Any]], temperature: float) -> Plot:
    title = f"Acceptance probability α by kind at T={temperature:g}, teacher-forced"
    first = min(row["depth"] for row in rows)
    rows = [row for row in rows if row["depth"] == first]
    return Plot(title, _KINDS, draw_svg(_draw_alpha_kinds, rows, "alpha-kinds", title, rows=len(rows)))


def _draw_alpha_kinds(figure: Figure, rows: Sequence[dict[str, Any]]) -> None:
    axes = figure.subplots()
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    drafters = list(dict.fromkeys(str(row.get("drafter", "drafter")) for row in rows))
    for shift, (drafter, colour, marker, _) in zip(shifts(len(drafters)), styled(drafters), strict=True):
        own = [row for row in rows if str(row.get("drafter", "drafter")) == drafter]
        for number, row in enumerate(own):
            place = kinds.index(row["kind"]) + shift
            points(axes, place, row["interval"], colour, marker, None if number else drafter)
    axes.set(xlabel="α of the first draft token", xlim=(0, 1.02))
    name_rows(axes, kinds)
    legend(figure)


def _depths_plot(rows: Sequence[dict[str, Any]], temperature: float) -> Plot:
    title = f"Acceptance probability α by position at T={temperature:g}, teacher-forced"
    return Plot(title, _DEPTHS, draw_svg(_draw_alpha, rows, "alpha", title))


def _draw_alpha(figure: Figure, rows: Sequence[dict[str, Any]]) -> None:
    axes = figure.subplots()
    kinds = sorted({str(row["kind"]) for row in rows}, key=lambda kind: (kind != EVERYTHING, kind))
    for kind, colour, marker, line in styled(kinds):
        own = sorted((row for row in rows if str(row["kind"]) == kind), key=lambda row: row["depth"])
        places = [row["depth"] + 1 for row in own]  # depth 0 is the first draft token
        band(axes, places, [row["interval"] for row in own], colour)
        axes.plot(places, [row["alpha"] for row in own], color=colour, marker=marker, linestyle=line, label=kind)
    axes.set(xlabel="draft position i", ylabel="α", ylim=(0, 1.02))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend(figure)


# --- by band ----------------------------------------------------------------------------------------------------------


def band_plots(bands: Mapping[str, Sequence[tuple[dict[str, Any], dict[str, Any]]]], name: str) -> list[Plot]:
    """Tokens per round along each way to cut the answers up, a line a contender."""
    found = []
    for number, (cut, pairs) in enumerate(bands.items()):
        title = f"Tokens per round by {BAND_AXES.get(cut, cut)}"
        lossy = {c["contender"] for c, _ in pairs if c["lossy"]}
        content, count = (cut, pairs), len({c["contender"] for c, _ in pairs})
        svg = draw_svg(_draw_bands, content, f"{name}-band{number}", title, rows=count, lossy=lossy)
        found.append(Plot(title, _BANDS, svg))
    return found


def _draw_bands(figure: Figure, content: tuple[str, Sequence[tuple[dict[str, Any], dict[str, Any]]]]) -> None:
    (cut, pairs), axes = content, figure.subplots()
    labels = list(dict.fromkeys(found["label"] for _, found in pairs))
    names = list(dict.fromkeys(c["contender"] for c, _ in pairs))
    for shift, (contender, colour, marker, line) in zip(shifts(len(names)), styled(names), strict=True):
        own = [found for c, found in pairs if c["contender"] == contender]
        places = [labels.index(found["label"]) + 0.5 * shift for found in own]
        tokens = [found["tokens_per_round"] for found in own]
        axes.plot(places, [t["value"] for t in tokens], color=colour, linestyle=line, marker=marker, label=contender)
        for place, found in zip(places, tokens, strict=True):
            axes.errorbar(place, found["value"], yerr=error(found), color=colour, capsize=2)
    axes.set_xticks(range(len(labels)), labels)
    axes.set(xlabel=BAND_AXES.get(cut, cut), ylabel="tokens per round τ", xlim=(-0.5, len(labels) - 0.5))
    axes.set_ylim(bottom=min(1.0, axes.get_ylim()[0]))
    legend(figure)


# --- confidence and law -----------------------------------------------------------------------------------------------


def calibration_plots(rows: Sequence[dict[str, Any]]) -> list[Plot]:
    """Reliability curves: over given answers (the first draft token), and while decoding."""
    forced = [row for row in rows if row["source"] == "teacher-forced"]
    first = min((row["depth"] for row in forced), default=0)
    given = [(row["drafter"], row) for row in forced if row["depth"] == first]
    given = [pair for pair in given if pair[1]["sampler"] == given[0][1]["sampler"]]
    visited = [(f"{row['source']}, {row['sampler']}", row) for row in rows if row["source"] != "teacher-forced"]
    found = []
    for name, where, series in (
        ("calibration", "over given answers", given),
        ("calibrated", "while decoding", visited),
    ):
        if series:
            title = f"Calibration {where}"
            found.append(Plot(title, _CALIBRATION, draw_svg(_draw_calibration, series, name, title, rows=len(series))))
    return found


def _draw_calibration(figure: Figure, series: Sequence[tuple[str, dict[str, Any]]]) -> None:
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color=INK, linewidth=1)
    for (name, row), colour, marker, line in styled(series):
        known = [(b["confidence"], b["accepted"]) for b in row["bins"] if b["count"]]
        if known:
            confidence, accepted = zip(*known, strict=True)
            label = f"{name} (ECE {row['ece']:.3f})" if row["ece"] is not None else name
            axes.plot(confidence, accepted, color=colour, marker=marker, linestyle=line, label=label)
    axes.set(xlabel="confidence of the drafter", ylabel="share accepted", xlim=(0, 1.02), ylim=(0, 1.02))
    legend(figure)


def law_plot(tests: Sequence[dict[str, Any]] | None, name: str) -> Plot | None:
    """The bins of the law test of every contender, as multiples of what a uniform law has."""
    if not tests:
        return None
    title = "Test of the output's law"
    lossy = [test["contender"] for test in tests if test["lossy"]]
    return Plot(title, _LAW, draw_svg(_draw_law, tests, f"{name}-law", title, rows=len(tests), lossy=lossy))


def _draw_law(figure: Figure, tests: Sequence[dict[str, Any]]) -> None:
    axes = figure.subplots()
    count = len(tests[0]["bins"])
    chance = 3 * (count / max(min(test["tokens"] for test in tests), 1)) ** 0.5  # three deviations of a Poisson count
    axes.axhspan(max(1 - chance, 0), 1 + chance, color=INK, alpha=0.08, linewidth=0)
    axes.axhline(1, color=INK, linewidth=1)
    places = [(i + 0.5) / count for i in range(count)]
    for test, colour, marker, line in styled(tests):
        heights = [n * count / max(test["tokens"], 1) for n in test["bins"]]
        axes.plot(places, heights, color=colour, marker=marker, markersize=3.5, linewidth=1, linestyle=line,
                  label=test["contender"])  # fmt: skip
    axes.set(xlabel="place in the target's law, likeliest first", ylabel="tokens ÷ expected", xlim=(0, 1))
    axes.margins(y=0.1)
    axes.set_ylim(bottom=0)
    legend(figure)
