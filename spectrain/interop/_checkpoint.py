"""What every checkpoint format shares: strict reading of config.json and safetensors, and exact writing."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from spectrain.errors import SpectrainError

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
_FOREIGN_TENSORS = (WEIGHTS_FILE, "medusa_lm_head.safetensors")
_FOREIGN_PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt")


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json as a dictionary."""
    path = folder / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpectrainError(f"{folder} has no {CONFIG_FILE}: it is not a checkpoint folder") from None
    except ValueError as error:
        raise SpectrainError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise SpectrainError(f"{path} holds a {type(config).__name__}, not an object")
    return config


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of the folder's one safetensors file, on the CPU. Pickles are never opened."""
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        pickles = sorted(found.name for found in folder.glob("*.bin")) + sorted(
            found.name for found in folder.glob("*.pt*")
        )
        hint = f"; {pickles[0]} is a pickle and is not opened: convert it to safetensors" if pickles else ""
        raise SpectrainError(f"{folder} has no {WEIGHTS_FILE}{hint}")
    return _load(path)


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise SpectrainError(f"{path} is not a whole safetensors file: {error}") from error


def foreign_weights(folder: Path) -> Path:
    """The one file with the tensors of a checkpoint made elsewhere; safetensors where there are both."""
    names = [*_FOREIGN_TENSORS, *_FOREIGN_PICKLES]
    found = next((folder / name for name in names if (folder / name).is_file()), None)
    if found is None:
        raise SpectrainError(
            f"{folder} has none of {', '.join(names)}; weights in several files have to be joined first"
        )
    return found


def read_foreign_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint made elsewhere, on the CPU; of a pickle nothing but tensors is read
    (``torch.load`` with ``weights_only``)."""
    path = foreign_weights(folder)
    if path.name in _FOREIGN_TENSORS:
        return _load(path)
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling raises many kinds
        raise SpectrainError(f"{path} holds more than tensors, or is damaged, and is not read: {error}") from error
    if not isinstance(loaded, Mapping):
        raise SpectrainError(f"{path} holds a {type(loaded).__name__}, expected tensors by name")
    other = next((name for name, value in loaded.items() if not isinstance(value, Tensor)), None)
    if other is not None:
        raise SpectrainError(f"{path}: {other} is a {type(loaded[other]).__name__}, expected a tensor")
    return dict(loaded)


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], weights: str = WEIGHTS_FILE
) -> None:
    """Write config.json and the safetensors file ``weights``; each tensor gets a storage of its own."""
    text = json.dumps(config, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
    # A reduced head may be a view of the embedding's storage: clone, or the whole storage would be shared.
    own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_file(own, folder / weights, metadata={"format": "pt"})


def check_keys(found: Mapping[str, Any], required: Collection[str], optional: Collection[str], where: str) -> None:
    """Raise when a required key is missing or a key is unknown, with the nearest known name."""
    if not isinstance(found, Mapping):
        raise SpectrainError(f"{where} is {found!r}, expected an object")
    for key in required:
        if key not in found:
            raise SpectrainError(f"{where}: key {key!r} is missing; found {', '.join(sorted(found))}")
    known = {*required, *optional}
    for key in found:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise SpectrainError(f"{where}: unknown key {key!r} (value {found[key]!r}).{hint}")


def check_sizes(found: Mapping[str, Any], keys: Collection[str], where: str) -> None:
    """Raise on the first of ``keys`` that is there and no whole number of at least 1."""
    for key in keys:
        if key in found and (type(found[key]) is not int or found[key] < 1):
            raise SpectrainError(f"{where}: {key} is {found[key]!r}; expected a whole number of at least 1")


def check_shapes(
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, tuple[int, ...]],
    optional: Collection[str],
    where: str,
) -> None:
    """Raise on the first tensor missing, extra, misshapen or with a value that is no number. ``expected`` includes the
    optional ones."""
    for name in expected:
        if name not in tensors and name not in optional:
            raise SpectrainError(f"{where}: tensor {name} is missing; it should be {list(expected[name])}")
    for name, tensor in tensors.items():
        if name not in expected:
            near = difflib.get_close_matches(name, expected, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise SpectrainError(f"{where}: unknown tensor {name} {list(tensor.shape)}.{hint}")
        if tuple(tensor.shape) != expected[name]:
            raise SpectrainError(
                f"{where}: tensor {name} is {list(tensor.shape)}, but the configuration asks for {list(expected[name])}"
            )
        # Of one byte are quantised kinds, which no format takes.
        checked = tensor.is_floating_point() and tensor.element_size() > 1 and not tensor.is_meta
        if checked and not bool(tensor.isfinite().all()):
            raise SpectrainError(f"{where}: tensor {name} holds values that are not finite: its training diverged")
