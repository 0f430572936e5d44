"""What the target makes of a proposal: one forward, one verdict, one transfer to the host.

Shapes: B requests, N proposed nodes, M = N + 1 rows (the pending token first), P probes, A probes with answers,
U uniforms, X rows whose logits are asked, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spectrain.cache import KeyValueCache, right_padded
from spectrain.decoding.history import History
from spectrain.decoding.requests import Options
from spectrain.decoding.trace import Clock
from spectrain.decoding.verification import verify
from spectrain.drafters.base import Proposal
from spectrain.errors import SpectrainError
from spectrain.shapes import ABSENT, Layout, Shape
from spectrain.target import Features, Target


@dataclass(frozen=True)
class Outcome:
    """Of each request: kept nodes in order, tokens to commit, nodes proposed and how deep they went.

    ``p_BMV``: the target's laws that decided, where somebody asked for them.
    """

    paths: list[list[int]]
    tokens: list[list[int]]
    nodes: list[int]
    depths: list[int]
    features: Features
    probed: list[list[int]] | None
    p_BMV: Tensor | None
    target_s: float
    other_s: float

    def kept_features(self, rows: Sequence[int]) -> Features:
        """The target's states that these requests' tokens were decided from, right-padded."""
        paths = [[0, *(node + 1 for node in self.paths[row])] for row in rows]
        width = max(len(path) for path in paths)
        hidden, taps = self.features.hidden_BTH, self.features.taps_BTF
        if all(path == list(range(len(path))) for path in paths):
            if len(rows) == len(self.paths):
                return self.features[:width]
            return Features(hidden[list(rows), :width], taps[list(rows), :width])
        at_BT = right_padded(paths, hidden.device)
        row_B1 = torch.tensor(list(rows)).to(hidden.device)[:, None]
        return Features(hidden[row_B1, at_BT], taps[row_B1, at_BT])

    def answers(self, rows: Sequence[int]) -> list[list[int]] | None:
        """The target's most likely tokens after these requests' probes, where there were any."""
        return None if self.probed is None else [self.probed[row] for row in rows]


def evaluate(target: Target, cache: KeyValueCache, options: Options, shape: Shape, pending: Sequence[int],
             produced: Sequence[int], limits: Sequence[int], proposal: Proposal, uniforms_BU: Tensor,
             clock: Clock, history: History | None = None, *, keep_laws: bool = False) -> Outcome:  # fmt: skip
    """Run and judge a round; ``cache`` then holds the pending tokens and the kept nodes.

    ``produced`` counts each answer's tokens so far, ``limits`` how deep its proposal may go. ``keep_laws``: the laws
    stay in memory as long as the outcome does.
    """
    before, N = list(cache.lengths), proposal.tokens_BN.shape[1]
    pending_B1 = torch.tensor(pending)[:, None].to(target.device, non_blocking=True)
    layout, inputs_BT = _placed(proposal, pending_B1, shape.depth)
    features = target.forward(inputs_BT, cache=cache, layout=layout)
    asked_BXH = features.hidden_BTH
    if proposal.probes:
        asked_BXH = torch.cat([asked_BXH[:, : N + 1], asked_BXH[:, -proposal.probes.answers :]], 1)
    logits_BXV = target.logits(asked_BXH)
    logits_BMV, answers_BA = logits_BXV[:, : N + 1], logits_BXV[:, N + 1 :].argmax(-1)
    target_s = clock.lap()

    depth_BM = layout.depth_BX[:, : N + 1].expand(len(before), -1)
    produced_B1 = torch.tensor(produced)[:, None].to(target.device, non_blocking=True)
    behind = None if history is None else (
        history.prompt_BV.unsqueeze(1), history.behind(proposal.tokens_BN, layout.sees_BMX))  # fmt: skip
    p_BMV = options.law(logits_BMV, depth_BM + produced_B1, behind)
    counts_B = _counts(proposal, depth_BM, [min(shape.depth, limit) for limit in limits])
    path_BN, accepted_B, token_B = verify(options.verification, shape, p_BMV, proposal, uniforms_BU, counts_B)
    there_BN = torch.arange(N, device=target.device) < counts_B[:, None]
    if proposal.parents_BN is not None:  # what hangs from an absent node is not there either
        absent_B1N = (proposal.parents_BN == ABSENT).unsqueeze(1)
        there_BN = there_BN & ~(layout.sees_BMX[:, 1 : N + 1, 1 : N + 1] & absent_B1N).any(-1)
    deepest_B = (depth_BM[:, 1:] * there_BN).amax(-1) if N else counts_B
    # A row of p with a NaN has nothing else: the sampler spreads it.
    finite_B = features.hidden_BTH.isfinite().flatten(1).all(1) & p_BMV[..., 0].isfinite().all(1)
    columns = [accepted_B, token_B, there_BN.sum(-1), deepest_B, finite_B]
    host = torch.cat([torch.stack(columns, 1), path_BN, proposal.tokens_BN, answers_BA], 1).tolist()  # the one wait

    check_finite(all(row[4] for row in host), target)
    paths = [row[5 : 5 + row[0]] for row in host]
    tokens = [[*(row[5 + N + node] for node in path), row[1]] for row, path in zip(host, paths, strict=True)]
    probed = [row[5 + 2 * N :] for row in host] if proposal.probes else None
    cache.keep(before, [[0, *(node + 1 for node in path)] for path in paths])
    other_s = clock.lap()
    return Outcome(paths, tokens, [row[2] for row in host], [row[3] for row in host], features, probed,
                   p_BMV if keep_laws else None, target_s, other_s)  # fmt: skip


def _placed(proposal: Proposal, pending_B1: Tensor, depth: int) -> tuple[Layout, Tensor]:
    """The round's rows: the pending token, the proposal, and what is to be evaluated beside it."""
    inputs_BT, parents_BN, probes = [pending_B1, proposal.tokens_BN], proposal.parents_BN, proposal.probes
    if probes is None:
        rows = 1 + proposal.tokens_BN.shape[1]
        layout = Layout.row(rows, pending_B1.device) if parents_BN is None else Layout.tree(parents_BN, depth)
        return layout, torch.cat(inputs_BT, 1)
    if parents_BN is None:
        parents_BN = torch.arange(-1, proposal.tokens_BN.shape[1] - 1, device=pending_B1.device)
        parents_BN = parents_BN.expand(len(pending_B1), -1)
    both_BN = torch.cat([parents_BN, probes.parents_BN], 1)
    return Layout.tree(both_BN, max(depth, probes.depth)), torch.cat([*inputs_BT, probes.tokens_BN], 1)


def _counts(proposal: Proposal, depth_BM: Tensor, limits: Sequence[int]) -> Tensor:
    """How many nodes of each request count: nodes come level by level, so those within its limit are the first."""
    device = depth_BM.device
    limit_B = torch.tensor(limits).to(device, non_blocking=True)
    too_deep_BN = depth_BM[:, 1:] > limit_B[:, None]
    counts_B = (too_deep_BN.cumsum(-1) == 0).sum(-1)  # absent nodes stand at depth 1 wherever they are
    if proposal.counts is not None:
        counts_B = torch.minimum(counts_B, torch.tensor(proposal.counts).to(device, non_blocking=True))
    return counts_B


def check_finite(finite: bool, target: Target) -> None:
    """A NaN would decode to id 0 without a word."""
    if not finite:
        raise SpectrainError(
            f"the target's states or logits are not finite with {target.dtype} and "
            f"{target.config._attn_implementation!r} attention; load it in float32 or bfloat16, or with sdpa attention"
        )
