"""Tree proposals that are verified with a law they were not drawn from: biased, and kept as negative controls.

A proof that passes them is no proof. Each is a shortcut that was seen in use.
"""

from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction

from spectrain.exact.law import Conditional, Law, Outcomes, Prefix
from spectrain.exact.tree_law import Siblings, chosen, independent, without_replacement


def by_confidence(q: Conditional) -> Callable[[Prefix], list[int]]:
    """The tokens of q, the likeliest first; the lowest id among equals."""

    def ranking(prefix: Prefix) -> list[int]:
        law = q(prefix)
        return sorted(range(len(law)), key=lambda token: (-law[token], token))

    return ranking


def chosen_scored_as_drawn(q: Conditional, vocabulary: int) -> Siblings:
    """The top tokens of q, tested as if they had been drawn from it."""
    return Siblings(chosen(by_confidence(q), vocabulary).drawn, independent(q).scored)


def not_renormalised(q: Conditional) -> Siblings:
    """Drawn without replacement, each tested with the whole q."""
    return Siblings(without_replacement(q).drawn, independent(q).scored)


def resorted(q: Conditional) -> Siblings:
    """Drawn without replacement, then tested in the order of q rather than of the draws."""
    right = without_replacement(q)

    def reorder(law: Law, tokens: Prefix) -> Prefix:
        return tuple(sorted(tokens, key=lambda token: (-law[token], token)))

    return Siblings(_changed(right, lambda prefix, tokens: reorder(q(prefix), tokens)), right.scored)


def pruned(q: Conditional) -> Siblings:
    """Drawn i.i.d., then only those are tested that are at least as likely as the average token."""

    def keep(law: Law, tokens: Prefix) -> Prefix:
        return tuple(token for token in tokens if law[token] * len(law) >= 1)

    right = independent(q)
    return Siblings(_changed(right, lambda prefix, tokens: keep(q(prefix), tokens)), right.scored)


def merged(q: Conditional) -> Siblings:
    """Drawn i.i.d., then duplicates are tested once."""
    right = independent(q)
    return Siblings(_changed(right, lambda prefix, tokens: tuple(dict.fromkeys(tokens))), right.scored)


def _changed(right: Siblings, change: Callable[[Prefix, Prefix], Prefix]) -> Callable[[Prefix, int], Outcomes]:
    """The law of the children once `change` had its way with what was drawn."""

    def drawn(prefix: Prefix, n: int) -> Outcomes:
        outcomes: defaultdict[Prefix, Fraction] = defaultdict(Fraction)
        for tokens, weight in right.drawn(prefix, n).items():
            outcomes[change(prefix, tokens)] += weight
        return dict(outcomes)

    return drawn
