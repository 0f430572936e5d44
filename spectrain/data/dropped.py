"""Rows that are left out: why, how many, and where the first few of them lie."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from spectrain.errors import SpectrainError

PLACES = 5  # kept for each reason

REASONS = {
    "too_long": "longer than max_length",
    "nothing_supervised": "without an answer",
    "broken_json": "not valid JSON",
    "bad_row": "not a conversation",
    "unknown_role": "with an unknown role",
    "empty_turn": "with an empty turn",
    "bad_content": "with content that is no text",
    "bad_tools": "with unreadable tools or tool calls",
    "no_user_turn": "without a user turn before an answer",
    "bad_ids": "with unusable token ids",
    "duplicate_id": "with an id that was taken",
    "duplicate": "repeating another conversation",
    "template_fails": "refused by the chat template",
    "no_boundary": "whose answer the chat template does not set apart",
    "no_room": "whose prompt leaves no room for an answer",
}
ALWAYS = ("too_long", "nothing_supervised")  # told also when there are none


class RowError(SpectrainError):
    """What is wrong with one row alone: others may well be usable. ``reason`` is one of ``REASONS``."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class BadRowsError(SpectrainError):
    """One row's error, where such rows may be left out: ``how`` says by which key or flag."""

    def __init__(self, error: RowError, how: str) -> None:
        super().__init__(f"{error} (or leave such rows out, counted: {how})")
        self.row, self.how = str(error), how


@dataclass
class Dropped:
    """How many rows were left out, by reason, with up to ``PLACES`` places each."""

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ALWAYS, 0))
    places: dict[str, list[str]] = field(default_factory=dict)

    def __getitem__(self, reason: str) -> int:
        return self.counts.get(reason, 0)

    def add(self, reason: str, place: str = "") -> None:
        self.counts[reason] = self[reason] + 1
        known = self.places.setdefault(reason, [])
        if place and len(known) < PLACES:
            known.append(place)

    def __add__(self, other: Dropped) -> Dropped:
        counts = {reason: self[reason] + other[reason] for reason in {**self.counts, **other.counts}}
        places = {
            reason: [*self.places.get(reason, ()), *other.places.get(reason, ())][:PLACES]
            for reason in {**self.places, **other.places}
        }
        return Dropped(counts, places)

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def by_reason(self) -> dict[str, int]:
        """Counts of the reasons that there were."""
        return {reason: count for reason, count in self.counts.items() if count}

    def __str__(self) -> str:
        return ", ".join(f"{count} {REASONS[reason]}" for reason, count in self.counts.items())

    def describe(self) -> dict[str, Any]:
        """Counts and, where there are any, places as JSON."""
        places = {reason: list(found) for reason, found in self.places.items() if found}
        return {"dropped": dict(self.counts), **({"dropped_at": places} if places else {})}

    def listing(self) -> str:
        """Where the rows lie that could be mended: one line a reason. Empty when there are none."""
        bad = [reason for reason in self.counts if reason not in ALWAYS and self[reason]]
        return "\n".join(f"  {REASONS[reason]}: {self._where(reason)}" for reason in bad)

    def _where(self, reason: str) -> str:
        shown = self.places.get(reason, [])
        more = self[reason] - len(shown)
        return ", ".join([*shown, f"{more} more"] if more else shown)


@contextlib.contextmanager
def leaving_out(dropped: Dropped | None, place: str) -> Iterator[None]:
    """A row that fails inside is counted in ``dropped``; without one its error goes on."""
    try:
        yield
    except RowError as error:
        if dropped is None:
            raise
        dropped.add(error.reason, place)
