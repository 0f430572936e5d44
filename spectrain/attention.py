"""What the rows of a round may attend to: masks and positions for a cached forward, and the probe that they are obeyed.

Shapes: B batch, M rows of a round, C columns of the cache, T tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from spectrain.cache import KeyValueCache, cache_argument
from spectrain.errors import SpectrainError
from spectrain.shapes import Layout


def layer_kinds(config: PreTrainedConfig) -> tuple[str, ...]:
    """The kinds of attention of a model's layers, each once."""
    listed = getattr(config, "layer_types", None)
    if listed:
        return tuple(sorted(set(listed)))
    return ("sliding_attention",) if getattr(config, "sliding_window", None) else ("full_attention",)


def additive(sees: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a row sees, -inf where it does not: what eager attention adds to its scores, and SDPA takes too."""
    return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill_(~sees, -torch.inf)


def context(config: PreTrainedConfig) -> int | None:
    """Positions that a request may fill.

    Rotary embeddings of type longrope turn every key another way as soon as one row of the batch is longer than the
    model was first trained for; what a request gets would then depend on the others, and on how its rounds fell.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else [kind for kind in rope.values() if isinstance(kind, dict)]
    short = [k["original_max_position_embeddings"] for k in kinds if k.get("rope_type") == "longrope"]
    limits = [*short, getattr(config, "max_position_embeddings", None)]
    return min((int(limit) for limit in limits if limit is not None), default=None)


class Masks:
    """Builds what a model's layers take as ``attention_mask`` and ``position_ids`` for rows behind a cache."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.kinds = layer_kinds(config)
        self._context = context(config)
        self._window = int(getattr(config, "sliding_window", None) or 0)
        self._chunk = int(getattr(config, "attention_chunk_size", None) or 0)

    def arguments(self, layout: Layout, cache: KeyValueCache, dtype: torch.dtype) -> dict[str, Any]:
        device = layout.depth_BX.device
        lengths_B = torch.tensor(cache.lengths).to(device, non_blocking=True) - layout.earlier
        depth_BX = layout.depth_BX.expand(len(lengths_B), -1)
        position_BX = lengths_B[:, None] + depth_BX
        position_BM = position_BX[:, layout.earlier :]
        # Companions may draft deeper than a row's context goes. Nodes out there never count, but need a position.
        given_BM = position_BM if self._context is None else position_BM.clamp(max=self._context - 1)
        alone = layout.rows == 1 and cache.uniform and self.kinds == ("full_attention",)
        if layout.chain and (alone or not cache.longest):
            return {"position_ids": given_BM}  # the usual causal mask, or one row that sees everything
        sees_BMC = layout.seen(lengths_B, cache.longest + layout.rows)
        key_BC = torch.arange(sees_BMC.shape[-1], device=device).expand(len(lengths_B), -1)
        key_BC = key_BC.scatter(1, lengths_B[:, None] + torch.arange(depth_BX.shape[1], device=device), position_BX)
        masks = {kind: self._mask(kind, sees_BMC, position_BM, key_BC, dtype) for kind in self.kinds}
        mask: Any = masks if len(masks) > 1 else next(iter(masks.values()))
        return {"position_ids": given_BM, "attention_mask": mask}

    def _mask(self, kind: str, sees_BMC: Tensor, query_BM: Tensor, key_BC: Tensor, dtype: torch.dtype) -> Tensor:
        if kind == "sliding_attention":
            sees_BMC = sees_BMC & (query_BM.unsqueeze(-1) - key_BC.unsqueeze(1) < self._window)
        if kind == "chunked_attention":
            sees_BMC = sees_BMC & (query_BM.unsqueeze(-1) // self._chunk == key_BC.unsqueeze(1) // self._chunk)
        return additive(sees_BMC, dtype).unsqueeze(1)


@torch.inference_mode()
def cached_forward(body: Any, masks: Masks, ids_BT: Tensor, cache: KeyValueCache, layout: Layout | None) -> Tensor:
    """Last hidden state [B, T, H] of new tokens, one after another or as ``layout`` says; the cache then holds them.

    Into an empty cache prompts of unlike lengths go right-padded: no row sees what follows it, so the padding does no
    harm and is rolled back afterwards.
    """
    T = ids_BT.shape[1]
    layout = layout or Layout.row(T, ids_BT.device)
    arguments = masks.arguments(layout, cache, next(body.parameters()).dtype)
    cache.prepare(T, ids_BT.device)
    hidden_BTH = body(input_ids=ids_BT, use_cache=True, **{cache_argument(body): cache}, **arguments).last_hidden_state
    cache.advance(T)
    return hidden_BTH


PROBE_PARENTS = (-1, 0, 0, 1)  # a node with two children, one of which has a child


@torch.inference_mode()
def check_attention(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Refuse, by name, a model that does not obey a tree's mask behind a rolled-back ragged cache.

    Configs do not always tell: this catches states kept outside the cache, attention that is not causal, and positions
    that are not taken from ``position_ids``. Every node must come out as a plain forward of its own path.
    """
    if getattr(model, "_is_stateful", False):
        raise SpectrainError(
            f"a {type(model).__name__} carries a recurrent state, which cannot be rolled back after a rejected draft "
            "token. Speculative decoding here needs a target whose layers all keep keys and values by position."
        )
    body, size = model.base_model, int(config.vocab_size)
    ids = torch.arange(8, device=model.device).remainder(size)
    prompts = [ids[:2], ids[:3]]
    cache, masks = KeyValueCache(2), Masks(config)
    padded_BT = torch.stack([ids[[0, 1, 4]], ids[:3]])
    _probe(model, masks, padded_BT, cache, None)
    if not cache.layers:
        raise SpectrainError(
            f"a {type(model).__name__} keeps nothing in its cache (a recurrent model?), so a rejected draft token "
            "cannot be rolled back; this architecture is not supported as a target"
        )
    cache.rollback([2, 3])
    nodes_BM = ids[3:8].expand(2, -1)
    parents_BN = torch.tensor([PROBE_PARENTS], device=model.device).expand(2, -1)
    got_BMH = _probe(model, masks, nodes_BM, cache, Layout.tree(parents_BN, 3))
    rows = [[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 2, 4]]
    for row, prompt in enumerate(prompts):
        for node, path in enumerate(rows):
            whole = torch.cat([prompt, nodes_BM[row, path]])[None]
            want_H = body(input_ids=whole, use_cache=False).last_hidden_state[0, -1]
            _compare(model, got_BMH[row, node], want_H)


def _probe(model: PreTrainedModel, masks: Masks, ids_BT: Tensor, cache: KeyValueCache, layout: Layout | None) -> Tensor:
    try:
        return cached_forward(model.base_model, masks, ids_BT, cache, layout)
    except SpectrainError:
        raise
    except Exception as error:  # an architecture that does not expect a mask or positions stumbles in its own way
        raise SpectrainError(
            f"a {type(model).__name__} does not run with a mask and positions of every row's own behind a cache "
            f"({type(error).__name__}: {error}); this architecture is not supported as a target"
        ) from error


def _compare(model: PreTrainedModel, got_H: Tensor, want_H: Tensor) -> None:
    # Rounding stays near eps, a stale or missing state near 1; many layers compute their norms in float32.
    tolerance = 2 * max(torch.finfo(want_H.dtype).eps, torch.finfo(torch.float32).eps) ** 0.5
    size = float(want_H.abs().mean(dtype=torch.float32))
    difference = float((got_H - want_H).abs().mean(dtype=torch.float32))
    if not difference <= tolerance * size:  # a NaN is refused too
        raise SpectrainError(
            f"a {type(model).__name__} does not go on from a rolled-back cache as from a recomputation (states of "
            f"mean size {size:.2g} differ by {difference:.2g}): a state outside the cache, positions that cannot be "
            "given, or attention that is not causal. Speculative decoding cannot be exact with it."
        )
