"""Rows of the target's features, however they are kept: what all of them offer, and those that nothing is stored of.

Shapes: B rows of a batch, T tokens of a row, H hidden, F = taps x H, K of the likeliest tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from spectrain.attention import context
from spectrain.data.conversations import EncodedRow
from spectrain.errors import SpectrainError
from spectrain.target import FeatureBatch, Target


class FeatureRows(Protocol):
    """Rows by number, from 0. ``key`` is everything their numbers depend on."""

    key: dict[str, Any]

    def __len__(self) -> int: ...

    def length(self, row: int) -> int:
        """Tokens of a row."""
        ...

    def conversation(self, row: int) -> str | None:
        """The id of the chat that a row is of, for messages; None where it is not known."""
        ...

    def answer(self, row: int) -> Tensor:
        """The answer mask of a row, bool [T]; nothing else of the row is read or computed."""
        ...

    def batch(self, rows: Sequence[int], device: torch.device | str = "cpu") -> FeatureBatch:
        """These rows on a device, padded on the right."""
        ...


class LiveFeatures:
    """Features that the target computes whenever a batch is asked for. They are those of a store with the same key but
    for rounding: a store's rows had other companions in their forward."""

    def __init__(self, rows: Sequence[EncodedRow], target: Target, key: Mapping[str, Any]) -> None:
        check_lengths(rows, target)
        self.rows, self.target = rows, target
        # A run does not go on from another's checkpoints where even roundings differ.
        self.key = {**key, "features": "live"}

    def __len__(self) -> int:
        return len(self.rows)

    def length(self, row: int) -> int:
        return len(self.rows[row].ids)

    def conversation(self, row: int) -> str | None:
        return self.rows[row].conversation

    def answer(self, row: int) -> Tensor:
        return torch.tensor(self.rows[row].mask, dtype=torch.bool)

    def batch(self, rows: Sequence[int], device: torch.device | str = "cpu") -> FeatureBatch:
        self.target.tap(self.key["taps"])
        dtype = getattr(torch, self.key["store_dtype"])
        parts = row_features([self.rows[row] for row in rows], self.target, dtype, self.key["teacher_top_k"], device)
        return padded(parts, device)


def check_lengths(rows: Sequence[EncodedRow], target: Target) -> None:
    """A row that the target has no positions for is a SpectrainError."""
    limit = context(target.config)
    for row in rows:
        if limit is not None and len(row.ids) > limit:
            raise SpectrainError(
                f"conversation {row.conversation!r} has {len(row.ids)} tokens, the target's context is {limit}; "
                "lower data.max_length"
            )


@torch.inference_mode()
def row_features(batch: Sequence[EncodedRow], target: Target, dtype: torch.dtype, top_k: int | None = None,
                 place: torch.device | str = "cpu") -> dict[str, list[Tensor]]:  # fmt: skip
    """Per row, on the device ``place``: ids, answer mask, features, and where the next token is an answer's the law's
    normaliser, argmax and ``top_k`` likeliest tokens: ids (int32) and log-probabilities (float32). SpectrainError,
    naming the conversations, where a feature is not finite."""
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
        out["ids"].append(ids_BT[i, : lengths[i]].to(place))
        out["answer"].append(answer_T.to(place))
        out["hidden"].append(hidden_TH.to(dtype).to(place))
        out["taps"].append(features.taps_BTF[i, : lengths[i]].to(dtype).to(place))
        out["log_normaliser"].append(_at(wanted, law.log_normaliser_N, lengths[i], place))
        out["greedy"].append(_at(wanted, law.greedy_N, lengths[i], place))
        if law.top_ids_NK is not None and law.top_log_p_NK is not None:
            out["top_ids"].append(_at(wanted, law.top_ids_NK, lengths[i], place))
            out["top_log_p"].append(_at(wanted, law.top_log_p_NK, lengths[i], place))
    _check_finite(batch, out, target)
    return out


def _check_finite(batch: Sequence[EncodedRow], parts: Mapping[str, Sequence[Tensor]], target: Target) -> None:
    """What is not finite now would be a loss that is none, hours later."""
    finite = [h.isfinite().all() & t.isfinite().all() for h, t in zip(parts["hidden"], parts["taps"], strict=True)]
    bad = [row.conversation for row, good in zip(batch, torch.stack(finite).tolist(), strict=True) if not good]
    if bad:
        raise SpectrainError(
            f"the target's features are not finite for conversation {', '.join(map(repr, bad))}: found NaN or infinity "
            f"with target.dtype {str(target.dtype).removeprefix('torch.')}; try target.dtype=float32, check the "
            "target's weights, or leave these chats out"
        )


def _at(places: Tensor, values: Tensor, length: int, place: torch.device | str) -> Tensor:
    """Values at their places of a row, zeros elsewhere."""
    row = torch.zeros(length, *values.shape[1:], dtype=values.dtype, device=place)
    row[places.to(place)] = values.to(place)
    return row


def padded(parts: Mapping[str, Sequence[Tensor]], device: torch.device | str) -> FeatureBatch:
    """A batch of ``row_features``, padded on the right with zeros: no padding is ever an answer."""

    def pad(name: str) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(list(parts[name]), batch_first=True).to(device)

    return FeatureBatch(
        ids_BT=pad("ids"),
        answer_BT=pad("answer"),
        hidden_BTH=pad("hidden"),
        taps_BTF=pad("taps"),
        log_normaliser_BT=pad("log_normaliser"),
        greedy_BT=pad("greedy"),
        top_ids_BTK=pad("top_ids") if "top_ids" in parts else None,
        top_log_p_BTK=pad("top_log_p") if "top_log_p" in parts else None,
    )


def unsupervised(batch: FeatureBatch) -> FeatureBatch:
    """The batch with nothing in it to learn."""
    return FeatureBatch(**{**vars(batch), "answer_BT": torch.zeros_like(batch.answer_BT)})
