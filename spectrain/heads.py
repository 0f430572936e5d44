"""Output heads as plain tensors: hidden state in, next-token logits out.

Shapes: `...` any leading dimensions, R rows of them in all, H hidden, D or V columns of the head.
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

    def logits(self, hidden_XH: Tensor) -> Tensor:
        """[..., H] after the final norm -> [..., V] next-token logits; padded vocabulary rows are -inf."""
        logits = head_product(hidden_XH.to(self.weight_VH.dtype), self.weight_VH)
        logits = soft_capped(logits if self.bias_V is None else logits + self.bias_V, self.cap)
        if self.size < logits.shape[-1]:
            logits[..., self.size :] = -torch.inf
        return logits
