"""Which tokens every node of a round has behind it, for penalties that depend on them.

Shapes: B requests, N proposed nodes, M = N + 1 rows (the pending token first), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class History:
    """Tokens of each request's prompt, and counts of its answer's; rows leave with their requests."""

    def __init__(self, prompts: Sequence[Sequence[int]], vocabulary: int, device: torch.device) -> None:
        self.prompt_BV = torch.zeros(len(prompts), vocabulary, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            self.prompt_BV[row, list(prompt)] = True
        self.prompt_BV = self.prompt_BV.to(device)
        self.answer_BV = torch.zeros(len(prompts), vocabulary, dtype=torch.int32, device=device)

    def add(self, tokens: Sequence[Sequence[int]]) -> None:
        """Newly committed tokens of every request."""
        rows = [row for row, new in enumerate(tokens) for _ in new]
        ids = torch.tensor([token for new in tokens for token in new], dtype=torch.long)
        at = (torch.tensor(rows, dtype=torch.long).to(self.answer_BV.device), ids.to(self.answer_BV.device))
        self.answer_BV.index_put_(at, self.answer_BV.new_ones(()), accumulate=True)

    def select(self, rows: Sequence[int]) -> None:
        self.prompt_BV, self.answer_BV = self.prompt_BV[list(rows)], self.answer_BV[list(rows)]

    def behind(self, tokens_BN: Tensor, sees_BMM: Tensor) -> Tensor:
        """How often each token occurs in the answer up to and with each row [B, M, V]; the pending token and all before
        it are committed."""
        B, N = tokens_BN.shape
        counts_BMV = self.answer_BV.unsqueeze(1).repeat(1, N + 1, 1)
        on_path_BMN = sees_BMM[:, : N + 1, 1 : N + 1].expand(B, -1, -1).to(torch.int32)
        return counts_BMV.scatter_add_(2, tokens_BN.unsqueeze(1).expand(-1, N + 1, -1), on_path_BMN)
