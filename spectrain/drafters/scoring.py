"""A drafter against the target on given rows: acceptance by depth, teacher-forced. Shared by validation and reports.

Shapes: B batch, T positions, N supervised positions of a depth, D columns of the drafter's head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from spectrain.drafters.base import DepthOutput, TrainableDrafter
from spectrain.heads import OutputHead, soft_capped
from spectrain.losses import acceptance
from spectrain.target import FeatureBatch


def teacher_law(batch: FeatureBatch, head: OutputHead, place_N: Tensor) -> Callable[[slice], Tensor]:
    """The target's log-probabilities of the token after each place, on the columns of ``head``, by slice of places.

    ``place_N`` counts positions through the batch (row x T + position). In float32 also under autocast: a law in
    bfloat16 would not sum to one. A place that a slice repeats is computed once.
    """
    state_XH, normaliser_X = batch.hidden_BTH.flatten(0, 1), batch.log_normaliser_BT.flatten()

    def log_p(rows: slice) -> Tensor:
        place_U, back_C = place_N[rows].unique(return_inverse=True)
        with torch.autocast(state_XH.device.type, enabled=False):
            logits_UD = head.logits(state_XH[place_U]).float()
        return (logits_UD - normaliser_X[place_U, None])[back_C]

    return log_p


@dataclass
class DepthScores:
    """Sums over supervised positions for each depth, and how often every depth up to it was right in a row.

    ``survived[d]`` counts positions whose first d+1 greedy draft tokens all equal the target's, among the
    ``started`` positions that have a depth 0; the answer's end counts as the end of the prefix.

    ``rounds`` and ``committed`` are what a decoder would make of the same answers: a round starts where the one before
    ended, so regions that are hard to draft hold more rounds than their share of positions.
    """

    positions: list[int] = field(default_factory=list)
    alpha: list[float] = field(default_factory=list)
    greedy: list[int] = field(default_factory=list)
    survived: list[int] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    started: int = 0
    rounds: int = 0
    committed: int = 0

    def __add__(self, other: DepthScores) -> DepthScores:
        if not self.positions:
            return other
        if not other.positions:
            return self
        joined = {
            name: [a + b for a, b in zip(getattr(self, name), getattr(other, name), strict=True)]
            for name in ("positions", "alpha", "greedy", "survived", "reached")
        }
        return DepthScores(
            **joined,
            started=self.started + other.started,
            rounds=self.rounds + other.rounds,
            committed=self.committed + other.committed,
        )

    def mean_alpha(self) -> list[float]:
        """Acceptance probability at T=1 by depth, on the target's own prefixes."""
        return [a / max(1, n) for a, n in zip(self.alpha, self.positions, strict=True)]

    def conditional(self) -> list[float]:
        """Greedy acceptance of depth d among positions that got that far and still had an answer token to predict."""
        return [s / max(1, r) for s, r in zip(self.survived, self.reached, strict=True)]

    def tokens_per_round(self) -> float:
        """Tokens per round at T=0, the target's own included, with as many draft tokens as depths.

        Equal to the decoder's on answers that the target gave greedily; along sampled answers it is what the drafter
        would get if the target agreed with them.
        """
        return self.committed / max(1, self.rounds)


@torch.no_grad()
def score_batch(drafter: TrainableDrafter, batch: FeatureBatch, head: OutputHead, depths: int | None = None,
                chunk: int = 256) -> DepthScores:  # fmt: skip
    """Score every depth of a training forward against the law of the target's ``head``, over the full vocabulary.

    It is always the whole law, whatever is stored of it; that of the jointly trained target where the drafter has one.
    """
    output = drafter(batch, depths)
    held = batch if output.teacher is None else output.teacher
    head = head.columns(output.columns_D)
    scores = DepthScores()
    alive_BT = output.depths[0].mask_BT
    accepted_BT = torch.zeros_like(alive_BT, dtype=torch.long)
    scores.started = int(alive_BT.sum())
    for depth in output.depths:
        alpha, right_BT = _score_depth(held, depth, head, output.columns_D, chunk)
        scores.positions.append(int(depth.mask_BT.sum()))
        scores.alpha.append(alpha)
        scores.greedy.append(int(right_BT.sum()))
        reached_BT = alive_BT & depth.mask_BT
        alive_BT = reached_BT & right_BT
        scores.reached.append(int(reached_BT.sum()))
        scores.survived.append(int(alive_BT.sum()))
        accepted_BT += alive_BT
    scores.rounds, scores.committed = _walk(batch.answer_BT, accepted_BT, output.depths[0].shift)
    return scores


def _walk(answer_BT: Tensor, accepted_BT: Tensor, shift: int) -> tuple[int, int]:
    """Rounds and committed tokens of decoding the answers: the first token is given, each round starts at the last one.

    ``accepted_BT[t]`` is the accepted prefix of a round whose pending token is t + shift - 1.
    """
    rounds = committed = 0
    for answer, accepted in zip(answer_BT.tolist(), accepted_BT.tolist(), strict=True):
        pending = 0
        while pending < len(answer):
            last = pending + 1 >= len(answer) or not answer[pending + 1]
            if not answer[pending] or last:  # outside an answer, or at its end: nothing to draft
                pending += 1
                continue
            place = pending - shift + 1
            step = 1 + (accepted[place] if place >= 0 else 0)
            stop = next((i for i in range(pending + 1, pending + step + 1) if i == len(answer) or not answer[i]), None)
            rounds += 1
            committed += step if stop is None else stop - pending - 1
            pending += step
    return rounds, committed


def _score_depth(batch: FeatureBatch, depth: DepthOutput, head: OutputHead, columns_D: Tensor | None,
                 chunk: int) -> tuple[float, Tensor]:  # fmt: skip
    """Sum of acceptance probabilities at T=1, and where the greedy draft token equals the target's."""
    row_N, at_N = depth.mask_BT.nonzero(as_tuple=True)
    place_N = row_N * depth.mask_BT.shape[1] + at_N + depth.shift - 1
    log_p, greedy_X = teacher_law(batch, head, place_N), batch.greedy_BT.flatten()
    hidden_NH = depth.hidden_BTH[row_N, at_N].to(depth.head_DH.dtype)  # a borrowed head has the target's
    alpha, right_BT = torch.zeros((), device=hidden_NH.device), torch.zeros_like(depth.mask_BT)
    for start in range(0, hidden_NH.shape[0], chunk):
        rows = slice(start, start + chunk)
        z_CD = soft_capped((hidden_NH[rows] @ depth.head_DH.T).float(), depth.cap)
        alpha += acceptance(z_CD, log_p(rows)).sum()
        best_C = z_CD.argmax(-1) if columns_D is None else columns_D[z_CD.argmax(-1)]
        right_BT[row_N[rows], at_N[rows]] = best_C == greedy_X[place_N[rows]]
    return float(alpha), right_BT


def describe(scores: DepthScores) -> dict[str, Any]:
    """Scores as plain numbers: tokens per round at T=0, and by depth alpha at T=1 and conditional greedy acceptance."""
    return {
        "tokens_per_round": scores.tokens_per_round(),
        "alpha": scores.mean_alpha(),
        "conditional": scores.conditional(),
        "positions": scores.positions,
    }


def summary_line(validation: dict[str, Any]) -> str:
    """One line for a person watching."""

    def by_depth(name: str) -> str:
        return " ".join(f"{value:.2f}" for value in validation[name])

    return (
        f"tokens/round {validation['tokens_per_round']:.2f} (T=0) | "
        f"conditional acceptance {by_depth('conditional')} (T=0) | α {by_depth('alpha')} (T=1)"
    )
