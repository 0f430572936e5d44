"""Reads rows from JSON-lines, JSON and Parquet files, each with the place to name when it is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spectrain.data.dropped import Dropped, RowError, leaving_out
from spectrain.errors import SpectrainError

Row = dict[str, Any]


def read_rows(path: Path | str, dropped: Dropped | None = None) -> Iterator[tuple[str, Row]]:
    """Yield ``(place, row)``: place is ``file:line`` for JSON-lines and ``file row i`` (from 1) otherwise.

    ``.jsonl`` holds one object a line; ``.json`` an array of objects, or one object a line; ``.parquet`` a
    table. Blank lines are skipped. Anything broken is a SpectrainError that names the place; with ``dropped``
    broken rows are counted there and left out, and only a file that is broken as a whole is an error.
    """
    path = Path(path)
    if not path.is_file():
        raise SpectrainError(f"{path}: no such file; give the path of a .jsonl, .json or .parquet file")
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
    elif path.suffix == ".json" and _starts_with(path, b"["):
        yield from _array_rows(path, dropped)
    elif path.suffix in (".jsonl", ".json"):
        yield from _line_rows(path, dropped)
    else:
        raise SpectrainError(f"{path}: unknown file type {path.suffix!r}; expected .jsonl, .json or .parquet")


def _starts_with(path: Path, sign: bytes) -> bool:
    """Whether the first thing in a file, after a mark of its encoding and blank lines, is this."""
    with path.open("rb") as file:
        return next((rest.startswith(sign) for line in file if (rest := line.lstrip(b"\xef\xbb\xbf \t\r\n"))), False)


def _line_rows(path: Path, dropped: Dropped | None) -> Iterator[tuple[str, Row]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            row, place = None, f"{path}:{number}"
            if line.strip():
                with leaving_out(dropped, place):
                    row = _row(place, _parse(place, line))
            if row is not None:
                yield place, row


def _array_rows(path: Path, dropped: Dropped | None) -> Iterator[tuple[str, Row]]:
    for number, value in enumerate(_parse(str(path), path.read_bytes()), start=1):
        row, place = None, f"{path} row {number}"
        with leaving_out(dropped, place):
            row = _row(place, value)
        if row is not None:
            yield place, row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Row]]:
    import datasets  # a second to import, and most files are JSON-lines

    try:
        # Streaming reads the file where it lies; otherwise a copy would go to the user's cache.
        table = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
        for number, row in enumerate(table, start=1):
            yield f"{path} row {number}", dict(row)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise SpectrainError(f"{path}: not a readable Parquet file ({error})") from error


def _parse(place: str, raw: bytes) -> Any:
    try:
        return json.loads(raw.decode("utf-8-sig"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise RowError("broken_json", f"{place}: not UTF-8 at byte {error.start}; save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise RowError(
            "broken_json", f"{place}: not valid JSON ({error.msg}, {where}); expected one JSON object"
        ) from error
    except RecursionError:
        raise RowError(
            "broken_json", f"{place}: nested too deeply to be a conversation; expected one JSON object"
        ) from None
    except ValueError as error:
        raise RowError("broken_json", f"{place}: {error}") from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON; write a number or null")


def _row(place: str, value: Any) -> Row:
    if not isinstance(value, dict):
        raise RowError("bad_row", f"{place}: found a JSON {type(value).__name__}, expected an object with messages")
    return value
