"""The files of a folder against a list of their hashes: none missing, extra, changed or linked elsewhere."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath

from spectrain.errors import SpectrainError
from spectrain.files import file_digest

_NOT_OURS = {".git", ".gitattributes", ".cache"}  # left by git and by `hf download`; never read
SUFFIXES = {".safetensors", ".json", ".jinja", ".txt", ".model", ".md"}


def list_files(folder: Path) -> Iterator[str]:
    """Every file below ``folder`` as a relative POSIX path; a linked folder counts as one file."""
    for root, folders, files in os.walk(folder):
        if Path(root) == folder:
            folders[:] = [name for name in folders if name not in _NOT_OURS]
            files = [name for name in files if name not in _NOT_OURS]
        linked = [name for name in folders if (Path(root) / name).is_symlink()]
        for name in files + linked:
            yield (Path(root) / name).relative_to(folder).as_posix()


def check_listing(folder: Path, recorded: Mapping[str, str], list_name: str, allowed: Collection[str]) -> None:
    """Raise on the first file that is not as ``recorded`` (path → SHA-256) in the file ``list_name``.

    ``allowed`` names files that may be there without being recorded.
    """
    present = set(list_files(folder)) - {list_name}
    for name in sorted({*recorded, *present, list_name}):
        _check_path(folder, name, allowed)
        if name in recorded and name not in present:
            raise SpectrainError(f"{folder}: {name} is missing; {list_name} lists it")
        if name not in recorded and name not in allowed and name != list_name:
            raise SpectrainError(f"{folder}: {name} is not listed in {list_name}; remove it")
    for name, digest in recorded.items():
        found = file_digest(folder / name)
        if found != digest:
            raise SpectrainError(
                f"{folder}: {name} was changed after it was written: SHA-256 {found}, {list_name} says {digest}"
            )


def _check_path(folder: Path, name: str, allowed: Collection[str]) -> None:
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or "\\" in name:
        raise SpectrainError(f"{folder}: {name} lies outside the bundle")
    if pure.suffix not in SUFFIXES and name not in allowed:
        raise SpectrainError(f"{folder}: {name} is refused: a bundle holds no pickles, code or other files")
    # In the Hub's cache a snapshot's files are links into the repository's own blobs.
    roots = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":
        roots.append(folder.resolve().parent.parent / "blobs")
    real = (folder / name).resolve()
    if not any(real.is_relative_to(root) for root in roots):
        raise SpectrainError(f"{folder}: {name} is a link to {real}, outside the bundle")
