"""Variants of one drafter, each trained with several seeds, compared on the same rows: which is better, if any.

An interval resamples conversations and seeds, both (a pigeonhole bootstrap, Owen 2007). A difference resamples the same
ones on both sides, so what two variants share cancels. Two or three seeds say little of how much seeds differ: with so
few an interval is rather too narrow than too wide.

Shapes: S seeds, W rows, C conversations, K draft depths, R resamples, X columns: one a depth, then one for rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, product
from typing import Any

import numpy as np
import numpy.typing as npt

from spectrain.errors import SpectrainError
from spectrain.evaluation.leaves import EVERYTHING
from spectrain.intervals import RESAMPLE_CELLS, Interval, percentile_interval

FIRST, MEAN, ROUNDS = "alpha_depth_1", "alpha_mean_depth", "tokens_per_round"
RESAMPLES, CONFIDENCE = 4000, 0.95
DIGITS = 4  # after the point, in print
Floats = npt.NDArray[np.float64]
Pair = tuple[Floats, Floats]


@dataclass(frozen=True)
class RowScores:
    """What one bundle scored on every row: for each depth the acceptance probabilities over positions, then committed
    tokens over rounds, as sums above and below the line, [W, K + 1]. And the optimizer steps it was trained for."""

    top: list[list[float]]
    bottom: list[list[int]]
    steps: int


def compare(scores: Mapping[str, Sequence[RowScores]], conversations: Sequence[str],
            kinds: Sequence[str]) -> dict[str, Any]:  # fmt: skip
    """Every variant by kind group and measure, and every later variant less an earlier one, with intervals.

    ``scores``: for each variant one entry a seed, the seeds alike in all; ``conversations`` and ``kinds`` name each
    row's. A kind's group is what stands before its slash. Groups of fewer than two conversations, which have no
    interval, are listed in ``left_out``. A measure is the mean over seeds (and draft depths) of ratios of sums.
    """
    depths = min(len(one.top[0]) for found in scores.values() for one in found) - 1
    groups = _groups(conversations, kinds)
    tables = {variant: _tables(found, depths, conversations) for variant, found in scores.items()}
    measures = {f"alpha_depth_{depth + 1}": [depth] for depth in range(depths)}
    measures |= {MEAN: list(range(depths)), ROUNDS: [depths]}
    results: list[dict[str, Any]] = []
    differences: list[dict[str, Any]] = []
    for (group, members), (measure, columns) in product(groups.items(), measures.items()):
        drawn = {name: _draw(*(side[:, members][:, :, columns] for side in pair)) for name, pair in tables.items()}
        if not np.isfinite([value_S for value_S, _ in drawn.values()]).all():
            continue  # no answer of the group is long enough for this depth
        about = {"group": group, "measure": measure}
        for name, (value_S, draws_R) in drawn.items():
            interval = percentile_interval(value_S.mean(), draws_R, CONFIDENCE)
            results.append({"variant": name, **about, **asdict(interval), "by_seed": value_S.tolist()})
        for against, name in combinations(drawn, 2):
            value_S, draws_R = (ours - theirs for ours, theirs in zip(drawn[name], drawn[against], strict=True))
            interval = percentile_interval(value_S.mean(), draws_R, CONFIDENCE)
            verdict = {"verdict": in_words(interval)}
            differences.append({"variant": name, "against": against, **about, **asdict(interval), **verdict})
    sizes = {group: len(members) for group, members in groups.items()}
    left_out = sorted({kind.split("/")[0] for kind in kinds} - groups.keys())
    return {"confidence": CONFIDENCE, "depths": depths, "conversations": sizes, "left_out": left_out,
            "results": results, "differences": differences}  # fmt: skip


def _groups(conversations: Sequence[str], kinds: Sequence[str]) -> dict[str, list[int]]:
    """Numbers of the conversations of each group of two or more, in order of appearance; everything last."""
    groups: dict[str, list[int]] = {}
    for number, kind in enumerate(dict(zip(conversations, kinds, strict=True)).values()):
        groups.setdefault(kind.split("/")[0], []).append(number)
    everything = sorted(number for members in groups.values() for number in members)
    if len(everything) < 2:
        raise SpectrainError(f"found {len(everything)} held-out conversation, an interval needs 2 or more; add some")
    return {group: members for group, members in groups.items() if len(members) > 1} | {EVERYTHING: everything}


def _tables(found: Sequence[RowScores], depths: int, conversations: Sequence[str]) -> Pair:
    """The sums of each conversation, above and below the line [S, C, K + 1]."""
    place = {name: number for number, name in enumerate(dict.fromkeys(conversations))}
    tables = np.zeros((2, len(found), len(place), depths + 1))
    for number, one in enumerate(found):
        for table_SCX, rows in zip(tables, (np.array(one.top), np.array(one.bottom)), strict=True):
            cut_WX = np.concatenate([rows[:, :depths], rows[:, -1:]], axis=1)
            np.add.at(table_SCX[number], [place[name] for name in conversations], cut_WX)
    return tables[0], tables[1]


def _draw(top_SCX: Floats, bottom_SCX: Floats) -> Pair:
    """The mean over X of the ratios of sums: by seed [S], and over drawn seeds and conversations [R].

    The draws depend on the numbers of both alone, so they are the same for every variant.
    """
    S, C, _ = top_SCX.shape
    rng = np.random.default_rng(0)
    seed_RS = rng.integers(S, size=(RESAMPLES, S))
    part, draws = max(1, RESAMPLE_CELLS // C), []
    for start in range(0, RESAMPLES, part):
        weight_RC = rng.multinomial(C, np.full(C, 1 / C), size=min(part, RESAMPLES - start)).astype(np.float64)
        draws.append(_ratio(*(np.einsum("rc,scx->rsx", weight_RC, side) for side in (top_SCX, bottom_SCX))))
    drawn_RS = np.take_along_axis(np.concatenate(draws), seed_RS, axis=1)
    return _ratio(top_SCX.sum(1), bottom_SCX.sum(1)), drawn_RS.mean(1)


def _ratio(top: Floats, bottom: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):  # the callers leave out what has no value
        return np.asarray((top / bottom).mean(-1))


def in_words(difference: Interval) -> str:
    """What a difference says of the variant that it is of; more is better in every measure."""
    if difference.low > 0:
        return "better"
    return "worse" if difference.high < 0 else "no difference found"


def markdown(document: Mapping[str, Any]) -> str:
    """The document as two tables, one of the variants and one of their differences."""
    shown = {FIRST: "α, first depth", MEAN: f"α, mean of {document['depths']} depths", ROUNDS: "tokens per round, T=0"}
    sizes, seeds = document["conversations"], ", ".join(map(str, document["seeds"]))
    lines = [
        f"Teacher-forced on {sizes[EVERYTHING]} held-out conversations; α is the acceptance probability at T=1. Mean "
        f"over seeds {seeds}, in brackets the {document['confidence']:.0%} interval over conversations and seeds. One "
        "difference in twenty is found by chance alone.", "",
        f"| kinds | measure | {' | '.join(document['variants'])} |", "| --- " * (2 + len(document["variants"])) + "|",
    ]  # fmt: skip
    cells: dict[tuple[str, str], list[str]] = {}
    for row in document["results"]:
        cells.setdefault((row["group"], row["measure"]), []).append(_shown(row))
    lines += [f"| {g} ({sizes[g]}) | {shown[m]} | {' | '.join(c)} |" for (g, m), c in cells.items() if m in shown]
    if document["differences"]:
        lines += ["", "| kinds | measure | difference | | |", "| --- | --- | --- | --- | --- |"]
    for row in document["differences"]:
        if row["measure"] in shown:
            pair, about = f"{row['variant']} − {row['against']}", f"{row['group']} | {shown[row['measure']]}"
            lines.append(f"| {about} | {pair} | {_shown(row, '+')} | {_verdict(row)} |")
    if len(document["seeds"]) == 1:
        lines += ["", "With one seed, the intervals say nothing of how much seeds differ."]
    if document["left_out"]:
        lines += ["", f"Too few conversations for an interval of their own: {', '.join(document['left_out'])}."]
    return "\n".join(lines)


def _verdict(row: Mapping[str, Any]) -> str:
    """A verdict on what is printed as nothing would contradict it."""
    nothing = f"{abs(row['value']):.{DIGITS}f}" == f"{0:.{DIGITS}f}"
    found = row["low"] > 0 or row["high"] < 0
    return "no difference at the printed precision" if nothing and found else str(row["verdict"])


def _shown(row: Mapping[str, float], sign: str = "") -> str:
    value, low, high = (f"{row[key]:{sign}.{DIGITS}f}" for key in ("value", "low", "high"))
    return f"{value} ({low} to {high})"
