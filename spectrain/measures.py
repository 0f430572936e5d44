"""What rounds of drafting and verification yielded, counted so that every rate comes from sums.

`RoundCounts` holds counts only: counts of two workers, conversations or days add up, and a rate of the sum is
the pooled rate, never a mean of rates.

Words: *accepted prefix length* is the number of accepted draft tokens of a round, without repair or bonus;
*tokens per round* (τ) counts committed tokens, with repair or bonus, clipped at EOS and at the budget. A
*whole* round is one that was not clipped; it commits exactly one token more than it accepts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from spectrain.errors import SpectrainError


@dataclass
class RoundCounts:
    """How often each (proposed, accepted, committed, clipped) was seen. Merged with `+`."""

    seen: Counter[tuple[int, int, int, bool]] = field(default_factory=Counter)

    def add(self, proposed: int, accepted: int, committed: int, clipped: bool = False) -> None:
        """Count one round. Plain decoding is a round of 0 proposals.

        clipped: the round ended at EOS or at the token budget, so it may have committed less than it
        accepted. Raises SpectrainError when the numbers contradict each other.
        """
        possible = 0 <= accepted <= proposed and 1 <= committed <= accepted + 1
        if not possible or (not clipped and committed != accepted + 1):
            raise SpectrainError(
                f"round: found proposed={proposed}, accepted={accepted}, committed={committed}, "
                f"clipped={clipped}; expected accepted <= proposed and committed = accepted + 1, "
                "or from 1 up to that when clipped"
            )
        self.seen[proposed, accepted, committed, bool(clipped)] += 1

    @classmethod
    def from_rounds(cls, rounds: Iterable[Sequence[object]]) -> RoundCounts:
        """From [proposed, accepted, committed, clipped] a round, clipped being a reason, a bool or None."""
        counts = cls()
        for proposed, accepted, committed, clipped in rounds:
            counts.add(_count(proposed), _count(accepted), _count(committed), bool(clipped))
        return counts

    def __add__(self, other: RoundCounts) -> RoundCounts:
        return RoundCounts(self.seen + other.seen)

    # Sums over all rounds

    @property
    def rounds(self) -> int:
        return self.seen.total()

    @property
    def proposed_tokens(self) -> int:
        return sum(proposed * times for (proposed, _, _, _), times in self.seen.items())

    @property
    def accepted_tokens(self) -> int:
        """Draft tokens that reached the output: accepted, and not cut off by EOS or the budget."""
        return sum(min(accepted, committed) * times for (_, accepted, committed, _), times in self.seen.items())

    @property
    def committed_tokens(self) -> int:
        return sum(committed * times for (_, _, committed, _), times in self.seen.items())

    @property
    def tokens_per_round(self) -> float:
        """τ over all rounds, clipped ones as they were clipped."""
        return pooled_rate([self.committed_tokens], [self.rounds], "tokens per round")

    # Rates over whole rounds: a clipped round hides what its later positions would have done

    @property
    def whole(self) -> RoundCounts:
        return RoundCounts(Counter({key: times for key, times in self.seen.items() if not key[3]}))

    @property
    def reached(self) -> list[int]:
        """Whole rounds that accepted at least i tokens, i = 1…, the longest proposal."""
        return [self._reaching(i, i) for i in range(1, self._longest() + 1)]

    @property
    def tested(self) -> list[int]:
        """Whole rounds that accepted i - 1 tokens and proposed an i-th, i = 1…, the longest proposal."""
        return [self._reaching(i - 1, i) for i in range(1, self._longest() + 1)]

    @property
    def survival(self) -> list[float]:
        """Marginal P(first i accepted), i = 1…, over all whole rounds.

        Rounds that proposed fewer than i tokens count as rounds, so 1 + Σ survival is the tokens per round of
        whole rounds.
        """
        rounds = self.whole.rounds
        return [accepted / rounds for accepted in self.reached]

    @property
    def conditional(self) -> list[float | None]:
        """P(i-th accepted | first i - 1 accepted), i = 1….

        Over the whole rounds that accepted i - 1 and proposed an i-th token; None where there are none.
        """
        return [accepted / n if n else None for accepted, n in zip(self.reached, self.tested, strict=True)]

    @property
    def alpha(self) -> float:
        """Accepted ÷ tested draft tokens of whole rounds: the likeliest α if all positions had the same.

        A token is tested when all before it were accepted; the tokens after a rejection are not.
        """
        accepted = tested = 0
        for (proposed, length, _, _), times in self.whole.seen.items():
            accepted += length * times
            tested += min(length + 1, proposed) * times
        return pooled_rate([accepted], [tested], "alpha")

    def _longest(self) -> int:
        return max((proposed for (proposed, _, _, clipped) in self.seen if not clipped), default=0)

    def _reaching(self, accepted: int, proposed: int) -> int:
        """Whole rounds that accepted and proposed at least this many tokens."""
        return sum(
            times
            for (offered, length, _, clipped), times in self.seen.items()
            if not clipped and length >= accepted and offered >= proposed
        )


def pooled_rate(amounts: Iterable[float], units: Iterable[float], name: str = "rate") -> float:
    """Σ amounts ÷ Σ units (tokens and seconds, say). Raises SpectrainError unless Σ units > 0."""
    total, per = sum(amounts), sum(units)
    if not per > 0:
        raise SpectrainError(f"{name}: found a denominator of {per}, expected more than 0; was anything run?")
    return total / per


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise SpectrainError(f"round counts: found {value!r}, expected a whole number of at least 0")
    return value
