"""Whose verdict a reader came for: of a document's drafters, those that a bundle brought, and the fastest of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spectrain.evaluation.leaves import PLAIN


def trained_drafters(document: Mapping[str, Any], block: Mapping[str, Any]) -> list[str]:
    """The drafters of a sampler's block that have weights of their own; prompt lookup and the like have none."""
    facts, name = document["context"].get("drafters") or {}, document["context"]["drafter"]["name"]
    names = [drafter for drafter in block["verdict"]["by_drafter"] if drafter != PLAIN]
    return [drafter for drafter in names if drafter == name or (facts.get(drafter) or {}).get("bytes")]


def fastest_trained(document: Mapping[str, Any], block: Mapping[str, Any]) -> str | None:
    """The trained drafter whose best contender decodes fastest; None where none was measured beside plain decoding."""
    speedups = {
        drafter: own["best"]["decode_speedup"]["value"]
        for drafter in trained_drafters(document, block)
        if (own := block["verdict"]["by_drafter"][drafter]["overall"])["best"] is not None
    }
    return max(speedups, key=lambda drafter: speedups[drafter], default=None)
