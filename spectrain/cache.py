"""Key-value caches of the target and of drafters: make one, ask its length, roll it back, drop finished rows.

The one place that knows how transformers' caches differ between versions: 5.20 and newer name the forward argument
``cache``, older ones ``past_key_values``.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig, PreTrainedModel
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

    ``keys`` and ``values`` are views [B, heads, length, size] of the filled part. For inference only.
    """

    ROOM = 256  # positions added when a buffer is full

    keys: Tensor
    values: Tensor

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]
            self._keys, self._values = self.keys, self.values
        start = self.keys.shape[-2]
        stop = start + key_states.shape[-2]
        if stop > self._keys.shape[-2]:
            self._keys, self._values = (_grown(t, stop + self.ROOM) for t in (self.keys, self.values))
        self._keys[..., start:stop, :] = key_states
        self._values[..., start:stop, :] = value_states
        self.keys, self.values = self._keys[..., :stop, :], self._values[..., :stop, :]
        return self.keys, self.values

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order."""
        self._keys, self._values = self._keys[rows], self._values[rows]
        length = self.keys.shape[-2]
        self.keys, self.values = self._keys[..., :length, :], self._values[..., :length, :]


def _grown(filled: Tensor, room: int) -> Tensor:
    buffer = filled.new_empty((*filled.shape[:-2], room, filled.shape[-1]))
    buffer[..., : filled.shape[-2], :] = filled
    return buffer


def new_cache(config: PreTrainedConfig) -> Cache:
    """An empty cache that keeps every position of every layer, so that any rollback is exact."""
    check_reversible(config)
    return Cache(layer_class_to_replicate=BufferedLayer)


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


@torch.inference_mode()
def check_rollback(model: PreTrainedModel) -> None:
    """Refuse, by name, a model that does not go on from a rolled-back cache as from a recomputation.

    Configs do not always tell: this catches states kept outside the cache and attention that is not causal.
    """
    if getattr(model, "_is_stateful", False):
        raise SpectrainError(
            f"a {type(model).__name__} carries a recurrent state, which cannot be rolled back after a rejected draft "
            "token. Speculative decoding here needs a target whose layers all keep keys and values by position."
        )
    body, name = model.base_model, cache_argument(model.base_model)
    ids_1T = torch.arange(4, device=model.device).remainder(model.config.get_text_config().vocab_size)[None]
    cache = new_cache(model.config)
    body(input_ids=ids_1T[:, [0, 1, 3]], use_cache=True, **{name: cache})  # the third token is then rejected
    rollback(cache, min(2, cached_length(cache)))
    after = body(input_ids=ids_1T[:, 2:], use_cache=True, **{name: cache}).last_hidden_state
    whole = body(input_ids=ids_1T, use_cache=False).last_hidden_state[:, 2:]
    # Rounding stays near eps, a stale or missing state near 1; many layers compute their norms in float32.
    tolerance = 2 * max(torch.finfo(whole.dtype).eps, torch.finfo(torch.float32).eps) ** 0.5
    size = float(whole.abs().mean(dtype=torch.float32))
    difference = float((after - whole).abs().mean(dtype=torch.float32))
    if cached_length(cache) != 4 or not difference <= tolerance * size:  # a NaN is refused too
        raise SpectrainError(
            f"a {type(model).__name__} does not go on from a rolled-back cache as from a recomputation (its cache "
            f"holds {cached_length(cache)} of 4 positions, its states of mean size {size:.2g} differ by "
            f"{difference:.2g}): a state outside the cache, or attention that is not causal. Speculative decoding "
            "cannot be exact with it."
        )


def _layers(cache: Cache) -> list[BufferedLayer]:
    return cast(list[BufferedLayer], cache.layers)


def cached_length(cache: Cache) -> int:
    """Number of positions whose keys and values the cache holds."""
    return int(cache.get_seq_length())


def rollback(cache: Cache, length: int) -> None:
    """Forget every position from ``length`` on; the next forward then equals one over the first ``length`` tokens.

    Nothing is copied, and nothing stale is ever attended to: the views end at ``length`` and what lies behind is
    overwritten. Raises SpectrainError when the cache holds fewer positions.
    """
    held = cached_length(cache)
    if not 0 <= length <= held:
        raise SpectrainError(f"cannot roll a cache of {held} positions back to {length}; expected 0 to {held}")
    if length < held:
        for layer in _layers(cache):
            layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]


def select_rows(cache: Cache, rows: Tensor) -> None:
    """Keep these rows of the batch, in this order, in every layer."""
    for layer in _layers(cache):
        layer.select(rows)


def cache_bytes(cache: Cache) -> int:
    """Memory of the cached keys and values, in bytes, room to spare not counted."""
    return sum(t.numel() * t.element_size() for layer in _layers(cache) for t in (layer.keys, layer.values))
