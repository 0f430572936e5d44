"""Held-out conversations: splitting without leaks, and checking that a given split has none."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import floor

import numpy as np

from spectrain.data.conversations import Conversation, content_digest
from spectrain.data.dropped import Dropped
from spectrain.errors import SpectrainError
from spectrain.files import json_digest

WORDS_PER_SHINGLE = 3
# Scripts without spaces count by character, else a whole sentence would be one word.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\s\u3040-\u30ff\u3400-\u9fff]+")


@dataclass(frozen=True)
class NearDuplicate:
    heldout: str  # conversation ids
    train: str
    similarity: float  # Jaccard, of shingles of three words
    places: tuple[str, str] = ("", "")  # where the two rows lie

    def __str__(self) -> str:
        named = [f"{name!r} at {place}" if place else repr(name)
                 for name, place in zip((self.heldout, self.train), self.places, strict=True)]  # fmt: skip
        return f"{named[0]} and {named[1]} ({self.similarity:.2f})"


@dataclass(frozen=True)
class LeakReport:
    """Held-out conversations that resemble one in training, and those that are one."""

    train: int
    heldout: int
    threshold: float
    near_duplicates: tuple[NearDuplicate, ...]  # at most one for each held-out conversation
    leaks: tuple[str, ...] = ()  # pairs that are the same

    def __str__(self) -> str:
        return (
            f"{len(self.near_duplicates)} of {self.heldout} held-out conversations have a near-duplicate "
            f"among {self.train} in training (word-shingle similarity of at least {self.threshold:g})"
        )


@dataclass(frozen=True)
class Split:
    train: list[Conversation]
    heldout: list[Conversation]


def normalised(conversation: Conversation) -> str:
    """The user turns without case, punctuation and spacing: what makes two conversations the same."""
    text = "\n".join(message.content for message in conversation.messages if message.role == "user")
    text = unicodedata.normalize("NFKC", text).casefold()
    # Punctuation, separators and control characters go; symbols such as + and < stay, for they carry meaning.
    words = "".join(" " if unicodedata.category(c)[0] in "PZC" else c for c in text).split()
    return " ".join(words) or text.strip()  # a text of punctuation alone stands for itself


def without_duplicates(conversations: Sequence[Conversation], dropped: Dropped, *, answers: bool) -> list[Conversation]:
    """The first of each that says the same, with or without its last answer; the others are counted."""
    seen: set[str] = set()
    kept = []
    for conversation in conversations:
        said = content_digest(conversation.messages if answers else conversation.prompt, conversation.tools)
        if said in seen:
            dropped.add("duplicate", conversation.place)
        else:
            kept.append(conversation)
        seen.add(said)
    return kept


def conversations_digest(conversations: Sequence[Conversation]) -> str:
    """SHA-256 of a set of conversations, in hex; their order does not matter."""
    return json_digest(sorted(_digest(conversation) for conversation in conversations))


def _digest(conversation: Conversation) -> str:
    messages = [message.turn for message in conversation.messages]
    labels = [conversation.id, conversation.kind, conversation.template, conversation.slots]
    tools = [list(conversation.tools)] if conversation.tools else []
    return json_digest([labels, messages, conversation.prompt_ids, conversation.answer_ids, *tools])


def check_leaks(train: Sequence[Conversation], heldout: Sequence[Conversation], threshold: float = 0.7,
                *, refuse_near: bool = False) -> LeakReport:  # fmt: skip
    """Refuse a split in which a held-out conversation has the user turns, or the template and slots, of one
    in training (SpectrainError naming both); list those that merely resemble one (Jaccard ≥ ``threshold``), or
    refuse those as well.
    """
    report = find_leaks(train, heldout, threshold)
    if report.leaks:
        more = f"; and {len(report.leaks) - 5} more" if len(report.leaks) > 5 else ""
        raise SpectrainError(
            f"held-out conversations are also in training: {'; '.join(report.leaks[:5])}{more}; "
            "remove one of each pair, or leave data.heldout out: then a share of data.train is held out"
        )
    if refuse_near and report.near_duplicates:
        raise SpectrainError(
            f"{report}: {'; '.join(map(str, report.near_duplicates[:5]))}; remove one of each pair, or only have them "
            "reported (data.near_duplicates: report)"
        )
    return report


def find_leaks(train: Sequence[Conversation], heldout: Sequence[Conversation], threshold: float = 0.7) -> LeakReport:
    """What ``check_leaks`` finds, with nothing refused."""
    seen = {key: conversation.named for conversation in reversed(train) for key in _keys(conversation)}
    leaks = [f"{held.named} and {seen[key]} ({_why(key)})" for held in heldout for key in _keys(held) if key in seen]
    near = tuple(_near_duplicates(train, heldout, threshold))
    return LeakReport(len(train), len(heldout), threshold, near, tuple(leaks))


def _keys(conversation: Conversation) -> Iterator[tuple[str, str]]:
    """What two conversations must not share across a split: digests, for texts of all would fill memory once more."""
    yield "text", hashlib.sha256(normalised(conversation).encode()).hexdigest()
    if conversation.template is not None and conversation.slots is not None:
        yield "slots", json_digest([conversation.kind, conversation.template, conversation.slots])


def _why(key: tuple[str, str]) -> str:
    return {"text": "same user turns", "slots": "same template and slots"}[key[0]]


def _shingles(conversation: Conversation) -> frozenset[str]:
    words = _WORD.findall(normalised(conversation))
    last = max(1, len(words) - WORDS_PER_SHINGLE + 1)
    return frozenset(" ".join(words[i : i + WORDS_PER_SHINGLE]) for i in range(last))


def _near_duplicates(
    train: Sequence[Conversation], heldout: Sequence[Conversation], threshold: float
) -> Iterator[NearDuplicate]:
    """For each held-out conversation (H of them) the most similar one in training, where it is similar enough."""
    index: defaultdict[str, list[int]] = defaultdict(list)
    sizes_H = np.zeros(len(heldout), dtype=np.int64)
    # The held-out side is the small one: of the other, one conversation is looked at and forgotten at a time.
    for i, conversation in enumerate(heldout):
        shingles = _shingles(conversation)
        sizes_H[i] = len(shingles)
        for shingle in shingles:
            index[shingle].append(i)
    best_H, most_H = np.zeros(len(heldout), dtype=np.int64), np.zeros(len(heldout))
    for number, conversation in enumerate(train):
        own = _shingles(conversation)
        hits = [i for shingle in own if shingle in index for i in index[shingle]]
        if hits:
            like, shared = np.unique(hits, return_counts=True)
            similarity = shared / (len(own) + sizes_H[like] - shared)
            better = similarity > most_H[like]  # of equals the first
            best_H[like[better]], most_H[like[better]] = number, similarity[better]
    for held, best, most in zip(heldout, best_H.tolist(), most_H.tolist(), strict=True):
        if 0 < most >= threshold:
            yield NearDuplicate(held.id, train[best].id, most, (held.place, train[best].place))


def split_conversations(
    conversations: Sequence[Conversation],
    *,
    heldout_fraction: float | None = None,
    heldout_count: int | None = None,
    seed: int = 0,
) -> Split:
    """Split by conversation, every kind in proportion. Give the held-out part as a fraction or as a count.

    Conversations that share their user turns, or template and slots, stay on one side, and ``check_leaks``
    passes; where such a group does not fit, the held-out part is smaller than asked. The same conversations
    in any order give the same split. A part that would be empty is a SpectrainError.
    """
    wanted = _wanted(len(conversations), heldout_fraction, heldout_count)
    by_kind: defaultdict[str, list[list[Conversation]]] = defaultdict(list)
    for group in _groups(conversations):
        by_kind[min(group, key=lambda conversation: conversation.id).kind].append(group)
    quotas = _shares({kind: sum(map(len, groups)) for kind, groups in by_kind.items()}, wanted)
    heldout: set[str] = set()
    for kind, groups in by_kind.items():
        room = quotas[kind]
        for group in sorted(groups, key=lambda group: _draw(group, seed)):
            if len(group) <= room:
                room -= len(group)
                heldout.update(conversation.id for conversation in group)
    parts = Split(
        [conversation for conversation in conversations if conversation.id not in heldout],
        [conversation for conversation in conversations if conversation.id in heldout],
    )
    if not parts.train or not parts.heldout:
        raise SpectrainError(
            f"{len(conversations)} conversations leave {len(parts.train)} to train on and "
            f"{len(parts.heldout)} held out (asked for {wanted}); both need one, and duplicates stay together"
        )
    return parts


def _wanted(total: int, fraction: float | None, count: int | None) -> int:
    if (fraction is None) == (count is None):
        raise SpectrainError("give either heldout_fraction or heldout_count")
    if fraction is not None and not 0 < fraction < 1:
        raise SpectrainError(f"heldout_fraction is {fraction}, expected a number between 0 and 1")
    wanted = count if count is not None else max(1, round((fraction or 0) * total))
    if not 0 < wanted < total:
        raise SpectrainError(f"cannot hold out {wanted} of {total} conversations; both parts need at least one")
    return wanted


def _groups(conversations: Sequence[Conversation]) -> list[list[Conversation]]:
    """Conversations that share a key, directly or through others (union-find over their positions)."""
    parent = list(range(len(conversations)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    first: dict[tuple[str, str], int] = {}
    for i, conversation in enumerate(conversations):
        for key in _keys(conversation):
            parent[root(i)] = root(first.setdefault(key, i))
    groups: defaultdict[int, list[Conversation]] = defaultdict(list)
    for i, conversation in enumerate(conversations):
        groups[root(i)].append(conversation)
    return list(groups.values())


def _draw(group: Sequence[Conversation], seed: int) -> str:
    """A pseudo-random place in the order, from the ids and the seed alone."""
    name = min(conversation.id for conversation in group)
    return hashlib.sha256(f"{seed}:{name}".encode()).hexdigest()


def _shares(sizes: dict[str, int], wanted: int) -> dict[str, int]:
    """``wanted`` in proportion to ``sizes``, by largest remainder (ties by name)."""
    total = sum(sizes.values())
    exact = {kind: wanted * size / total for kind, size in sizes.items()}
    shares = {kind: floor(share) for kind, share in exact.items()}
    ranked = sorted(exact, key=lambda kind: (shares[kind] - exact[kind], kind))
    for kind in ranked[: wanted - sum(shares.values())]:
        shares[kind] += 1
    return shares
