"""Which of a run's validations was the best so far, and whether it is worth going on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Selection:
    """The step whose held-out rows gave most tokens per round (the first of equals), and validations since then.

    Tokens per round, and not the loss, because they are what a server gets: rounds walk through the held-out answers as
    a decoder would.
    """

    step: int | None = None
    tokens_per_round: float | None = None
    since: int = 0

    def after(self, step: int, tokens_per_round: float) -> Selection:
        """With one more validation."""
        if self.tokens_per_round is None or tokens_per_round > self.tokens_per_round:
            return Selection(step, tokens_per_round)
        return Selection(self.step, self.tokens_per_round, self.since + 1)

    def exhausted(self, patience: int | None) -> bool:
        """Whether ``patience`` validations in a row brought nothing better."""
        return patience is not None and self.since >= patience
