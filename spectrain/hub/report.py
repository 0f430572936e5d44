"""What the card tells of an acceptance document: the drafter's own contenders, and how long its drafts should be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spectrain.errors import SpectrainError


def own_contenders(block: Mapping[str, Any], drafter: str) -> list[Mapping[str, Any]]:
    return [contender for contender in block["contenders"] if contender["drafter"] == drafter]


def served_k(document: Mapping[str, Any], drafter: str) -> int:
    """How many tokens to draft a round: of the exact chains measured the fastest; without chains, a tree's depth."""
    own = [c for block in document["samplers"] for c in own_contenders(block, drafter) if not c["lossy"]]
    if not own:
        raise SpectrainError(f"the report has no exact measurement of {drafter}; measure it: spectrain evaluate")
    chains = [c for c in own if c["shape"]["type"] == "chain"] or own
    return int(max(chains, key=lambda c: c["pooled"]["speedup"]["decode"]["value"])["depth"])
