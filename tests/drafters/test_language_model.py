"""A small draft model: what it starts from, what it is trained on, and a decode state that is always a fresh prefill.

Shapes: B batch, N nodes, T positions, V vocabulary.
"""

from __future__ import annotations

import copy
import itertools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from pydantic import ValidationError
from torch import nn
from training_lab import Killed, stop_at

from spectrain.data.batches import live_batch
from spectrain.data.conversations import EncodedRow
from spectrain.decoding import generate, generate_batch, generate_plain
from spectrain.drafters import language_model
from spectrain.drafters.base import Committed
from spectrain.drafters.language_model import LanguageModelConfig, LanguageModelDrafter
from spectrain.drafters.objective import DrafterLoss, LossConfig
from spectrain.drafters.scoring import score_batch
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler
from spectrain.measures import RoundCounts
from spectrain.shapes import Chain, DynamicTree, StaticTree
from spectrain.target import Features, Target, load_target
from spectrain.training import OptimConfig, Trainer, TrainingConfig

REAL = Path(__file__).parents[2] / "targets" / "smollm2-135m-instruct"
GREEDY, WARM = Sampler(), Sampler(1.0, top_k=6)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9], [0, 0, 0]]
SHAPES = [
    Chain(3),
    Chain(1),
    StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0))),
    StaticTree(((0,), (0, 0), (0, 0, 0))),  # a chain that calls itself a tree
    StaticTree(((0,), (0, 0), (0, 1), (0, 1, 0))),  # one that branches later
    DynamicTree(3, 3, 8),
]
ARCHITECTURES = {"qwen3", "gpt2", "gpt_neox", "mistral", "gemma2"}
NAMES = ["chain", "k=1", "static", "narrow", "late", "dynamic"]


def built(target: Target, *, noise: float = 0.0, **settings: Any) -> Any:
    """A new drafter; ``noise`` on its weights makes one that is right for a while."""
    drafter = LanguageModelDrafter.build(LanguageModelConfig(**settings), target, torch.zeros(target.vocab_size))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return drafter


def everything(target: Target) -> tuple[int, ...]:
    return tuple(range(target.num_layers))


def saved(folder: Any, model: Any, tokenizer: Any) -> str:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def logits_of(drafter: LanguageModelDrafter, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        hidden_BTH = drafter.model.base_model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state
        return drafter.head().logits(hidden_BTH)[0]


# --- what it starts from --------------------------------------------------------------------------------------------


def truncated(target: Target, layers: tuple[int, ...]) -> Any:
    """Logits of the target's model with its list of layers cut by hand, as a function of ids."""
    model: Any = copy.deepcopy(target.model)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[layer] for layer in layers]
    model.config.num_hidden_layers = len(layers)
    name = "h" if hasattr(model.base_model, "h") else "layers"
    kept = nn.ModuleList([getattr(model.base_model, name)[layer] for layer in layers])
    setattr(model.base_model, name, kept)
    return lambda ids: model(torch.tensor(ids), use_cache=False).logits


@pytest.mark.parametrize("layers", [(0, 3, 6), (5,), (1, 2, 4, 7)], ids=str)
def test_it_is_the_target_cut_by_hand(tiny_target, architecture, layers):
    target = tiny_target(architecture)
    drafter, ids = built(target, layers=layers), [[3, 1, 4, 1, 5, 9, 2, 6]]
    with torch.no_grad():
        want = truncated(target, layers)(ids)[0]
    assert torch.equal(logits_of(drafter, ids[0]), want)
    assert drafter.model.config.num_hidden_layers == len(layers)
    assert type(drafter.model) is type(target.model)


def test_with_all_its_layers_it_is_the_target(tiny_target, architecture):
    """C22: everything is accepted, at every k."""
    target = tiny_target(architecture, layers=3, padding=3)
    drafter, ids = built(target, layers=everything(target)), [2, 7, 1, 8, 2, 8]
    want = target.logits(target.forward(torch.tensor([ids])).hidden_BTH)[0, :, :24]
    assert torch.equal(logits_of(drafter, ids), want)
    for k, sampler in itertools.product((1, 2, 5), (GREEDY, WARM)):
        results = generate_batch(
            target, drafter, PROMPTS, seeds=range(4), sampler=sampler, max_new_tokens=14, shape=Chain(k), eos_ids=()
        )
        rounds = [one for result in results for one in result.rounds]
        assert sum(one.proposed for one in rounds) > 15
        assert all(one.accepted == one.proposed for one in rounds)


@pytest.mark.parametrize(("depth", "kept"), [(30, (0, 14, 29)), (8, (0, 3, 7)), (3, (0, 1, 2)), (2, (0, 1)), (1, (0,))])
def test_the_default_is_three_layers_spread_evenly(depth, kept):
    target: Any = SimpleNamespace(num_layers=depth)
    assert LanguageModelConfig().kept(target) == kept
    assert LanguageModelConfig().taps(target) == ()


def test_layers_that_are_not_there_are_refused_before_anything_is_computed():
    target: Any = SimpleNamespace(num_layers=8)
    for wrong in ((0, 8), (-1, 2), (3, 3), (4, 1)):
        with pytest.raises(SpectrainError, match=r"drafter\.layers \[.*distinct ascending .* from 0 to 7"):
            LanguageModelConfig(layers=wrong).taps(target)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"start": "org/model", "layers": (0, 1)}, r"layers are the target's, but start is 'org/model'"),
        ({"revision": "abc"}, "revision belongs to a smaller model"),
        ({"layers": ()}, "layers"),
        ({"layer": (1,)}, "layer"),
    ],
)
def test_settings_that_do_not_belong_together_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        LanguageModelConfig.model_validate({"type": "language_model", **settings})


@pytest.mark.parametrize("tied", [True, False])
def test_tied_stays_tied_and_is_its_own(tiny_target, tied):
    target = tiny_target("llama", tie_word_embeddings=tied, dtype=torch.bfloat16)
    drafter = built(target)
    embedding, head = drafter.model.get_input_embeddings().weight, drafter.model.get_output_embeddings().weight
    assert (embedding is head) == tied
    assert embedding.dtype == torch.float32  # half precision cannot follow small steps
    assert torch.equal(embedding, target.embedding_weight.float())
    before = target.embedding_weight.clone()
    with torch.no_grad():
        head.zero_()
    assert (not embedding.any()) == tied
    assert torch.equal(target.embedding_weight, before)
    assert target.head_weight.any()


def test_everything_trains_and_nothing_is_the_targets(tiny_target):
    target = tiny_target("llama", dtype=torch.float32)
    drafter = built(target)
    assert all(parameter.requires_grad for parameter in drafter.parameters())
    assert {parameter.data_ptr() for parameter in drafter.parameters()}.isdisjoint(
        parameter.data_ptr() for parameter in target.model.parameters()
    )


def test_a_model_that_cannot_be_cut_is_refused_by_name(tiny_target, monkeypatch):
    mixed = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    target = tiny_target(
        "qwen3_moe", layers=4, num_key_value_heads=2, mlp_only_layers=[0], dtype=torch.float32, **mixed
    )
    with pytest.raises(
        SpectrainError, match=r"Qwen3MoeForCausalLM cannot be cut to .* \[1, 2\]: model\.layers\.0\.mlp"
    ):
        built(target, layers=(1, 2))
    target = tiny_target("llama", layers=2)
    target.model.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(SpectrainError, match=r"'llama' \(a LlamaForCausalLM\) is quantised"):
        built(target)
    monkeypatch.setattr(target, "config", copy.copy(target.config))  # as of a model that also sees
    del target.model.config.quantization_config
    with pytest.raises(SpectrainError, match=r"LlamaForCausalLM.* more than a causal language model"):
        built(target)


def test_a_mixture_of_experts_is_cut_too(tiny_target):
    target = tiny_target("mixtral", layers=4, num_key_value_heads=2, num_local_experts=4, dtype=torch.float32)
    with torch.no_grad():
        want = truncated(target, (1, 3))([[3, 1, 4, 1]])[0]
    torch.testing.assert_close(logits_of(built(target, layers=(1, 3)), [3, 1, 4, 1]), want)


# --- a smaller model --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("theirs", "ours"), [(0, 0), (0, 8), (8, 0), (5, 3), (3, 5)])
def test_a_smaller_model_with_other_padding(tiny_target, tiny_model, word_tokenizer, tmp_path, tied, theirs, ours):
    """C05: no id that does not exist is drafted, and its rows are as many as the target's, as servers want them."""
    small = tiny_model("qwen3", layers=2, hidden=16, rows=24 + theirs, tie_word_embeddings=tied, dtype=torch.float32)
    target = tiny_target("llama", layers=2, padding=ours)
    drafter = built(target, start=saved(tmp_path, small, word_tokenizer(24)))
    ids = [3, 1, 4, 1, 5]
    with torch.no_grad():
        want = small(torch.tensor([ids])).logits[0, :, :24]
    torch.testing.assert_close(logits_of(drafter, ids), want)
    head = drafter.model.get_output_embeddings()
    assert drafter.model.config.vocab_size == len(head.weight) == 24 + ours
    assert (drafter.model.get_input_embeddings().weight is head.weight) == tied
    assert drafter.columns == 24
    if ours > theirs:  # to a server that does not mask them, new rows never are the most likely
        with torch.no_grad():
            logits = drafter.model(torch.tensor([ids])).logits[0]
        assert (logits[:, 24 + theirs :] < logits[:, :24].amax(-1, keepdim=True)).all()
    for sampler in (GREEDY, Sampler(1.0)):
        for result in generate_batch(
            target, drafter, PROMPTS, seeds=range(4), sampler=sampler, max_new_tokens=8, shape=Chain(3), eos_ids=()
        ):
            assert max(result.tokens) < 24


def test_another_tokenizer_is_refused_with_the_first_difference(chat_target, tiny_model, make_tokenizer, tmp_path):
    model = tiny_model("llama", layers=1, rows=272, dtype=torch.float32)
    for name, tokenizer, difference in [
        ("swapped", make_tokenizer(swap=("h", "i")), r"vocabulary: token '[hi]': id \d+ against \d+"),
        ("ending", make_tokenizer(eos="<|endoftext|>"), "special_ids: eos"),
    ]:
        start = saved(tmp_path / name, model, tokenizer)
        with pytest.raises(SpectrainError, match=rf"{name}' has another tokenizer than the target .*{difference}"):
            built(chat_target, start=start)
    template = saved(tmp_path / "template", model, make_tokenizer(template="{{ messages }}"))
    assert built(chat_target, start=template).columns == chat_target.tokenizer_size


def test_what_does_not_load_is_named(tiny_target, tmp_path):
    with pytest.raises(SpectrainError, match=r"drafter\.start '.*nowhere' does not serve as a draft model.*not exist"):
        built(tiny_target("llama", layers=2), start=str(tmp_path / "nowhere"))


@pytest.mark.parametrize("shape", [Chain(4), SHAPES[2]], ids=["chain", "tree"])
def test_beyond_its_own_context_it_proposes_nothing(tiny_target, tiny_model, word_tokenizer, tmp_path, shape):
    small = tiny_model("gpt2", layers=2, context=16, dtype=torch.float32)
    target = tiny_target("gpt2", layers=2)
    drafter = built(target, start=saved(tmp_path, small, word_tokenizer(24)))
    settings: dict[str, Any] = {"sampler": GREEDY, "max_new_tokens": 24, "eos_ids": ()}
    results = generate_batch(target, drafter, PROMPTS, seeds=range(4), shape=shape, **settings)
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.tokens == generate_plain(target, prompt, **settings).tokens
        length = len(prompt) + 1
        for one in result.rounds[:-1]:
            left = len(prompt) + 24 - length - 1
            assert (one.proposed > 0) == (length + min(shape.depth, left) - 1 <= 16)
            length += one.committed
        assert length > 16
    row = EncodedRow("long", "all", [1] * 17, [0] * 4 + [1] * 13)
    with pytest.raises(SpectrainError, match=r"a row has 17 tokens, the draft model a context of 16; lower data\.max"):
        drafter(live_batch(target, [row]))


# --- training ---------------------------------------------------------------------------------------------------------


def test_supervised_positions_of_the_worked_example(tiny_target):
    """C01: 8 tokens, the answer is tokens 4 to 6."""
    target = tiny_target("llama", dtype=torch.float32)
    drafter = built(target)
    row = EncodedRow("row", "all", [3, 1, 4, 1, 5, 9, 2, 6], [0, 0, 0, 0, 1, 1, 1, 0])
    output = drafter.train()(live_batch(target, [row]))
    (depth,) = output.depths
    assert depth.mask_BT[0].int().tolist() == [0, 0, 0, 1, 1, 1, 0, 0]
    assert depth.shift == 1
    assert output.columns_D is None
    depth.hidden_BTH.retain_grad()
    kept = [output]
    drafter.forward = lambda batch: kept[0]
    DrafterLoss(drafter, target.head, LossConfig())(live_batch(target, [row]), [1.0]).backward()
    assert (depth.hidden_BTH.grad[0].abs().sum(-1) > 0).int().tolist() == [0, 0, 0, 1, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("architecture", "extra"),
    [("llama", {}), ("gemma2", {"final_logit_softcapping": 3.0}), ("phi", {}), ("gpt2", {})],
    ids=["llama", "soft cap", "bias", "dropout"],
)
@pytest.mark.parametrize("padding", [0, 5])
def test_the_law_that_is_trained_is_the_law_that_is_drafted(tiny_target, make_rows, architecture, extra, padding):
    """Soft caps and biases of the head included, padding left out, and no dropout in between."""
    target = tiny_target(architecture, padding=padding, dtype=torch.float32, **extra)
    rows = make_rows(target, 3)
    drafter, batch = built(target, layers=(0, 5, 7)), live_batch(target, rows)
    output = drafter.train()(batch)
    size, columns_D, (depth,) = 24, output.columns_D, output.depths
    assert columns_D.tolist() == list(range(size)) if padding else columns_D is None
    law_BTV = truncated(target, (0, 5, 7))(batch.ids_BT.tolist())[..., :size].log_softmax(-1)
    z = depth.hidden_BTH @ depth.head_DH.T
    z = torch.tanh(z / depth.cap) * depth.cap if depth.cap else z
    torch.testing.assert_close(z.log_softmax(-1), law_BTV, rtol=1e-4, atol=1e-4)
    teacher_BTV = target.logits(batch.hidden_BTH)[..., :size].float().softmax(-1)
    want = -(teacher_BTV * law_BTV).sum(-1)[depth.mask_BT].sum()
    loss = DrafterLoss(drafter, target.head, LossConfig())(batch, [1.0])
    torch.testing.assert_close(loss, want, rtol=1e-4, atol=1e-4)
    scores = score_batch(drafter, batch, target.head)
    accepted = torch.minimum(teacher_BTV, law_BTV.exp()).sum(-1)[depth.mask_BT].sum()
    assert scores.alpha == pytest.approx([accepted.item()], rel=1e-4)
    loss.backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, name


def test_the_loss_falls_and_the_target_stays_as_it_was(tiny_target, make_rows):
    target = tiny_target("llama", dtype=torch.float32, tie_word_embeddings=True)
    drafter, batch = built(target), live_batch(target, make_rows(target, 6))
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    module, losses = DrafterLoss(drafter.train(), target.head, LossConfig()), []
    first = score_batch(drafter, batch, target.head, 3)
    for _ in range(20):
        loss = module(batch, [1 / int(batch.answer_BT.sum())])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert score_batch(drafter, batch, target.head, 3).tokens_per_round() > first.tokens_per_round()
    assert drafter.model.get_input_embeddings().weight is drafter.model.get_output_embeddings().weight
    for name, value in target.model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_every_round_of_the_decoder_is_counted_the_same(tiny_target, make_rows):
    """Depth d of validation is what a decoder drafts after d accepted tokens, on the target's own greedy answers."""
    target, k = tiny_target("llama", layers=3), 3
    rows = make_rows(target, 3, answer=(8, 12))
    drafter, batch = built(target, layers=everything(target), noise=0.05), live_batch(target, rows)
    output = drafter(batch, k)
    assert tuple(depth.shift for depth in output.depths) == drafter.shifts(k) == (1, 2, 3)
    assert drafter.shifts() == (1,)
    for d, depth in enumerate(output.depths):
        assert torch.equal(depth.hidden_BTH[:, : -d or None], output.depths[0].hidden_BTH[:, d:])
        assert depth.mask_BT.sum() == sum(sum(row.mask) - d for row in rows)
    scores = score_batch(drafter, batch, target.head, k)
    rounds, decoded = RoundCounts(), RoundCounts()
    settings: dict[str, Any] = {"sampler": GREEDY, "shape": Chain(k), "eos_ids": ()}
    for row in rows:
        prompt = row.mask.index(1)
        for start in range(prompt, len(row.ids) - 1):  # the pending token
            left = len(row.ids) - start - 1
            run = generate(target, drafter, row.ids[:start], max_new_tokens=min(k, left) + 2, **settings)
            assert run.tokens[: left + 1] == row.ids[start : start + len(run.tokens)][: left + 1]
            one = run.rounds[0]
            assert one.proposed == min(k, left)
            rounds.add(one.proposed, one.accepted, one.accepted + 1)
        run = generate(target, drafter, row.ids[:prompt], max_new_tokens=sum(row.mask), **settings)
        for one in run.rounds:
            decoded.add(one.proposed, one.accepted, one.committed, one.clipped is not None)
    # Positions before the answer are supervised too: the first answer token, which a decoder gets from the prefill.
    firsts = [scored(drafter, target, row, k) for row in rows]
    reached = [r - sum(f[0][d] for f in firsts) for d, r in enumerate(scores.reached)]
    survived = [s - sum(f[1][d] for f in firsts) for d, s in enumerate(scores.survived)]
    assert [s / r for s, r in zip(survived, reached, strict=True)] == pytest.approx(rounds.conditional)
    assert 0 < scores.survived[-1] < scores.started
    assert (scores.rounds, scores.committed) == (decoded.rounds, decoded.committed_tokens)
    assert scores.tokens_per_round() == decoded.tokens_per_round


def scored(drafter: Any, target: Target, row: Any, k: int) -> tuple[list[int], list[int]]:
    """Depths reached and survived of the position before a row's answer alone."""
    prompt = row.mask.index(1)
    cut = EncodedRow("first", "all", row.ids[: prompt + k], row.mask[: prompt + k])
    output, batch = drafter(live_batch(target, [cut]), k), live_batch(target, [cut])
    reached, survived, alive = [], [], True
    for depth in output.depths:
        reached.append(int(alive))
        best = (depth.hidden_BTH[0, prompt - 1] @ depth.head_DH.T).argmax()
        alive = alive and bool(best == batch.greedy_BT[0, prompt - 1 + depth.shift - 1])
        survived.append(int(alive))
    return reached, survived


@pytest.mark.parametrize("tied", [True, False])
def test_an_interrupted_run_ends_bit_equal_to_the_unbroken_one(tiny_target, make_rows, make_store, tmp_path, tied):
    """Tied weights also pass through the state that training goes on from."""
    target = tiny_target("llama", dtype=torch.float32, layers=3, tie_word_embeddings=tied)
    store = make_store(tmp_path / "features", target, make_rows(target, 6))

    def trained(folder: str, stop: int | None = None) -> dict[str, torch.Tensor]:
        AcceleratorState._reset_state(True)
        drafter = built(target, layers=(0, 2))
        trainer = Trainer(
            drafter, target.head, store, store, loss=LossConfig(), optim=OptimConfig(lr=1e-3),
            config=TrainingConfig(epochs=2, micro_batch_tokens=20, checkpoint_every=2, keep=9, validate_every=99),
            folder=tmp_path / folder, save_bundle=lambda path: path.mkdir(), settings={},
        )  # fmt: skip
        if stop is not None:
            with pytest.raises(Killed):
                stop_at(trainer, stop + 1).run()
        else:
            trainer.run()
        AcceleratorState._reset_state(True)
        weights = drafter.model.get_input_embeddings().weight, drafter.model.get_output_embeddings().weight
        assert (weights[0] is weights[1]) == tied
        return {name: value.clone() for name, value in drafter.state_dict().items()}

    unbroken = trained("unbroken")
    trained("broken", stop=3)
    resumed = trained("broken")
    for name, value in unbroken.items():
        assert torch.equal(value, resumed[name]), name


# --- decoding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "shape"),
    [*itertools.product(sorted(ARCHITECTURES), (SHAPES[0], SHAPES[4])), *(("llama", shape) for shape in SHAPES)],
    ids=lambda value: value if isinstance(value, str) else value.describe(),
)
def test_greedy_is_plain_alone_and_in_a_batch(tiny_target, architecture, shape):
    target = tiny_target(architecture, layers=2)
    drafter = built(target, layers=everything(target), noise=0.05)
    settings: dict[str, Any] = {"max_new_tokens": 10, "eos_ids": (5,)}
    plain = [generate_plain(target, prompt, sampler=GREEDY, **settings).tokens for prompt in PROMPTS]
    accepted = 0
    for sampler in (GREEDY, WARM):
        settings |= {"sampler": sampler}
        together = generate_batch(target, drafter, PROMPTS, seeds=range(4), shape=shape, **settings)
        for seed, (prompt, result) in enumerate(zip(PROMPTS, together, strict=True)):
            alone = generate(target, drafter, prompt, seed=seed, shape=shape, **settings)
            assert alone.tokens == result.tokens
            accepted += sum(one.accepted for one in result.rounds)
        if sampler.greedy:
            assert [result.tokens for result in together] == plain
    assert accepted > 0


def committed(rows: list[list[int]]) -> Committed:
    width = max(map(len, rows))
    ids_BT = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    empty = torch.empty(*ids_BT.shape, 0)
    return Committed(rows, ids_BT, Features(empty, empty))


def prefilled(drafter: Any, texts: list[list[int]]) -> Any:
    state = drafter.start([text[0] for text in texts])
    drafter.observe(state, committed([text[1:] for text in texts]))
    return state


def assert_fresh(drafter: Any, state: Any, texts: list[list[int]]) -> None:
    """The state is that of a drafter that read these texts at once."""
    fresh = prefilled(drafter, texts)
    assert state.lengths == fresh.lengths == state.cache.lengths == [len(text) for text in texts]
    for mine, theirs in zip(state.cache.layers, fresh.cache.layers, strict=True):
        for row, length in enumerate(state.lengths):
            torch.testing.assert_close(mine.keys[row, :, :length], theirs.keys[row, :, :length])
            torch.testing.assert_close(mine.values[row, :, :length], theirs.values[row, :, :length])
    torch.testing.assert_close(state.root_B1H, fresh.root_B1H)


def a_path(proposal: Any, row: int, count: int, dice: random.Random) -> list[int]:
    """At most ``count`` tokens down some path of a proposal."""
    tokens, found, node = proposal.tokens_BN[row].tolist(), list[int](), -1
    parents = range(-1, len(tokens) - 1) if proposal.parents_BN is None else proposal.parents_BN[row].tolist()
    while len(found) < count:
        children = [n for n, parent in enumerate(parents) if parent == node]
        if not children:
            break
        node = dice.choice(children)
        found.append(tokens[node])
    return found


@pytest.mark.parametrize("sampler", [GREEDY, WARM], ids=Sampler.describe)
@pytest.mark.parametrize("shape", SHAPES, ids=NAMES)
def test_after_every_round_the_state_is_a_fresh_prefill(tiny_target, shape, sampler):
    """C22, whatever was accepted, proposed and not, observed without a proposal, or dropped from the batch."""
    target = tiny_target("llama", layers=4, padding=2)
    drafter, dice = built(target, layers=(0, 3)), random.Random(0)
    generator = torch.Generator().manual_seed(0)
    texts = [[*prompt, 11] for prompt in PROMPTS]
    state = prefilled(drafter, texts)
    for number in range(12):
        assert_fresh(drafter, state, texts)
        new: list[list[int]] = [[] for _ in texts]
        for _ in range(number % 3):  # none, one, or one that is thrown away and one more
            uniforms = torch.rand(len(texts), shape.nodes, generator=generator, dtype=torch.float64)
            limits = [dice.randint(1, 4) for _ in texts]
            proposal = drafter.propose(state, sampler, shape, limits, uniforms)
            new = [a_path(proposal, row, dice.randint(0, shape.depth), dice) for row in range(len(texts))]
        if number in (4, 10):  # what is committed was not drafted at all
            new = [[dice.randrange(24) for _ in range(dice.randint(1, 3))] for _ in texts]
        new = [[*tokens, dice.randrange(24)] for tokens in new]
        if number == 7:  # two have finished
            drafter.select(state, [3, 1])
            texts, new = [texts[3], texts[1]], [new[3], new[1]]
        drafter.observe(state, committed(new))
        texts = [text + tokens for text, tokens in zip(texts, new, strict=True)]
    assert drafter.memory(state) > 0


@pytest.mark.parametrize(("accepted", "read"), [(0, 1), (1, 1), (3, 1), (4, 1), (5, 2)])
def test_what_was_drafted_is_not_read_again(tiny_target, monkeypatch, accepted, read):
    """Of a chain only the last drafted token was never read."""
    target = tiny_target("llama", layers=4)
    drafter, widths = built(target), list[int]()
    state, uniforms = prefilled(drafter, [PROMPTS[0], PROMPTS[2]]), torch.zeros(2, 5)
    proposal = drafter.propose(state, GREEDY, Chain(5), [5, 5], uniforms)
    whole = language_model.cached_forward

    def spy(body, masks, ids_BT, cache, layout):
        widths.append(ids_BT.shape[1])
        return whole(body, masks, ids_BT, cache, layout)

    monkeypatch.setattr(language_model, "cached_forward", spy)
    other = [(chain[min(accepted, 4)] + 1) % 24 for chain in proposal.tokens_BN.tolist()]
    new = [[*chain[:accepted], token] for chain, token in zip(proposal.tokens_BN.tolist(), other, strict=True)]
    drafter.observe(state, committed(new))
    assert widths == [read]
    assert_fresh(drafter, state, [PROMPTS[0] + new[0], PROMPTS[2] + new[1]])


def test_q_is_the_law_over_the_targets_rows_and_padding_is_never_drawn(tiny_target):
    target = tiny_target("llama", padding=6)
    drafter = built(target)
    uniforms = torch.rand(2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    state = prefilled(drafter, PROMPTS[:2])
    sampler = Sampler(3.0)
    proposal = drafter.propose(state, sampler, Chain(4), [4, 4], uniforms)
    assert proposal.q.shape == (2, 4, 30)
    assert not proposal.q[..., 24:].any()
    model = truncated(target, (0, 3, 7))
    for row, prompt in enumerate(PROMPTS[:2]):
        ids = prompt + proposal.tokens_BN[row].tolist()
        with torch.no_grad():
            logits = model([ids])[0, len(prompt) - 1 : -1, :24]
        torch.testing.assert_close(proposal.q[row, :, :24], sampler.probabilities(logits))


def test_a_drafter_that_is_not_bound_or_has_seen_nothing_says_so(tiny_target):
    target = tiny_target("llama", layers=2)
    bound = built(target)
    loose = LanguageModelDrafter(bound.config, bound.model)
    with pytest.raises(SpectrainError, match=r"call bind\(target\) first"):
        loose.head()
    with pytest.raises(SpectrainError, match="nothing was observed yet"):
        bound.root(bound.start([1]))
    with pytest.raises(SpectrainError, match="24 vocabulary rows, the target's tokenizer 30 ids"):
        loose.bind(tiny_target("llama", layers=2, vocab=30))


def test_a_loaded_target_serves_as_it_is(chat_folder, chat_target):
    """From a folder, tokenizer and all: the target itself as the smaller model."""
    drafter = built(chat_target, start=str(chat_folder))
    prompt = [10, 20, 30]
    run = generate(
        load_target(str(chat_folder)), drafter, prompt, sampler=GREEDY, max_new_tokens=9, shape=Chain(4), eos_ids=()
    )
    assert [one.accepted for one in run.rounds] == [one.proposed for one in run.rounds]


@pytest.mark.slow
@pytest.mark.skipif(not (REAL / "config.json").is_file(), reason=f"no real target in {REAL}: run `make target`")
def test_three_layers_of_a_real_model_change_nothing_but_the_time():
    target = load_target(str(REAL))
    drafter = built(target, layers=(0, 14, 29))
    assert drafter.model.get_input_embeddings().weight is drafter.model.get_output_embeddings().weight
    prompts = [target.tokenizer.encode(text) for text in ("The capital of France is", "def add(a, b):")]
    settings: dict[str, Any] = {"sampler": GREEDY, "max_new_tokens": 16}
    results = generate_batch(target, drafter, prompts, seeds=(0, 0), shape=Chain(5), **settings)
    for prompt, result in zip(prompts, results, strict=True):
        want = generate_plain(target, prompt, **settings).tokens
        assert generate(target, drafter, prompt, shape=Chain(5), **settings).tokens == result.tokens == want
