"""The leaderboard: contenders of one run side by side, best first, and a tie where the clock cannot tell them apart.

Ranks go by tokens per device-second. Each contender is set against the one above it on the same conversations, which
are resampled together, so that what they share cancels. What changes the output is listed apart and has no rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from spectrain.evaluation.answers import Answers, Clusters
from spectrain.evaluation.blocks import rate_ratio
from spectrain.evaluation.decisions import FEWEST_CONVERSATIONS
from spectrain.evaluation.figures import one
from spectrain.evaluation.kinds import measured_kinds
from spectrain.evaluation.leaves import EVERYTHING, PLAIN

OWN_TARGET = "its target was trained with it: another law than the original's"
_TAKEN = ("tokens_per_second", "accepted_draft_tokens_per_second", "speedup", "tokens_per_round")


def leaderboard(group: Sequence[Answers], blocks: Sequence[Mapping[str, Any]], inexact: Mapping[str, str], sampler: str,
                context: Mapping[str, Any]) -> dict[str, Any]:  # fmt: skip
    """Rank the contenders of one sampler.

    Args:
        group: their answers, in the order of ``blocks``.
        blocks: their blocks of the document, plain decoding's among them.
        inexact: contenders whose output was found not to be the target's, and how it differs.
        sampler: its name, as the teacher-forced rows call it.
        context: ``drafters``: name → ``bytes`` and ``training`` (``seconds``, ``answer_tokens``), null where unknown;
            ``teacher_forced``: rows of the document.

    Returns:
        ``ranked``: rows, best first, with ``rank``, ``tied`` and ``above`` (the ratio to the row above);
        ``apart``: the same without a rank, and ``why``; ``by_kind``: both again over the conversations of each kind
        that lies in no other, where there are several.
    """
    kinds = [kind for kind in measured_kinds(blocks[0]) if "/" not in kind]
    by_kind = {k: _board(group, blocks, inexact, sampler, context, k) for k in kinds} if len(kinds) > 1 else {}
    return {**_board(group, blocks, inexact, sampler, context, None), "by_kind": by_kind}


def _board(group: Sequence[Answers], blocks: Sequence[Mapping[str, Any]], inexact: Mapping[str, str], sampler: str,
           context: Mapping[str, Any], kind: str | None) -> dict[str, Any]:  # fmt: skip
    answers = {c.name: c.clusters(c.of_kind(kind)) for c in group}
    alphas = _alphas(context.get("teacher_forced") or (), sampler, kind or EVERYTHING)
    rows = []
    for block in blocks:
        numbers = block["pooled"] if kind is None else block["by_kind"][kind]
        row = _row(block, numbers, context["drafters"], alphas)
        rows.append({**row, "why": _why(block, inexact)})
    rows.sort(key=lambda row: row["tokens_per_second"]["value"], reverse=True)
    return {
        "ranked": _ranked([row for row in rows if row["why"] is None], answers),
        "apart": [{**row, "rank": None, "tied": False, "above": None} for row in rows if row["why"] is not None],
    }


def _why(block: Mapping[str, Any], inexact: Mapping[str, str]) -> str | None:
    """Why a contender has no rank."""
    if block["lossy"]:
        return "another law than the target's"
    if block["contender"] in inexact:
        return inexact[block["contender"]]
    return OWN_TARGET if block["baseline"] != PLAIN else None


def _row(block: Mapping[str, Any], numbers: Mapping[str, Any], drafters: Mapping[str, Any],
         alphas: Mapping[str, float]) -> dict[str, Any]:  # fmt: skip
    name = block["drafter"]
    known, cost = drafters.get(name) or {}, numbers["cost"] or {}
    training = known.get("training") or {}
    return {
        **{key: block[key] for key in ("contender", "drafter", "k", "depth", "nodes", "verification")},
        **{key: numbers[key] for key in _TAKEN},
        "alpha": alphas.get(name),
        "draft_cost_per_round": cost.get("draft_cost_per_round"),
        "verify_cost_per_round": cost.get("verify_cost_per_round"),
        "drafter_bytes": known.get("bytes"),
        "state_bytes": numbers["memory"]["state_bytes"],
        "training_seconds": training.get("seconds"),
        "training_answer_tokens": training.get("answer_tokens"),
    }


def _alphas(rows: Sequence[Mapping[str, Any]], sampler: str, kind: str) -> dict[str, float]:
    """Each drafter's acceptance probability of the first draft token, on the answers of this sampler."""
    return {
        row["drafter"]: row["alpha"]
        for row in rows
        if row.get("prefixes") == sampler and row["kind"] == kind and row["depth"] == 0
    }


def _ranked(rows: Sequence[Mapping[str, Any]], answers: Mapping[str, Clusters]) -> list[dict[str, Any]]:
    ranked: list[dict[str, Any]] = []
    for place, row in enumerate(rows, start=1):
        rank, above = place, None
        if ranked:
            better, own = ranked[-1]["contender"], answers[row["contender"]]
            above = {"contender": better, "ratio": one(rate_ratio(own, answers[better]))}
            if _undecided(above["ratio"], len(own)):
                rank = ranked[-1]["rank"]
        ranked.append({**row, "rank": rank, "above": above})
    shared = Counter(row["rank"] for row in ranked)
    return [{**row, "tied": shared[row["rank"]] > 1} for row in ranked]


def _undecided(ratio: Mapping[str, float | None], conversations: int) -> bool:
    """Whether the interval holds 1. Of a handful of conversations it is too narrow to say that it does not."""
    low, high = ratio["low"], ratio["high"]
    return low is None or high is None or conversations < FEWEST_CONVERSATIONS or low <= 1 <= high
