"""The target's hidden states of every training row, in sharded safetensors: computed once, read every epoch.

A store is keyed by everything its numbers depend on; an interrupted extraction goes on at the first missing shard.
``feature_rows`` says what is stored, and has the kind of rows that nothing is stored of.

Shapes: T tokens of a row, H hidden, F = taps x H, K of the likeliest tokens.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from spectrain.data.conversations import EncodedRow
from spectrain.data.feature_rows import check_lengths, padded, row_features
from spectrain.data.shards import Digests
from spectrain.errors import SpectrainError
from spectrain.files import atomic_file, json_digest, json_list_digest, write_json
from spectrain.settings import FEATURES
from spectrain.taps import TAP_CONVENTION
from spectrain.target import FeatureBatch, Target

INDEX = "index.json"
REPORT = "extraction.json"
STALE = 3600  # seconds; a shard is written in far less
OPEN_SHARDS = 8  # mapped at once; rows of a batch are of like length, and such rows share a shard


def store_key(rows: Sequence[EncodedRow], target: Target, model_digest: str, taps: Sequence[int], dtype: str,
              top_k: int | None = None) -> dict[str, Any]:  # fmt: skip
    """Everything the stored numbers depend on; two stores agree exactly when their keys do.

    The rows carry the effect of template and tokenizer: they are token ids and masks. With ``top_k`` the likeliest
    tokens of each law are stored too; more than the target has is a SpectrainError.
    """
    if top_k is not None and not 1 <= top_k <= target.tokenizer_size:
        raise SpectrainError(
            f"data.teacher_top_k: found {top_k}, expected 1 to {target.tokenizer_size}, the number of the target's "
            "tokens; lower it, or leave it out for the whole law"
        )
    return {
        "rows": json_list_digest([row.conversation, row.turn, row.ids, row.mask] for row in rows),
        "model": model_digest,
        "tokenizer_size": target.tokenizer_size,
        "compute_dtype": str(target.dtype),
        "store_dtype": dtype,
        "taps": list(taps),
        "tap_convention": TAP_CONVENTION,
        "final_state": "after the final norm",
        "teacher_top_k": top_k,
    }


def extract_features(folder: Path, rows: Sequence[EncodedRow], target: Target, key: dict[str, Any], *,
                     shard_tokens: int = 16384, progress: bool = True) -> FeatureStore:  # fmt: skip
    """Fill ``folder`` with the features of ``rows`` and open it. Shards that are there already are kept.

    A folder made with another key is an error: it belongs to other data or another target.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / INDEX).exists():
        return FeatureStore(folder, key, progress, rows)
    check_lengths(rows, target)
    _clear(folder)
    target.tap(key["taps"])
    shards: list[dict[str, Any]] = []
    digests, seconds, extracted = Digests(folder), 0.0, 0
    total = sum(len(row.ids) for row in rows)
    with tqdm(total=total, unit="tok", desc="features", disable=not progress) as bar:
        for number, members in enumerate(_plan(rows, shard_tokens)):
            path = folder / f"shard-{number:05d}.safetensors"
            digest = json_digest([key, members])  # another shard size puts other rows under the same name
            lengths = [len(rows[i].ids) for i in members]
            if _is_shard_of(path, digest, digests):
                bar.update(sum(lengths))
            else:
                started = time.perf_counter()
                with atomic_file(path) as partial:
                    save_file(_shard(rows, members, target, key, bar), partial, metadata={"key": digest})
                seconds, extracted = seconds + time.perf_counter() - started, extracted + sum(lengths)
            shards.append({"file": path.name, "rows": members, "lengths": lengths, "sha256": digests.of(path)})
    size = sum((folder / shard["file"]).stat().st_size for shard in shards)
    write_json(folder / REPORT, {
        "tokens": total, "bytes": size, "bytes_per_token": size / total, "extracted_tokens": extracted,
        "seconds": seconds, "tokens_per_second": extracted / seconds if extracted else None,
    })  # fmt: skip
    index = {"key": key, "shards": shards}
    write_json(folder / INDEX, {**index, "digest": json_digest(index)})
    return FeatureStore(folder, key, progress, rows)


def _clear(folder: Path) -> None:
    """Remove what a killed extraction left half written. Files that another one may be writing now are left alone."""
    for partial in folder.glob(".*.partial"):
        if time.time() - partial.stat().st_mtime > STALE:
            partial.unlink()


def _plan(rows: Sequence[EncodedRow], shard_tokens: int) -> list[list[int]]:
    """Row numbers by shard; rows of like length lie together so that their forward wastes little padding."""
    shards: list[list[int]] = []
    room = 0
    for i in sorted(range(len(rows)), key=lambda i: (len(rows[i].ids), i)):
        if room < len(rows[i].ids) or not shards:
            shards.append([])
            room = shard_tokens
        shards[-1].append(i)
        room -= len(rows[i].ids)
    return shards


def _is_shard_of(path: Path, digest: str, digests: Digests) -> bool:
    """Whether the shard of an unfinished extraction is there, whole and of these rows."""
    if not path.exists():
        return False
    again = "delete the file and run again"
    try:
        with safe_open(path, "pt") as file:
            found = (file.metadata() or {}).get("key")
    except SafetensorError as error:
        raise SpectrainError(f"feature shard {path} is damaged ({error}); {again}") from error
    if found != digest:
        raise SpectrainError(
            f"feature shard {path} was made from other rows, another target or other settings; "
            "delete its folder, or choose another output"
        )
    last = digests.last(path.name)
    if last is not None and digests.of(path, last) != last:
        raise SpectrainError(f"feature shard {path} is damaged (its digest is not what it was when written); {again}")
    return True


def _shard(rows: Sequence[EncodedRow], members: list[int], target: Target, key: dict[str, Any], bar: Any,
           batch_tokens: int = 2048) -> dict[str, Tensor]:  # fmt: skip
    """Tensors of one shard, rows one after the other."""
    parts: dict[str, list[Tensor]] = defaultdict(list)
    dtype, start = getattr(torch, key["store_dtype"]), 0
    while start < len(members):
        # Ascending lengths: the last row of a batch is its widest.
        stop = start + 1
        while stop < len(members) and len(rows[members[stop]].ids) * (stop + 1 - start) <= batch_tokens:
            stop += 1
        batch = [rows[i] for i in members[start:stop]]
        for name, value in row_features(batch, target, dtype, key.get("teacher_top_k")).items():
            parts[name].extend(value)
        bar.update(sum(len(row.ids) for row in batch))
        start = stop
    return {name: torch.cat(values).contiguous() for name, values in parts.items()}


class FeatureStore:
    """Rows of features by number, memory-mapped: what lies on disk may be far larger than memory. Opening checks the
    key and every shard's digest; files that did not change since they were last read are not read again. ``rows`` are
    those that it was made of, where they are at hand."""

    def __init__(self, folder: Path, key: dict[str, Any], progress: bool = True,
                 rows: Sequence[EncodedRow] = ()) -> None:  # fmt: skip
        index = _read_index(folder / INDEX)
        for name, wanted in key.items():
            if index["key"].get(name) != wanted:
                raise SpectrainError(
                    f"feature store {folder} was made with {FEATURES.get(name, name)} = {index['key'].get(name)!r}, "
                    f"this run has {wanted!r}; delete the folder, or choose another output"
                )
        wrong = Digests(folder).wrong(
            [(folder / shard["file"], shard["sha256"]) for shard in index["shards"]], progress
        )
        if wrong is not None:
            raise SpectrainError(
                f"feature shard {wrong} is {'damaged' if wrong.exists() else 'missing'}; "
                f"delete {folder / INDEX} and that shard, and run again: the others are kept"
            )
        self.folder, self.key = folder, key
        self._conversations = [row.conversation for row in rows]
        self._places = dict(_places(index))
        self._open: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self._places)

    def length(self, row: int) -> int:
        """Tokens of a row."""
        _, start, stop = self._places[row]
        return stop - start

    def conversation(self, row: int) -> str | None:
        """The id of the chat that a row is of; None where the store was opened without its rows."""
        return self._conversations[row] if self._conversations else None

    def bytes_per_token(self) -> float:
        """Stored bytes per token."""
        size = sum((self.folder / name).stat().st_size for name in {name for name, _, _ in self._places.values()})
        return size / sum(stop - start for _, start, stop in self._places.values())

    def describe(self) -> str:
        """Bytes of a token, and how fast the extraction that ended here was, for people."""
        report = self.folder / REPORT
        rate = json.loads(report.read_text(encoding="utf-8"))["tokens_per_second"] if report.exists() else None
        speed = "" if rate is None else f", extracted at {rate:,.0f} tokens a second"
        return f"{self.bytes_per_token():,.0f} bytes a token{speed}"

    def row(self, row: int) -> dict[str, Tensor]:
        """The tensors of one row: ids, answer, hidden [T, H], taps [T, F], log_normaliser, greedy; top_ids and
        top_log_p [T, K] where they are stored."""
        file, where = self._slice(row)
        return {key: file.get_slice(key)[where] for key in file.keys()}  # noqa: SIM118 (not a dict)

    def answer(self, row: int) -> Tensor:
        """The answer mask of one row, bool [T]."""
        file, where = self._slice(row)
        return file.get_slice("answer")[where]

    def batch(self, rows: Sequence[int], device: torch.device | str = "cpu") -> FeatureBatch:
        """Read rows and pad them on the right."""
        parts = [self.row(row) for row in rows]
        return padded({name: [part[name] for part in parts] for name in parts[0]}, device)

    def _slice(self, row: int) -> tuple[Any, slice]:
        name, start, stop = self._places[row]
        file = self._open.pop(name, None) or safe_open(self.folder / name, "pt").__enter__()
        self._open[name] = file  # the latest last
        if len(self._open) > OPEN_SHARDS:
            del self._open[next(iter(self._open))]
        return file, slice(start, stop)


def _places(index: dict[str, Any]) -> Iterator[tuple[int, tuple[str, int, int]]]:
    """Every row: its shard, and where it starts and stops there."""
    for shard in index["shards"]:
        start = 0
        for row, length in zip(shard["rows"], shard["lengths"], strict=True):
            yield row, (shard["file"], start, start + length)
            start += length


def _read_index(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise SpectrainError(f"feature store {path.parent} has no {INDEX}: its extraction did not end; run it again")
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        digest = index.pop("digest", None)  # stores of earlier versions have none
        if not index.keys() >= {"key", "shards"}:
            raise ValueError(f"its keys are {sorted(index)}")
        if digest is not None and digest != json_digest(index):
            raise ValueError("its contents are not those that its digest was taken of")
        if sorted(row for row, _ in _places(index)) != list(range(sum(len(s["rows"]) for s in index["shards"]))):
            raise ValueError("its rows are not numbered from 0 without gaps")
        if not isinstance(index["key"], dict) or not all("sha256" in shard for shard in index["shards"]):
            raise ValueError("its key or a shard's digest is missing")
        return index
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise SpectrainError(
            f"feature index {path} is damaged ({error}); delete it and run again: whole shards are kept"
        ) from error
