"""The layers of feature drafters, and attention as training simulates drafting.

Shapes: B batch, T positions, M queried positions of a row, H hidden, size of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, rotate_half

Rotary = tuple[Tensor, Tensor]
KeysValues = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Projections of a draft layer; queries, keys and values read ``width`` values a position."""

    def __init__(self, config: LlamaConfig, width: int) -> None:
        super().__init__()
        self.size = int(config.head_dim or config.hidden_size // config.num_attention_heads)
        inner = config.num_attention_heads * self.size
        outer = int(config.num_key_value_heads or config.num_attention_heads) * self.size
        self.q_proj = nn.Linear(width, inner, bias=False)
        self.k_proj = nn.Linear(width, outer, bias=False)
        self.v_proj = nn.Linear(width, outer, bias=False)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=False)

    def queries(self, x_BTH: Tensor, rotary: Rotary) -> Tensor:
        """Rotated queries [B, heads, T, size]."""
        return self._rotated(self.q_proj, x_BTH, rotary)

    def keys_values(self, x_BTH: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values, [B, kv_heads, T, size]."""
        return self._rotated(self.k_proj, x_BTH, rotary), self._split(self.v_proj(x_BTH))

    def _rotated(self, projection: nn.Linear, x_BTH: Tensor, rotary: Rotary) -> Tensor:
        cos, sin = (part.unsqueeze(1) for part in rotary)
        heads = self._split(projection(x_BTH))
        return heads * cos + rotate_half(heads) * sin

    def _split(self, x_BTH: Tensor) -> Tensor:
        return x_BTH.view(*x_BTH.shape[:-1], -1, self.size).transpose(1, 2)

    def merge(self, heads: Tensor) -> Tensor:
        return self.o_proj(heads.transpose(1, 2).flatten(2))


def depth_attention(q: Tensor, context: KeysValues, own: Sequence[KeysValues], at_BM: Tensor) -> Tensor:
    """Attention of M queries a row, at positions ``at_BM``, at draft depth d = len(own).

    Query i sees the depth-0 keys of every position up to its own (``context``, T positions) and, of the depths 1..d,
    its own index only (``own``, M positions each). One softmax spans both; the own-index part is a dot product a
    query, so nothing grows with T x depth. Shapes [B, heads, M, size], keys and values with kv_heads.
    """
    (k_context, v_context), (B, heads, M, size) = context, q.shape
    T = k_context.shape[2]
    seen_BMT = torch.arange(T, device=q.device) <= at_BM.unsqueeze(-1)
    if not own:
        mask = seen_BMT.unsqueeze(1)
        return nn.functional.scaled_dot_product_attention(q, k_context, v_context, attn_mask=mask, enable_gqa=True)
    q = q.view(B, k_context.shape[1], -1, M, size) * size**-0.5
    scores = (q @ k_context.unsqueeze(2).transpose(-1, -2)).masked_fill(~seen_BMT[:, None, None], -torch.inf)
    own_scores = torch.stack([(q * k.unsqueeze(2)).sum(-1) for k, _ in own], dim=-1)
    weights = (
        torch.cat([scores, own_scores], dim=-1)
        .softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))
        .to(q.dtype)
    )
    mixed = weights[..., :T] @ v_context.unsqueeze(2)
    for depth, (_, v) in enumerate(own):
        mixed = mixed + weights[..., T + depth, None] * v.unsqueeze(2)
    return mixed.reshape(B, heads, M, size)


def packed_positions(mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Positions [B, M] where ``mask_BT`` is true, in order, and which of them are real (rows with fewer are padded)."""
    count_B = mask_BT.sum(1)
    M = max(1, int(count_B.max()))  # never none: kernels and reshapes stumble over empty queries
    at_BM = mask_BT.int().argsort(dim=1, descending=True, stable=True)[:, :M]
    return at_BM, torch.arange(M, device=mask_BT.device) < count_B[:, None]


def take_positions(x_BTH: Tensor, at_BM: Tensor) -> Tensor:
    """[B, T, H] at positions [B, M]: [B, M, H]."""
    return x_BTH.gather(1, at_BM.unsqueeze(-1).expand(-1, -1, x_BTH.shape[-1]))


class DraftLayer(nn.Module):
    """A Llama layer from its attention on, which reads ``width`` values a position; ``norms`` are for what it reads."""

    post_attention_layernorm: LlamaRMSNorm

    def __init__(self, config: LlamaConfig, width: int, norms: Sequence[str] = ()) -> None:
        super().__init__()
        for name in (*norms, "post_attention_layernorm"):
            self.add_module(name, LlamaRMSNorm(config.hidden_size, config.rms_norm_eps))
        self.self_attn = Attention(config, width)
        self.mlp = LlamaMLP(config)

    def finish(self, residual_BTH: Tensor, attended: Tensor) -> Tensor:
        residual_BTH = residual_BTH + self.self_attn.merge(attended)
        return residual_BTH + self.mlp(self.post_attention_layernorm(residual_BTH))


class WideDraftLayer(DraftLayer):
    """The layer of EAGLE-3: its attention reads embedding and feature, normed, side by side; the residual is the
    feature."""

    input_layernorm: LlamaRMSNorm
    hidden_norm: LlamaRMSNorm

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, 2 * config.hidden_size, ("input_layernorm", "hidden_norm"))

    def attention_input(self, embedded_BTH: Tensor, hidden_BTH: Tensor) -> Tensor:
        return torch.cat([self.input_layernorm(embedded_BTH), self.hidden_norm(hidden_BTH)], dim=-1)
