"""Atomic writes: a file or folder appears whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

FULL = (errno.ENOSPC, errno.EDQUOT)  # a full disk is no wrong place
WRITING = "while writing "  # a note on an error, of the file or folder that is not complete
T = TypeVar("T")


def _begin(path: Path, make: Callable[..., T]) -> T:
    """What stands for ``path`` until it is complete, made beside it; errors name ``path``, which users know."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return make(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    except OSError as error:
        wrong = f"cannot be written ({error.strerror}); choose another place"
        raise OSError(error.errno, error.strerror if error.errno in FULL else wrong, str(path)) from error


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """An error carries a note of what was to be written: it may name the file that stands for it, or none."""
    try:
        yield
    except Exception as error:
        error.add_note(f"{WRITING}{path}")
        raise


@contextlib.contextmanager
def atomic_file(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; on success it replaces ``path``, on any error it is removed."""
    path = Path(path)
    handle, name = _begin(path, tempfile.mkstemp)
    os.close(handle)
    partial = Path(name)
    try:
        with _naming(path):
            yield partial
            _settle(partial)
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: Path | str) -> Iterator[Path]:
    """Yield an empty temporary folder beside ``path``; on success it takes the place of ``path``.

    An existing folder is set aside first and removed last, so an interruption leaves the old or the new one whole.
    """
    path = Path(path)
    partial = Path(_begin(path, tempfile.mkdtemp))
    try:
        with _naming(path):
            yield partial
            for file in partial.rglob("*"):
                if file.is_file():
                    _settle(file)
            partial.chmod(0o755)
            replace_folder(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def replace_folder(source: Path, path: Path) -> None:
    """Rename the complete folder ``source`` to ``path``; a folder that was there is back in place if that fails."""
    replaced = source.with_suffix(".replaced")
    if not path.exists():
        os.rename(source, path)
        return
    os.rename(path, replaced)
    try:
        os.rename(source, path)
    except BaseException:
        os.rename(replaced, path)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _settle(path: Path) -> None:
    """On disk for certain, and readable by the server's user: temporary files are born private."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    path.chmod(0o644)


def write_json(path: Path | str, value: Any) -> None:
    """Write ``value`` as indented JSON, atomically. NaN and infinity are refused."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    with atomic_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def whole_lines(path: Path) -> list[str]:
    """The lines of a JSON-lines file that was appended to; one that was cut off in the middle is removed from it."""
    raw = path.read_bytes()
    end = raw.rfind(b"\n") + 1
    if end < len(raw):
        os.truncate(path, end)
    # Not splitlines(): JSON may hold other characters that Python takes for line ends.
    return raw[:end].decode("utf-8").split("\n")[:-1]


def file_digest(path: Path | str) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_digest(value: Any) -> str:
    """SHA-256 of a JSON value in its canonical form (sorted keys, no spaces), in hex."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def json_list_digest(values: Iterable[Any]) -> str:
    """``json_digest`` of a list of these values, which are never all there at once."""
    digest, comma = hashlib.sha256(b"["), ""
    for value in values:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        digest.update((comma + text).encode())
        comma = ","
    digest.update(b"]")
    return digest.hexdigest()


def holds(folder: Path, source: Path) -> bool:
    """Whether every file of ``source`` is in ``folder`` as it is there."""
    names = [path.relative_to(source) for path in source.rglob("*") if path.is_file()]
    return all((folder / n).is_file() and file_digest(folder / n) == file_digest(source / n) for n in names)
