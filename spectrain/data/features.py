"""The target's hidden states of every training row, in sharded safetensors: computed once, read every epoch.

A store is keyed by everything its numbers depend on; an interrupted extraction goes on at the first missing shard.

Shapes: n tokens of a shard, T tokens of a row, H hidden, F = taps x H, K of the likeliest tokens.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from spectrain.attention import context
from spectrain.data.conversations import EncodedRow
from spectrain.errors import SpectrainError
from spectrain.files import atomic_file, file_digest, json_digest, write_json
from spectrain.taps import TAP_CONVENTION
from spectrain.target import Target

INDEX = "index.json"


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
        "rows": json_digest([[row.conversation, row.turn, row.ids, row.mask] for row in rows]),
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
        return FeatureStore(folder, key)
    _check_lengths(rows, target)
    target.tap(key["taps"])
    shards, bar = (
        _plan(rows, shard_tokens),
        tqdm(total=sum(len(r.ids) for r in rows), unit="tok", desc="features", disable=not progress),
    )
    names = []
    for number, members in enumerate(shards):
        path = folder / f"shard-{number:05d}.safetensors"
        digest = json_digest([key, members])  # another shard size puts other rows under the same name
        if not _is_shard_of(path, digest):
            with atomic_file(path) as partial:
                save_file(_shard(rows, members, target, key, bar), partial, metadata={"key": digest})
        else:
            bar.update(sum(len(rows[i].ids) for i in members))
        names.append(
            {
                "file": path.name,
                "rows": members,
                "lengths": [len(rows[i].ids) for i in members],
                "sha256": file_digest(path),
            }
        )
    bar.close()
    write_json(folder / INDEX, {"key": key, "shards": names})
    return FeatureStore(folder, key)


def _check_lengths(rows: Sequence[EncodedRow], target: Target) -> None:
    limit = context(target.config)
    for row in rows:
        if limit is not None and len(row.ids) > limit:
            raise SpectrainError(
                f"conversation {row.conversation!r} has {len(row.ids)} tokens, the target's context is {limit}; "
                "lower data.max_length"
            )


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


def _is_shard_of(path: Path, digest: str) -> bool:
    if not path.exists():
        return False
    try:
        with safe_open(path, "pt") as file:
            found = (file.metadata() or {}).get("key")
    except SafetensorError as error:
        raise SpectrainError(f"feature shard {path} is damaged ({error}); delete the file and run again") from error
    if found != digest:
        raise SpectrainError(
            f"feature shard {path} was made from other rows, another target or other settings; "
            "delete its folder, or choose another output"
        )
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


@torch.inference_mode()
def row_features(batch: Sequence[EncodedRow], target: Target, dtype: torch.dtype,
                 top_k: int | None = None) -> dict[str, list[Tensor]]:  # fmt: skip
    """Per row: ids, answer mask, features, and where the next token is an answer's the law's normaliser, argmax and
    ``top_k`` likeliest tokens: ids (int32) and log-probabilities (float32)."""
    lengths = [len(row.ids) for row in batch]
    ids_BT = torch.zeros(len(batch), max(lengths), dtype=torch.long)
    for i, row in enumerate(batch):
        ids_BT[i, : lengths[i]] = torch.tensor(row.ids)
    # Right padding needs no mask: causal attention never looks at what comes later.
    features = target.forward(ids_BT.to(target.device))
    out: dict[str, list[Tensor]] = defaultdict(list)
    for i, row in enumerate(batch):
        answer_T = torch.tensor(row.mask, dtype=torch.bool)
        hidden_TH = features.hidden_BTH[i, : lengths[i]]
        (wanted,) = answer_T[1:].nonzero(as_tuple=True)
        law = target.head.summary(hidden_TH[wanted.to(target.device)], top_k)
        out["ids"].append(ids_BT[i, : lengths[i]])
        out["answer"].append(answer_T)
        out["hidden"].append(hidden_TH.to(dtype).cpu())
        out["taps"].append(features.taps_BTF[i, : lengths[i]].to(dtype).cpu())
        out["log_normaliser"].append(_at(wanted, law.log_normaliser_N, lengths[i]))
        out["greedy"].append(_at(wanted, law.greedy_N, lengths[i]))
        if law.top_ids_NK is not None and law.top_log_p_NK is not None:
            out["top_ids"].append(_at(wanted, law.top_ids_NK, lengths[i]))
            out["top_log_p"].append(_at(wanted, law.top_log_p_NK, lengths[i]))
    return out


def _at(places: Tensor, values: Tensor, length: int) -> Tensor:
    """Values at their places of a row, zeros elsewhere."""
    row = torch.zeros(length, *values.shape[1:], dtype=values.dtype)
    row[places] = values.cpu()
    return row


class FeatureStore:
    """Rows of features by number, memory-mapped. Opening checks the key and every shard's digest."""

    def __init__(self, folder: Path, key: dict[str, Any]) -> None:
        index = _read_index(folder / INDEX)
        for name, wanted in key.items():
            if index["key"].get(name) != wanted:
                raise SpectrainError(
                    f"feature store {folder} was made with {name} = {index['key'].get(name)!r}, "
                    f"this run has {wanted!r}; delete the folder, or choose another output"
                )
        self.folder, self.key = folder, key
        self._places: dict[int, tuple[str, int, int]] = {}
        for shard in index["shards"]:
            path = folder / shard["file"]
            if not path.exists() or file_digest(path) != shard["sha256"]:
                raise SpectrainError(
                    f"feature shard {path} is {'damaged' if path.exists() else 'missing'}; "
                    f"delete {folder / INDEX} and that shard, and run again: the others are kept"
                )
            start = 0
            for row, length in zip(shard["rows"], shard["lengths"], strict=True):
                self._places[row] = (shard["file"], start, start + length)
                start += length
        self._open: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self._places)

    def length(self, row: int) -> int:
        """Tokens of a row."""
        _, start, stop = self._places[row]
        return stop - start

    def bytes_per_token(self) -> float:
        """Stored bytes per token."""
        size = sum((self.folder / name).stat().st_size for name in {name for name, _, _ in self._places.values()})
        return size / sum(stop - start for _, start, stop in self._places.values())

    def row(self, row: int) -> dict[str, Tensor]:
        """The tensors of one row: ids, answer, hidden [T, H], taps [T, F], log_normaliser, greedy; top_ids and
        top_log_p [T, K] where they are stored."""
        file, where = self._slice(row)
        return {key: file.get_slice(key)[where] for key in file.keys()}  # noqa: SIM118 (not a dict)

    def answer(self, row: int) -> Tensor:
        """The answer mask of one row, bool [T]."""
        file, where = self._slice(row)
        return file.get_slice("answer")[where]

    def _slice(self, row: int) -> tuple[Any, slice]:
        name, start, stop = self._places[row]
        if name not in self._open:
            self._open[name] = safe_open(self.folder / name, "pt").__enter__()
        return self._open[name], slice(start, stop)


def _read_index(path: Path) -> dict[str, Any]:
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        if index.keys() >= {"key", "shards"}:
            return index
        raise ValueError(f"its keys are {sorted(index)}")
    except (ValueError, AttributeError) as error:
        raise SpectrainError(
            f"feature index {path} is damaged ({error}); delete it and run again: whole shards are kept"
        ) from error
