"""Raw acceptance samples: one generation each, checked before anything is computed from them.

A sample is one answer to one conversation by one contender ("plain", "ngram k=5", "eagle3 tree of 9") with one
sampler. Samples of one conversation form a cluster: they are resampled together, never one by one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, replace
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from spectrain.decoding.verification import is_lossy
from spectrain.errors import SpectrainError
from spectrain.evaluation.leaves import LOSSY, PLAIN

CLIPS = ("eos", "budget", "stop")  # why a round kept less, or was asked for less, than usual

# The parts of a generation are timed one by one, the whole is timed around them. Parts that exceed the whole
# by more than this (relative, and seconds) mean that the clock was read wrongly.
CLOCK_SLACK = (0.01, 1e-3)


Count = Annotated[int, Field(ge=0)]
Sums = list[list[float]]


@dataclass(frozen=True, config=ConfigDict(strict=True, allow_inf_nan=False))
class Sample:
    """One generation. ``rounds`` holds (proposed, accepted, committed, clipped, nodes); times are in seconds.

    ``proposed`` is how many tokens deep a proposal went, ``nodes`` how many tokens it had: of a chain the same.
    ``shape`` holds type, depth and nodes of the drafts that were asked for and, of a tree, what else it was made of;
    plain decoding has none. ``k`` is a chain's length, 0 for plain decoding, None for a tree. The first of
    ``new_tokens`` comes from prefill, all others from rounds. ``state_bytes`` is the most that the drafter's state
    held; None where it was not recorded. ``baseline`` is the contender that is plain decoding of the same target.

    ``turn`` says which of the assistant's turns was answered, 1 being the first; ``seed_index`` which of the answers to
    it this is. ``teacher_forced`` holds scores of a drafter (see ``DepthScores``). Where decoding recorded them:
    ``visited_alpha`` [Σ α, n] for each draft position over the positions that were tested; ``confidence`` [Σ q, tested,
    accepted] for each of ten bins of the drafted token's probability q; ``pit`` the bins of the law test;
    ``cache_bytes`` the most that the target's cache held; ``energy_j`` joules.
    """

    conversation: str
    kind: str
    contender: str
    drafter: str
    k: int | None
    shape: dict[str, Any] | None
    verification: str | None
    lossy: bool
    sampler: dict[str, Any]
    seed: int
    prompt_tokens: Count
    new_tokens: Count
    rounds: tuple[tuple[int, int, int, str | None, int], ...]
    prefill_s: float
    draft_s: float
    verify_s: float
    overhead_s: float
    total_s: float
    equal_to_plain: bool | None
    first_difference: dict[str, Any] | None
    state_bytes: Count | None = None
    baseline: str = PLAIN
    turn: int | None = None
    seed_index: int = 0
    visited_alpha: Sums | None = None
    confidence: Sums | None = None
    pit: dict[str, float | list[float]] | None = None
    cache_bytes: Count | None = None
    energy_j: Annotated[float, Field(ge=0)] | None = None
    teacher_forced: dict[str, int | list[float] | list[Sums]] | None = None

    @property
    def depth(self) -> int:
        """How many tokens deep its drafts may go."""
        return self.shape["depth"] if self.shape else 0

    @property
    def nodes(self) -> int:
        """How many tokens its drafts may have."""
        return self.shape["nodes"] if self.shape else 0

    @property
    def tree(self) -> bool:
        return self.shape is not None and self.shape["type"] != "chain"

    @property
    def measured(self) -> tuple[str, str, str | None, bool, str]:
        """What makes two samples those of one contender."""
        return self.drafter, json.dumps(self.shape, sort_keys=True), self.verification, self.lossy, self.baseline

    @property
    def sampler_key(self) -> str:
        return json.dumps(self.sampler, sort_keys=True)

    def without_rounds(self) -> Sample:
        """What it says of its contender, without its content."""
        return replace(self, rounds=(), visited_alpha=None, confidence=None, pit=None, first_difference=None,
                       teacher_forced=None)  # fmt: skip

    def __str__(self) -> str:
        return f"sample of conversation {self.conversation!r}, contender {self.contender!r}"


def is_of(kind: str, group: str) -> bool:
    """Whether a kind is this one or lies below it: "narrow/sql" is of "narrow"."""
    return f"{kind}/".startswith(f"{group}/")


LATER = {  # not in the samples of earlier versions
    name: field.default for name, field in Sample.__dataclass_fields__.items() if field.default is not MISSING
}


def kind_and_parents(kind: str) -> list[str]:
    """A kind and what it lies in, outermost first: "narrow/sql" → "narrow", "narrow/sql"."""
    parts = kind.split("/")
    return ["/".join(parts[: i + 1]) for i in range(len(parts))]


Observer = Callable[[Mapping[str, Any]], None]


def seen(samples: Iterable[Mapping[str, Any]], *observers: Observer) -> Iterator[Mapping[str, Any]]:
    """The samples once, each shown to the observers after whoever takes it from here, and checks it, has done so."""
    for sample in samples:
        yield sample
        for observe in observers:
            observe(sample)


def parse_sample(raw: Mapping[str, Any]) -> Sample:
    """Check one raw sample (the JSON object of one line) and give it a type.

    Raises ``SpectrainError`` naming the sample and the field.
    """
    sample = typed(raw)
    _check_drafting(sample)
    _check_rounds(sample)
    _check_times(sample)
    return sample


def typed(raw: Mapping[str, Any]) -> Sample:
    """A raw sample whose fields have their types; whether they agree with one another is not looked at."""
    values = {name: raw.get(name, missing) for name, missing in LATER.items()}
    values |= {name: _field(raw, name) for name in Sample.__dataclass_fields__ if name not in LATER}
    values["conversation"] = str(values["conversation"])
    values["kind"] = str(values["kind"] or "unlabelled")
    if isinstance(values["rounds"], list | tuple):
        values["rounds"] = tuple(_round(raw, found) for found in values["rounds"])
    try:
        return Sample(**values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise SpectrainError(
            f"a raw sample ({_place(raw)}): {where} is {first['input']!r}: {first['msg']}; measure it again"
        ) from error


def _field(raw: Mapping[str, Any], name: str) -> Any:
    if name in raw:
        return raw[name]
    raise SpectrainError(f"a raw sample ({_place(raw)}) has no {name!r}; measure again with this version")


def _place(raw: Mapping[str, Any]) -> str:
    return f"conversation {raw.get('conversation', '?')!r}, contender {raw.get('contender', '?')!r}"


def _round(raw: Mapping[str, Any], values: Any) -> tuple[Any, ...]:
    if not isinstance(values, list | tuple) or len(values) != 5:
        raise SpectrainError(
            f"a raw sample ({_place(raw)}) has a round {values!r}, expected [proposed, accepted, committed, clipped, "
            "nodes]; measure again with this version"
        )
    return tuple(values)


def _check_drafting(sample: Sample) -> None:
    """A lossy contender must say so wherever its name is read, and none may pass for one that it is not."""
    known = ("type", "depth", "nodes")
    if sample.shape is not None and any(key not in sample.shape for key in known):
        raise SpectrainError(f"{sample}: shape is {sample.shape!r}, expected {', '.join(known)}")
    lossy = sample.verification is not None and is_lossy(sample.verification)
    if not lossy == sample.lossy == (LOSSY in sample.contender):
        raise SpectrainError(
            f"{sample}: lossy is {sample.lossy} with verification {sample.verification!r}; a lossy rule must be called "
            f"so, with {LOSSY} in the contender's name, and no other may be"
        )
    if sample.k != (None if sample.tree else sample.depth):
        raise SpectrainError(f"{sample}: k is {sample.k!r}, but its drafts are {sample.depth} deep")


def _check_rounds(sample: Sample) -> None:
    depth, most = sample.depth, sample.nodes
    for number, (proposed, accepted, committed, clipped, nodes) in enumerate(sample.rounds):
        if not 0 <= accepted <= proposed <= depth or not 1 <= committed <= accepted + 1:
            raise SpectrainError(
                f"{sample}: round {number} proposed {proposed}, accepted {accepted}, committed "
                f"{committed}; expected accepted ≤ proposed ≤ {depth}, 1 ≤ committed ≤ accepted + 1"
            )
        if not proposed <= nodes <= most or (nodes != proposed and not sample.tree):
            what = f"from {proposed} to {most}" if sample.tree else f"{proposed}, as many as it is deep"
            raise SpectrainError(f"{sample}: round {number} had {nodes} nodes, expected {what}")
        if clipped not in (None, *CLIPS):
            expected = ", ".join(CLIPS)
            raise SpectrainError(f"{sample}: round {number} is clipped by {clipped!r}; expected {expected} or null")
        if clipped is None and committed != accepted + 1:
            raise SpectrainError(
                f"{sample}: round {number} accepted {accepted} and committed {committed} tokens without being clipped; "
                "expected accepted + 1: the decoder loses or invents tokens, or does not mark clipped rounds"
            )
    from_rounds = 1 + sum(committed for _, _, committed, _, _ in sample.rounds)
    if sample.new_tokens != from_rounds:
        raise SpectrainError(
            f"{sample}: {sample.new_tokens} new tokens, but prefill (1) and rounds commit {from_rounds}"
        )


def _check_times(sample: Sample) -> None:
    parts = {name: getattr(sample, name) for name in ("prefill_s", "draft_s", "verify_s", "overhead_s")}
    wrong = [name for name, seconds in parts.items() if seconds < 0]
    if wrong or sample.total_s <= 0:
        raise SpectrainError(f"{sample}: {', '.join(wrong) or 'total_s'} is not a duration; measure it again")
    relative, absolute = CLOCK_SLACK
    if sum(parts.values()) > sample.total_s * (1 + relative) + absolute:
        raise SpectrainError(
            f"{sample}: prefill, draft, verification and overhead take {sum(parts.values()):.4f} s of a "
            f"total of {sample.total_s:.4f} s; synchronise the device at both ends of every part"
        )
