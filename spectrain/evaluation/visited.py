"""What can be seen of an answer while it is decoded: the states that it goes through, and the energy that it takes.

A state is visited where all draft tokens before it were kept, so a drafter that errs is seen where its errors lead.
On visited states the mean acceptance probability is what the share of accepted tokens estimates, with less noise.

Shapes: X visited states, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

from spectrain.decoding import Judged, Observer
from spectrain.drafters.scoring import BINS, added, binned
from spectrain.evaluation.energy import Meter, energy_counter
from spectrain.exact.sampler import Sampler
from spectrain.exact.verify.chain import acceptance_probability


class Visited:
    """An observer of sampled decoding with chains of ``k`` tokens; it adds up over requests and rounds.

    ``alpha``, by draft position: [Σ acceptance probability, visited states]. A token that was chosen rather than drawn
    is accepted with the target's probability of it. ``confidence``, in the bins of ``scoring.binned``: [Σ probability
    that the drafter gave its token, tested, accepted]; None until a token was drawn.
    """

    def __init__(self, k: int) -> None:
        self.alpha: list[list[float]] = [[0.0, 0] for _ in range(k)]
        self.confidence: list[list[float]] | None = None

    def __call__(self, judged: Judged) -> None:
        tokens_BN, q, device = judged.proposal.tokens_BN, judged.proposal.q, judged.p_BMV.device
        of_rows = zip(judged.paths, judged.nodes, judged.committed, strict=True)
        places = [  # the first that was not kept was tested too; what stands behind an answer's end was not its state
            (row, at, at < len(path))
            for row, (path, nodes, committed) in enumerate(of_rows)
            for at in range(min(len(path) + 1, nodes, committed))
        ]
        if not places:
            return
        row_X, at_X, kept_X = torch.tensor(places, device=device).T
        token_X1 = tokens_BN[row_X, at_X][:, None]
        p_XV = judged.p_BMV[row_X, at_X]
        if q is None:
            alpha_X = p_XV.gather(-1, token_X1).squeeze(-1)
        else:
            q_XV = q[row_X, at_X]
            alpha_X = acceptance_probability(p_XV, q_XV)
            found = binned(q_XV.gather(-1, token_X1).squeeze(-1), kept_X)
            self.confidence = added(self.confidence or [[0.0, 0, 0]] * BINS, found)
        for (_, at, _), alpha in zip(places, alpha_X.tolist(), strict=True):
            self.alpha[at] = [self.alpha[at][0] + alpha, self.alpha[at][1] + 1]


class Watch:
    """Watches one answer, from here to ``end``: visited states of sampled chains of ``k`` tokens, and energy.

    ``observer`` is the decoder's; None where there is nothing to see (T=0, plain decoding, trees). What it does itself
    is in neither the seconds nor the joules.
    """

    def __init__(self, device: torch.device, sampler: Sampler, k: int | None) -> None:
        self._visited = Visited(k) if k and not sampler.greedy else None
        self._meter = Meter(energy_counter(device))
        self._meter.start()

    @property
    def observer(self) -> Observer | None:
        return self._observe if self._visited else None

    def _observe(self, judged: Judged) -> None:
        if self._visited is not None:
            with self._meter.left_out():
                self._visited(judged)

    def end(self) -> dict[str, Any]:
        """What a raw sample says of it: ``visited_alpha``, ``confidence`` (see ``Visited``), ``energy_j``."""
        joules, seen = self._meter.stop(), self._visited
        return {
            "visited_alpha": seen.alpha if seen else None,
            "confidence": seen.confidence if seen else None,
            "energy_j": joules,
        }
