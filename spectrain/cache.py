"""Key-value caches of the target and of drafters: ragged lengths, rollback, the gather of an accepted path.

Row b of a cache holds its first ``lengths[b]`` positions at columns 0, 1, 2, ...: position and column are the same, for
every row, whatever its companions' lengths. New positions are written behind that, and what is not kept is overwritten.

The one place that knows how transformers' caches differ between versions: 5.20 and newer name the forward argument
``cache``, older ones ``past_key_values``.

Shapes: B rows of the batch, T new positions, C columns, heads, size of a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from spectrain.errors import SpectrainError

# Layers whose whole state is keys and values by position. A sliding-window layer belongs here because it is given a
# full-length cache and only its mask slides; a recurrent state has overwritten what a rollback would need.
REVERSIBLE_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


def check_reversible(config: PreTrainedConfig) -> None:
    """Refuse, by name, an architecture whose cache cannot be rolled back to an earlier position."""
    text = config.get_text_config(decoder=True)
    recurrent = sorted(set(getattr(text, "layer_types", None) or ()) - REVERSIBLE_LAYERS)
    if recurrent or hasattr(text, "state_size") or hasattr(text, "ssm_cfg"):
        what = f"layers of type {', '.join(recurrent)}" if recurrent else "a recurrent state"
        raise SpectrainError(
            f"model type {text.model_type!r} has {what}: its cache cannot be rolled back after a rejected draft token. "
            "Speculative decoding here needs a target whose layers all keep keys and values by position."
        )


class BufferedLayer(DynamicLayer):
    """Keys and values in buffers with room to spare, so that a step appends in place instead of copying everything.

    ``keys`` and ``values`` are views [B, heads, C, size] of the columns in use. For inference only.
    """

    ROOM = 256  # columns added when a buffer is full

    keys: Tensor
    values: Tensor

    def write(self, keys: Tensor, values: Tensor, start: int | None, columns_BT: Tensor | None, stop: int) -> None:
        """Put [B, heads, T, size] at columns ``start`` on (the same for all rows) or at ``columns_BT``."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
            self._keys, self._values = keys[..., :0, :], values[..., :0, :]
        if stop > self._keys.shape[-2]:
            self._keys, self._values = (_grown(t, stop + self.ROOM) for t in (self._keys, self._values))
        for buffer, new in ((self._keys, keys), (self._values, values)):
            if columns_BT is None:
                buffer[..., start:stop, :] = new
            else:
                buffer.scatter_(2, columns_BT[:, None, :, None].expand_as(new), new)
        self.cut(stop)

    def cut(self, stop: int) -> None:
        self.keys, self.values = self._keys[..., :stop, :], self._values[..., :stop, :]

    def move(self, source_BT: Tensor, destination_BT: Tensor) -> None:
        """Copy columns; all are read before any is written."""
        for buffer in (self._keys, self._values):  # whose sizes may differ
            B, heads, _, size = buffer.shape
            moved = buffer.gather(2, source_BT[:, None, :, None].expand(B, heads, -1, size))
            buffer.scatter_(2, destination_BT[:, None, :, None].expand_as(moved), moved)

    def select(self, rows: Tensor, stop: int) -> None:
        """Keep these rows of the batch, in this order."""
        self._keys, self._values = self._keys[rows], self._values[rows]
        self.cut(stop)


def _grown(filled: Tensor, room: int) -> Tensor:
    buffer = filled.new_empty((*filled.shape[:-2], room, filled.shape[-1]))
    held = filled.shape[-2]
    buffer[..., :held, :] = filled
    buffer[..., held:, :] = 0  # a column nobody wrote is masked, but NaN times 0 would still be NaN
    return buffer


class KeyValueCache(Cache):
    """Keys and values of B requests, each with its own length; any rollback is exact.

    ``lengths`` are on the host: the decoder knows them anyway, once a round.
    """

    def __init__(self, batch: int = 1) -> None:
        super().__init__(layer_class_to_replicate=BufferedLayer)
        self.lengths = [0] * batch
        self._columns_BT: Tensor | None = None

    @property
    def uniform(self) -> bool:
        """Whether all rows have the same length."""
        return min(self.lengths) == max(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.longest

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        return self.longest + int(query_length), 0

    def prepare(self, count: int, device: torch.device) -> None:
        """Choose the columns of the next ``count`` positions once, for all layers."""
        self._columns_BT = None
        if not self.uniform:
            start_B = torch.tensor(self.lengths).to(device, non_blocking=True)
            self._columns_BT = start_B[:, None] + torch.arange(count, device=device)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        while len(self.layers) <= layer_idx:
            self.layers.append(BufferedLayer())
        layer = cast(BufferedLayer, self.layers[layer_idx])
        stop = self.longest + key_states.shape[-2]
        layer.write(key_states, value_states, self.longest, self._columns_BT, stop)
        return layer.keys, layer.values

    def advance(self, count: int) -> None:
        """Count the positions that a forward has written."""
        self.lengths = [length + count for length in self.lengths]

    def rollback(self, lengths: int | Sequence[int]) -> None:
        """Forget every position from ``lengths[b]`` on; the next forward then equals one over what is left.

        Nothing is copied, and nothing stale is ever attended to: what lies behind is masked, then overwritten. Raises
        SpectrainError when a row holds fewer positions.
        """
        wanted = [lengths] * len(self.lengths) if isinstance(lengths, int) else list(lengths)
        for held, length in zip(self.lengths, wanted, strict=True):
            if not 0 <= length <= held:
                raise SpectrainError(f"cannot roll a cache of {held} positions back to {length}; expected 0 to {held}")
        self.lengths = wanted
        self._cut()

    def keep(self, before: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Of the positions written behind ``before``, keep these and no others, in this order.

        ``paths[b]`` are the kept rows of the last forward, ascending, counted from 0.
        """
        if any(path != list(range(len(path))) for path in map(list, paths)):
            device = cast(BufferedLayer, self.layers[0]).keys.device
            width = max(len(path) for path in paths)
            rows = [[*path, *range(len(path), width)] for path in paths]  # what is not kept stays where it is
            before_B1 = torch.tensor(before)[:, None]
            source_BT = (before_B1 + torch.tensor(rows)).to(device)
            destination_BT = (before_B1 + torch.arange(width)).to(device)
            for layer in self._layers:
                layer.move(source_BT, destination_BT)
        self.rollback([start + len(path) for start, path in zip(before, paths, strict=True)])

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows of the batch, in this order."""
        self.lengths = [self.lengths[row] for row in rows]
        for layer in self._layers:
            layer.select(torch.tensor(rows, device=layer.keys.device), self.longest)

    def bytes(self) -> int:
        """Memory of the cached keys and values, in bytes, room to spare not counted."""
        return sum(t.numel() * t.element_size() for layer in self._layers for t in (layer.keys, layer.values))

    @property
    def _layers(self) -> list[BufferedLayer]:
        return cast(list[BufferedLayer], self.layers)

    def _cut(self) -> None:
        for layer in self._layers:
            layer.cut(self.longest)


def right_padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Rows of unlike lengths as one tensor [B, T] of whole numbers, zeros behind the shorter ones."""
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.long).to(
        device, non_blocking=True
    )


def last_positions(hidden_BTH: Tensor, counts: Sequence[int]) -> Tensor:
    """The state of each row's last real position, [B, 1, H], of rows right-padded to one length."""
    if min(counts) == hidden_BTH.shape[1]:
        return hidden_BTH[:, -1:]
    at_B = torch.tensor(counts).to(hidden_BTH.device, non_blocking=True) - 1
    return hidden_BTH[torch.arange(len(counts), device=hidden_BTH.device), at_B].unsqueeze(1)


def cache_argument(model: nn.Module) -> str:
    """The name under which this version of ``model.forward`` takes its cache."""
    taken = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in taken:
            return name
    raise SpectrainError(
        f"a {type(model).__name__} takes no cache of keys and values by position (a recurrent model?), so a rejected "
        "draft token cannot be rolled back; expected a decoder-only transformer"
    )
