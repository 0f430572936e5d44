"""Answers that say nothing: one may be the target's own; where there is no other, something is broken."""

from __future__ import annotations

from collections.abc import Sequence

from spectrain.data.conversations import Conversation
from spectrain.errors import SpectrainError
from spectrain.regenerate.answers import Row

FIRST = 16  # answers after which it is clear that no other kind comes


def is_empty(row: Row) -> bool:
    """Whether a row's answer is without text, trace and tool call."""
    answer = row["messages"][-1]
    return not any((answer["content"].strip(), answer.get("reasoning_content"), answer.get("tool_calls")))


class Empties:
    """Holds the first answers back as long as all are empty: kept ones would not be asked for again.

    ``first`` is how many it takes to give up (0: never), of the conversations ``asked``.
    """

    def __init__(self, first: int, asked: Sequence[Conversation]) -> None:
        self._left, self._asked = first, {conversation.id: conversation for conversation in asked}
        self._held: list[Row] = []

    def held_back(self, rows: list[Row]) -> list[Row]:
        """The rows to keep now. SpectrainError once the first ones are there and none says anything."""
        if not self._left:
            return rows
        self._held += rows
        if not all(map(is_empty, self._held)):
            self._left = 0
            return self._held
        if len(self._held) >= self._left:
            named = ", ".join(self._asked[row["id"]].named for row in self._held[:3])
            raise SpectrainError(
                f"all of the first {len(self._held)} answers are empty, without text or tool call (conversation "
                f"{named} ...): is it the right model, with its chat template, and does it have tokens left to say "
                "something? None was kept: mend it, and run the same command again"
            )
        return []
