"""One run at a time in a folder: two would both write the same files.

A file lock of the operating system's, which ends with the process that has it, however that ends. The processes of one
launcher are one run: the first of them has the lock.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from spectrain.distributed import processes
from spectrain.errors import SpectrainError

LOCK_FILE, PID_FILE = ".spectrain.lock", ".spectrain.pid"  # the second is for people: a lock says not whose it is


@contextlib.contextmanager
def working_in(folder: Path | str) -> Iterator[None]:
    """Have ``folder`` to oneself for a while; once inside, entering it again changes nothing.

    SpectrainError, naming the folder and the other process, where another has it. The folder is made if it is not
    there, and nothing of this is left in the end.
    """
    if not processes().is_main_process:
        yield
        return
    folder = Path(folder).absolute()
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK_FILE, timeout=0, is_singleton=True)
    if lock.is_locked:  # by a stage around this one
        yield
        return
    try:
        lock.acquire()
    except Timeout:
        raise SpectrainError(
            f"{folder}: another process{_named(folder)} works in this folder; wait until it has ended, or choose "
            "another output"
        ) from None
    try:
        (folder / PID_FILE).write_text(f"{os.getpid()}\n", encoding="utf-8")
        yield
    finally:
        for file in (PID_FILE, LOCK_FILE):  # before it is released: afterwards they may be another's
            (folder / file).unlink(missing_ok=True)
        lock.release()
        with contextlib.suppress(OSError):  # one that is not empty stays, with those around it
            for place in made:
                place.rmdir()


def _named(folder: Path) -> str:
    with contextlib.suppress(OSError):  # it may have ended just now
        return f" (pid {(folder / PID_FILE).read_text(encoding='utf-8').strip()})"
    return ""
