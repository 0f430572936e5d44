"""The proof that the verification rules are lossless, over random small p and q, in Fractions.

A case is a target p and a drafter q on three tokens, with a law of its own after every prefix and many zeros. One
round followed by plain decoding must have the law of plain decoding, exactly; by induction then so has any number
of rounds. Rules that are known to be biased go through the same cases and must be rejected. That the torch
kernels have the laws enumerated here is proved in tests/exact/.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from random import Random

from spectrain.errors import SpectrainError
from spectrain.exact import biased, tree_law
from spectrain.exact.block_law import block_round
from spectrain.exact.law import (
    Conditional,
    Outcomes,
    Prefix,
    chain_round,
    normalised,
    point,
    resampled,
    residual,
    sequence_law,
    target_law,
    total_variation,
)
from spectrain.exact.tree_law import Descent, Shape, Siblings, tree_round

VOCABULARY = 3
DEPTH = 3  # of the deepest path; one more token follows it
SHAPES: tuple[Shape, ...] = (((), ()), ((), (), ()), (((), ()), ()), ((((), ()),), ((),)), ((), (((),), ())))

Rule = Callable[[Conditional, Conditional, Random], Outcomes]  # (p, q, source of shapes) -> what a round commits


def _argmax(q: Conditional) -> Conditional:
    return lambda prefix: point(biased.by_confidence(q)(prefix)[0], VOCABULARY)


def _tree(siblings: Callable[[Conditional], Siblings], descent: Descent = tree_law.fresh) -> Rule:
    return lambda p, q, random: tree_round(p, siblings(q), random.choice(SHAPES), descent=descent)


LOSSLESS: dict[str, Rule] = {
    "chain, drawn": lambda p, q, _: chain_round(p, q, DEPTH),
    "chain, chosen": lambda p, q, _: chain_round(p, _argmax(q), DEPTH),
    "block, drawn": lambda p, q, _: block_round(p, q, DEPTH),
    "block, chosen": lambda p, q, _: block_round(p, _argmax(q), DEPTH),
    "tree, chosen": _tree(lambda q: tree_law.chosen(biased.by_confidence(q), VOCABULARY)),
    "tree, i.i.d.": _tree(tree_law.independent),
    "tree, without replacement": _tree(tree_law.without_replacement),
}

BIASED: dict[str, Rule] = {
    "chain: repair drawn from p again": lambda p, q, _: chain_round(p, q, DEPTH, repair=resampled),
    "chain: argmax scored as drawn": lambda p, q, _: chain_round(p, _argmax(q), DEPTH, scored=q),
    "block: repair of token-wise": lambda p, q, _: block_round(p, q, DEPTH, repair=lambda _, p, q: residual(p, q)),
    "block: argmax scored as drawn": lambda p, q, _: block_round(p, _argmax(q), DEPTH, scored=q),
    "tree: top-k scored as drawn": _tree(lambda q: biased.chosen_scored_as_drawn(q, VOCABULARY)),
    "tree: without replacement, q not renormalised": _tree(biased.not_renormalised),
    "tree: siblings re-sorted by q": _tree(biased.resorted),
    "tree: pruned by own confidence": _tree(biased.pruned),
    "tree: duplicates merged": _tree(biased.merged),
    "tree: last residual as a child's law": _tree(tree_law.independent, tree_law.stale),
}


@dataclass(frozen=True)
class Finding:
    """What the cases of a rule showed. Distances are total variations between laws of whole rounds."""

    rule: str
    lossless: bool  # whether it is claimed to be
    cases: int
    differing: int  # cases whose law is not p
    worst: Fraction  # the largest distance from p


def prove(cases: int, seed: int = 0, advance: Callable[[], object] = lambda: None) -> list[Finding]:
    """Every rule over the same `cases` random cases; `advance` is called after each of them.

    Raises SpectrainError for less than one case.
    """
    if cases < 1:
        raise SpectrainError(f"cases: found {cases}, expected at least 1")
    rules = [*LOSSLESS.values(), *BIASED.values()]
    differing, worst = [0] * len(rules), [Fraction(0)] * len(rules)
    random = Random(seed)
    for _ in range(cases):
        p, q = random_laws(random), random_laws(random)
        expected = target_law(p, DEPTH + 1)
        for i, rule in enumerate(rules):
            distance = total_variation(_followed_by_plain_decoding(rule(p, q, random), p), expected)
            differing[i] += distance > 0
            worst[i] = max(worst[i], distance)
        advance()
    rows = zip([*LOSSLESS, *BIASED], differing, worst, strict=True)
    return [Finding(name, name in LOSSLESS, cases, found, farthest) for name, found, farthest in rows]


def check(findings: Sequence[Finding]) -> None:
    """Raise SpectrainError unless every lossless rule has the law p and every negative control was rejected."""
    for finding in findings:
        where = f"{finding.rule}: found {finding.differing} of {finding.cases} cases with a law other than p"
        if finding.lossless and finding.differing:
            raise SpectrainError(f"{where}, expected none; this rule must not be used")
        if not finding.lossless and not finding.differing:
            raise SpectrainError(f"{where}, expected some of a biased rule; give it more cases")


def random_laws(random: Random) -> Conditional:
    """A law of small whole weights, often zero, after every prefix of up to DEPTH tokens."""
    laws = {}
    for prefix in (x for n in range(DEPTH + 1) for x in product(range(VOCABULARY), repeat=n)):
        weights = [random.choice((0, 0, 1, 2, 3, 4)) for _ in range(VOCABULARY)]
        laws[prefix] = normalised(weights if any(weights) else [1] * VOCABULARY)
    return laws.__getitem__


def _followed_by_plain_decoding(outcomes: Outcomes, p: Conditional) -> Outcomes:
    """The law of the first DEPTH + 1 tokens when plain decoding goes on after the round."""

    def round_at(prefix: Prefix) -> Outcomes:
        return {(token,): w for token, w in enumerate(p(prefix)) if w} if prefix else outcomes

    return sequence_law(round_at, DEPTH + 1)


def table(findings: Sequence[Finding]) -> str:
    """The findings for people: every lossless rule, then every negative control."""
    width = max(len(finding.rule) for finding in findings)
    lines = [f"{'lossless rules':<{width}}  cases  worst |law - p|"]
    lines += [f"{f.rule:<{width}}  {f.cases:>5}  {_shown(f.worst)}" for f in findings if f.lossless]
    lines += ["", f"{'negative controls':<{width}}  cases  worst |law - p|  cases that reject it"]
    for f in findings:
        if not f.lossless:
            lines.append(f"{f.rule:<{width}}  {f.cases:>5}  {_shown(f.worst):<15}  {f.differing}")
    rejected = sum(not f.lossless and f.differing > 0 for f in findings)
    return "\n".join([*lines, "", f"negative controls rejected: {rejected} of {len(BIASED)}"])


def _shown(distance: Fraction) -> str:
    return "0 (exact)" if distance == 0 else f"{float(distance):.3f}"
