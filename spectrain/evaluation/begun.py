"""A measurement that goes on: beside its lines lies what it was begun with, and only with the same does it go on."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from spectrain.errors import SpectrainError
from spectrain.files import whole_lines, write_json
from spectrain.identity import first_difference
from spectrain.settings import MEASURED

Line = dict[str, Any]


def go_on(sidecar: Path, key: Mapping[str, Any], *, fresh: bool, clocked: Sequence[str], read: Callable[[], bool],
          lines: Path, remove: Path) -> dict[str, Any]:  # fmt: skip
    """What the measurement in ``lines`` was begun with: ``key``, which is written to ``sidecar`` when it is ``fresh``.

    ``read`` takes in what is there and says whether that is everything. Then nothing more is timed, so those parts of
    the key may differ that matter to the clock alone, ``clocked``. Otherwise another key is an error, which tells to
    remove ``remove``.
    """
    wanted = json.loads(json.dumps(key))
    sidecar.parent.mkdir(parents=True, exist_ok=True)
    if fresh:
        write_json(sidecar, wanted)
    found = json.loads(sidecar.read_text(encoding="utf-8")) if sidecar.exists() else {}
    if found | {name: wanted[name] for name in clocked} == wanted and (read() or found == wanted):
        return dict(found)
    where = first_difference(found, wanted, names=MEASURED)
    raise SpectrainError(
        f"{lines} was measured with other settings, its own against these: {where}; choose another output, or delete "
        f"{remove}"
    )


def lines_by(file: Path, name: Callable[[Line], Hashable]) -> dict[Any, Line]:
    """The lines of a file by what each is about; none when there is no file.

    Raises SpectrainError, with file and line, for one that is no such line or is about the same as another.
    """
    found: dict[Any, Line] = {}
    for number, text in enumerate(whole_lines(file) if file.exists() else (), start=1):
        try:
            line = json.loads(text)
            key = name(line)
        except (ValueError, KeyError, TypeError) as error:
            raise SpectrainError(
                f"{file}:{number}: {text[:60]!r} is no raw line; delete it, or the file, and measure again"
            ) from error
        if key in found:
            raise SpectrainError(f"{file}:{number}: {key!r} is there twice; delete one of its lines, and measure again")
        found[key] = line
    return found
