"""Fields of whole numbers that take little room: a Python list has 36 bytes for a token id, and this has 4."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
REQUIRED = object()
IDS, FLAGS = "i", "b"  # signed, of 4 bytes and of 1
LARGEST_ID = 2**31 - 1


class Packed(Generic[T]):
    """A field of a dataclass that is given numbers, keeps them as an array of ``code`` and gives ``kind`` of them back,
    a new one each time. None stays None."""

    def __init__(self, code: str, kind: Callable[[Iterable[int]], T], default: Any = REQUIRED) -> None:
        self._code, self._kind, self._default = code, kind, default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, instance: object, owner: type | None = None) -> T:
        if instance is not None:
            packed = instance.__dict__[self._name]
            given: Any = None if packed is None else self._kind(packed)
            return given
        if self._default is REQUIRED:  # dataclasses ask the class whether the field has a default
            raise AttributeError(self._name)
        default: T = self._default
        return default

    def __set__(self, instance: object, value: T) -> None:
        numbers: Any = value
        instance.__dict__[self._name] = None if numbers is None else array(self._code, numbers)
