"""Whether a folder can be written into: asked before the work whose result would go there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from spectrain.errors import SpectrainError
from spectrain.files import FULL


def check_writable(key: str, folder: Path | str, *, as_a_whole: bool = False) -> None:
    """SpectrainError where a file lies in the way of ``folder``, OSError where the system lets nobody write there; both
    are named by ``key``. Nothing is left there.

    ``as_a_whole``: it is put in place when it is complete, so that it is the folder around it that has to take it.
    """
    folder = Path(folder)
    start = folder.absolute().parent if as_a_whole else folder.absolute()
    # Not Path.exists(), which raises where a folder above may not be searched.
    there = next(place for place in (start, *start.parents) if os.path.exists(place))
    if not os.path.isdir(there):
        raise SpectrainError(f"{key} {folder}: {there} is a file, expected a folder; choose another place")
    try:
        # Permissions alone do not tell: root has them all, and still no folder of /proc takes a file.
        with tempfile.TemporaryDirectory(prefix=".spectrain.", dir=there):
            pass
    except OSError as error:
        if error.errno in FULL:
            raise
        raise OSError(
            f"{key} {folder}: {there} cannot be written into ({error.strerror}); choose another place"
        ) from error
