"""Raw samples → sums: one row an answer, and the raw samples are let go of.

So ten thousand conversations take megabytes, whatever their answers hold. All that the document says is computed from
these rows, summed by conversation.

Shapes: N answers of a contender, C conversations, X entries of a column.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from spectrain.errors import SpectrainError
from spectrain.evaluation.leaves import PLAIN
from spectrain.evaluation.samples import CLIPS, Sample, is_of, parse_sample
from spectrain.measures import RoundCounts

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

PARTS = ("prefill", "draft", "verify", "overhead", "total")
LAW_BINS, CONFIDENCE_BINS = 20, 10
POSITION_EDGES = (32, 128, 512)  # the last token of a band of positions in the answer
NOT_RECORDED = float("nan")
COUNTS = ("rounds", "committed", "new_tokens", "kept", "nodes", "full", "full_tokens", *CLIPS)
SINGLE = (*COUNTS, *PARTS, "energy", "cache_bytes", "state_bytes")  # columns of one entry


def columns(depth: int) -> dict[str, int]:
    """What is summed of an answer, and how many entries it has, for drafts that are up to ``depth`` tokens deep.

    ``full``, ``reached`` and ``tested`` count full rounds (see ``RoundCounts``), ``full_tokens`` what they committed,
    ``offered`` all rounds that proposed at least i tokens. ``kept`` are accepted draft tokens that reached the answer.
    ``band_rounds`` and ``band_tokens`` are rounds by where in the answer they start. What was not recorded is NaN.
    """
    bands = len(POSITION_EDGES) + 1
    return {
        **dict.fromkeys(SINGLE, 1),
        **dict.fromkeys(("reached", "tested", "offered"), depth),
        **dict.fromkeys(("band_rounds", "band_tokens"), bands),
        "visited": 2 * depth,
        "law": LAW_BINS,
        "confidence": 3 * CONFIDENCE_BINS,
    }


@dataclass
class Answers:
    """All answers of one contender with one sampler. ``first``, without its rounds, tells what the contender is."""

    first: Sample
    conversations: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    turns: list[int | None] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    compared: int = 0
    differences: list[dict[str, Any]] = field(default_factory=list)
    """Of the answers that were compared with plain decoding's, those that are not equal."""
    _cells: array[float] = field(default_factory=lambda: array("d"))

    @property
    def name(self) -> str:
        return self.first.contender

    def add(self, sample: Sample) -> None:
        values = _sums(sample)
        for name, width in columns(self.first.depth).items():
            found = values[name]
            if len(found) != width:
                raise SpectrainError(f"{sample}: {name} has {len(found)} numbers, expected {width}; measure again")
            self._cells.extend(found)
        self.conversations.append(sys.intern(sample.conversation))  # of many answers each name is held once
        self.kinds.append(sys.intern(sample.kind))
        self.turns.append(sample.turn)
        self.seeds.append(sample.seed)
        self.prompt_tokens.append(sample.prompt_tokens)
        self.compared += sample.equal_to_plain is not None
        if sample.equal_to_plain is False:
            where = {name: (sample.first_difference or {}).get(name) for name in ("position", "logit_gap")}
            self.differences.append({"conversation": sample.conversation, "kind": sample.kind, **where})

    def keys(self) -> list[tuple[str, str, str, str]]:
        """Conversation, turn, seed and kind of every answer."""
        rows = zip(self.conversations, self.turns, self.seeds, self.kinds, strict=True)
        return [(conversation, str(turn), str(seed), kind) for conversation, turn, seed, kind in rows]

    @cached_property
    def table(self) -> Floats:
        return np.frombuffer(self._cells).reshape(len(self.conversations), -1)

    @cached_property
    def _places(self) -> dict[str, slice]:
        widths = columns(self.first.depth)
        return {
            name: slice(end - width, end)
            for (name, width), end in zip(widths.items(), accumulate(widths.values()), strict=True)
        }

    @cached_property
    def _ranks(self) -> npt.NDArray[np.int64]:
        """Each answer's conversation by its place among the names: the same for every contender."""
        return np.unique(np.array(self.conversations), return_inverse=True)[1]

    def column(self, name: str) -> Floats:
        """A column [N], or [N, X] where it has several entries."""
        found = self.table[:, self._places[name]]
        return found[:, 0] if name in SINGLE else found

    def of_kind(self, kind: str | None) -> Mask:
        """The answers to conversations of a kind; None is all."""
        groups = {name: kind is None or is_of(name, kind) for name in set(self.kinds)}
        return np.array([groups[name] for name in self.kinds], dtype=bool)

    def clusters(self, chosen_N: Mask | None = None) -> Clusters:
        """Some of the answers (all by default), by conversation."""
        rows = np.arange(len(self.conversations)) if chosen_N is None else np.flatnonzero(chosen_N)
        # Sums do not depend on the order in which samples were written, to the last bit.
        seeds, turns = np.array(self.seeds), np.array([turn or 0 for turn in self.turns])
        order = np.lexsort((seeds[rows], turns[rows], self._ranks[rows]))
        rows = rows[order]
        return Clusters(self, rows, np.unique(self._ranks[rows], return_inverse=True)[1])


@dataclass(frozen=True)
class Clusters:
    """Answers of one contender, by conversation: row ``rows[i]`` belongs to conversation ``place[i]``."""

    answers: Answers
    rows: npt.NDArray[np.int64]
    place: npt.NDArray[np.int64]

    def __len__(self) -> int:
        """How many conversations there are."""
        return int(self.place[-1]) + 1 if len(self.place) else 0

    @property
    def first(self) -> Sample:
        return self.answers.first

    def each(self, name: str) -> Floats:
        """A column by answer [N] or [N, X]."""
        return self.answers.column(name)[self.rows]

    def sums(self, name: str) -> Floats:
        """A column by conversation [C] or [C, X]; ``decode`` is everything after prefill."""
        if name == "decode":
            return self.sums("total") - self.sums("prefill")
        values = self.each(name)
        summed = np.zeros((len(self), *values.shape[1:]))
        np.add.at(summed, self.place, values)
        return summed

    def total(self, name: str) -> float:
        """The sum of a column over everything."""
        return float(self.sums(name).sum())

    def recorded(self, name: str) -> bool:
        """Whether all of these answers have the column."""
        return len(self.rows) > 0 and not bool(np.isnan(self.each(name)).any())

    def most(self, name: str) -> int | None:
        """The largest entry of a column among the answers that have it."""
        values = self.each(name)
        values = values[~np.isnan(values)]
        return int(values.max()) if values.size else None


Groups = list[tuple[dict[str, Any], list[Answers]]]
"""Samplers, each with the answers of its contenders, plain decoding's first."""


def gather(raws: Iterable[Mapping[str, Any]]) -> Groups:
    """Samples, one at a time → for every sampler its contenders, plain first, all on the same conversations.

    Raises ``SpectrainError`` when a sample is malformed or doubled, plain is missing, or a contender has not
    answered exactly the conversations (and seeds) that plain has.
    """
    groups: dict[str, dict[str, Answers]] = {}
    samplers: dict[str, dict[str, Any]] = {}
    for sample in map(parse_sample, raws):
        samplers.setdefault(sample.sampler_key, sample.sampler)
        contenders = groups.setdefault(sample.sampler_key, {})
        if sample.contender not in contenders:
            contenders[sample.contender] = Answers(sample.without_rounds())
        contender = contenders[sample.contender]
        if contender.first.measured != sample.measured:
            raise SpectrainError(
                f"{sample}: drafter, shape and verification are {sample.measured[:3]}, but other samples of this "
                f"contender have {contender.first.measured[:3]}; give each its own contender name"
            )
        contender.add(sample)
    if not groups:
        raise SpectrainError("there are no raw samples to summarise; run the acceptance evaluation first")
    return [(samplers[key], _paired(key, contenders)) for key, contenders in groups.items()]


def _paired(sampler_key: str, contenders: dict[str, Answers]) -> list[Answers]:
    if PLAIN not in contenders:
        raise SpectrainError(
            f"sampler {sampler_key}: no samples of plain decoding, so nothing to compare with; "
            f"found {', '.join(contenders)}"
        )
    plain = contenders[PLAIN]
    expected = _keys(plain)
    for contender in contenders.values():
        if contender.first.baseline not in contenders:
            raise SpectrainError(
                f"sampler {sampler_key}: {contender.name!r} is to be compared with {contender.first.baseline!r}, which "
                f"has no samples; found {', '.join(contenders)}"
            )
        found = _keys(contender)
        if found != expected:
            name, _, seed, _ = min(found ^ expected)
            raise SpectrainError(
                f"sampler {sampler_key}: {contender.name!r} and plain decoding must answer the same "
                f"conversations; {name!r} (seed {seed}) is only in one; finish or restart the evaluation"
            )
    return [plain, *(c for c in contenders.values() if c is not plain)]


def _keys(contender: Answers) -> set[tuple[str, str, str, str]]:
    keys = contender.keys()
    if len(set(keys)) != len(keys):
        doubled = next(key for key in keys if keys.count(key) > 1)
        raise SpectrainError(
            f"contender {contender.name!r} answered conversation {doubled[0]!r} (seed {doubled[2]}) more "
            f"than once; start the evaluation with an empty samples file"
        )
    return set(keys)


def _sums(sample: Sample) -> dict[str, list[float]]:
    """One answer's entries of every column."""
    depth, rounds = sample.depth, sample.rounds
    counts = RoundCounts.from_rounds(found[:4] for found in rounds)
    clips = [clipped for _, _, _, clipped, _ in rounds]
    nothing = [NOT_RECORDED]
    return {
        "rounds": [counts.rounds],
        "committed": [counts.committed_tokens],
        "new_tokens": [sample.new_tokens],
        "kept": [counts.accepted_tokens],
        "nodes": [sum(nodes for *_, nodes in rounds)],
        "full": [counts.whole.rounds],
        "full_tokens": [counts.whole.committed_tokens],
        **{clip: [clips.count(clip)] for clip in CLIPS},
        **{part: [getattr(sample, f"{part}_s")] for part in PARTS},
        "energy": nothing if sample.energy_j is None else [sample.energy_j],
        "cache_bytes": nothing if sample.cache_bytes is None else [sample.cache_bytes],
        "state_bytes": nothing if sample.state_bytes is None else [sample.state_bytes],
        "reached": _padded(counts.reached, depth),
        "tested": _padded(counts.tested, depth),
        "offered": [sum(found[0] > i for found in rounds) for i in range(depth)],
        **_by_position([committed for _, _, committed, _, _ in rounds]),
        "visited": _flat(sample.visited_alpha, 2 * depth),
        "law": nothing * LAW_BINS if sample.pit is None else _bins(sample.pit),
        "confidence": _flat(sample.confidence, 3 * CONFIDENCE_BINS),
    }


def _bins(places: Mapping[str, float | list[float]]) -> list[float]:
    found = places.get("bins")
    return found if isinstance(found, list) else []


def _padded(counts: list[int], depth: int) -> list[float]:
    return [*counts, *[0] * (depth - len(counts))]


def _flat(rows: list[list[float]] | None, size: int) -> list[float]:
    return [NOT_RECORDED] * size if rows is None else [value for row in rows for value in row]


def _by_position(committed: list[int]) -> dict[str, list[float]]:
    """Rounds and their tokens by the place of the first of them in the answer: 2 is the first that a round gives."""
    starts = np.cumsum([2, *committed])[:-1]
    band = np.searchsorted(POSITION_EDGES, starts)
    size = len(POSITION_EDGES) + 1
    rounds, tokens = np.bincount(band, minlength=size), np.bincount(band, weights=committed, minlength=size)
    return {"band_rounds": rounds.tolist(), "band_tokens": tokens.tolist()}
