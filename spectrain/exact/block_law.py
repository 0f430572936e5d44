"""The law of block verification (arXiv 2403.10444) by exact enumeration, in Fractions.

The whole chain is tested at once: a prefix may be kept although one of its tokens alone would have been
rejected, and the longest kept prefix counts. The law is that of token-wise verification, the accepted length
never less.
"""

from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction

from spectrain.exact.law import ZERO, Conditional, Law, Outcomes, Prefix, acceptance, normalised, spread

BlockRepair = Callable[[Fraction, Law, Law], Law]  # (reach, p, the scored q) -> the law of the token after a stop


def excess(reach: Fraction, p: Law, q: Law) -> list[Fraction]:
    """(reach · p - q)+: what the proposals after a prefix cannot supply. Of sum 0 to 1."""
    return [max(reach * pi - qi, ZERO) for pi, qi in zip(p, q, strict=True)]


def block_residual(reach: Fraction, p: Law, q: Law) -> Law:
    """norm((reach · p - q)+), the repair that makes block verification lossless; p where nothing is left."""
    left = excess(reach, p, q)
    return normalised(left) if any(left) else p


def keep_probability(reach: Fraction, p: Law, q: Law) -> Fraction:
    """P(a prefix is kept), given that no longer one is; p and q are the laws of the token after it."""
    if reach == 1:
        return Fraction(1)
    left = sum(excess(reach, p, q), ZERO)
    return left / (left + 1 - reach)


def block_round(
    target: Conditional,
    proposal: Conditional,
    k: int,
    *,
    scored: Conditional | None = None,
    repair: BlockRepair = block_residual,
    prefix: Prefix = (),
) -> Outcomes:
    """What a round of k proposals commits after `prefix`; the arguments are those of `law.chain_round`.

    reach_i = min(1, reach_{i-1} p(x_i)/q(x_i)), reach_0 = 1. The k proposals are kept with probability reach_k;
    else the first k-1 are with their `keep_probability`, and so on down to none, which is always kept.
    """
    outcomes: defaultdict[Prefix, Fraction] = defaultdict(Fraction)

    def walk(drafted: Prefix, weight: Fraction, reach: Fraction, stops: list[tuple[Fraction, Law]]) -> None:
        p = target(prefix + drafted)
        if len(drafted) == k:
            _settle(outcomes, drafted, weight, [*stops, (reach, p)])
            return
        q = (scored or proposal)(prefix + drafted)
        stop = (keep_probability(reach, p, q), repair(reach, p, q))
        for token, drawn in enumerate(proposal(prefix + drafted)):
            if drawn:
                walk((*drafted, token), weight * drawn, acceptance(reach * p[token], q[token]), [*stops, stop])

    walk((), Fraction(1), Fraction(1), [])
    return dict(outcomes)


def _settle(
    outcomes: defaultdict[Prefix, Fraction],
    drafted: Prefix,
    weight: Fraction,
    stops: list[tuple[Fraction, Law]],
) -> None:
    """Share a drafted chain's weight among the lengths at which it may stop, the longest first."""
    for length in reversed(range(len(stops))):
        keep, law = stops[length]
        if weight * keep:
            spread(outcomes, drafted[:length], weight * keep, law)
        weight *= 1 - keep
