"""Output laws by exact enumeration, in Fractions: the proof that a verification rule is lossless, or is not.

A rule is proved in two steps: its law here is the target's, and the torch kernel has the law enumerated here.
The law that tokens are drawn from, the law that scores them and the repair can be exchanged, so that rules
known to be biased can be enumerated and seen to fail.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from fractions import Fraction

from spectrain.errors import SpectrainError

ZERO = Fraction(0)

Prefix = tuple[int, ...]
Law = tuple[Fraction, ...]  # over token ids, of sum 1
Conditional = Callable[[Prefix], Law]  # the law of the token after a prefix
Outcomes = dict[Prefix, Fraction]  # the committed tokens of a round, or whole sequences, with their probabilities
Repair = Callable[[Law, Law], Law]  # (p, the scored q) -> the law of the token after a rejection


def as_law(weights: Iterable[Fraction | int | str]) -> Law:
    """A law from exact values such as "0.3", "1/3" or Fraction(1, 3).

    Raises SpectrainError for negative values or a sum other than 1.
    """
    law = tuple(Fraction(weight) for weight in weights)
    if any(weight < 0 for weight in law) or sum(law) != 1:
        raise SpectrainError(
            f"law: found {' '.join(map(str, law))}, of sum {sum(law)}; expected sum 1, nothing negative"
        )
    return law


def normalised(weights: Iterable[Fraction | int | str]) -> Law:
    """The law proportional to the weights. Raises SpectrainError when their sum is 0."""
    exact = [Fraction(weight) for weight in weights]
    if sum(exact) == 0:
        raise SpectrainError("law: found weights of sum 0, expected at least one above 0")
    return as_law(weight / sum(exact) for weight in exact)


def point(token: int, vocabulary: int) -> Law:
    """The point mass: the law of a token that was chosen, not drawn."""
    return tuple(Fraction(int(i == token)) for i in range(vocabulary))


def residual(p: Law, q: Law) -> Law:
    """norm((p - q)+), the repair that makes rejection sampling lossless; p itself where nothing is left."""
    left = [max(pi - qi, ZERO) for pi, qi in zip(p, q, strict=True)]
    return normalised(left) if any(left) else p


def resampled(p: Law, q: Law) -> Law:
    """The repair that draws from p again. Biased: kept as a negative control."""
    return p


def chain_round(
    target: Conditional,
    proposal: Conditional,
    k: int,
    *,
    scored: Conditional | None = None,
    repair: Repair = residual,
    prefix: Prefix = (),
) -> Outcomes:
    """What a round of k proposals commits after `prefix`: the accepted tokens and one repair or bonus token.

    proposal: the law that each token is really drawn from. scored: the q of the acceptance test and of the
    repair, by default the proposal itself. Every outcome is one token longer than what was accepted.
    """
    outcomes: defaultdict[Prefix, Fraction] = defaultdict(Fraction)

    def walk(committed: Prefix, weight: Fraction) -> None:
        p = target(prefix + committed)
        if len(committed) == k:
            spread(outcomes, committed, weight, p)
            return
        q = (scored or proposal)(prefix + committed)
        rejected = ZERO
        for token, drawn in enumerate(proposal(prefix + committed)):
            accept = acceptance(p[token], q[token])
            rejected += weight * drawn * (1 - accept)
            if drawn * accept:
                walk((*committed, token), weight * drawn * accept)
        if rejected:
            spread(outcomes, committed, rejected, repair(p, q))

    walk((), Fraction(1))
    return dict(outcomes)


def acceptance(p: Fraction, q: Fraction) -> Fraction:
    """min(1, p/q), with 0/0 = 0: the kernel's `u q < p`."""
    return Fraction(int(p > 0)) if p >= q else p / q


def spread(outcomes: defaultdict[Prefix, Fraction], committed: Prefix, weight: Fraction, law: Law) -> None:
    """Add the outcomes `committed` + one token of `law`, which share the weight."""
    for token, probability in enumerate(law):
        if probability:
            outcomes[(*committed, token)] += weight * probability


def sequence_law(round_at: Callable[[Prefix], Outcomes], length: int) -> Outcomes:
    """The law of the first `length` tokens of rounds in a row; `round_at` gives the round after a prefix."""
    waiting: list[defaultdict[Prefix, Fraction]] = [defaultdict(Fraction) for _ in range(length + 1)]
    waiting[0][()] = Fraction(1)
    for known in range(length):
        for prefix, weight in waiting[known].items():
            for committed, probability in round_at(prefix).items():
                sequence = (prefix + committed)[:length]
                waiting[len(sequence)][sequence] += weight * probability
    return dict(waiting[length])


def target_law(target: Conditional, length: int) -> Outcomes:
    """The law of `length` tokens under plain decoding: what every lossless rule must reproduce."""

    def one_token(prefix: Prefix) -> Outcomes:
        return {(token,): probability for token, probability in enumerate(target(prefix)) if probability}

    return sequence_law(one_token, length)


def first_token_law(outcomes: Outcomes, vocabulary: int) -> Law:
    """The law of the first committed token of a round."""
    heads = [ZERO] * vocabulary
    for committed, probability in outcomes.items():
        heads[committed[0]] += probability
    return tuple(heads)


def survival(outcomes: Outcomes, k: int) -> list[Fraction]:
    """P(the first i proposals are accepted) for i = 1..k; the sum is the expected accepted prefix length."""
    return [sum((w for x, w in outcomes.items() if len(x) > i), ZERO) for i in range(1, k + 1)]


def expected_accepted(outcomes: Outcomes) -> Fraction:
    """The expected accepted prefix length of a round, without the repair or bonus token."""
    return sum((weight * (len(committed) - 1) for committed, weight in outcomes.items()), ZERO)


def total_variation(one: Outcomes, other: Outcomes) -> Fraction:
    """Half the L1 distance: 0 for equal laws, 1 for disjoint ones."""
    gaps = (abs(one.get(x, ZERO) - other.get(x, ZERO)) for x in one | other)
    return sum(gaps, ZERO) / 2
