"""What is trained is what is drafted: depth d of the training forward, at every position of a row, is the law that
decoding proposes once the row's tokens up to there are committed and its next d tokens drafted.

A family added to the registry is tested here by itself. Shapes: B rows, T positions, D columns, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import TRAINABLE, named, ready_drafter
from torch import Tensor

from spectrain.data.batches import live_batch
from spectrain.data.conversations import EncodedRow
from spectrain.drafters.growth import GrowingDrafter
from spectrain.exact.sampler import Sampler
from spectrain.heads import soft_capped
from spectrain.shapes import Chain
from spectrain.target import Target

DEPTHS, LENGTH, ROWS = 3, 13, 3
TOLERANCE = 1e-5  # laws, where what a head says is kept in float32; faults are of the order of 1


@pytest.fixture(scope="module")
def target(tiny_target):
    """With rows of the head that no token has."""
    return tiny_target("llama", layers=8, padding=4)


@pytest.fixture(scope="module")
def texts(target) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, target.tokenizer_size, (ROWS, LENGTH), generator=generator).tolist()


@pytest.fixture(params=TRAINABLE, ids=named)
def drafter(request, target):
    return ready_drafter(request.param, target)


def law_over(size: int, logits_XD: Tensor, columns_D: Tensor | None) -> Tensor:
    """The law of a head's logits over the target's vocabulary [..., V]."""
    law_XD = logits_XD.double().softmax(-1)
    columns_D = torch.arange(law_XD.shape[-1]) if columns_D is None else columns_D
    return law_XD.new_zeros(*law_XD.shape[:-1], size).index_copy_(-1, columns_D, law_XD)


@torch.no_grad()
def trained_laws(drafter: Any, target: Target, texts: list[list[int]]) -> tuple[list[Tensor], tuple[int, ...]]:
    """The laws of every depth [B, T, V], and how far ahead of their positions they are."""
    rows = [EncodedRow(str(i), "all", text, [0] + [1] * (LENGTH - 1)) for i, text in enumerate(texts)]
    output, laws = drafter(live_batch(target, rows), DEPTHS), []
    for depth in output.depths:
        logits_BTD = soft_capped((depth.hidden_BTH @ depth.head_DH.T).float(), depth.cap)
        laws.append(law_over(target.vocab_size, logits_BTD, output.columns_D))
    return laws, tuple(depth.shift for depth in output.depths)


def drafted_laws(drafter: Any, state: Any, texts: list[list[int]], read: int, depths: int) -> list[Tensor]:
    """The laws [B, V] of the tokens after ``read``, each after the row's own tokens before it."""
    size, columns_D = drafter.vocabulary()
    parents_B1 = torch.zeros(ROWS, 1, dtype=torch.long)
    laws = []
    with torch.inference_mode():
        for depth in range(depths):
            before_B1 = torch.tensor([[text[read + depth - 1]] for text in texts])
            logits_B1D = drafter.extend(state, before_B1, parents_B1) if depth else drafter.root(state)
            laws.append(law_over(size, logits_B1D[:, 0], columns_D))
    return laws


def same_law(got_BV: Tensor, want_BV: Tensor, drafter: Any, depth: int, position: int) -> None:
    gap = float((got_BV - want_BV).abs().max())
    assert gap < TOLERANCE, (
        f"{drafter.name}: depth {depth} of forward, position {position}, is not what decoding proposes after the same "
        f"tokens (probabilities differ by {gap:.2g}): forward reads another feature or token, or shifts() is wrong"
    )


def test_every_depth_of_forward_is_what_decoding_proposes(drafter, target, texts, tools):
    trained, shifts = trained_laws(drafter, target, texts)
    compared = 0
    for read in range(2, LENGTH):  # tokens that are committed, the last of them pending
        state = tools.observed(drafter, target, [text[:read] for text in texts])
        whole = [depth for depth, shift in enumerate(shifts) if shift <= read + depth < LENGTH]
        if isinstance(drafter, GrowingDrafter):
            drafted = drafted_laws(drafter, state, texts, read, len(whole))
        else:  # deeper down only its own tokens can be had
            proposal = drafter.propose(state, Sampler(1.0), Chain(1), [1] * ROWS, torch.full((ROWS, 1), 0.5))
            assert proposal.q is not None, f"{drafter.name} has weights and draws nothing: nothing to compare"
            drafted = [proposal.q[:, 0].double()]
        for depth, drafted_BV in zip(whole, drafted, strict=False):
            position = read + depth - shifts[depth]
            same_law(trained[depth][:, position], drafted_BV, drafter, depth, position)
            compared += 1
    assert compared >= LENGTH // 2, f"{drafter.name}: shifts {shifts} leave next to nothing to compare"


def test_random_drafters_have_laws_that_differ_from_place_to_place(drafter, target, texts):
    """Else the comparison would show nothing: a neighbour's law is another one, at every depth."""
    for laws_BTV in trained_laws(drafter, target, texts)[0]:
        inner_BTV = laws_BTV[:, : LENGTH - DEPTHS - 1]
        assert (inner_BTV[:, 1:] - inner_BTV[:, :-1]).abs().amax(-1).median() > 100 * TOLERANCE
