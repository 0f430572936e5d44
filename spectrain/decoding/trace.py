"""What happened in each round of a generation, and how long each part took.

Shapes: B requests of a round, N proposed nodes, M = N + 1 rows (the pending token first), V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spectrain.decoding.stopping import Finish
from spectrain.drafters.base import Proposal

Clip = Finish  # why a round kept less than it could


@dataclass(frozen=True)
class Round:
    """One draft and one verification of a request. ``committed`` counts the tokens kept, with repair or bonus.

    ``proposed`` is how many tokens deep the proposal went, ``nodes`` how many it had (the same, for a chain).
    ``clipped`` says why a round kept fewer tokens than were accepted plus one, or was asked for fewer draft tokens than
    usual: the answer ended, or the budget did. The device seconds are those of the round, which a batch shares.
    """

    proposed: int
    accepted: int
    committed: int
    clipped: Clip | None = None
    nodes: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    total_s: float = 0.0


@dataclass
class Generation:
    """Generated ``tokens`` (the first one comes from the prefill), the rounds, and device seconds.

    ``text`` is the answer without its stop string, where stop strings were given; no other is made here.
    ``prefill_s`` is the target's part of the prefill; ``total_s`` also holds the drafter's. ``state_bytes`` is the most
    that the drafter's state, which a batch shares, held after any of its rounds, and ``cache_bytes`` the most that the
    target's cache of keys and values did, after the prefill or a round. ``lossy``: verification did not keep the
    target's law.
    """

    tokens: list[int] = field(default_factory=list)
    finished: Finish = "budget"
    rounds: list[Round] = field(default_factory=list)
    text: str | None = None
    prefill_s: float = 0.0
    prefill_draft_s: float = 0.0
    total_s: float = 0.0
    state_bytes: int = 0
    cache_bytes: int = 0
    lossy: bool = False

    @property
    def draft_s(self) -> float:
        """Seconds in the drafter."""
        return self.prefill_draft_s + sum(r.draft_s for r in self.rounds)

    @property
    def verify_s(self) -> float:
        """Seconds in the target after the prefill."""
        return sum(r.verify_s for r in self.rounds)

    @property
    def overhead_s(self) -> float:
        """Time outside the models: sampling, verification arithmetic, bookkeeping."""
        return max(0.0, self.total_s - self.prefill_s - self.draft_s - self.verify_s)


@dataclass(frozen=True)
class Judged:
    """A round as an observer sees it: row b is the decoding's request ``requests[b]``.

    ``p_BMV`` is the target's law after the pending token and after each node; ``nodes`` says how many of a row's nodes
    there are, ``paths`` which were kept, and ``committed`` how many tokens came to the answer: fewer than were kept
    where the answer ended among them.
    """

    requests: Sequence[int]
    p_BMV: Tensor
    proposal: Proposal
    nodes: Sequence[int]
    paths: Sequence[Sequence[int]]
    committed: Sequence[int]


Observer = Callable[[Judged], None]


class Clock:
    """Seconds between marks, with the device's queue drained at each, so that work is charged where it arose.

    An accelerator that has to be drained cannot run ahead: ``exact=False`` drains nothing, for serving rather than
    measuring; then only totals mean something.
    """

    def __init__(self, device: torch.device, *, exact: bool = True) -> None:
        self._asynchronous = exact and device.type != "cpu"
        self.last = self._now()

    def _now(self) -> float:
        if self._asynchronous:
            torch.accelerator.synchronize()
        return time.perf_counter()

    def lap(self) -> float:
        """Seconds since the previous lap (or the start)."""
        before, self.last = self.last, self._now()
        return self.last - before
