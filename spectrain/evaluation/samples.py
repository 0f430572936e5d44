"""Raw acceptance samples: one generation each, checked before anything is computed from them.

A sample is one answer to one conversation by one contender ("plain", "ngram k=5", "eagle3 k=3") with one
sampler. Samples of one conversation form a cluster: they are resampled together, never one by one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from spectrain.errors import SpectrainError

PLAIN = "plain"

# The parts of a generation are timed one by one, the whole is timed around them. Parts that exceed the whole
# by more than this (relative, and seconds) mean that the clock was read wrongly.
CLOCK_SLACK = (0.01, 1e-3)


@dataclass(frozen=True)
class Sample:
    """One generation. ``rounds`` holds (proposed, accepted, committed, clipped); times are in seconds.

    The first of ``new_tokens`` comes from prefill, all others from rounds.
    """

    conversation: str
    kind: str
    contender: str
    drafter: str
    k: int
    sampler: dict[str, Any]
    seed: int
    new_tokens: int
    rounds: tuple[tuple[int, int, int, str | None], ...]
    prefill_s: float
    draft_s: float
    verify_s: float
    overhead_s: float
    total_s: float
    equal_to_plain: bool | None
    first_difference: dict[str, Any] | None

    def is_of(self, kind: str) -> bool:
        """Whether the conversation is of this kind or of one below it: "narrow/sql" is of "narrow"."""
        return f"{self.kind}/".startswith(f"{kind}/")

    @property
    def decode_s(self) -> float:
        """Everything after prefill."""
        return self.total_s - self.prefill_s

    @property
    def sampler_key(self) -> str:
        return json.dumps(self.sampler, sort_keys=True)

    def __str__(self) -> str:
        return f"sample of conversation {self.conversation!r}, contender {self.contender!r}"


def kind_and_parents(kind: str) -> list[str]:
    """A kind and what it lies in, outermost first: "narrow/sql" → "narrow", "narrow/sql"."""
    parts = kind.split("/")
    return ["/".join(parts[: i + 1]) for i in range(len(parts))]


def parse_sample(raw: Mapping[str, Any]) -> Sample:
    """Check one raw sample (the JSON object of one line) and give it a type.

    Raises ``SpectrainError`` naming the sample and the field.
    """
    values = {name: _field(raw, name) for name in Sample.__dataclass_fields__}
    values["conversation"] = str(values["conversation"])
    values["kind"] = str(values["kind"] or "unlabelled")
    values["rounds"] = tuple((int(p), int(a), int(c), clip) for p, a, c, clip in values["rounds"])
    sample = Sample(**values)
    _check_rounds(sample)
    _check_times(sample)
    return sample


def _field(raw: Mapping[str, Any], name: str) -> Any:
    if name in raw:
        return raw[name]
    where = f"conversation {raw.get('conversation', '?')!r}, contender {raw.get('contender', '?')!r}"
    raise SpectrainError(f"a raw sample ({where}) has no {name!r}; measure again with this version")


def _check_rounds(sample: Sample) -> None:
    for number, (proposed, accepted, committed, clipped) in enumerate(sample.rounds):
        if not 0 <= accepted <= proposed <= sample.k or not 1 <= committed <= accepted + 1:
            raise SpectrainError(
                f"{sample}: round {number} proposed {proposed}, accepted {accepted}, committed "
                f"{committed}; expected accepted ≤ proposed ≤ k = {sample.k}, 1 ≤ committed ≤ accepted + 1"
            )
        if clipped not in (None, "eos", "budget"):
            raise SpectrainError(f"{sample}: round {number} is clipped by {clipped!r}; expected eos, budget or null")
    from_rounds = 1 + sum(committed for _, _, committed, _ in sample.rounds)
    if sample.new_tokens != from_rounds:
        raise SpectrainError(
            f"{sample}: {sample.new_tokens} new tokens, but prefill (1) and rounds commit {from_rounds}"
        )


def _check_times(sample: Sample) -> None:
    parts = {name: getattr(sample, name) for name in ("prefill_s", "draft_s", "verify_s", "overhead_s")}
    negative = [name for name, seconds in parts.items() if seconds < 0]
    if negative or sample.total_s <= 0:
        raise SpectrainError(f"{sample}: {', '.join(negative) or 'total_s'} is not a duration")
    relative, absolute = CLOCK_SLACK
    if sum(parts.values()) > sample.total_s * (1 + relative) + absolute:
        raise SpectrainError(
            f"{sample}: prefill, draft, verification and overhead take {sum(parts.values()):.4f} s of a "
            f"total of {sample.total_s:.4f} s; synchronise the device at both ends of every part"
        )


def seconds_of(samples: Iterable[Sample]) -> dict[str, float]:
    """Summed seconds by part, and ``total``; ``unaccounted`` is what the total holds beyond the parts."""
    samples = list(samples)
    parts = ("prefill", "draft", "verify", "overhead", "total")
    seconds = {part: sum(getattr(sample, f"{part}_s") for sample in samples) for part in parts}
    total = seconds.pop("total")
    return {**seconds, "unaccounted": max(total - sum(seconds.values()), 0.0), "total": total}


@dataclass(frozen=True)
class Contender:
    """All samples of one contender with one sampler."""

    name: str
    drafter: str
    k: int
    samples: list[Sample]


def group_by_sampler(raws: Iterable[Mapping[str, Any]]) -> list[tuple[dict[str, Any], list[Contender]]]:
    """Samples → for every sampler its contenders, plain first, all on the same conversations.

    Raises ``SpectrainError`` when a sample is malformed or doubled, plain is missing, or a contender has not
    answered exactly the conversations (and seeds) that plain has.
    """
    groups: dict[str, dict[str, Contender]] = {}
    samplers: dict[str, dict[str, Any]] = {}
    for sample in map(parse_sample, raws):
        samplers.setdefault(sample.sampler_key, sample.sampler)
        contenders = groups.setdefault(sample.sampler_key, {})
        contender = contenders.setdefault(sample.contender, Contender(sample.contender, sample.drafter, sample.k, []))
        if (contender.drafter, contender.k) != (sample.drafter, sample.k):
            raise SpectrainError(
                f"{sample}: drafter {sample.drafter!r}, k = {sample.k}, but other samples of this contender "
                f"have {contender.drafter!r}, k = {contender.k}; give each its own contender name"
            )
        contender.samples.append(sample)
    if not groups:
        raise SpectrainError("there are no raw samples to summarise; run the acceptance evaluation first")
    return [(samplers[key], _paired(key, contenders)) for key, contenders in groups.items()]


def _paired(sampler_key: str, contenders: dict[str, Contender]) -> list[Contender]:
    if PLAIN not in contenders:
        raise SpectrainError(
            f"sampler {sampler_key}: no samples of plain decoding, so nothing to compare with; "
            f"found {', '.join(contenders)}"
        )
    plain = contenders[PLAIN]
    expected = _keys(plain)
    for contender in contenders.values():
        found = _keys(contender)
        if found != expected:
            name, seed, _ = min(found ^ expected)
            raise SpectrainError(
                f"sampler {sampler_key}: {contender.name!r} and plain decoding must answer the same "
                f"conversations; {name!r} (seed {seed}) is only in one; finish or restart the evaluation"
            )
    return [plain, *(c for c in contenders.values() if c is not plain)]


def _keys(contender: Contender) -> set[tuple[str, int, str]]:
    keys = [(s.conversation, s.seed, s.kind) for s in contender.samples]
    if len(set(keys)) != len(keys):
        doubled = next(key for key in keys if keys.count(key) > 1)
        raise SpectrainError(
            f"contender {contender.name!r} answered conversation {doubled[0]!r} (seed {doubled[1]}) more "
            f"than once; start the evaluation with an empty samples file"
        )
    return set(keys)
