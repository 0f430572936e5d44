"""Sampled answers against the target's law, token by token: if they were drawn from it, what is counted is uniform.

Every token is replaced by its place in the law it was drawn from: the mass of the likelier tokens, and of its own a
random share (the randomised probability integral transform). Under exact sampling these places are uniform on [0, 1)
and independent of one another, whatever the law, the sampler or the prefix, and however the answer's end came about;
likelier tokens first, since most faults move mass between head and tail. ``goodness`` tests the counts. What moves mass
among tokens that are about as likely is not seen.

Shapes: N tokens of an answer, C of a chunk, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spectrain.decoding.requests import stream_seed, uniform_stream
from spectrain.exact.sampler import Sampler
from spectrain.target import Target

PLACES = 20
"""Equal bins of [0, 1) in which places are counted."""


@torch.inference_mode()
def placed(target: Target, sampler: Sampler, prompt: Sequence[int], tokens: Sequence[int], *, name: str, seed: int,
           chunk: int = 64) -> dict[str, Any]:  # fmt: skip
    """Counts of an answer's tokens by their place in the law that ``sampler`` makes of the target's logits.

    One forward over ``prompt`` and ``tokens``, whose logits are held ``chunk`` positions at a time. The random shares
    are those of conversation ``name`` and ``seed``, one a position.

    Returns:
        ``bins``: how many tokens lie in each of the ``PLACES`` bins; ``outside``: how many of them the law cannot give
        at all, which are in the last bin.
    """
    target.tap(())
    ids = torch.tensor([[*prompt, *tokens]], device=target.device)
    hidden_NH = target.forward(ids).hidden_BTH[0, len(prompt) - 1 : -1]
    token_N = ids[0, len(prompt) :]
    share_N = uniform_stream(stream_seed("place", name, seed))(len(tokens)).to(target.device)
    bins, outside = torch.zeros(PLACES, dtype=torch.long), 0
    for start in range(0, len(tokens), chunk):
        rows = slice(start, start + chunk)
        p_CV = sampler.probabilities(target.logits(hidden_NH[rows]))
        place_C = places(p_CV, token_N[rows], share_N[rows])
        bins += torch.bincount((place_C * PLACES).long().clamp(max=PLACES - 1), minlength=PLACES).cpu()
        outside += int((p_CV.gather(-1, token_N[rows, None]) == 0).sum())
    return {"bins": bins.tolist(), "outside": outside}


def places(p_CV: Tensor, token_C: Tensor, share_C: Tensor) -> Tensor:
    """Float64 [C] in [0, 1]: the mass of tokens before each token and ``share_C`` of its own, of the row's whole mass.

    Before it stand those that are likelier, and among equals those of lower id.
    """
    own_C1 = p_CV.gather(-1, token_C[:, None])
    earlier_CV = torch.arange(p_CV.shape[-1], device=p_CV.device) < token_C[:, None]
    before_CV = (p_CV > own_C1) | ((p_CV == own_C1) & earlier_CV)
    before_C = p_CV.masked_fill(~before_CV, 0.0).sum(-1, dtype=torch.float64)
    return (before_C + share_C.double() * own_C1.squeeze(-1)) / p_CV.sum(-1, dtype=torch.float64)
