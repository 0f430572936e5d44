"""Where raw samples lie while they are measured: lines by conversation, in a file a process, all in one folder.

A conversation's lines are written at once, so after an interruption it is there whole or measured again, by however
many processes. Nothing but the place of its lines is held in memory. Processes follow one another's files: what is
counted and shown, and where measuring may end, is the same for all of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from spectrain.errors import SpectrainError
from spectrain.files import atomic_file

Samples = list[dict[str, Any]]
Observer = Callable[[Samples], None]
Place = tuple[Path, int, int]  # a file, and where in it a conversation's lines begin and end


class Ledger:
    """The lines of ``conversations``, ``size`` each: those of process 0 in ``samples.jsonl``, which in the end has all,
    those of process 1 in ``samples.1.jsonl``.

    ``observe`` is called with the samples of every conversation, in the order of ``conversations``, as soon as all
    before it are there too.
    """

    def __init__(self, folder: Path, conversations: Sequence[str], size: int, *, rank: int = 0,
                 observe: Observer = lambda samples: None) -> None:  # fmt: skip
        self.folder, self.conversations, self.size = folder, conversations, size
        self.whole = folder / "samples.jsonl"
        self.own = folder / f"samples.{rank}.jsonl" if rank else self.whole
        self._observe, self._observed = observe, 0
        self._read: dict[Path, int] = {}
        self._places: dict[str, Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, conversation: str) -> bool:
        return conversation in self._places

    def files(self) -> list[Path]:
        """The files of all processes that are there."""
        return [file for file in (self.whole, *self._parts()) if file.exists()]

    def open(self) -> None:
        """Read what is there; what an interruption has cut off at the end of this process's file is removed."""
        self.own.touch()
        self.whole.touch()  # that there is something to go on with is said by the first file
        self.refresh()
        os.truncate(self.own, self._read[self.own])

    def append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Write the lines of one conversation, on disk for certain."""
        with self.own.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())
        self.refresh()

    def refresh(self) -> None:
        """Read what all processes have written since."""
        for file in self.files():
            self._follow(file)
        while self._observed < len(self.conversations) and self.conversations[self._observed] in self:
            self._observe(list(self._lines(self.conversations[self._observed])))
            self._observed += 1

    def lines(self, count: int | None = None) -> Iterator[dict[str, Any]]:
        """The lines of the first ``count`` conversations (default: all that are there), in their order."""
        for conversation in self.conversations[:count]:
            if conversation in self:
                yield from self._lines(conversation)

    def merge(self, *, write: bool) -> None:
        """One file with everything, in order, in the place of those of the processes. One process has to ``write`` it,
        before the others read it."""
        if write:
            there = sorted(self._places, key=lambda name: self._places[name])
            ordered = [conversation for conversation in self.conversations if conversation in self]
            if self._parts() or there != ordered:
                with atomic_file(self.whole) as partial, partial.open("wb") as out:
                    for conversation in ordered:
                        out.write(_bytes(self._places[conversation]))
            for part in self._parts():
                part.unlink()
        self._read, self._places = {}, {}
        self._follow(self.whole)

    def _parts(self) -> list[Path]:
        return sorted(self.folder.glob("samples.*.jsonl"))

    def _follow(self, file: Path) -> None:
        """Take note of the whole conversations that a file has after the place where reading it ended."""
        start = self._read.setdefault(file, 0)
        with file.open("rb") as lines:
            lines.seek(start)
            raw = lines.read()
        kept = raw[: raw.rfind(b"\n") + 1].split(b"\n")[:-1]  # JSON may hold other characters that are line ends
        for conversation, group in groupby(kept, key=partial(_conversation, file)):
            found = list(group)
            end = start + sum(len(line) + 1 for line in found)
            if len(found) > self.size:
                raise self._twice(conversation, file, file)
            if len(found) == self.size:
                self._note(conversation, (file, start, end))
                self._read[file] = end
            start = end

    def _note(self, conversation: str, place: Place) -> None:
        """Two files may have the same lines: a merge that was interrupted leaves them. Others would be lost."""
        before = self._places.setdefault(conversation, place)
        if before != place and (before[0] == place[0] or _bytes(before) != _bytes(place)):
            raise self._twice(conversation, before[0], place[0])

    def _twice(self, conversation: str, first: Path, second: Path) -> SpectrainError:
        where = f"{second}" if first == second else f"{first} and {second}"
        return SpectrainError(
            f"conversation {conversation!r} is there twice, in {where}, with {self.size} lines each; delete those of "
            "one, or the file, and measure again"
        )

    def _lines(self, conversation: str) -> Iterator[dict[str, Any]]:
        return (json.loads(line) for line in _bytes(self._places[conversation]).split(b"\n")[:-1])


def _bytes(place: Place) -> bytes:
    file, start, end = place
    with file.open("rb") as lines:
        lines.seek(start)
        return lines.read(end - start)


def _conversation(file: Path, line: bytes) -> str:
    try:
        return str(json.loads(line)["conversation"])
    except (ValueError, KeyError, TypeError) as error:
        shown = line[:60].decode("utf-8", "replace")
        raise SpectrainError(
            f"{file}: {shown!r} is no raw sample; delete that line, or the file, and measure again"
        ) from error
