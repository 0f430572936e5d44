"""Raw acceptance samples → one JSON document; the report, the plots and the cards are made from it alone.

Every number of the document says what it counts: *accepted prefix lengths* are accepted draft tokens without
repair or bonus; *tokens per round* (τ) are committed tokens with them, clipped at EOS and budget. Rates are
pooled (sums over sums, never means of rates); intervals resample whole conversations, and comparisons with
plain decoding resample the same conversations on both sides.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from spectrain.errors import SpectrainError
from spectrain.evaluation.blocks import STATISTICS, decode_speedup, number_block
from spectrain.evaluation.cost_model import cost_model
from spectrain.evaluation.costs import add_predictions_from_siblings
from spectrain.evaluation.document import SCHEMA, check_document
from spectrain.evaluation.leaderboard import leaderboard
from spectrain.evaluation.samples import PLAIN, Contender, group_by_sampler, kind_and_parents
from spectrain.evaluation.verdict import exactness_block, verdict_block
from spectrain.exact.sampler import Sampler

CONTEXT = {
    "target": ("name",),
    "drafter": ("name",),
    "traffic": ("name", "digest", "conversations"),
    "device": ("name", "threads", "dtype"),
    "versions": (),
}
ELSEWHERE = ("teacher_forced", "drift", "load", "request_rates")  # places of their own in the document


def summarise(samples: Iterable[Mapping[str, Any]], *, context: Mapping[str, Any]) -> dict[str, Any]:
    """Make the acceptance document from raw samples.

    Args:
        samples: JSON objects as ``evaluation/acceptance.py`` writes them, one for each conversation,
            contender and sampler (see ``Sample``).
        context: what was measured, and how: ``target``, ``drafter``, ``traffic``, ``device``, ``versions``
            (see ``CONTEXT`` for their keys; a target that its bundle changed in training has ``derived_from``), any
            other JSON value, optionally ``teacher_forced``: a list of
            {temperature, kind, depth, alpha, coverage, positions}, and ``drafters``, which asks for a leaderboard:
            what is known of each (see ``leaderboard``), ``drift`` (see ``evaluation/drift.py``): by drafter, and
            ``load`` (see ``evaluation/load_summary.py``), with its ``sampler``, and ``request_rates``.

    Returns:
        A JSON object: ``schema``, ``context``, ``statistics``, ``teacher_forced``, ``drift``, ``samplers``, ``load``
        (null when no batches were measured) and ``cost_model``.

    Raises:
        SpectrainError: malformed samples, missing context, or numbers that contradict one another: rounds
            that commit other than accepted + 1 tokens without being clipped, or a speedup above τ.
    """
    _check_context(context)
    samplers = [_sampler_block(sampler, group, context) for sampler, group in group_by_sampler(samples)]
    document = {
        "schema": SCHEMA,
        "context": {key: copy.deepcopy(value) for key, value in context.items() if key not in ELSEWHERE},
        "statistics": dict(STATISTICS),
        "teacher_forced": copy.deepcopy(list(context.get("teacher_forced") or [])),
        "drift": copy.deepcopy(dict(context.get("drift") or {})),
        "samplers": samplers,
        "load": copy.deepcopy(context.get("load")),
        "cost_model": cost_model(samplers, context.get("load"), context.get("request_rates") or ()),
    }
    check_document(document)
    return document


def _check_context(context: Mapping[str, Any]) -> None:
    for section, keys in CONTEXT.items():
        if not isinstance(context.get(section), Mapping):
            raise SpectrainError(f"summary context: {section!r} is missing; expected an object with {keys or 'names'}")
        for key in keys:
            if key not in context[section]:
                raise SpectrainError(f"summary context: {section}.{key} is missing")


def _sampler_block(sampler: dict[str, Any], group: list[Contender], context: Mapping[str, Any]) -> dict[str, Any]:
    plain, by_name = group[0], {contender.name: contender for contender in group}
    kinds = sorted({kind for sample in plain.samples for kind in kind_and_parents(sample.kind)})
    contenders = [_contender_block(contender, by_name[contender.first.baseline], kinds) for contender in group]
    add_predictions_from_siblings(contenders)
    described = Sampler(**sampler)
    exactness = [
        exactness_block(c.name, c.samples, str(context["device"]["dtype"]))
        for c in group
        if described.greedy and c.first.shape is not None
    ]
    drafting = [c for c in contenders if c["shape"] is not None]
    load = context.get("load")
    load = load if load and load["sampler"] == described.describe() else None

    def speedup_at(kind: str | None, name: str, confidence: float) -> dict[str, Any]:
        """The interval of a contender's decode speedup on conversations of a kind, or of all kinds."""
        sides = (by_name[name], by_name[by_name[name].first.baseline])
        own, base = ([s for s in side.samples if kind is None or s.is_of(kind)] for side in sides)
        return decode_speedup(own, base, confidence)

    inexact = {block["contender"] for block in exactness if block["unexplained"] and not block["lossy"]}
    return {
        "name": described.describe(),
        "sampler": sampler,
        "conversations": len({sample.conversation for sample in plain.samples}),
        "kinds": kinds,
        "contenders": contenders,
        "exactness": exactness,
        "leaderboard": (
            leaderboard(group, contenders, inexact, described.describe(), context) if context.get("drafters") else None
        ),
        "verdict": {
            **_verdicts([c for c in drafting if c["baseline"] == PLAIN], kinds, inexact, speedup_at, load),
            "by_drafter": {
                drafter: _verdicts([c for c in drafting if c["drafter"] == drafter], kinds, inexact, speedup_at, load)
                for drafter in dict.fromkeys(c["drafter"] for c in drafting)
            },
        },
    }


def _verdicts(contenders: Sequence[dict[str, Any]], kinds: Sequence[str], inexact: set[str],
              speedup_at: Callable[[str | None, str, float], dict[str, Any]],
              load: Mapping[str, Any] | None) -> dict[str, Any]:  # fmt: skip
    """Verdicts of these contenders over all conversations, and over those of each kind. Batches are drawn from all
    kinds, so they say nothing of one."""
    by_kind = {
        kind: verdict_block([(c, c["by_kind"][kind]) for c in contenders], inexact, partial(speedup_at, kind))
        for kind in kinds
    }
    overall = verdict_block([(c, c["pooled"]) for c in contenders], inexact, partial(speedup_at, None), load)
    return {"overall": overall, "by_kind": by_kind}


def _contender_block(contender: Contender, plain: Contender, kinds: Sequence[str]) -> dict[str, Any]:
    def block(kind: str | None) -> dict[str, Any]:
        chosen = [[s for s in c.samples if kind is None or s.is_of(kind)] for c in (contender, plain)]
        return number_block(contender.name, kind, *chosen)

    first = contender.first
    return {
        "contender": contender.name,
        "drafter": first.drafter,
        "k": first.k,
        "shape": first.shape,
        "depth": first.depth,
        "nodes": first.nodes,
        "verification": first.verification,
        "lossy": first.lossy,
        "baseline": first.baseline,
        "pooled": block(None),
        "by_kind": {kind: block(kind) for kind in kinds},
    }
