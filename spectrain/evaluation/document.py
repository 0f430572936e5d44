"""Reading an acceptance document: nobody sees one that lacks a key, holds what cannot be, or contradicts itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spectrain.errors import SpectrainError
from spectrain.evaluation.consistency import check_consistency
from spectrain.evaluation.leaves import check_leaf, no_number
from spectrain.evaluation.shape import DOCUMENT, SCHEMA

AGAIN = "it is of another version: evaluate again, into the same folder to keep the raw samples that it was made from"


def read_document(path: Path | str) -> dict[str, Any]:
    """Read and check an acceptance document.

    Raises:
        SpectrainError: no such file, not JSON, or whatever ``check_document`` finds.
    """
    path = Path(path)
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=no_number)
    except OSError as error:
        raise SpectrainError(f"{path}: cannot be read ({error.strerror}); expected an acceptance document") from error
    except (ValueError, RecursionError) as error:
        raise SpectrainError(f"{path}: not JSON ({error}); expected an acceptance document") from error
    try:
        check_document(document)
    except SpectrainError as error:
        raise SpectrainError(f"{path}: {error}") from error
    return document


def check_document(document: Any) -> None:
    """Raise ``SpectrainError`` unless ``document`` has every key and agrees with itself; it names the place."""
    check_shape(document)
    check_consistency(document)


def check_shape(document: Any) -> None:
    """Raise ``SpectrainError`` unless ``document`` has this schema, and every key with what it may hold."""
    found = document.get("schema") if isinstance(document, dict) else None
    if found != SCHEMA:
        raise SpectrainError(f"schema is {found!r}, expected {SCHEMA!r}; {AGAIN}")
    _check(document, DOCUMENT, "", "")
    if not document["samplers"]:
        raise SpectrainError("samplers is empty; expected at least one measured sampler")


def _check(value: Any, shape: Any, key: str, path: str, *, nullable: bool = False) -> None:
    """``key`` is the name of what stands at ``path``, or of the list or object that it is an item of."""
    if shape is None:
        check_leaf(key, value, path, nullable=nullable)
        return
    if nullable and value is None:
        return
    expected = type(shape)
    if not isinstance(value, expected):
        kind = "an object" if expected is dict else "a list"
        raise SpectrainError(f"{path} is {type(value).__name__}, expected {kind}")
    if isinstance(shape, list):
        for index, item in enumerate(value):
            _check(item, shape[0], key, f"{path}[{index}]")
        return
    for name, inner in shape.items():
        own, optional = name.rstrip("?"), name.endswith("?")
        if own == "*":
            for each, item in value.items():
                _check(item, inner, key, f"{path}.{each}", nullable=optional)
        elif own not in value and not name.endswith("??"):
            raise SpectrainError(f"key {f'{path}.{own}'.removeprefix('.')} is missing; {AGAIN}")
        elif own in value:
            _check(value[own], inner, own, f"{path}.{own}".removeprefix("."), nullable=optional)
