"""What a measurement found, in a few lines for a terminal: the verdict and a small table for each sampler, and whether
the clock was steady."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spectrain.evaluation.steadiness import unsteady
from spectrain.evaluation.trained import fastest_trained
from spectrain.evaluation.view import changed
from spectrain.evaluation.wording import drafter_sentence, headline, interval, percent, sentence

HEADS = ("contender", "tokens per round τ", "decode speedup")


def told(document: Mapping[str, Any]) -> str:
    """The text of an acceptance document."""
    confidence = percent(document["statistics"]["confidence"])
    samplers = [_sampler(document, block, confidence) for block in document["samplers"]]
    return "\n\n".join([*samplers, *unsteady(document)])


def _sampler(document: Mapping[str, Any], block: Mapping[str, Any], confidence: str) -> str:
    overall, own_target = block["verdict"]["overall"], changed(document)
    trained = drafter_sentence(block["verdict"], fastest_trained(document, block))
    words = f"{headline(overall, changed=own_target)}. {sentence(overall, confidence, changed=own_target)} {trained}"
    rows = [HEADS, *(_row(contender) for contender in block["contenders"])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADS))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    return "\n".join([f"{block['name']}: {words.strip()}", *lines])


def _row(contender: Mapping[str, Any]) -> tuple[str, str, str]:
    numbers = contender["pooled"]
    if numbers["speedup"] is None:
        return contender["contender"], "1", "1"
    return contender["contender"], interval(numbers["tokens_per_round"]), interval(numbers["speedup"]["decode"])
