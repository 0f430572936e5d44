"""What a reader of the report should beware of, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spectrain.evaluation.faults import departures, not_exact
from spectrain.evaluation.steadiness import unsteady
from spectrain.evaluation.wording import percent, plural

CHOSE_THE_STEP = {
    True: "The held-out conversations also chose the training step, which flatters the trained drafter slightly; "
    "measure on conversations that no choice has seen to be rid of it.",
    None: "Whether the held-out conversations also chose the training step cannot be told: the bundle's manifest lacks "
    "data_digests.heldout_asked, as those of earlier versions do. Measure on others, or train again.",
    False: "",
}


def cautions(document: Mapping[str, Any]) -> list[str]:
    """What a reader should hold against the numbers."""
    context, statistics = document["context"], document["statistics"]
    chosen = CHOSE_THE_STEP[context["traffic"]["chose_the_step"]]
    found = list(filter(None, [fault_sentence(document["samplers"]), *unsteady(document), chosen]))
    if left_out := context.get("dropped"):
        named = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in left_out.items())
        found.append(
            f"Left out: {plural(sum(left_out.values()), 'row')} of the traffic that could not be used ({named}); the "
            "numbers are of the others."
        )
    if (stopped := context.get("stopped_early")) is not None:
        found.append(
            f"Stopped early, by the rule {stopped['rule']}: the interval's half-width is {stopped['half_width']:.3g}, "
            f"{stopped['asked']:.3g} was asked for."
        )
    if (tried := statistics["comparisons"]) > 1:
        found.append(
            f"The verdict picks the fastest of {tried} contenders, which flatters it; it therefore rests on an "
            f"interval of {percent(statistics['adjusted_confidence'], 1)} (Bonferroni)."
        )
    return found


def fault_sentence(samplers: Sequence[Mapping[str, Any]]) -> str:
    """That decoding was found not to be exact, where it was."""
    faulty = departures(samplers)
    if not faulty:
        return ""
    reason = not_exact(faulty)
    return (
        f"A check of the output failed, {reason}: that is a fault of decoding. Until it is mended no contender is "
        "recommended, at any temperature or batch size, however fast it was."
    )
