"""Reduced draft vocabularies: which target ids a drafter's head can name, and the offset form that servers read.

Shapes: D draft vocabulary, C another one, V target vocabulary, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor


def draft_vocabulary(counts_V: Tensor, size: int, tokenizer_size: int) -> Tensor:
    """Target ids [D], ascending: the ``size`` most frequent answer tokens, ties and unseen ids lowest id first; all
    ids where there are no more.

    ``counts_V`` counts answer tokens of the training rows; ids at ``tokenizer_size`` or above do not exist.
    """
    counts = torch.zeros(tokenizer_size, dtype=torch.long)
    seen = counts_V[:tokenizer_size].cpu()
    counts[: len(seen)] = seen
    by_frequency = torch.sort(counts, descending=True, stable=True).indices
    return by_frequency[:size].sort().values


def target_ids(d2t_D: Tensor) -> Tensor:
    """Column -> target id from the stored offsets: target_id = column + d2t[column]."""
    return torch.arange(d2t_D.numel(), device=d2t_D.device) + d2t_D


@torch.no_grad()
def remapped_rows(old_CH: Tensor, ids_C: Tensor, head_VH: Tensor, ids_D: Tensor) -> tuple[Tensor, int]:
    """Rows [D, H] of a head for the target ids ``ids_D``, and how many of those ids are new.

    Rows of ids that are also in ``ids_C`` (ascending) come from ``old_CH``, the head of that vocabulary; the others
    from the target's head.
    """
    ids_C, wanted_D = ids_C.to(head_VH.device), ids_D.to(head_VH.device)
    place_D = torch.searchsorted(ids_C, wanted_D).clamp(max=len(ids_C) - 1)
    known_D = ids_C[place_D] == wanted_D
    rows_DH = head_VH[wanted_D].to(old_CH.dtype)
    rows_DH[known_D] = old_CH.to(head_VH.device)[place_D[known_D]]
    return rows_DH, int((~known_D).sum())
