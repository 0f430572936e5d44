"""EAGLE: its features are the target's own, its loss asks for both feature and law, its training is its decoding.

Shapes: B batch, T positions, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from spectrain.data.batches import live_batch
from spectrain.decoding import generate, generate_batch, generate_plain
from spectrain.drafters.draft_layer import packed_positions, take_positions
from spectrain.drafters.eagle import EagleConfig, EagleDrafter
from spectrain.drafters.objective import DrafterLoss, LossConfig
from spectrain.drafters.scoring import score_batch
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler
from spectrain.losses import supervised
from spectrain.shapes import Chain, DynamicTree, StaticTree
from spectrain.target import FeatureBatch
from spectrain.training import OptimConfig, Trainer, TrainingConfig

DEPTHS = 4
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9], [0, 0, 0]]
PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0))
SHAPES = {"chain": Chain(3), "static": StaticTree(PATHS), "dynamic": DynamicTree(3, 3, 8)}
MATCHING = {"rtol": 1e-5, "atol": 1e-5}


def built(tools: Any, target: Any, rows: list[Any], **settings: Any) -> EagleDrafter:
    """A drafter in the target's precision that errs, and whose norm does something."""
    drafter = tools.drafter(target, tools.config(EagleConfig, **{"depths": DEPTHS, **settings}), rows)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return drafter.to(target.dtype).eval()


@pytest.fixture(scope="module")
def lab(tools, make_rows, tiny_target):
    """A float64 target, rows of several lengths, a drafter and their batch."""
    target = tiny_target("llama", padding=8)
    rows = make_rows(target, 3, answer=(5, 9))
    drafter = built(tools, target, rows)
    return SimpleNamespace(target=target, rows=rows, drafter=drafter, batch=tools.batch(target, drafter, rows))


def with_answers(batch: FeatureBatch, answer: list[int]) -> FeatureBatch:
    """The first row of a batch, with other answer tokens."""
    T = len(answer)
    parts = {name: value[:1, :T] for name, value in vars(batch).items() if value is not None}
    return FeatureBatch(**{**parts, "answer_BT": torch.tensor([answer], dtype=torch.bool)})


# --- alignment ------------------------------------------------------------------------------------------------------


def test_supervised_positions_of_the_worked_example(lab):
    """8 tokens, the answer is tokens 4 to 6: depth 0 trains positions 3 and 4, depth 1 position 3, depth 2 none."""
    batch = with_answers(lab.batch, [0, 0, 0, 0, 1, 1, 1, 0])
    assert [depth.mask_BT[0].int().tolist() for depth in lab.drafter(batch, 3).depths] == [
        [0, 0, 0, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0, 0, 0],
        [0] * 8,
    ]
    assert lab.drafter(batch).depths[0].shift == 2


def layer_of(drafter: EagleDrafter) -> LlamaDecoderLayer:
    """The same layer as transformers computes it, without the first norm."""
    config = LlamaConfig(**drafter.layer_config.to_dict())
    config._attn_implementation = "sdpa"
    layer = LlamaDecoderLayer(config, 0).double()
    layer.input_layernorm = nn.Identity()
    layer.load_state_dict(drafter.layers[0].state_dict())
    return layer


@torch.no_grad()
def feature_by_hand(drafter: EagleDrafter, target: Any, ids: list[int], features_TH: torch.Tensor, t: int,
                    depth: int) -> torch.Tensor:  # fmt: skip
    """The feature of token t+1+depth, from the true features up to position t and predicted ones after it."""
    known = list(features_TH[: t + 1])
    embedding, layer = target.embedding_weight, layer_of(drafter)
    for step in range(depth + 1):
        T = t + 1 + step
        x_1TH = torch.stack([drafter.fc(torch.cat([embedding[ids[i + 1]], known[i]])) for i in range(T)])[None]
        blocked = torch.full((T, T), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        rotary = drafter.rotary(x_1TH, torch.arange(T)[None])
        known.append(layer(x_1TH, attention_mask=blocked, position_embeddings=rotary)[0, -1])
    return known[-1]


def test_every_depth_by_hand(lab):
    """Position t reads feature t beside token t+1; what it says of a feature stands in for it one position later."""
    with torch.no_grad():
        output = lab.drafter(lab.batch)
    compared = 0
    for number, row in enumerate(lab.rows):
        features_TH = lab.target.forward(torch.tensor([row.ids])).hidden_BTH[0]
        for d, depth in enumerate(output.depths):
            for t in depth.mask_BT[number].nonzero()[:, 0].tolist():
                want_H = feature_by_hand(lab.drafter, lab.target, row.ids, features_TH, t, d)
                torch.testing.assert_close(depth.hidden_BTH[number, t], want_H, **MATCHING)
                compared += 1
    assert compared == sum(int(depth.mask_BT.sum()) for depth in output.depths) > 40


@pytest.mark.parametrize(
    ("architecture", "extra"),
    [
        ("llama", {"num_key_value_heads": 4}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}}),
        ("qwen3", {}),  # heads wider than hidden size / heads
        ("gpt2", {}),  # no rotary positions of its own
        ("gpt_neox", {}),  # rotary positions on a part of each head
        ("gemma2", {}),  # a soft cap
        ("phi", {}),  # a bias in the head
    ],
)
def test_every_depth_of_training_is_what_decoding_computes(tools, make_rows, tiny_target, architecture, extra):
    """The states that the head reads, and the logits that it makes of them."""
    target = tiny_target(architecture, padding=2, **extra)
    rows = make_rows(target, 3, answer=(5, 9))
    rows[1].mask[:] = [1] * len(rows[1].ids)  # from the first token on
    rows[2].mask[4:6] = [0, 0]  # two answers in one row
    drafter = built(tools, target, rows)
    batch = tools.batch(target, drafter, rows)
    with torch.inference_mode():
        output = drafter(batch)
    compared = 0
    for number, row in enumerate(rows):
        for t in output.depths[0].mask_BT[number].nonzero()[:, 0].tolist():
            state = tools.observed(drafter, target, [row.ids[: t + 2]])
            with torch.inference_mode():
                logits_V, hidden_H = drafter.root(state)[0, 0], state.root_B1H[0, 0]
            for d, depth in enumerate(output.depths):
                if not depth.mask_BT[number, t]:
                    continue
                trained_H = depth.hidden_BTH[number, t]
                torch.testing.assert_close(hidden_H, trained_H[: len(hidden_H)], **MATCHING)
                scored_V = trained_H @ depth.head_DH.T
                scored_V = depth.cap * (scored_V / depth.cap).tanh() if depth.cap else scored_V
                torch.testing.assert_close(logits_V.double(), scored_V, rtol=1e-4, atol=1e-4)
                compared += 1
                if t + 2 + d < len(row.ids):
                    with torch.inference_mode():
                        token_11, root_11 = torch.tensor([[row.ids[t + 2 + d]]]), torch.zeros(1, 1, dtype=torch.long)
                        logits_V = drafter.extend(state, token_11, root_11)[0, 0]
                    hidden_H = state.hidden_BWH[0, 0]
    assert compared == sum(int(depth.mask_BT.sum()) for depth in output.depths) > 40


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "phi"])
def test_scores_are_those_of_a_decoder_on_the_targets_own_answers(tools, make_rows, tiny_target, architecture):
    """Tokens per round of validation, and those of greedy decoding with as many draft tokens as depths."""
    target = tiny_target(architecture)
    rows = make_rows(target, 5, answer=(16, 16))
    drafter = built(tools, target, rows, depths=1)
    tools.train(drafter, target, tools.batch(target, drafter, rows), 30)
    scores = score_batch(drafter.eval(), tools.batch(target, drafter, rows), target.head, 3)
    rounds = committed = 0
    for row in rows:
        prompt = row.ids[: row.mask.index(1)]
        run = generate(target, drafter, prompt, sampler=Sampler(), shape=Chain(3), max_new_tokens=16, eos_ids=())
        assert run.tokens == row.ids[len(prompt) :]
        rounds, committed = rounds + len(run.rounds), committed + sum(r.committed for r in run.rounds)
    assert (scores.rounds, scores.committed) == (rounds, committed)
    assert scores.tokens_per_round() > 1.5, "nothing was accepted, so nothing was compared"


NO_LAW = {"forward_kl": 1e-30}  # beside the regression, nothing in float32

# --- the loss -------------------------------------------------------------------------------------------------------


def loss_of(lab: Any, batch: FeatureBatch | None = None, weights: Any = None, **config: Any) -> torch.Tensor:
    module = DrafterLoss(lab.drafter, lab.target.head, LossConfig(**config))
    return module(batch or lab.batch, weights or [1.0] * DEPTHS)


class Given(nn.Module):
    """Says these features at every depth, whatever it is given."""

    name = "given"

    def __init__(self, lab: Any, said: list[torch.Tensor]) -> None:
        super().__init__()
        self.lab, self.said = [lab], said

    def shifts(self) -> tuple[int, ...]:
        return self.lab[0].drafter.shifts(len(self.said))

    def forward(self, batch: FeatureBatch, depths: int | None = None) -> Any:
        output = self.lab[0].drafter(batch, depths or len(self.said))
        told = zip(output.depths, self.said, strict=True)
        return replace(output, depths=tuple(replace(depth, hidden_BTH=said) for depth, said in told))


def test_the_regression_by_hand(lab):
    """Positions 3 and 4 of the worked example are compared with the features of tokens 4 and 5, and nothing else is."""
    batch = with_answers(lab.batch, [0, 0, 0, 0, 1, 1, 1, 0])
    H = batch.hidden_BTH.shape[-1]
    said_BTH = torch.full_like(batch.hidden_BTH, 1e6)
    said_BTH[0, 3] = batch.hidden_BTH[0, 4] + 0.5  # within 1: half the square
    said_BTH[0, 4] = batch.hidden_BTH[0, 5]
    said_BTH[0, 4, 0] -= 3.0  # beyond 1: the distance less a half
    said_BTH.requires_grad_()
    module = DrafterLoss(Given(lab, [said_BTH]), lab.target.head, LossConfig(terms=NO_LAW, regression=2.0))  # type: ignore[arg-type]
    loss = module(batch, [0.25])
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(0.25 * 2.0 * (0.5 * 0.5**2 + (3.0 - 0.5) / H))
    (gradient,) = torch.autograd.grad(loss, said_BTH)
    want = torch.zeros_like(gradient)
    want[0, 3] = 0.25 * 2.0 * 0.5 / H
    want[0, 4, 0] = -0.25 * 2.0 / H
    torch.testing.assert_close(gradient, want, rtol=1e-5, atol=1e-9)


def test_deeper_depths_are_compared_with_later_features(lab):
    """Depth d at position t stands for the feature of token t+1+d."""
    batch, wrong = lab.batch, []
    for late in range(3):
        said = [batch.hidden_BTH.roll(-1 - d - (late if d == 1 else 0), dims=1) for d in range(DEPTHS)]
        module = DrafterLoss(Given(lab, said), lab.target.head, LossConfig(terms=NO_LAW))  # type: ignore[arg-type]
        wrong.append(module(batch, [1.0] * DEPTHS).item())
    assert wrong[0] < 1e-20
    assert min(wrong[1:]) > 0.1


def test_law_and_regression_have_weights_of_their_own(lab):
    law, both = loss_of(lab, regression=0.0), loss_of(lab, terms={"forward_kl": 0.1}, regression=3.0)
    regression = loss_of(lab, terms=NO_LAW)
    assert min(law.item(), regression.item()) > 0.1
    torch.testing.assert_close(both, 0.1 * law + 3.0 * regression)
    weighted = loss_of(lab, weights=[0.0, 1.0, 0.0, 0.0], terms=NO_LAW)
    total = sum(loss_of(lab, weights=[float(d == one) for d in range(DEPTHS)], terms=NO_LAW) for one in range(DEPTHS))
    assert 0 < weighted.item() < regression.item()
    torch.testing.assert_close(total, regression)


def test_regression_is_known_to_those_alone_who_predict_features(tools, make_rows, tiny_target, family):
    target = tiny_target("llama", dtype=torch.float32)
    rows = make_rows(target, 2)
    drafter = tools.drafter(target, tools.config(family), rows)
    batch, count = tools.batch(target, drafter, rows), len(drafter.shifts())
    with_it, without = (DrafterLoss(drafter, target.head, LossConfig(regression=r))(batch, [1.0] * count)
                        for r in (5.0, 0.0))  # fmt: skip
    predicts = any(depth.predicts_features for depth in drafter(batch).depths)
    assert predicts or family is not EagleConfig
    assert torch.equal(with_it, without) == (not predicts)


def test_feature_and_law_both_get_better(tools, make_rows, tiny_target):
    target = tiny_target("llama", dtype=torch.float32)
    rows = make_rows(target, 5)
    drafter = tools.drafter(target, EagleConfig(), rows)
    batch = tools.batch(target, drafter, rows)
    lab = SimpleNamespace(target=target, drafter=drafter.eval())
    parts = [{"terms": NO_LAW}, {"regression": 0.0}]
    before = [loss_of(lab, batch, [1.0], **part).item() for part in parts]
    alpha = score_batch(drafter, batch, target.head).mean_alpha()
    tools.train(drafter, target, batch, 60)
    drafter.eval()
    after = [loss_of(lab, batch, [1.0], **part).item() for part in parts]
    assert after[0] < 0.8 * before[0]
    assert after[1] < 0.8 * before[1]
    assert score_batch(drafter, batch, target.head).mean_alpha()[0] > alpha[0] + 0.1


def test_a_loss_on_the_last_depth_alone_reaches_every_weight(tools, make_rows, tiny_target):
    target = tiny_target("llama", dtype=torch.float32)
    rows = make_rows(target, 3)
    drafter = built(tools, target, rows)
    batch = tools.batch(target, drafter, rows)
    for config in (LossConfig(terms=NO_LAW), LossConfig(regression=0.0)):
        drafter.zero_grad()
        DrafterLoss(drafter, target.head, config)(batch, [0.0] * (DEPTHS - 1) + [1.0]).backward()
        for name, parameter in drafter.named_parameters():
            assert parameter.grad.abs().sum() > 0, name


# --- an oracle ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "phi"])
def test_with_the_true_next_feature_every_depth_is_accepted(tools, make_rows, tiny_target, architecture):
    """Head and target of every depth belong together, also with a bias, a soft cap and rows that are no ids (C11)."""
    target = tiny_target(architecture, padding=4)
    rows = make_rows(target, 4)
    drafter = built(tools, target, rows)
    batch = tools.batch(target, drafter, rows)
    at_BM, _ = packed_positions(supervised(batch.answer_BT, 2))
    truths = iter(range(1, DEPTHS + 1))
    drafter.layer.finish = lambda *_: take_positions(batch.hidden_BTH.roll(-next(truths), dims=1), at_BM)  # type: ignore[method-assign]
    scores = score_batch(drafter, batch, target.head, DEPTHS)
    assert scores.mean_alpha() == pytest.approx([1.0] * DEPTHS, abs=1e-5)
    assert scores.survived == scores.reached
    assert scores.greedy == scores.positions


class Oracle(EagleDrafter):
    """Reads the next feature off the target itself, which it runs over the request's own tokens."""

    target: Any

    def start(self, first):
        state = super().start(first)
        state.ids = list(first)
        return state

    def observe(self, state, committed):
        super().observe(state, committed)
        state.ids += committed.tokens[0]
        state.root_B1H = self.truth(state.ids)

    def truth(self, ids):
        return self.target.forward(torch.tensor([ids])).hidden_BTH[:, -1:]

    def root(self, state):
        state.drafted = []
        return super().root(state)

    def extend(self, state, tokens_BW, parents_BW):
        super().extend(state, tokens_BW, parents_BW)
        state.drafted += tokens_BW[0].tolist()
        state.hidden_BWH = self.truth(state.ids + state.drafted)
        return self._logits(state.hidden_BWH)


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(1.0)], ids=Sampler.describe)
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_a_perfect_drafter_is_always_accepted(tools, make_rows, tiny_target, sampler, k):
    """Case C22: every draft token of every round, at every length."""
    target = tiny_target("llama", padding=4)
    oracle = tools.drafter(target, EagleConfig(), make_rows(target, 1)).double()
    oracle.__class__, oracle.target = Oracle, target
    run = generate(target, oracle, [3, 1, 4], sampler=sampler, shape=Chain(k), max_new_tokens=19, eos_ids=(), seed=1)
    assert [r.accepted for r in run.rounds] == [r.proposed for r in run.rounds]
    assert [r.committed for r in run.rounds[:-1]] == [k + 1] * (len(run.rounds) - 1)
    if sampler.greedy:
        assert run.tokens == generate_plain(target, [3, 1, 4], sampler=sampler, max_new_tokens=19, eos_ids=()).tokens


# --- noise ----------------------------------------------------------------------------------------------------------


def noisy(lab: Any, noise: float) -> EagleDrafter:
    drafter = EagleDrafter(EagleConfig(noise=noise), lab.drafter.layer_config).double()
    drafter.load_state_dict(lab.drafter.state_dict())
    drafter.bind(lab.target)
    return drafter


def test_noise_is_uniform_and_goes_by_the_length_of_the_row(lab):
    """Up to +-noise x 512 / T, T being where the last answer ends: padding is no part of a row."""
    drafter = noisy(lab, 0.1).train()
    torch.manual_seed(0)
    batch = lab.batch
    noise_BTH = torch.stack([drafter.training_features(batch) - batch.hidden_BTH for _ in range(60)])
    assert len({len(row.ids) for row in lab.rows}) > 1
    for number, row in enumerate(lab.rows):
        width = 0.1 * 512 / len(row.ids)
        values = noise_BTH[:, number].flatten()
        assert values.abs().max() <= width
        assert values.abs().max() > 0.999 * width
        assert abs(values.mean()) < 0.02 * width
        assert values.std() == pytest.approx(width / 3**0.5, rel=0.02)
        assert (values < -width / 2).double().mean().item() == pytest.approx(0.25, abs=0.01)


def test_noise_is_there_in_training_alone(lab):
    drafter, quiet = noisy(lab, 0.1), noisy(lab, 0.0)
    for mode, differs in ((True, True), (False, False)):
        got, want = (d.train(mode)(lab.batch).depths[0].hidden_BTH for d in (drafter, quiet))
        assert torch.equal(got, want) != differs
    torch.manual_seed(3)
    before = torch.get_rng_state()
    drafter.eval()(lab.batch)
    assert torch.equal(torch.get_rng_state(), before), "validation would change what training draws"


def test_noise_never_reaches_a_proposal_or_what_is_wanted(lab, tools):
    """A drafter that is still in training mode may be asked for one; and the regression is towards clean features."""
    drafter = noisy(lab, 5.0)
    drawn = []
    for mode in (True, False):
        drafter.train(mode)
        state = tools.observed(drafter, lab.target, [row.ids for row in lab.rows])
        uniforms_BN = torch.full((3, 3), 0.5, dtype=torch.float64)
        drawn.append(drafter.propose(state, Sampler(1.0), Chain(3), [3] * 3, uniforms_BN))
    assert torch.equal(drawn[0].tokens_BN, drawn[1].tokens_BN)
    assert torch.equal(drawn[0].q, drawn[1].q)
    kept = lab.batch.hidden_BTH.clone()
    drafter.train()(lab.batch)
    assert torch.equal(lab.batch.hidden_BTH, kept)


def test_noise_comes_from_torchs_generator(lab):
    drafter = noisy(lab, 0.1).train()
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append([drafter(lab.batch).depths[0].hidden_BTH for _ in range(2)])
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert torch.equal(outputs[0][1], outputs[1][1])
    assert not torch.equal(outputs[0][0], outputs[0][1])
    assert not torch.equal(outputs[0][0], outputs[2][0])


class Killed(BaseException):
    """What no code handles."""


def test_an_interrupted_run_draws_the_noise_of_the_unbroken_one(tools, make_rows, make_store, tiny_target, tmp_path):
    """Checkpoints keep the generator: weights are bit-equal, although something else used it in between."""
    target = tiny_target("llama", dtype=torch.float32)
    rows = make_rows(target, 6, answer=(8, 9))
    store = make_store(tmp_path / "features", target, rows)

    def trainer(folder: str, noise: float) -> Trainer:
        AcceleratorState._reset_state(True)
        drafter = tools.drafter(target, EagleConfig(noise=noise), rows)

        def save_bundle(path: Any) -> None:
            path.mkdir()
            save_file(dict(drafter.state_dict()), path / "model.safetensors")

        config = TrainingConfig(epochs=2, micro_batch_tokens=16, checkpoint_every=4, validate_every=3)
        return Trainer(drafter, target.head, store, store, loss=LossConfig(terms={"forward_kl": 0.1}),
                       optim=OptimConfig(lr=1e-3), config=config, folder=tmp_path / folder, save_bundle=save_bundle,
                       settings={})  # fmt: skip

    whole = trainer("whole", 0.1)
    whole.run()
    broken = trainer("broken", 0.1)
    step = broken._step

    def dies(batches: Any, number: int) -> Any:
        if number == 7:
            raise Killed
        return step(batches, number)

    broken._step = dies  # type: ignore[method-assign]
    with pytest.raises(Killed):
        broken.run()
    resumed = trainer("broken", 0.1)
    torch.manual_seed(1234)
    resumed.run()
    quiet = trainer("quiet", 0.0)
    quiet.run()
    AcceleratorState._reset_state(True)
    assert whole.total_steps > 8
    for name, value in whole.drafter.state_dict().items():
        assert torch.equal(value, resumed.drafter.state_dict()[name]), name
    assert not torch.equal(whole.drafter.state_dict()["fc.weight"], quiet.drafter.state_dict()["fc.weight"])


# --- decoding -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["llama", "qwen3", "gpt2", "gpt_neox", "mistral", "gemma2", "phi"])
def pair(request, tiny_target, tools):
    """Targets of every architecture with rows that are no ids, what plain decoding says, and a drafter."""
    target = tiny_target(request.param, layers=3, padding=4)
    plain = [generate_plain(target, p, sampler=Sampler(), max_new_tokens=14, eos_ids=(3,)).tokens for p in PROMPTS]
    torch.manual_seed(0)
    return target, plain, tools.ready(EagleConfig, target)


@pytest.mark.parametrize("name", SHAPES)
def test_greedy_decoding_is_plain_decoding_alone_and_in_a_batch(pair, name):
    target, plain, drafter = pair
    settings = {"sampler": Sampler(), "max_new_tokens": 14, "eos_ids": (3,), "shape": SHAPES[name]}
    assert [generate(target, drafter, prompt, **settings).tokens for prompt in PROMPTS] == plain
    batch = generate_batch(target, drafter, PROMPTS, seeds=range(len(PROMPTS)), **settings)
    assert [run.tokens for run in batch] == plain


@pytest.mark.parametrize("name", SHAPES)
def test_sampled_decoding_in_a_batch_is_that_alone(pair, name):
    target, _, drafter = pair
    settings = {"sampler": Sampler(1.0, top_k=6), "max_new_tokens": 14, "eos_ids": (3,), "shape": SHAPES[name]}
    one = [generate(target, drafter, prompt, seed=seed, **settings) for seed, prompt in enumerate(PROMPTS)]
    batch = generate_batch(target, drafter, PROMPTS, seeds=range(len(PROMPTS)), **settings)
    assert [run.tokens for run in batch] == [run.tokens for run in one]
    assert all(token < target.tokenizer_size for run in batch for token in run.tokens)


def test_a_bfloat16_target_can_be_trained_on_scored_and_drafted_for(tools, make_rows, tiny_target):
    """The drafter stays in float32, the head that it borrows does not."""
    target = tiny_target("llama", padding=4, dtype=torch.bfloat16)
    rows = make_rows(target, 4)
    drafter = tools.drafter(target, EagleConfig(), rows)
    assert all(parameter.dtype == torch.float32 for parameter in drafter.parameters())
    target.tap(())
    batch = live_batch(target, rows)
    losses = tools.train(drafter, target, batch, 30)
    assert losses[-1] < 0.9 * losses[0]
    scores = score_batch(drafter.eval(), batch, target.head, 3)
    assert all(0 < alpha <= 1 for alpha in scores.mean_alpha())
    for shape in SHAPES.values():
        run = generate(target, drafter, [1, 2, 3], sampler=Sampler(1.0), shape=shape, max_new_tokens=8, eos_ids=())
        assert len(run.tokens) == 8


# --- building -------------------------------------------------------------------------------------------------------


def test_parameter_names_are_those_that_servers_read(lab):
    assert set(lab.drafter.state_dict()) == {
        "fc.weight", "layers.0.post_attention_layernorm.weight",
        *(f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    }  # fmt: skip
    assert lab.drafter.fc.weight.shape == (32, 64)
    assert lab.drafter.layer.self_attn.q_proj.weight.shape == (32, 32)
    assert (lab.drafter.tap_layers, lab.drafter.columns) == ((), 24)


def test_the_head_is_the_targets_own_and_is_not_copied(lab, tiny_target):
    assert lab.drafter.head().data_ptr() == lab.target.head_weight.data_ptr()
    assert not lab.drafter.head().requires_grad
    assert lab.drafter.vocabulary()[0] == 32
    assert lab.drafter.vocabulary()[1].tolist() == list(range(24))
    whole = tiny_target("llama")
    drafter = EagleDrafter.build(EagleConfig(), whole, torch.zeros(24))
    assert drafter.vocabulary() == (24, None)


def test_it_does_not_bind_to_a_target_of_another_size_nor_draft_without_one(lab, tools, tiny_target):
    drafter = EagleDrafter(EagleConfig(), lab.drafter.layer_config).double()
    with pytest.raises(SpectrainError, match=r"borrows the target's head: call bind\(target\) first"):
        drafter.head()
    with pytest.raises(SpectrainError, match=r"borrows the target's embedding: call bind\(target\) first"):
        drafter(lab.batch)
    with pytest.raises(SpectrainError, match=r"hidden size 32 and 32 vocabulary rows, target has 32 and 26"):
        drafter.bind(tiny_target("llama", vocab=26))
    drafter.bind(lab.target)
    with pytest.raises(SpectrainError, match="nothing was observed yet"):
        drafter.propose(drafter.start([1]), Sampler(), Chain(1), [1], torch.zeros(1, 1))


def test_settings_out_of_range_are_refused(tiny_target):
    assert (EagleConfig().depths, EagleConfig().noise, EagleConfig().taps(tiny_target("llama"))) == (1, 0.1, ())
    for wrong in ({"depths": 0}, {"depths": 17}, {"noise": -0.1}, {"intermediate_size": 0}, {"draft_vocab_size": 9}):
        with pytest.raises(ValidationError, match=next(iter(wrong))):
            EagleConfig(**wrong)
    for loss in ({"terms": {"forward_kl": -1}}, {"regression": -0.5}):
        with pytest.raises(ValidationError, match=next(iter(loss))):
            LossConfig(**loss)
