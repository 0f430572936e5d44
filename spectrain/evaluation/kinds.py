"""Kinds of conversation in a document: those of which something was decoded have figures, the others are null."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Numbers = Mapping[str, Any]


def measured_kinds(contender: Mapping[str, Any]) -> dict[str, Numbers]:
    """The kinds that a contender has figures of; of the others every answer ended with its first token."""
    return {kind: numbers for kind, numbers in contender["by_kind"].items() if numbers is not None}
