"""Which of a run's validations was the best so far, and whether it is worth going on."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Selection:
    """The step whose held-out rows gave most tokens per round, and validations since then. Of equals, which are all of
    them while nothing is accepted, the one of the highest mean ``alpha`` counts, and then the first.

    Tokens per round, and not the loss, because they are what a server gets: rounds walk through the held-out answers as
    a decoder would.
    """

    step: int | None = None
    tokens_per_round: float | None = None
    since: int = 0
    alpha: float = 0.0

    def after(self, step: int, tokens_per_round: float, alpha: float = 0.0) -> Selection:
        """With one more validation."""
        if self.tokens_per_round is None or (tokens_per_round, alpha) > (self.tokens_per_round, self.alpha):
            return Selection(step, tokens_per_round, 0, alpha)
        return replace(self, since=self.since + 1)

    def exhausted(self, patience: int | None) -> bool:
        """Whether ``patience`` validations in a row brought nothing better."""
        return patience is not None and self.since >= patience
