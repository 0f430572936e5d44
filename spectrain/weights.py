"""Stored models: where they lie, the dtype they are loaded in, and the digest of their weights, for which no model is
loaded."""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import snapshot_download

from spectrain.errors import SpectrainError
from spectrain.fetching import refused
from spectrain.files import json_digest

if TYPE_CHECKING:
    import torch

OWN_TARGET = "target"
"""Folder of a bundle that holds the target, where that was trained together with the drafter."""
SHOWN = 2**30  # bytes from which loading takes seconds
MODEL_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]


def resolve_model(
    name: str, revision: str | None = None, *, files: Sequence[str] = tuple(MODEL_FILES), what: str = "target"
) -> tuple[Path, str | None]:
    """Folder and revision of a local folder or a Hub id. Only weights, configs and tokenizer files are fetched.

    ``files``: patterns of what is fetched; ``what`` it is, for errors.
    """
    if Path(name).is_dir():
        return Path(name), None
    check_no_file(name, what)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise SpectrainError(
            f"{what} folder {name!r} does not exist; give a model folder, or a Hub id such as 'org/name'"
        )
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=list(files)))
    except Exception as error:  # the Hub client raises many kinds; the user needs one sentence
        raise SpectrainError(
            f"{what} {name!r} is neither a folder here nor could it be fetched from the Hub "
            f"(revision {revision or 'main'}): {refused(error, name, revision)}"
        ) from error
    return folder, folder.name


def check_no_file(name: str, what: str = "target") -> None:
    """SpectrainError where ``name`` is a file: the Hub would only say that this is no id."""
    if Path(name).is_file():
        raise SpectrainError(
            f"{what} {name!r} is a file, not a folder with a model (config.json, its tokenizer, *.safetensors); "
            "give such a folder, or a Hub id such as 'org/name'"
        )


@contextlib.contextmanager
def loading(size: int) -> Iterator[None]:
    """transformers' bar of the weights it loads only where there is something to wait for, by their bytes."""
    from transformers.utils import logging  # seconds, as torch below

    hidden = size < SHOWN and logging.is_progress_bar_enabled()
    if hidden:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if hidden:
            logging.enable_progress_bar()


def stored_bytes(folder: Path) -> int:
    """Of the weights in a folder."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def floating_dtype(name: str) -> torch.dtype:
    """A floating torch dtype by its name, with or without ``torch.``."""
    import torch  # seconds, which whoever only reads a manifest does without

    name = str(name).removeprefix("torch.")
    kind = getattr(torch, name, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise SpectrainError(f"target.dtype {name!r} is not a torch dtype; use float32, bfloat16 or float16")
    return kind


def weights_digest(folder: Path) -> str:
    """SHA-256 over name, dtype, shape and bytes of every stored tensor, by name: sharding does not matter.

    The safetensors files are memory-mapped, so nothing is held whatever their size.
    """
    entries: dict[str, list[Any]] = {}
    for path in _weight_files(folder):
        for name, *entry in _tensor_digests(path):
            if name in entries:
                raise SpectrainError(f"{path}: tensor {name} is stored in two files of {folder}")
            entries[name] = entry
    return json_digest([[name, *entries[name]] for name in sorted(entries)])


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values() if index.is_file() else ()
    names = sorted(set(shards)) or ["model.safetensors"]
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise SpectrainError(f"{folder}: weight file {name} is missing; weights must be safetensors")
    return [folder / name for name in names]


def _tensor_digests(path: Path) -> Iterator[tuple[str, str, list[int], str]]:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            data = 8 + int.from_bytes(mapped[:8], "little")
            for name, entry in json.loads(mapped[8:data]).items():
                if name != "__metadata__":
                    start, end = (data + offset for offset in entry["data_offsets"])
                    if end > len(mapped):
                        raise ValueError(f"it ends inside tensor {name}")
                    with memoryview(mapped) as view, view[start:end] as part:
                        yield name, entry["dtype"], entry["shape"], hashlib.sha256(part).hexdigest()
    except (ValueError, KeyError) as error:
        raise SpectrainError(f"{path} is not a whole safetensors file: {error}. Fetch it again.") from error
