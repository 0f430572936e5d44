"""Does the server do with a bundle what spectrain does with it? The comparison alone: numbers in, findings out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from spectrain.evaluation.workbench import table

Gap = Callable[[int, Sequence[int], Sequence[int]], tuple[int, float | None]]
"""Of an answer's number and two outputs: where they part, and the gap of the target's logits of both tokens there."""


@dataclass
class Finding:
    """A row of the table; ``faults`` are what is not explained."""

    name: str
    starts: bool = False
    equal: int = 0
    ties: int = 0
    compared: int = 0
    alike: int | None = None
    cells: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def fault(self, what: str) -> None:
        self.faults.append(f"{self.name}: {what}")


@dataclass
class Control:
    """A bundle that was broken on purpose: ``found`` are the faults that gave it away, at least one."""

    finding: Finding
    found: list[str] = field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        """Not to be found is one, and so is an answer that a bad drafter changed."""
        unseen = [] if self.found else [f"{self.finding.name}: nothing gave it away, so the comparison sees too little"]
        return [*self.finding.faults, *unseen]


def compare_tokens(finding: Finding, served: Sequence[Sequence[int]], expected: Sequence[Sequence[int]], gap: Gap,
                   tolerance: float) -> None:  # fmt: skip
    """Greedy outputs, token by token; a difference within ``tolerance`` logits is a tie of floating point."""
    finding.compared = len(expected)
    if len(served) != len(expected):
        finding.fault(f"{len(served)} answers to {len(expected)} prompts")
        return
    for number, (tokens, reference) in enumerate(zip(served, expected, strict=True)):
        if list(tokens) == list(reference):
            finding.equal += 1
            continue
        at, apart = gap(number, tokens, reference)
        if apart is not None and apart <= tolerance:
            finding.ties += 1
        else:
            how = "one of them has ended" if apart is None else f"logits {apart:.2g} apart"
            finding.fault(f"prompt {number} differs at token {at}, {how}")


def compare_acceptance(finding: Finding, served: dict[str, Any], ours: dict[str, Any]) -> None:
    """The server's counters beside our intervals, and each request's rounds beside ours.

    A counter outside the interval is explained when it is not more than one accept off: a tie in the drafter's own
    logits, which the interval of a small sample does not know. The interval alone would let a drafter pass that is
    computed a little wrong; that one drafts otherwise in most conversations, while a tie changes one.
    """
    counters, positions = served["counters"], ours["acceptance"]
    drafts, accepted = counters.get("drafts", 0), counters.get("accepted_tokens_per_pos", [])
    if not drafts or len(accepted) != len(positions):
        finding.fault(f"{drafts} drafts counted at {len(accepted)} positions, expected some at {len(positions)}")
        return
    for i, (count, own) in enumerate(zip(accepted, positions, strict=True), start=1):
        theirs, slack = count / drafts, 1 / drafts
        finding.cells.append(f"{theirs:.3f} ({own['value']:.3f} [{own['low']:.3f}, {own['high']:.3f}])")
        if not own["low"] - slack <= theirs <= own["high"] + slack:
            finding.fault(f"position {i} has acceptance {finding.cells[-1]} there (here)")
    if not accepted[0]:
        finding.fault("nothing was accepted, so nothing was compared; take prompts that the drafter was trained for")
    own_rounds = [conversation["rounds"] for conversation in ours["conversations"]]
    finding.alike = sum(a == b for a, b in zip(served["rounds"], own_rounds, strict=True))
    if 2 * finding.alike <= len(own_rounds):
        finding.fault(
            f"{finding.alike} of {len(own_rounds)} conversations go round by round as here, expected more than half"
        )


def render(findings: Sequence[Finding], k: int) -> str:
    """The table, every fault, and the finding in a sentence."""
    heads = ["served", "starts", "greedy equal", "rounds alike", *(f"accepted, position {i}" for i in range(1, k + 1))]
    rows = [[f.name, "yes" if f.starts else "NO", _tokens(f), _alike(f), *_padded(f.cells, k)] for f in findings]
    legend = "acceptance: the server's counters (spectrain's own [95% interval over conversations])"
    return "\n".join([table(heads, rows), "", legend, *told(findings, "all served as measured")])


def render_controls(controls: Sequence[Control]) -> str:
    """The bundles that were broken on purpose, and what gave each away."""
    if not controls:
        return "SKIPPED: nothing was broken on purpose; give a bundle of Medusa, EAGLE or EAGLE-3 that starts"
    heads = ["broken on purpose", "starts", "greedy equal", "found by"]
    rows = [
        [c.finding.name, "yes" if c.finding.starts else "NO", _tokens(c.finding), _short(c.found)] for c in controls
    ]
    return "\n".join([table(heads, rows), "", *told(controls, "all that was broken was found")])


def told(parts: Sequence[Any], good: str) -> list[str]:
    """Every fault, and the finding in a sentence."""
    faults = [fault for part in parts for fault in part.faults]
    return [*faults, f"{len(faults)} UNEXPLAINED" if faults else good]


def _short(found: Sequence[str]) -> str:
    if not found:
        return "NOTHING"
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return found[0].split(": ", 1)[1].splitlines()[0] + more


def _tokens(finding: Finding) -> str:
    return f"{finding.equal}/{finding.compared}" + (f" ({finding.ties} ties)" if finding.ties else "")


def _alike(finding: Finding) -> str:
    return "–" if finding.alike is None else f"{finding.alike}/{finding.compared}"


def _padded(cells: Sequence[str], k: int) -> list[str]:
    return [*cells, *["–"] * (k - len(cells))]
