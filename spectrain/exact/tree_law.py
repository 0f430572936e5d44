"""The law of tree verification by exact enumeration, in Fractions.

The children of a node are tested in order, each against what the ones before it left of the target's law; the
first that passes is entered, and when none does the last residual gives the token (arXiv 2305.09781). That is
lossless if the q of a test is the law that the child was really drawn from, given its earlier siblings and
whatever else decided that it is there and where it stands.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from spectrain.exact.law import (
    ZERO,
    Conditional,
    Law,
    Outcomes,
    Prefix,
    acceptance,
    normalised,
    point,
    residual,
    spread,
)

Shape = tuple["Shape", ...]  # the shapes of a node's children; () is a leaf
Descent = Callable[[Law, Law], Law]  # (the target's law at the entered child, what was left at its parent)


@dataclass(frozen=True)
class Siblings:
    """How the children of a node come about, and what they are tested with.

    drawn: (prefix, n) -> the law of the n children, in the order of their tests; a tuple may have fewer.
    scored: (prefix, earlier siblings) -> the q of the next child's test and residual.
    """

    drawn: Callable[[Prefix, int], Outcomes]
    scored: Callable[[Prefix, Prefix], Law]


def independent(q: Conditional) -> Siblings:
    """Drawn i.i.d. from q, duplicates kept; tested with q each time (SpecInfer, arXiv 2305.09781)."""

    def drawn(prefix: Prefix, n: int) -> Outcomes:
        law = q(prefix)
        tuples: Outcomes = {(): Fraction(1)}
        for _ in range(n):
            tuples = {(*x, t): w * qt for x, w in tuples.items() for t, qt in enumerate(law) if qt}
        return tuples

    return Siblings(drawn, lambda prefix, earlier: q(prefix))


def without_replacement(q: Conditional) -> Siblings:
    """Drawn without replacement, tested with q renormalised over the undrawn tokens (arXiv 2402.14160, 2402.12374).

    Where q's support runs out there are fewer children.
    """

    def scored(prefix: Prefix, earlier: Prefix) -> Law:
        return normalised(ZERO if t in earlier else qt for t, qt in enumerate(q(prefix)))

    def drawn(prefix: Prefix, n: int) -> Outcomes:
        tuples: Outcomes = {(): Fraction(1)}
        for _ in range(min(n, sum(qt > 0 for qt in q(prefix)))):
            tuples = {(*x, t): w * qt for x, w in tuples.items() for t, qt in enumerate(scored(prefix, x)) if qt}
        return tuples

    return Siblings(drawn, scored)


def chosen(ranking: Callable[[Prefix], Sequence[int]], vocabulary: int) -> Siblings:
    """The first tokens of a ranking: nothing is drawn, every child is a point mass.

    The test then accepts what "draw y from p and enter the child that equals y" enters.
    """

    def drawn(prefix: Prefix, n: int) -> Outcomes:
        return {tuple(ranking(prefix)[:n]): Fraction(1)}

    return Siblings(drawn, lambda prefix, earlier: point(ranking(prefix)[len(earlier)], vocabulary))


def fresh(p: Law, left: Law) -> Law:
    """An entered child starts from the target's law there."""
    return p


def stale(p: Law, left: Law) -> Law:
    """What was left at the parent goes on as the child's law. Biased: kept as a negative control."""
    return left


def tree_round(
    target: Conditional,
    siblings: Siblings,
    shape: Shape,
    *,
    descent: Descent = fresh,
    prefix: Prefix = (),
) -> Outcomes:
    """What a round over a tree of this shape commits after `prefix`: the entered path and one token more."""
    outcomes: defaultdict[Prefix, Fraction] = defaultdict(Fraction)

    def walk(committed: Prefix, weight: Fraction, p: Law, node: Shape) -> None:
        here = prefix + committed
        entered: defaultdict[tuple[int, int, Law], Fraction] = defaultdict(Fraction)
        for tokens, drawn in siblings.drawn(here, len(node)).items():
            left, remaining = p, weight * drawn
            for i, token in enumerate(tokens):
                q = siblings.scored(here, tokens[:i])
                accept = acceptance(left[token], q[token])
                if accept:
                    law = descent(target((*here, token)), left)
                    entered[i, token, law] += remaining * accept
                remaining *= 1 - accept
                left = residual(left, q)
            spread(outcomes, committed, remaining, left)
        for (i, token, law), entering in entered.items():
            walk((*committed, token), entering, law, node[i])

    walk((), Fraction(1), target(prefix), shape)
    return {committed: weight for committed, weight in outcomes.items() if weight}


def chain_shape(k: int) -> Shape:
    """A chain of k nodes, as a tree: its law is that of `law.chain_round`."""
    return (chain_shape(k - 1),) if k else ()
