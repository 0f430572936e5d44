"""Output heads as plain tensors: hidden state in, next-token logits out.

Shapes: `...` any leading dimensions, R rows of them in all, N positions, H hidden, D or V columns of the head, K of the
likeliest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

FEW_ROWS = 8
TALL = 1 << 23  # weights of a head that no CPU cache holds


def head_product(hidden_XH: Tensor, weight_DH: Tensor) -> Tensor:
    """[..., H] -> [..., D], as ``linear`` does it, up to rounding.

    A few rows against a tall float32 head cost a CPU little more than reading the head once, if the head is the left
    factor and there are two rows or more; the other way round 2 or 3 rows take four times as long.
    """
    rows_RH = hidden_XH.reshape(-1, hidden_XH.shape[-1])
    tall = weight_DH.numel() >= TALL and weight_DH.device.type == "cpu" and weight_DH.dtype == torch.float32
    if not tall or not 0 < len(rows_RH) <= FEW_ROWS:
        return nn.functional.linear(hidden_XH, weight_DH)
    pair_RH = rows_RH.repeat(2, 1) if len(rows_RH) == 1 else rows_RH
    product_RD = (weight_DH @ pair_RH.T).T[: len(rows_RH)]
    return product_RD.contiguous().view(*hidden_XH.shape[:-1], -1)


def soft_capped(logits: Tensor, cap: float | None) -> Tensor:
    """Logits kept within +-``cap`` as Gemma-2 does it (2408.00118); None leaves them as they are."""
    return torch.tanh(logits / cap) * cap if cap else logits


@dataclass(frozen=True)
class OutputHead:
    """The target's head as plain tensors, so that its law can be asked on some of its columns.

    ``cap`` is the soft cap of the logits, if the architecture has one; columns from ``size`` on are padding.
    """

    weight_VH: Tensor
    bias_V: Tensor | None
    cap: float | None
    size: int

    def columns(self, columns_D: Tensor | None) -> OutputHead:
        """This head cut to these ids, all of which exist (None: as it is)."""
        if columns_D is None:
            return self
        bias_D = None if self.bias_V is None else self.bias_V[columns_D]
        return OutputHead(self.weight_VH[columns_D], bias_D, self.cap, columns_D.numel())

    def first(self, count: int) -> OutputHead:
        """This head cut to its first columns, which share memory with it (all of them: as it is)."""
        if count == len(self.weight_VH):
            return self
        bias_D = None if self.bias_V is None else self.bias_V[:count]
        return OutputHead(self.weight_VH[:count], bias_D, self.cap, min(self.size, count))

    def folded(self) -> Tensor:
        """The weight alone; with a bias, that is the weight of one more value of the state, which is always 1."""
        if self.bias_V is None:
            return self.weight_VH
        return torch.cat([self.weight_VH, self.bias_V[:, None]], 1)

    def logits(self, hidden_XH: Tensor) -> Tensor:
        """[..., H] after the final norm -> [..., V] next-token logits; padded vocabulary rows are -inf."""
        logits = head_product(hidden_XH.to(self.weight_VH.dtype), self.weight_VH)
        logits = soft_capped(logits if self.bias_V is None else logits + self.bias_V, self.cap)
        if self.size < logits.shape[-1]:
            logits[..., self.size :] = -torch.inf
        return logits

    @torch.no_grad()
    def summary(self, hidden_NH: Tensor, top_k: int | None = None, chunk: int = 256) -> LawSummary:
        """What is kept of the laws of these states, with the logits of ``chunk`` of them held at once; in float32 also
        under autocast. ``top_k`` is at most the number of ids that exist."""
        empty_N = torch.zeros(len(hidden_NH), device=hidden_NH.device)
        normaliser_N, greedy_N = empty_N, empty_N.long()
        likeliest = (
            None if top_k is None else (empty_N[:, None].int().repeat(1, top_k), empty_N[:, None].repeat(1, top_k))
        )
        for start in range(0, len(hidden_NH), chunk):
            rows = slice(start, start + chunk)
            with torch.autocast(hidden_NH.device.type, enabled=False):
                logits_CV = self.logits(hidden_NH[rows].detach()).float()
            normaliser_N[rows], greedy_N[rows] = logits_CV.logsumexp(-1), logits_CV.argmax(-1)
            if likeliest is not None and top_k is not None:
                values_CK, likeliest[0][rows] = logits_CV.topk(top_k, dim=-1)
                likeliest[1][rows] = values_CK - normaliser_N[rows, None]
        return LawSummary(normaliser_N, greedy_N, *(likeliest or (None, None)))


@dataclass(frozen=True)
class LawSummary:
    """Of each law: the logsumexp of its logits over the full vocabulary, its argmax, and where asked for its likeliest
    tokens (int32) with their log-probabilities (float32), falling."""

    log_normaliser_N: Tensor
    greedy_N: Tensor
    top_ids_NK: Tensor | None
    top_log_p_NK: Tensor | None


def with_one(hidden_XH: Tensor, folded_VH: Tensor) -> Tensor:
    """States as a folded head reads them: with a 1 at their end where it has a bias."""
    has_bias = folded_VH.shape[1] > hidden_XH.shape[-1]
    return nn.functional.pad(hidden_XH, (0, 1), value=1.0) if has_bias else hidden_XH


def columns_of(size: int, vocabulary: int, device: torch.device) -> Tensor | None:
    """Target ids of a head's columns that is cut to the ``size`` ids that exist; None where that is all of them."""
    return torch.arange(size, device=device) if size < vocabulary else None
