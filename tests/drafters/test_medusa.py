"""Medusa heads: what they start as, which token each is trained on, one law a depth, and exact decoding with them.

Shapes: B batch, T positions, N nodes, K heads, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.utils._python_dispatch import TorchDispatchMode

from spectrain.decoding import generate, generate_batch, generate_plain
from spectrain.drafters.medusa import MedusaConfig, MedusaDrafter
from spectrain.drafters.objective import DrafterLoss, LossConfig
from spectrain.drafters.scoring import score_batch
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler
from spectrain.heads import OutputHead
from spectrain.shapes import ABSENT, Chain, DynamicTree, StaticTree
from spectrain.target import FeatureBatch, Target

GREEDY, WARM = Sampler(), Sampler(1.0)
SAMPLERS = [WARM, Sampler(0.7, top_k=5, top_p=0.9)]
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9], [0, 0, 0]]
PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0))
SHAPES = {
    "chain": Chain(3),
    "distinct": StaticTree(PATHS),
    "independent": StaticTree(PATHS, "independent"),
    "chosen": StaticTree(PATHS, "chosen"),
    "dynamic": DynamicTree(3, 3, 8),
}
HEADS = ["own", "shared"]


def built(target: Target, *, noise: float = 0.0, seed: int = 0, **settings: Any) -> MedusaDrafter:
    """A new drafter in the target's precision; ``noise`` on its weights makes heads that differ."""
    drafter = MedusaDrafter.build(MedusaConfig(**settings), target, torch.zeros(target.vocab_size))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    return drafter.to(target.dtype)


def uniforms(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@torch.no_grad()
def alone(drafter: MedusaDrafter, hidden_1H: torch.Tensor, depth: int) -> torch.Tensor:
    """Logits [V] of one head on one state, by the formula."""
    hidden_H = hidden_1H[0]
    for layer in drafter.blocks[depth].layers:  # type: ignore[union-attr]
        x_H = layer.weight @ hidden_H + layer.bias
        hidden_H = hidden_H + x_H * torch.sigmoid(x_H)
    own = drafter.config.head == "own"
    weight_VH = drafter.lm_heads[depth].weight if own else drafter.borrowed().weight_VH
    logits_V, cap = weight_VH @ hidden_H, drafter.borrowed().cap  # type: ignore[operator]
    logits_V = cap * torch.tanh(logits_V / cap) if cap else logits_V
    logits_V[drafter.columns :] = -torch.inf
    return logits_V


# --- what it starts as ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("layers", [1, 3])
def test_an_untrained_head_says_exactly_what_the_target_says(tiny_target, tools, architecture, head, layers):
    """Same state, same head, same soft cap (Gemma-2); nothing of the rows that are no ids."""
    target = tiny_target(architecture, layers=2, padding=4, dtype=torch.float32)
    drafter = built(target, head=head, layers=layers)
    state = tools.observed(drafter, target, PROMPTS)
    for block, own in zip(drafter.blocks, drafter.heads(4), strict=True):
        assert torch.equal(block(state.hidden_B1H.clone()), state.hidden_B1H)
        assert torch.equal(own.weight_VH, target.head_weight)
        assert (own.cap, own.size) == (target.head.cap, 24)
    want_B1V = target.logits(state.hidden_B1H)
    with torch.inference_mode():
        level_BWV = drafter.root(state)
        torch.testing.assert_close(level_BWV, want_B1V, rtol=1e-6, atol=1e-6)
        for _ in range(3):
            parents_BW = torch.zeros(len(PROMPTS), 2, dtype=torch.long)
            level_BWV = drafter.extend(state, parents_BW, parents_BW)
            torch.testing.assert_close(level_BWV, want_B1V, rtol=1e-6, atol=1e-6)
    assert (want_B1V[..., 24:] == -torch.inf).all()
    assert want_B1V[..., :24].isfinite().all()


@pytest.mark.parametrize("head", HEADS)
def test_training_starts_from_the_targets_law_too(tools, tiny_target, make_rows, head):
    """So the first loss is that of the target's next-token law against the laws further ahead."""
    target = tiny_target("gemma2", layers=2, padding=8, dtype=torch.float32)
    drafter = built(target, head=head)
    batch = tools.batch(target, drafter, make_rows(target, 3))
    for depth in drafter(batch).depths:
        assert torch.equal(depth.hidden_BTH, batch.hidden_BTH)
        assert torch.equal(depth.head_DH, target.head_weight[:24])
        assert depth.cap == target.head.cap is not None


def test_own_heads_are_copies_and_a_shared_one_is_borrowed(tiny_target):
    target = tiny_target(layers=2, padding=8, dtype=torch.float32)
    own, shared = built(target, head="own", heads=2), built(target, heads=2)
    blocks = {f"blocks.{i}.layers.0.{name}" for i in range(2) for name in ("weight", "bias")}
    assert set(shared.state_dict()) == blocks
    assert set(own.state_dict()) == blocks | {f"lm_heads.{i}.weight" for i in range(2)}
    before = target.head_weight.clone()
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.fill_(7.0)
    assert torch.equal(target.head_weight, before)
    assert shared.borrowed().weight_VH.data_ptr() == target.head_weight.data_ptr()
    assert not shared.borrowed().weight_VH.requires_grad


# --- which token each head is trained on ----------------------------------------------------------------------------


def test_supervised_positions_of_the_worked_example(tiny_target):
    """8 tokens, the answer is tokens 4 to 6: head 0 trains positions 3 and 4, head 1 position 3, head 2 none."""
    target = tiny_target(layers=2, dtype=torch.float32)
    answer_1T = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 0]], dtype=torch.bool)
    blank_1T = torch.zeros(1, 8)
    hidden_1TH = torch.zeros(1, 8, target.hidden_size)
    batch = FeatureBatch(blank_1T.long(), answer_1T, hidden_1TH, hidden_1TH[..., :0], blank_1T, blank_1T.long())
    output = built(target, heads=3)(batch)
    assert [depth.mask_BT[0].int().tolist() for depth in output.depths] == [
        [0, 0, 0, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0, 0, 0],
        [0] * 8,
    ]


def counted(drafter: MedusaDrafter, head: OutputHead) -> FeatureBatch:
    """Ids 0 to 9, all of them an answer; the target's state at t is sure of token t + 1."""
    ids_1T, eye = torch.arange(10)[None], torch.eye(drafter.hidden_size)
    hidden_1TH = eye[(ids_1T + 1) % drafter.hidden_size]
    normaliser_1T = head.logits(hidden_1TH).logsumexp(-1)
    return FeatureBatch(ids_1T, torch.ones(1, 10, dtype=torch.bool), hidden_1TH, hidden_1TH[..., :0], normaliser_1T,
                        ids_1T + 1)  # fmt: skip


def test_head_i_at_t_is_scored_on_token_t_plus_2_plus_i(tiny_target):
    """Three heads that are right about exactly that have no loss; about any other token they have a large one."""
    target = tiny_target(layers=2, vocab=16, hidden=16, dtype=torch.float32)
    drafter = built(target, heads=3, head="own")
    sure = OutputHead(30 * torch.eye(16), None, None, 16)
    batch = counted(drafter, sure)
    loss = DrafterLoss(drafter, sure, LossConfig())
    for late in (-1, 0, 1):
        with torch.no_grad():  # a state that is sure of token t + 1 gives token t + 2 + i
            for i, head in enumerate(drafter.lm_heads):
                head.weight.copy_(sure.weight_VH.roll(1 + i + late, dims=0))  # type: ignore[union-attr, operator]
        each = [loss(batch, [float(d == i) for d in range(3)]).item() for i in range(3)]
        wanted = [0.0 if late == 0 else 30.0 * count for count in (8, 7, 6)]  # the tail has no such token
        assert each == pytest.approx(wanted, rel=1e-3, abs=1e-3)
        scores = score_batch(drafter, batch, sure)
        assert scores.greedy == ([8, 7, 6] if late == 0 else [0, 0, 0])
    assert scores.positions == [8, 7, 6]


@pytest.mark.parametrize("head", HEADS)
def test_gradients_are_zero_outside_the_mask_and_none_reach_the_target(tools, tiny_target, make_rows, head):
    target = tiny_target(layers=2, padding=8, dtype=torch.float32)
    drafter = built(target, head=head, noise=0.1)
    batch = tools.batch(target, drafter, make_rows(target, 4))
    hidden_BTH = batch.hidden_BTH.clone().requires_grad_()
    DrafterLoss(drafter, target.head, LossConfig())(replace(batch, hidden_BTH=hidden_BTH), [1.0] * 4).backward()
    assert torch.equal(hidden_BTH.grad.abs().sum(-1) > 0, drafter(batch).depths[0].mask_BT)
    for name, parameter in drafter.named_parameters():
        assert parameter.grad.abs().sum() > 0, name
        if name.startswith("lm_heads"):
            assert not parameter.grad[24:].any(), "a row that is no id"
    assert all(parameter.grad is None for parameter in target.model.parameters())


@pytest.mark.parametrize("head", HEADS)
def test_the_loss_falls(tools, tiny_target, make_rows, head):
    target = tiny_target(layers=2, dtype=torch.float32)
    drafter = built(target, head=head)
    batch = tools.batch(target, drafter, make_rows(target, 5))
    losses = tools.train(drafter, target, batch, 40)
    assert losses[-1] < 0.8 * losses[0]
    scores = score_batch(drafter, batch, target.head)
    untrained = score_batch(built(target, head=head), batch, target.head)
    assert sum(scores.greedy) > sum(untrained.greedy)


class LargestLogits(TorchDispatchMode):
    """Most rows of any tensor as wide as the vocabulary, but for weights, which have as many rows as it is wide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.rows = width, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.dim() and tensor.shape[-1] == self.width:
                self.rows = max(self.rows, tensor.numel() // self.width)
        return result


@pytest.mark.parametrize("head", HEADS)
def test_the_logits_of_one_chunk_are_all_that_exist_at_once(tiny_target, head):
    target = tiny_target(layers=2, vocab=23, dtype=torch.float32)
    drafter = built(target, head=head)
    generator = torch.Generator().manual_seed(0)
    hidden_BTH = torch.randn(2, 300, target.hidden_size, generator=generator)
    ids_BT = torch.randint(23, (2, 300), generator=generator)
    normaliser_BT = target.logits(hidden_BTH).logsumexp(-1).clone()
    answer_BT = torch.ones_like(ids_BT, dtype=torch.bool)
    batch = FeatureBatch(ids_BT, answer_BT, hidden_BTH, hidden_BTH[..., :0], normaliser_BT, ids_BT)
    with LargestLogits(23) as watched:
        DrafterLoss(drafter, target.head, LossConfig())(batch, [1.0] * 4).backward()
    assert 23 < watched.rows <= 256


def test_validation_asks_for_no_more_depths_than_there_are_heads(tools, tiny_target, make_rows):
    target = tiny_target(layers=2, dtype=torch.float32)
    drafter = built(target, heads=2)
    batch = tools.batch(target, drafter, make_rows(target, 3))
    assert (drafter.shifts(), drafter.shifts(1), drafter.shifts(5)) == ((2, 3), (2,), (2, 3))
    assert len(drafter(batch, 5).depths) == 2
    assert len(score_batch(drafter, batch, target.head, 5).positions) == 2


# --- one law a depth ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("sampler", [GREEDY, *SAMPLERS], ids=Sampler.describe)
def test_every_node_is_drawn_from_the_head_of_its_depth(tiny_target, tools, head, name, sampler):
    target, shape = tiny_target("gemma2", layers=2, padding=4), SHAPES[name]
    drafter = built(target, head=head, noise=0.3)
    state, B = tools.observed(drafter, target, PROMPTS), len(PROMPTS)
    proposal = drafter.propose(state, sampler, shape, [9] * B, uniforms(B, shape.nodes))
    chosen = sampler.greedy or name in ("chosen", "dynamic")
    assert (proposal.q is None) == chosen
    parents_BN = proposal.parents_BN
    if parents_BN is None:
        parents_BN = (torch.arange(shape.nodes) - 1).expand(B, -1)
    law_BKV = torch.stack(
        [torch.stack([sampler.probabilities(alone(drafter, h_1H, d)) for d in range(3)]) for h_1H in state.hidden_B1H]
    ).to(torch.float64)
    for b in range(B):
        depths: list[int] = []
        for n, (token, parent) in enumerate(zip(proposal.tokens_BN[b].tolist(), parents_BN[b].tolist(), strict=True)):
            depths.append(0 if parent < 0 else depths[parent] + 1)
            if parent == ABSENT:  # it found nothing left to draw, or hangs from such a node
                assert sampler.top_k
                continue
            assert token < 24
            if chosen:
                ranked = alone(drafter, state.hidden_B1H[b], depths[-1]).argsort(descending=True)
                assert token in ranked[: shape.widest].tolist()
                continue
            q_V = proposal.q[b, n if name == "chain" else parent + 1]
            torch.testing.assert_close(q_V.double(), law_BKV[b, depths[-1]], rtol=1e-5, atol=1e-6)
            assert q_V[token] > 0


def test_q_is_the_law_that_is_sampled(tiny_target, tools):
    """Over an even grid of uniforms every token of a head comes up as often as q says, whatever was drawn before."""
    target, grid = tiny_target(layers=2, padding=4), 400
    drafter = built(target, noise=0.3)
    state = tools.observed(drafter, target, PROMPTS[:1])
    drafter.select(state, [0] * grid)
    uniforms_BN = uniforms(grid, 3, seed=3)
    uniforms_BN[:, 1] = (torch.arange(grid, dtype=torch.float64) + 0.5) / grid
    proposal = drafter.propose(state, Sampler(3.0), Chain(3), [9] * grid, uniforms_BN)
    assert (proposal.q == proposal.q[:1]).all()
    law_V = proposal.q[0, 1]
    count_V = torch.bincount(proposal.tokens_BN[:, 1], minlength=target.vocab_size)
    assert ((count_V / grid - law_V).abs() <= 1 / grid + 1e-6).all()
    assert (law_V > 0.02).sum() >= 2, "a point mass would show nothing"
    assert len(set(proposal.tokens_BN[:, 0].tolist())) > 1


def test_every_head_is_computed_once_a_round_and_only_those_that_are_needed(tiny_target, tools):
    target = tiny_target(layers=2)
    drafter = built(target, heads=4, noise=0.1)
    state = tools.observed(drafter, target, PROMPTS)
    calls: list[int] = []
    for number, block in enumerate(drafter.blocks):
        block.register_forward_hook(lambda *_, number=number: calls.append(number))
    cases = [(Chain(4), [9, 9, 9, 9], 4), (SHAPES["distinct"], [9] * 4, 3), (Chain(4), [2, 1, 2, 0], 2)]
    for shape, limits, count in cases:
        calls.clear()
        drafter.propose(state, WARM, shape, limits, uniforms(4, shape.nodes))
        assert calls == list(range(count))
        assert state.logits_BKV is None, "logits outlive the proposal"


# --- state ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", [GREEDY, WARM], ids=Sampler.describe)
def test_any_series_of_rounds_leaves_the_state_of_a_fresh_prefill(tiny_target, tools, sampler):
    target = tiny_target(layers=2)
    drafter = built(target, noise=0.3)
    texts = [[*prompt, *range(10)] for prompt in PROMPTS]
    state = drafter.start([text[0] for text in texts])
    starts = [1] * len(texts)
    for step in range(4):
        stops = [max(start + 1, len(prompt) + (step * (b + 2)) % 5 + step)
                 for b, (prompt, start) in enumerate(zip(PROMPTS, starts, strict=True))]  # fmt: skip
        drafter.observe(state, tools.told(target, texts, starts, stops))
        fresh = tools.observed(drafter, target, [text[:stop] for text, stop in zip(texts, stops, strict=True)])
        torch.testing.assert_close(state.hidden_B1H, fresh.hidden_B1H)
        got, want = (drafter.propose(s, sampler, Chain(3), [9] * 4, uniforms(4, 3)) for s in (state, fresh))
        assert torch.equal(got.tokens_BN, want.tokens_BN)
        starts = stops
    assert drafter.memory(state) == 4 * target.hidden_size * 8
    drafter.select(state, [2, 0])
    assert torch.equal(state.hidden_B1H, fresh.hidden_B1H[[2, 0]])


def test_it_reads_the_state_before_the_pending_token(tiny_target, tools):
    """An untrained head 0 predicts, after the pending token, what the target said of the pending one."""
    target = tiny_target(layers=2)
    drafter = built(target)
    state = tools.observed(drafter, target, PROMPTS)
    proposal = drafter.propose(state, GREEDY, Chain(2), [9] * 4, uniforms(4, 2))
    for prompt, tokens in zip(PROMPTS, proposal.tokens_BN.tolist(), strict=True):
        if len(prompt) > 1:
            want = target.model(input_ids=torch.tensor([prompt[:-1]])).logits[0, -1].argmax()
            assert tokens == [int(want)] * 2


# --- exact decoding -------------------------------------------------------------------------------------------------


def test_greedy_decoding_is_plain_decoding(tiny_target, architecture):
    target = tiny_target(architecture, layers=2, padding=4)
    request: dict[str, Any] = {"sampler": GREEDY, "max_new_tokens": 12, "eos_ids": (5,)}
    want = [generate_plain(target, prompt, **request).tokens for prompt in PROMPTS]
    cases = [("shared", SHAPES["chain"]), ("own", Chain(4)), ("shared", SHAPES["chosen"]), ("own", SHAPES["dynamic"])]
    for head, shape in cases:
        drafter = built(target, head=head, noise=0.03)
        got = generate_batch(target, drafter, PROMPTS, seeds=range(4), shape=shape, **request)
        assert [one.tokens for one in got] == want, shape


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("sampler", SAMPLERS, ids=Sampler.describe)
def test_a_request_in_a_batch_gets_what_it_gets_alone(tiny_target, name, sampler):
    target = tiny_target(layers=2, padding=4)
    drafter = built(target, noise=0.1)
    request: dict[str, Any] = {"sampler": sampler, "max_new_tokens": 8, "eos_ids": (5,), "shape": SHAPES[name]}
    together = generate_batch(target, drafter, PROMPTS, seeds=range(4), **request)
    one_by_one = [generate(target, drafter, prompt, seed=seed, **request) for seed, prompt in enumerate(PROMPTS)]
    assert [one.tokens for one in together] == [one.tokens for one in one_by_one]


RUNS, NEW = 2000, 4  # the prefill's token, a round two deep, and what is left


def misfit(found: list[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """p-value of Pearson's chi-square test that the outcomes were drawn from the law."""
    counts, statistic, cells, rare = Counter(found), 0.0, 0, [0.0, 0]
    for outcome, probability in law.items():
        if probability * RUNS < 5:
            rare = [rare[0] + probability * RUNS, rare[1] + counts[outcome]]
            continue
        statistic += (counts[outcome] - probability * RUNS) ** 2 / (probability * RUNS)
        cells += 1
    if rare[0] > 0:
        statistic, cells = statistic + (rare[1] - rare[0]) ** 2 / rare[0], cells + 1
    return float(torch.special.gammaincc(torch.tensor((cells - 1) / 2), torch.tensor(statistic / 2)))


@pytest.fixture(scope="module")
def small(tiny_target):
    """A target of four tokens, a prompt, the law of the next four tokens, and heads that err."""
    target, prompt = tiny_target(layers=2, vocab=4, hidden=16), [0, 1, 3, 2]
    outcomes = list(itertools.product(range(4), repeat=NEW))
    law_XTV = target.model(input_ids=torch.tensor([[*prompt, *outcome] for outcome in outcomes])).logits.softmax(-1)
    law = {}
    for x, outcome in enumerate(outcomes):
        at = [law_XTV[x, len(prompt) - 1 + i, token] for i, token in enumerate(outcome)]
        law[outcome] = float(torch.stack(at).prod())
    return target, prompt, law, built(target, heads=2, noise=0.3, seed=1)


def sampled(small: Any, drafter: MedusaDrafter, shape: Any, verification: Any = "token") -> Any:
    target, prompt, _, _ = small
    return generate_batch(target, drafter, [prompt] * RUNS, seeds=range(RUNS), sampler=WARM, max_new_tokens=NEW,
                          eos_ids=(), shape=shape, verification=verification)  # fmt: skip


CASES = {
    "chain": (Chain(2), "token"),
    "block": (Chain(2), "block"),
    "distinct": (StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0))), "token"),
    "chosen": (StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0)), "chosen"), "token"),
    "dynamic": (DynamicTree(2, 2, 4), "token"),
}


@pytest.mark.parametrize("name", CASES)
def test_sampled_decoding_has_the_targets_law(small, name):
    """Heads that know nothing of each other's tokens are exact all the same: q is what each was drawn from."""
    results = sampled(small, small[3], *CASES[name])
    assert misfit([tuple(one.tokens) for one in results], small[2]) > 1e-3
    assert sum(sum(round_.accepted for round_ in one.rounds) for one in results) > RUNS / 5


class ClaimsTheFirst(MedusaDrafter):
    """Says that everything was drawn from head 0: a known fault, which the test above has to find."""

    def propose(self, *arguments):
        proposal = super().propose(*arguments)
        return replace(proposal, q=proposal.q[:, :1].expand_as(proposal.q))


def test_the_sample_is_large_enough_to_find_a_wrong_q(small):
    liar = built(small[0], heads=2, noise=0.3, seed=1)
    liar.__class__ = ClaimsTheFirst
    results = sampled(small, liar, Chain(2))
    assert misfit([tuple(one.tokens) for one in results], small[2]) < 1e-6


def test_chosen_children_are_accepted_with_the_targets_probability(small):
    """Not with what the heads think of them: the two likeliest tokens of head 0 cover just their mass of p."""
    target, prompt, law, drafter = small
    results = sampled(small, drafter, StaticTree(((0,), (1,)), "chosen"))
    hidden_1TH = target.forward(torch.tensor([prompt])).hidden_BTH
    covered = alone(drafter, hidden_1TH[0, -1:], 0).topk(2).indices.tolist()
    mass = sum(probability for outcome, probability in law.items() if outcome[1] in covered)
    accepted = sum(one.rounds[0].accepted for one in results) / RUNS
    assert abs(accepted - mass) < 4 * (mass * (1 - mass) / RUNS) ** 0.5


# --- what is refused ------------------------------------------------------------------------------------------------


def test_a_shape_that_the_heads_cannot_fill_is_refused(tiny_target):
    target = tiny_target(layers=2)
    drafter = built(target, heads=3)
    request: dict[str, Any] = {"sampler": GREEDY, "max_new_tokens": 8, "eos_ids": ()}
    deep = StaticTree(((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)))
    wide = StaticTree(tuple((rank,) for rank in range(25)))
    with pytest.raises(SpectrainError, match=r"\[0, 0, 0, 0\] has depth 4, medusa drafts at most 3"):
        generate(target, drafter, [1, 2], shape=deep, **request)
    with pytest.raises(SpectrainError, match=r"k=4 has depth 4, medusa drafts at most 3"):
        generate(target, drafter, [1, 2], shape=Chain(4), **request)
    with pytest.raises(SpectrainError, match=r"\[24\] is beyond the 24 tokens"):
        generate(target, drafter, [1, 2], shape=wide, **request)
    with pytest.raises(SpectrainError, match=r"\[1, 0\]: its parent \[1\] is not in the tree"):
        StaticTree(((0,), (1, 0)))


def test_settings_out_of_range_are_refused():
    assert (MedusaConfig().heads, MedusaConfig().layers, MedusaConfig().head) == (4, 1, "shared")
    for wrong in ({"heads": 0}, {"heads": 9}, {"layers": 0}, {"head": "lent"}, {"depths": 3}):
        with pytest.raises(ValidationError, match=next(iter(wrong))):
            MedusaConfig(**wrong)


def test_a_head_with_a_bias_is_refused_before_anything_is_computed(tiny_target):
    target = tiny_target("phi", layers=2, dtype=torch.float32)
    assert target.head.bias_V is not None
    for refused in (MedusaConfig().taps, lambda target: MedusaDrafter(MedusaConfig(), 32, 24).bind(target)):
        with pytest.raises(SpectrainError, match=r"head of a PhiForCausalLM has a bias.*choose another drafter"):
            refused(target)


def test_heads_of_another_target_are_refused(tiny_target, tools):
    target = tiny_target(layers=2, dtype=torch.float32)
    drafter = built(target)
    with pytest.raises(SpectrainError, match=r"hidden size 32 and 24 vocabulary rows, target has 32 and 26"):
        drafter.bind(tiny_target(layers=2, vocab=26, dtype=torch.float32))
    other = tiny_target(layers=2, dtype=torch.float32, seed=1)
    drafter.expect_head(target.head_weight)
    with pytest.raises(SpectrainError, match=r"lm_heads\.0\.weight, is not this target's: they differ by up to"):
        drafter.bind(other)
    drafter.expect_head(target.head_weight.bfloat16())  # the same head, stored in another precision
    drafter.bind(target)
    loose = MedusaDrafter(MedusaConfig(), 32, 24)
    with pytest.raises(SpectrainError, match=r"call bind\(target\) first"):
        loose.heads(1)
    with pytest.raises(SpectrainError, match="nothing was observed yet"):
        loose.propose(loose.start([1]), GREEDY, Chain(1), [1], uniforms(1, 1))


def test_lower_precision_decodes(tiny_target):
    """A bfloat16 target with float32 heads: whatever is committed is a law of the target's own rounding."""
    target = tiny_target(layers=2, dtype=torch.bfloat16)
    for head in HEADS:
        drafter = MedusaDrafter.build(MedusaConfig(head=head), target, torch.zeros(24))
        assert all(parameter.dtype == torch.float32 for parameter in drafter.parameters())
        for shape in SHAPES.values():
            (one,) = generate_batch(target, drafter, [[1, 2, 3]], seeds=[0], sampler=WARM, max_new_tokens=8,
                                    eos_ids=(), shape=shape)  # fmt: skip
            assert len(one.tokens) == 8
