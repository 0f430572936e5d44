"""The one exception users are meant to see: what is wrong, what was found, what to do."""

from __future__ import annotations

from collections.abc import Callable


class SpectrainError(ValueError):
    """Bad input, explained. The command line prints the message alone and exits with code 2."""


def told(check: Callable[[], object]) -> list[str]:
    """What a check says, for whoever tells several at once; empty where it has nothing to say."""
    try:
        check()
    except SpectrainError as error:
        return [str(error)]
    return []
