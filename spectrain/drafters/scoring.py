"""A drafter against the target on given rows: acceptance by depth, teacher-forced. Shared by validation and reports.

Shapes: B batch, T positions, N supervised positions of a depth, C of a chunk, D columns of the drafter's head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from spectrain.drafters.base import DepthOutput, TrainableDrafter
from spectrain.errors import SpectrainError
from spectrain.heads import OutputHead, soft_capped
from spectrain.losses import Laws
from spectrain.target import FeatureBatch

BINS = 10
"""Of a confidence from 0 to 1, equally wide; 1 itself is in the last."""


def binned(confidence_N: Tensor, right_N: Tensor) -> list[list[float]]:
    """[Σ confidence, how many, how many right] of the positions in each of the ``BINS`` bins of their confidence."""
    confidence_N = confidence_N.double()
    bin_N = (confidence_N * BINS).long().clamp(0, BINS - 1)
    here_NX = (bin_N[:, None] == torch.arange(BINS, device=bin_N.device)).double()
    values_N3 = torch.stack([confidence_N, torch.ones_like(confidence_N), right_N.double()], 1)
    return [[total, int(count), int(right)] for total, count, right in (here_NX.T @ values_N3).tolist()]


def added(left: Any, right: Any) -> Any:
    """Sums of numbers, or of lists of such sums, place by place."""
    if isinstance(left, list):
        return [added(a, b) for a, b in zip(left, right, strict=True)]
    return left + right


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

    ``confidence[d]`` is ``binned``: the drafter's largest probability at T=1, and whether its greedy token is the
    target's. ``in_draft_vocabulary`` counts, of the positions that have a depth 0, those whose greedy token of the
    target the drafter can say at all, and those positions.

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
    confidence: list[list[list[float]]] = field(default_factory=list)
    in_draft_vocabulary: list[int] = field(default_factory=list)

    @classmethod
    def recorded(cls, record: Mapping[str, Any]) -> DepthScores:
        """Scores as a line of JSON has them beside other keys; SpectrainError names one that it lacks."""
        missing = next((name for name in cls.__dataclass_fields__ if name not in record), None)
        if missing is not None:
            raise SpectrainError(f"teacher-forced scores have no {missing!r}; measure again with this version")
        return cls(**{name: record[name] for name in cls.__dataclass_fields__})

    def __add__(self, other: DepthScores) -> DepthScores:
        if not self.positions:
            return other
        if not other.positions:
            return self
        names = self.__dataclass_fields__
        return DepthScores(**{name: added(getattr(self, name), getattr(other, name)) for name in names})

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
    held = output.held_to(batch)
    head = head.columns(output.columns_D)
    scores = DepthScores()
    alive_BT = output.depths[0].mask_BT
    accepted_BT = torch.zeros_like(alive_BT, dtype=torch.long)
    scores.started = int(alive_BT.sum())
    scores.in_draft_vocabulary = _covered(held, output.depths[0], output.columns_D)
    for depth in output.depths:
        alpha, right_BT, confidence = _score_depth(held, depth, head, output.columns_D, chunk)
        scores.confidence.append(confidence)
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
                 chunk: int) -> tuple[float, Tensor, list[list[float]]]:  # fmt: skip
    """Sum of acceptance probabilities at T=1, where the greedy draft token equals the target's, and how sure of it the
    drafter was."""
    row_N, at_N = depth.mask_BT.nonzero(as_tuple=True)
    place_N, greedy_X, device = _places(depth), batch.greedy_BT.flatten(), depth.hidden_BTH.device
    alpha, right_BT = torch.zeros((), device=device), torch.zeros_like(depth.mask_BT)
    confidence_N = torch.zeros(len(place_N), device=device)
    for rows, laws in laws_by_chunk(batch, depth, head, chunk):
        column_C = laws.z_ND.argmax(-1)
        alpha += laws.acceptance.sum()
        confidence_N[rows] = laws.q.gather(-1, column_C[:, None]).squeeze(-1)
        best_C = column_C if columns_D is None else columns_D[column_C]
        right_BT[row_N[rows], at_N[rows]] = best_C == greedy_X[place_N[rows]]
    return float(alpha), right_BT, binned(confidence_N, right_BT[row_N, at_N])


def laws_by_chunk(
    batch: FeatureBatch, depth: DepthOutput, head: OutputHead, chunk: int
) -> Iterator[tuple[slice, Laws]]:
    """The drafter's law and the target's at a depth's supervised positions, ``chunk`` at a time; ``head`` is the
    target's, cut to the drafter's columns where only those are asked for."""
    hidden_NH = depth.hidden_BTH[depth.mask_BT].to(depth.head_DH.dtype)  # a borrowed head has the target's
    log_p = teacher_law(batch, head, _places(depth))
    for start in range(0, len(hidden_NH), chunk):
        rows = slice(start, start + chunk)
        yield rows, Laws(soft_capped((hidden_NH[rows] @ depth.head_DH.T).float(), depth.cap), log_p(rows))


@contextmanager
def evaluating(drafter: TrainableDrafter) -> Iterator[None]:
    """The drafter as it decodes, in the middle of its training."""
    training = drafter.training
    drafter.eval()
    try:
        yield
    finally:
        drafter.train(training)


def _places(depth: DepthOutput) -> Tensor:
    """Where the target's law of each supervised position's token stands, counted through the batch."""
    row_N, at_N = depth.mask_BT.nonzero(as_tuple=True)
    return row_N * depth.mask_BT.shape[1] + at_N + depth.shift - 1


def _covered(batch: FeatureBatch, depth: DepthOutput, columns_D: Tensor | None) -> list[int]:
    """How many of the target's greedy tokens at this depth the drafter has a column for, and of how many."""
    greedy_N = batch.greedy_BT.flatten()[_places(depth)]
    return [len(greedy_N) if columns_D is None else int(torch.isin(greedy_N, columns_D).sum()), len(greedy_N)]


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
