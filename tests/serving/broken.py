"""Bundles broken on purpose, mostly in ways that a server loads without a word: a comparison has to find each."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spectrain.interop import CONFIG_FILE, WEIGHTS_FILE, format_of

Change = Callable[[dict[str, Tensor]], None]


def _head_rows_permuted(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"].roll(1, dims=0)


def _taps_swapped(tensors: dict[str, Tensor]) -> None:
    first, middle, last = tensors["fc.weight"].chunk(3, dim=1)
    tensors["fc.weight"] = torch.cat([last, middle, first], dim=1)


def _fusion_left_out(tensors: dict[str, Tensor]) -> None:
    del tensors["fc.weight"]


def _halves_swapped(tensors: dict[str, Tensor]) -> None:
    tensors["fc.weight"] = tensors["fc.weight"].roll(tensors["fc.weight"].shape[0], dims=1)


def _heads_swapped(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.startswith("blocks.0.")]:
        other = name.replace("blocks.0.", "blocks.1.", 1)
        tensors[name], tensors[other] = tensors[other], tensors[name]


def _head_left_out(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.startswith("blocks.0.")]:
        del tensors[name]


def _embedding_rows_permuted(tensors: dict[str, Tensor]) -> None:
    largest = max(tensors, key=lambda name: tensors[name].numel())
    tensors[largest] = tensors[largest].roll(1, dims=0)


# By the method that serves them.
BREAKAGES: dict[str, dict[str, Change]] = {
    "eagle3": {
        "head rows permuted": _head_rows_permuted,
        "taps swapped": _taps_swapped,
        "fusion left out": _fusion_left_out,
    },
    "eagle": {"embedding and feature swapped": _halves_swapped},
    "draft_model": {"embedding rows permuted": _embedding_rows_permuted},
    "medusa": {"heads swapped": _heads_swapped, "a head left out": _head_left_out},
}


def break_bundle(bundle: Path, change: Change, folder: Path) -> Path:
    """A copy of a bundle's checkpoint with other weights, at ``folder``; what was there goes."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copyfile(bundle / CONFIG_FILE, folder / CONFIG_FILE)
    tensors = load_file(bundle / WEIGHTS_FILE)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS_FILE)
    return folder


def breakages(bundle: Path) -> dict[str, Change]:
    """What can be broken in a bundle, by name."""
    return BREAKAGES.get(str(format_of(bundle).SERVED.vllm), {})
