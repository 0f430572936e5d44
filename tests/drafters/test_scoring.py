"""Teacher-forced scores: numbers by hand, and the same rounds as the decoder's on the same text."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pytest
import torch
from torch import Tensor, nn

from spectrain.decoding import generate
from spectrain.drafters.base import DepthOutput, DraftOutput
from spectrain.drafters.eagle3 import Eagle3Config
from spectrain.drafters.scoring import DepthScores, binned, describe, score_batch, summary_line, teacher_law
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler
from spectrain.heads import OutputHead
from spectrain.losses import supervised
from spectrain.measures import RoundCounts
from spectrain.shapes import Chain
from spectrain.target import FeatureBatch

V = 4
IDENTITY = OutputHead(torch.eye(V), None, None, V)


class Stub(nn.Module):
    """A drafter whose logits are given: its hidden states, seen through an identity head."""

    def __init__(self, logits: list[Tensor], batch: FeatureBatch, columns: Tensor | None = None) -> None:
        super().__init__()
        self.output = DraftOutput(
            tuple(
                DepthOutput(z, torch.eye(z.shape[-1]), 2 + depth, supervised(batch.answer_BT, 2 + depth))
                for depth, z in enumerate(logits)
            ),
            columns,
        )

    def forward(self, batch: FeatureBatch, depths: int | None = None) -> DraftOutput:
        return DraftOutput(self.output.depths[:depths], self.output.columns_D)


def batch_of(laws: Tensor, answer: list[int]) -> FeatureBatch:
    """One row whose target hidden states are its log-laws, seen through the identity head."""
    hidden = laws.log()[None]
    mask = torch.tensor([answer], dtype=torch.bool)
    T = len(answer)
    return FeatureBatch(
        torch.zeros(1, T, dtype=torch.long), mask, hidden, hidden[..., :0], hidden.logsumexp(-1), hidden.argmax(-1)
    )


def one_hot(*best: int) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor([best]), V).float()


LAWS = torch.tensor(
    [[0.7, 0.1, 0.1, 0.1], [0.1, 0.7, 0.1, 0.1], [0.1, 0.1, 0.7, 0.1], [0.1, 0.1, 0.1, 0.7], [0.25, 0.4, 0.25, 0.1],
     [0.7, 0.1, 0.1, 0.1]]
)  # fmt: skip


def test_counts_by_hand():
    """Answer tokens 2 to 5. Depth 0 predicts tokens 3, 4, 5 from positions 1, 2, 3; depth 1 tokens 4, 5 from 1, 2.

    The target's greedy tokens 3, 4, 5 are the argmaxes of laws 2, 3, 4: 2, 3, 1.
    """
    batch = batch_of(LAWS, [0, 0, 1, 1, 1, 1])
    depth_0 = one_hot(0, 2, 0, 1, 0, 0)  # right, wrong, right
    depth_1 = one_hot(0, 0, 1, 0, 0, 0)  # wrong, right
    scores = score_batch(Stub([depth_0, depth_1], batch), batch, IDENTITY)
    assert scores.positions == [3, 2]
    assert scores.greedy == [2, 1]
    assert scores.started == 3
    assert scores.reached == [3, 1]  # of the two that were right at depth 0, one has a token left
    assert scores.survived == [2, 0]
    assert scores.conditional() == pytest.approx([2 / 3, 0.0])
    # Token 2 is given. A round from it accepts token 3 and repairs token 4; one from there accepts the last, 5.
    assert (scores.rounds, scores.committed, scores.tokens_per_round()) == (2, 3, 1.5)
    scale = math.e + 3
    hit, miss = math.e / scale, 1 / scale  # q of a one-hot logit row
    for bins, right, positions in zip(scores.confidence, (2, 1), (3, 2), strict=True):
        assert bins[4] == [pytest.approx(positions * hit), positions, right]  # e / (e + 3) is 0.475
        assert sum(count for _, count, _ in bins) == positions
    assert scores.in_draft_vocabulary == [3, 3]
    a = min(0.7, hit) + 3 * min(0.1, miss)
    b = min(0.7, miss) + min(0.1, hit) + 2 * min(0.1, miss)
    c = min(0.4, hit) + 2 * min(0.25, miss) + min(0.1, miss)
    d = min(0.1, hit) + min(0.7, miss) + 2 * min(0.1, miss)
    assert scores.alpha == pytest.approx([a + b + c, d + c], rel=1e-6)
    assert scores.mean_alpha() == pytest.approx([(a + b + c) / 3, (d + c) / 2], rel=1e-6)


def test_alpha_is_over_the_full_vocabulary_and_a_greedy_token_outside_is_a_miss():
    """Columns 0, 1 and 3: the law keeps its mass on token 2, and nothing the drafter says can equal it."""
    columns = torch.tensor([0, 1, 3])
    batch = batch_of(LAWS, [0, 0, 1, 1, 1, 0])
    z = torch.zeros(1, 6, 3)
    z[0, 2, 2] = 5.0  # column 2 is token 3: right at position 2, where the target says 3
    scores = score_batch(Stub([z], batch, columns), batch, IDENTITY)
    assert scores.positions == [2]
    assert scores.greedy == [1]
    assert scores.in_draft_vocabulary == [1, 2]  # the target says 2 and 3
    q = torch.softmax(torch.tensor([0.0, 0.0, 5.0]), 0).tolist()
    want = 3 * min(0.1, 1 / 3) + (min(0.1, q[0]) + min(0.1, q[1]) + min(0.7, q[2]))
    assert scores.alpha == pytest.approx([want], rel=1e-6)


@pytest.mark.parametrize("chunk", [1, 2, 1000])
def test_chunks_change_nothing(chunk):
    generator = torch.Generator().manual_seed(0)
    laws = torch.randn(9, V, generator=generator).softmax(-1)
    batch = batch_of(laws, [0, 1, 1, 1, 1, 1, 1, 1, 1])
    z = [torch.randn(1, 9, V, generator=generator) for _ in range(3)]
    scores = score_batch(Stub(z, batch), batch, IDENTITY, chunk=chunk)
    whole = score_batch(Stub(z, batch), batch, IDENTITY)
    rough = {"alpha": [], "confidence": []}
    assert replace(scores, **rough) == replace(whole, **rough)
    assert scores.alpha == pytest.approx(whole.alpha)
    for bins, expected in zip(scores.confidence, whole.confidence, strict=True):
        assert [row[1:] for row in bins] == [row[1:] for row in expected]
        assert [row[0] for row in bins] == pytest.approx([row[0] for row in expected])
    assert score_batch(Stub(z, batch), batch, IDENTITY, depths=2).survived == whole.survived[:2]


def test_bins_of_confidence_are_closed_below():
    found = binned(torch.tensor([0.0, 0.1, 0.0999, 0.5, 1.0, 0.95]), torch.tensor([1, 0, 1, 1, 1, 0]))
    assert found[0] == [pytest.approx(0.0999), 2, 2]
    assert found[1] == [pytest.approx(0.1), 1, 0]
    assert found[5] == [0.5, 1, 1]
    assert found[9] == [pytest.approx(1.95), 2, 1]
    assert sum(count for _, count, _ in found) == 6
    assert binned(torch.zeros(0), torch.zeros(0)) == [[0.0, 0, 0]] * 10


def test_scores_come_back_from_a_line_of_json():
    batch = batch_of(LAWS, [0, 0, 1, 1, 1, 1])
    scores = score_batch(Stub([one_hot(0, 2, 0, 1, 0, 0)], batch), batch, IDENTITY)
    record = json.loads(json.dumps({"kind": "a", **asdict(scores)}))
    assert DepthScores.recorded(record) == scores
    del record["in_draft_vocabulary"]
    with pytest.raises(SpectrainError, match="no 'in_draft_vocabulary'; measure again"):
        DepthScores.recorded(record)


def test_scores_of_parts_add_up():
    sure, unsure = [[0.25, 1, 0], [2.75, 3, 2]], [[0.25, 1, 1], [0.0, 0, 0]]
    first = DepthScores([3, 2], [1.5, 0.5], [2, 1], [2, 0], [3, 1], 3, 5, 10, [sure, unsure], [2, 3])
    second = DepthScores([1, 1], [0.5, 1.0], [1, 1], [1, 1], [1, 1], 1, 3, 7, [unsure, unsure], [1, 1])
    both = first + second
    bins = [[[0.5, 2, 1], [2.75, 3, 2]], [[0.5, 2, 2], [0.0, 0, 0]]]
    assert both == DepthScores([4, 3], [2.0, 1.5], [3, 2], [3, 1], [4, 2], 4, 8, 17, bins, [3, 4])
    assert sum([first, second], DepthScores()) == both
    assert first + DepthScores() == first == DepthScores() + first
    assert both.conditional() == [0.75, 0.5]
    assert both.tokens_per_round() == 17 / 8
    assert describe(both) == {
        "tokens_per_round": 2.125, "alpha": [0.5, 0.5], "conditional": [0.75, 0.5], "positions": [4, 3],
    }  # fmt: skip
    assert "2.12 (T=0)" in summary_line(describe(both))
    assert DepthScores([0], [0.0], [0], [0], [0]).tokens_per_round() == 0.0


def test_the_law_keeps_its_precision_under_autocast():
    generator = torch.Generator().manual_seed(0)
    batch = batch_of(torch.randn(5, V, generator=generator).softmax(-1), [1] * 5)
    head = OutputHead(torch.eye(V) + 1e-3, None, None, V)
    places = torch.tensor([0, 0, 3, 4])
    plain = teacher_law(batch, head, places)(slice(0, 4))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(teacher_law(batch, head, places)(slice(0, 4)), plain)
    assert plain.dtype == torch.float32
    assert torch.equal(plain[0], plain[1])


@pytest.mark.parametrize("width", [24, 12])
def test_every_round_of_the_decoder_is_counted_the_same(width, tools, tiny_target, make_rows):
    """The target's own greedy answers: a round started by the decoder at any of their tokens accepts what the
    teacher-forced scores say, and so do the tokens per round. ``width``: the whole vocabulary, or half of it."""
    target, k = tiny_target("llama"), 3
    rows = make_rows(target, 5, answer=(8, 16))
    drafter = tools.drafter(target, tools.config(Eagle3Config, depths=k, draft_vocab_size=width), rows)
    batch = tools.batch(target, drafter, rows)
    tools.train(drafter, target, batch, 60)
    drafter = drafter.double().eval()
    scores = score_batch(drafter, batch, target.head, k)

    rounds = RoundCounts()
    for row in rows:
        for start in range(row.mask.index(1) - 1, len(row.ids) - 2):
            left = len(row.ids) - start - 2  # answer tokens after the pending one
            run = generate(
                target, drafter, row.ids[: start + 1], sampler=Sampler(), shape=Chain(k),
                max_new_tokens=min(k, left) + 2, eos_ids=(),
            )  # fmt: skip
            assert run.tokens[: left + 1] == row.ids[start + 1 : start + 1 + len(run.tokens)][: left + 1]
            first = run.rounds[0]
            assert first.proposed == min(k, left)
            rounds.add(first.proposed, first.accepted, first.accepted + 1)
    assert scores.started == rounds.rounds
    assert scores.conditional() == pytest.approx(rounds.conditional)
    assert 0 < scores.survived[-1] < scores.started  # neither all right nor all wrong

    assert scores.positions == [sum(sum(row.mask) - 1 - depth for row in rows) for depth in range(k)]
    decoded = RoundCounts()
    for row in rows:  # the same answers, decoded from their prompts
        prompt = row.ids[: row.mask.index(1)]
        run = generate(
            target, drafter, prompt, sampler=Sampler(), shape=Chain(k), max_new_tokens=sum(row.mask), eos_ids=()
        )
        assert run.tokens == row.ids[len(prompt) :]
        for one in run.rounds:
            decoded.add(one.proposed, one.accepted, one.committed, one.clipped is not None)
    assert (scores.rounds, scores.committed) == (decoded.rounds, decoded.committed_tokens)
    assert scores.tokens_per_round() == decoded.tokens_per_round
