"""The file of answers: finished rows are appended to a partial file, and put in order at the end.

Beside both lies a record of everything that the answers depend on, so that nothing is mixed or taken for another.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from spectrain.data.conversations import Conversation
from spectrain.errors import SpectrainError
from spectrain.files import atomic_file, whole_lines, write_json
from spectrain.identity import first_difference
from spectrain.settings import ANSWERS

Row = dict[str, Any]


def answer_row(conversation: Conversation, message: Row, prompt_ids: Sequence[int], answer_ids: Sequence[int],
               finished: str) -> Row:  # fmt: skip
    """A conversation with ``message`` as its last answer, as chat files have it. ``finished`` says what ended it:
    "eos", or "budget" for one that was cut, whose ids then end without an EOS."""
    row = {**conversation.labels, "messages": [*(m.turn for m in conversation.prompt), message]}
    return row | {"prompt_ids": list(prompt_ids), "answer_ids": list(answer_ids), "finished": finished}


def recorded(output: Path) -> Row:
    """What a finished or a partial file says that it depends on; empty where there is neither."""
    path = _record(output if output.exists() else _partial(output))
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


class AnswerFile:
    """``rows`` by id, as far as they are there. One interrupted at any moment goes on without a row lost or doubled.

    A finished or partial file with another ``header`` is a SpectrainError that names the first difference.
    """

    def __init__(self, output: Path, header: Row) -> None:
        self.output, self._header, self._path = output, header, _partial(output)
        self.rows: dict[str, Row] = {}
        self.finished = output.exists()
        if self.finished:
            _check_header(output, header)
            return
        output.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            _check_header(self._path, header)
            self.rows = {row["id"]: row for row in map(json.loads, whole_lines(self._path))}
        else:
            write_json(_record(self._path), header)
        self._file = self._path.open("a", encoding="utf-8")

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        self._file.close()

    def add(self, rows: Iterable[Row]) -> None:
        """Append rows as whole lines; they are on disk when this returns."""
        new = {row["id"]: row for row in rows}
        self._file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in new.values()))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.rows |= new

    def finish(self, order: Sequence[Conversation]) -> None:
        """Write the output with its record, and drop the partial file."""
        write_json(_record(self.output), self._header)
        with atomic_file(self.output) as path:
            lines = (json.dumps(self.rows[c.id], ensure_ascii=False) + "\n" for c in order)
            path.write_text("".join(lines), encoding="utf-8")
        self._file.close()
        self._path.unlink()
        _record(self._path).unlink()


def _partial(output: Path) -> Path:
    return output.with_name(output.name + ".partial")


def _record(path: Path) -> Path:
    return path.with_suffix(".json")


def _check_header(answers: Path, header: Row) -> None:
    path = _record(answers)
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if found != header:
        where = first_difference(found, header, names=ANSWERS)
        raise SpectrainError(
            f"{answers} was made with other settings, its own against these: {where}; delete it (and {path.name}) to "
            "answer again, or choose another output"
        )
