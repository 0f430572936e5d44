"""Raw acceptance samples → one JSON document; the report, the plots and the cards are made from it alone.

Every number of the document says what it counts: *accepted prefix lengths* are accepted draft tokens without
repair or bonus; *tokens per round* (τ) are committed tokens with them, clipped at EOS and budget. Rates are
pooled (sums over sums, never means of rates); intervals resample whole conversations, and comparisons with
plain decoding resample the same conversations on both sides.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from spectrain.errors import SpectrainError
from spectrain.evaluation.answers import Answers, Groups, gather
from spectrain.evaluation.bands import by_band
from spectrain.evaluation.blocks import decode_speedup, number_block
from spectrain.evaluation.cost_model import cost_model
from spectrain.evaluation.costs import add_predictions_from_siblings
from spectrain.evaluation.decisions import Choice, adjusted_confidence, resamples_at
from spectrain.evaluation.document import check_document
from spectrain.evaluation.faults import departures, not_exact
from spectrain.evaluation.figures import STATISTICS, one
from spectrain.evaluation.goodness import distribution_block
from spectrain.evaluation.leaderboard import leaderboard
from spectrain.evaluation.leaves import PLAIN
from spectrain.evaluation.samples import kind_and_parents
from spectrain.evaluation.shape import SCHEMA
from spectrain.evaluation.sums import check_parts
from spectrain.evaluation.verdict import exactness_block, judged, verdict_block
from spectrain.exact.sampler import Sampler
from spectrain.intervals import METHOD

CONTEXT = {
    "target": ("name",),
    "drafter": ("name",),
    "traffic": ("name", "digest", "conversations", "chose_the_step"),
    "device": ("name", "threads", "dtype"),
    "versions": (),
}
SECTIONS: dict[str, Any] = {"teacher_forced": list, "calibration": list, "draft_vocabulary": list, "drift": dict}
"""What a context may bring along that the document has beside it."""
ELSEWHERE = (*SECTIONS, "load", "request_rates")


def summarise(samples: Iterable[Mapping[str, Any]], *, context: Mapping[str, Any]) -> dict[str, Any]:
    """Make the acceptance document from raw samples.

    Args:
        samples: JSON objects as ``evaluation/acceptance.py`` writes them, one for each conversation, seed,
            contender and sampler (see ``Sample``). They are read once and not kept.
        context: what was measured, and how: ``target``, ``drafter``, ``traffic``, ``device``, ``versions``
            (see ``CONTEXT`` for their keys; a target that its bundle changed in training has ``derived_from``; traffic
            that ``chose_the_step`` flatters what was trained, see ``manifest.chose_the_step``), any
            other JSON value, optionally ``teacher_forced``: a list of
            {temperature, kind, depth, alpha, interval, positions, conversations}, ``calibration`` and
            ``draft_vocabulary``, ``drafters``, which asks for a leaderboard: what is known of each (see
            ``leaderboard``), ``memory``: bytes of weights, ``target`` and by drafter, ``drift`` (see
            ``evaluation/drift.py``): by drafter, ``load`` (see ``evaluation/load_summary.py``), with its ``sampler``,
            and ``request_rates``.

    Returns:
        A JSON object: ``schema``, ``context``, ``statistics``, the sections of the context, ``samplers``, ``load``
        (null when no batches were measured) and ``cost_model``.

    Raises:
        SpectrainError: malformed samples, missing context, or numbers that contradict one another: rounds
            that commit other than accepted + 1 tokens without being clipped, or a speedup above τ.
    """
    return document_of(gather(samples), context=context)


def document_of(groups: Groups, *, context: Mapping[str, Any]) -> dict[str, Any]:
    """``summarise`` for samples that ``gather`` has read already."""
    _check_context(context)
    checks = [_checks(sampler, group, context) for sampler, group in groups]
    inexact = departures(checks)
    samplers = [
        _sampler_block(sampler, group, found, inexact, context)
        for (sampler, group), found in zip(groups, checks, strict=True)
    ]
    document = {
        "schema": SCHEMA,
        "context": {key: copy.deepcopy(value) for key, value in context.items() if key not in ELSEWHERE},
        "statistics": _statistics(samplers),
        **{key: copy.deepcopy(kind(context.get(key) or ())) for key, kind in SECTIONS.items()},
        "samplers": samplers,
        "load": _load(context.get("load"), inexact),
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


def _statistics(samplers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How intervals were made, and what a verdict's would have to be at: it chooses among several contenders."""
    candidates = [
        sum(c["shape"] is not None and not c["lossy"] and c["baseline"] == PLAIN for c in block["contenders"])
        for block in samplers
    ]
    comparisons = max(candidates)
    adjusted = adjusted_confidence(comparisons)
    return {**STATISTICS, "method": METHOD, "comparisons": comparisons, "adjusted_confidence": adjusted}


def _load(load: Mapping[str, Any] | None, inexact: Mapping[str, str]) -> dict[str, Any] | None:
    """What was measured in batches, without a verdict that is on where decoding was found not to be exact."""
    if load is None:
        return None
    off = {"decision": "off", "contender": None, "k": 0, "reason": not_exact(inexact)} if inexact else {}
    return {**copy.deepcopy(dict(load)), "by_batch": [{**row, **off} for row in copy.deepcopy(load["by_batch"])]}


def _checks(sampler: dict[str, Any], group: Sequence[Answers], context: Mapping[str, Any]) -> dict[str, Any]:
    """Whether the output is the target's: greedily token by token, sampled by its law."""
    described = Sampler(**sampler)
    exactness = [
        exactness_block(answers, str(context["device"]["dtype"]))
        for answers in group
        if described.greedy and answers.first.shape is not None
    ]
    distribution = None if described.greedy else _distribution(group)
    return {"name": described.describe(), "exactness": exactness, "distribution": distribution}


def _sampler_block(sampler: dict[str, Any], group: list[Answers], checks: Mapping[str, Any],
                   inexact: Mapping[str, str], context: Mapping[str, Any]) -> dict[str, Any]:  # fmt: skip
    plain, by_name = group[0], {answers.name: answers for answers in group}
    kinds = sorted({kind for found in set(plain.kinds) for kind in kind_and_parents(found)})
    decoded = [kind for kind in kinds if all(a.clusters(a.of_kind(kind)).total("rounds") for a in group)]
    contenders = [
        _contender_block(answers, by_name[answers.first.baseline], kinds, decoded, context) for answers in group
    ]
    kinds_of_one = len(set(zip(plain.conversations, plain.kinds, strict=True))) == len(plain.clusters())
    for contender in contenders:
        check_parts(contender, contender["contender"], kinds_of_one=kinds_of_one)
    add_predictions_from_siblings(contenders)
    drafting = [c for c in contenders if c["shape"] is not None]
    load = context.get("load")
    load = load if load and load["sampler"] == checks["name"] else None

    def speedup_at(kind: str | None, name: str, confidence: float) -> dict[str, Any]:
        """The interval of a contender's decode speedup on conversations of a kind, or of all kinds."""
        sides = (by_name[name], by_name[by_name[name].first.baseline])
        own, base = (answers.clusters(answers.of_kind(kind)) for answers in sides)
        return one(decode_speedup(own, base), confidence=confidence, resamples=resamples_at(confidence))

    comparisons = Counter(c["baseline"] for c in drafting if not c["lossy"])

    def verdicts(chosen: Sequence[dict[str, Any]]) -> dict[str, Any]:
        among = max((comparisons[c["baseline"]] for c in chosen), default=0)
        looks = Choice(among, judged(contenders[0], among))
        return _verdicts(chosen, kinds, inexact, speedup_at, load, looks)

    return {
        "name": checks["name"],
        "sampler": sampler,
        "conversations": len(plain.clusters()),
        "kinds": kinds,
        "contenders": contenders,
        "exactness": checks["exactness"],
        "distribution": checks["distribution"],
        "leaderboard": (
            leaderboard(group, contenders, inexact, checks["name"], context) if context.get("drafters") else None
        ),
        "verdict": {
            **verdicts([c for c in drafting if c["baseline"] == PLAIN]),
            "by_drafter": {
                drafter: verdicts([c for c in drafting if c["drafter"] == drafter])
                for drafter in dict.fromkeys(c["drafter"] for c in drafting)
            },
        },
    }


def _distribution(group: Sequence[Answers]) -> list[dict[str, Any]] | None:
    """The test of every contender's law; None where the samples do not say where their tokens lay in it."""
    found = [answers.clusters() for answers in group]
    if not all(clusters.recorded("law") for clusters in found):
        return None
    return distribution_block(
        [(clusters.first.contender, clusters.first.lossy, clusters.sums("law").sum(0).tolist()) for clusters in found]
    )


def _verdicts(contenders: Sequence[dict[str, Any]], kinds: Sequence[str], inexact: Mapping[str, str],
              speedup_at: Callable[[str | None, str, float], dict[str, Any]],
              load: Mapping[str, Any] | None, looks: Choice) -> dict[str, Any]:  # fmt: skip
    """Verdicts of these contenders over all conversations, and over those of each kind. Batches are drawn from all
    kinds, so they say nothing of one. ``looks``: as many as were measured beside the same plain decoding, on as many
    kinds as can be judged."""
    by_kind = {
        kind: verdict_block([(c, c["by_kind"][kind]) for c in contenders], inexact, partial(speedup_at, kind),
                            comparisons=looks.contenders, kinds=looks.kinds)
        for kind in kinds
    }  # fmt: skip
    overall = verdict_block([(c, c["pooled"]) for c in contenders], inexact, partial(speedup_at, None), load,
                            looks.contenders)  # fmt: skip
    return {"overall": overall, "by_kind": by_kind}


def _contender_block(own: Answers, plain: Answers, kinds: Sequence[str], decoded: Sequence[str],
                     context: Mapping[str, Any]) -> dict[str, Any]:  # fmt: skip
    """``decoded``: the kinds that have figures; of the others not one round was decoded."""
    weights, first = context.get("memory") or {}, own.first
    memory = {
        "target_bytes": weights.get("target"),
        "drafter_bytes": 0 if first.shape is None else (weights.get("drafters") or {}).get(first.drafter),
    }

    def block(kind: str | None) -> dict[str, Any]:
        chosen, beside = (answers.clusters(answers.of_kind(kind)) for answers in (own, plain))
        return number_block(own.name, kind, chosen, beside, memory)

    return {
        "contender": own.name,
        "drafter": first.drafter,
        "k": first.k,
        "shape": first.shape,
        "depth": first.depth,
        "nodes": first.nodes,
        "verification": first.verification,
        "lossy": first.lossy,
        "baseline": first.baseline,
        "pooled": block(None),
        "by_kind": {kind: block(kind) if kind in decoded else None for kind in kinds},
        "by_band": by_band(own, plain),
    }
