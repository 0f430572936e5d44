"""What a document says in two places: the same, in order, of something that is there. Otherwise the place is named."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from spectrain.errors import SpectrainError
from spectrain.evaluation.leaves import finite

CONTRADICTS = "the document contradicts itself; evaluate again, into the same folder to keep the raw samples"
TOLERANCE = 1e-6  # relative: sums of the same seconds in another order, and differences of them
ESTIMATES = ("value", "rate", "share")  # what an interval may be one of


def same(path: str, found: Any, expected: Any, why: str) -> None:
    """Raise ``SpectrainError`` unless both are the same: numbers but for rounding, whole ones exactly."""
    inexact = (isinstance(found, int | float) and isinstance(expected, float)) or isinstance(found, float)
    if inexact and expected is not None and math.isclose(found, expected, rel_tol=TOLERANCE, abs_tol=1e-9):
        return
    if found != expected:
        raise SpectrainError(f"{path} is {found!r}, but {why} {expected!r}: {CONTRADICTS}")


def at_most(path: str, found: float, limit: float, what: str) -> None:
    if found > limit * (1 + TOLERANCE):
        raise SpectrainError(f"{path} is {found!r}, but {what} {limit!r}, which is less: {CONTRADICTS}")


def above_zero(path: str, found: float) -> None:
    if found <= 0:
        raise SpectrainError(f"{path} leaves {found!r}, expected more than 0: {CONTRADICTS}")


def named_once(names: Iterable[str], path: str) -> list[str]:
    """The names, of which none is there twice."""
    found = list(names)
    double = next((name for name in found if found.count(name) > 1), None)
    if double is not None:
        raise SpectrainError(f"{path}: {double!r} is there twice, expected once: {CONTRADICTS}")
    return found


def known(path: str, name: Any, names: Iterable[Any]) -> None:
    there = list(names)
    if name not in there:
        shown = ", ".join(map(str, there)) or "none"
        raise SpectrainError(f"{path} is {name!r}, which was not measured; found {shown}: {CONTRADICTS}")


def check_values(value: Any, path: str = "") -> None:
    """Every number anywhere is one, and every interval holds its estimate."""
    if isinstance(value, int | float) and not finite(value):
        raise SpectrainError(
            f"{path} is {value if isinstance(value, float) else 'too large'}, expected a finite number"
        )
    if isinstance(value, dict):
        for key, item in value.items():
            check_values(item, f"{path}.{key}".removeprefix("."))
        if "low" in value and "high" in value:
            _check_interval(value, path)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            check_values(item, f"{path}[{index}]")


def _check_interval(found: dict[str, Any], path: str) -> None:
    low, high = found["low"], found["high"]
    estimate = next((found[key] for key in ESTIMATES if key in found), low)
    known_all = [value is not None for value in (estimate, low, high)]
    if known_all[1] != known_all[2] or (known_all[1] and not known_all[0]):
        raise SpectrainError(f"{path} is {found!r}, expected an interval with both ends or with none: {CONTRADICTS}")
    if all(known_all) and not (_in_order(low, estimate) and _in_order(estimate, high)):
        raise SpectrainError(f"{path} is {found!r}: the interval from low to high does not hold it; {CONTRADICTS}")


def _in_order(lower: float, upper: float) -> bool:
    return lower <= upper or math.isclose(lower, upper, rel_tol=TOLERANCE, abs_tol=1e-9)
