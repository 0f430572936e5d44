"""Digests of a store's files, remembered: gigabytes are read again only where something changed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from spectrain.files import file_digest

VERIFIED = "verified.jsonl"
SHOWN = 1 << 30  # bytes; reading so much takes long enough for a progress bar


class Digests:
    """SHA-256 of the files of a folder, kept beside them with the size and time of change that they had."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / VERIFIED
        self._known: dict[str, tuple[int, int, str]] = {}
        for line in self._file.read_bytes().splitlines() if self._file.exists() else ():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a line cut off: its file is read again
                entry = json.loads(line)
                self._known[entry["file"]] = (entry["mtime_ns"], entry["size"], entry["sha256"])

    def last(self, name: str) -> str | None:
        """What the file of this name was when it was last found right."""
        return self._known[name][2] if name in self._known else None

    def is_fresh(self, path: Path) -> bool:
        """Whether a file is there as it was when it was last found right."""
        return path.exists() and self._known.get(path.name, ())[:2] == _stamp(path)

    def of(self, path: Path, wanted: str | None = None) -> str:
        """The digest of a file: the remembered one where the file did not change. One that is not ``wanted`` is not
        remembered."""
        stamp = _stamp(path)
        if self._known.get(path.name, ())[:2] == stamp:
            return self._known[path.name][2]
        digest = file_digest(path)
        if wanted in (None, digest):
            self._known[path.name] = (*stamp, digest)
            entry = {"file": path.name, "mtime_ns": stamp[0], "size": stamp[1], "sha256": digest}
            # Where the folder cannot be written to, the file is read again the next time.
            with contextlib.suppress(OSError), self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        return digest

    def wrong(self, wanted: Iterable[tuple[Path, str]], progress: bool = True) -> Path | None:
        """The first of these files that is missing or has another digest than the one beside it; None if none is."""
        files = list(wanted)
        to_read = sum(path.stat().st_size for path, _ in files if path.exists() and not self.is_fresh(path))
        hidden = not progress or to_read < SHOWN
        with tqdm(total=to_read, desc="checking features", unit="B", unit_scale=True, disable=hidden) as bar:
            for path, digest in files:
                fresh = self.is_fresh(path)
                if not path.exists() or self.of(path, digest) != digest:
                    return path
                bar.update(0 if fresh else path.stat().st_size)
        return None


def _stamp(path: Path) -> tuple[Any, ...]:
    found = path.stat()
    return found.st_mtime_ns, found.st_size
