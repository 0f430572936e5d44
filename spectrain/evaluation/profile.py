"""Acceptance vectors for other tools: planners, simulators and servers that take acceptance as given.

No layout of such a file is common to tools, so this one says what each number is. ``survival`` is what servers count
as acceptance per position (vLLM: accepted tokens at a position ÷ drafts); ``acceptance`` is conditional on the
positions before it, what a simulator draws one after the other. 1 + Σ ``survival`` is tokens per *full* round;
``tokens_per_round`` counts the rounds that the end of an answer or the budget has cut, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from spectrain.evaluation.kinds import measured_kinds
from spectrain.evaluation.leaves import EVERYTHING

PROFILE_SCHEMA = "spectrain.speculation_profile/1"
_MEANING = {
    "acceptance": "P(i-th draft token accepted | first i-1 accepted), i = 1..k; null where never proposed",
    "survival": "P(first i draft tokens accepted), i = 1..k, over full rounds",
    "tokens_per_round": "committed tokens of a round, the target's own included, ends of answers too",
    "draft_cost": "seconds of drafting a token, in plain decoding steps (c); null for a tree",
    "draft_cost_per_round": "seconds of drafting in a round, in plain decoding steps",
    "verify_cost": "seconds of verifying a round, in plain decoding steps (v)",
    "overhead_cost": "other seconds of a round, in plain decoding steps (o)",
    "k": "draft tokens of a chain; null for a tree, whose vectors go by depth",
    "lossy": "true: the rule changes the law of the output",
}


def speculation_profile(document: Mapping[str, Any]) -> dict[str, Any]:
    """One vector for every sampler, drafting contender and kind ("everything" is all kinds together)."""
    context = document["context"]
    return {
        "schema": PROFILE_SCHEMA,
        "from": document["schema"],
        "target": context["target"]["name"],
        "traffic": {key: context["traffic"][key] for key in ("name", "digest", "conversations")},
        "device": {key: context["device"][key] for key in ("name", "threads", "dtype")},
        "batch": 1,
        "meaning": _MEANING,
        "profiles": [profile for block in document["samplers"] for profile in _profiles(block)],
    }


def _profiles(block: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for contender in block["contenders"]:
        if contender["shape"] is None:
            continue
        for kind, numbers in ((EVERYTHING, contender["pooled"]), *measured_kinds(contender).items()):
            cost = numbers["cost"]
            yield {
                "sampler": block["name"],
                "temperature": block["sampler"]["temperature"],
                "kind": kind,
                **{key: contender[key] for key in ("contender", "drafter", "k", "depth", "nodes")},
                **{key: contender[key] for key in ("verification", "lossy")},
                "conversations": numbers["conversations"],
                "rounds": numbers["rounds"],
                "acceptance": [row["rate"] for row in numbers["conditional_acceptance"]],
                "survival": [row["rate"] for row in numbers["marginal_survival"]],
                "tokens_per_round": numbers["tokens_per_round"]["value"],
                "draft_cost": cost["draft_cost_per_token"],
                "draft_cost_per_round": cost["draft_cost_per_round"],
                "verify_cost": cost["verify_cost_per_round"],
                "overhead_cost": cost["overhead_cost_per_round"],
                "speedup": numbers["speedup"]["decode"]["value"],
            }
