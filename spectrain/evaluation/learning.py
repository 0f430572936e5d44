"""Learning curves of a comparison: what its validations said of each drafter while it was trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from spectrain.evaluation.axes import legend, styled
from spectrain.evaluation.svg import Plot, draw_svg

_CAPTION = "Tokens per round at T=0 on the run's own held-out answers, teacher-forced, at every validation."
Curve = tuple[str, Sequence[Mapping[str, Any]]]


def learning_curves(context: Mapping[str, Any]) -> list[Curve]:
    """Each drafter's name and its points, of those that a document has them of."""
    found = []
    for name, facts in (context.get("drafters") or {}).items():
        points = ((facts or {}).get("training") or {}).get("curve")
        if points:
            found.append((name, points))
    return found


def without_curve(facts: Any) -> Any:
    """What else is known of a drafter, for the table of settings."""
    training = facts.get("training") if isinstance(facts, Mapping) else None
    if not training:
        return facts
    return {**facts, "training": {key: value for key, value in training.items() if key != "curve"}}


def learning_plot(curves: Sequence[Curve]) -> Plot | None:
    """Tokens per round against training seconds, a line a drafter; None when there are no curves."""
    if not curves:
        return None
    title = "Learning curves"
    return Plot(title, _CAPTION, draw_svg(_draw, curves, "learning", title, rows=len(curves)))


def _draw(figure: Figure, curves: Sequence[Curve]) -> None:
    axes = figure.subplots()
    for (name, points), colour, marker, line in styled(curves):
        axes.plot(
            [p["seconds"] for p in points], [p["tokens_per_round"] for p in points], color=colour, marker=marker,
            linestyle=line, label=name,
        )  # fmt: skip
    axes.set(xlabel="training (s)", ylabel="tokens per round")
    axes.set_xlim(left=0)
    legend(figure)
