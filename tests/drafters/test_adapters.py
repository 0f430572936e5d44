"""Adapters on a small draft model: they alone train, saving merges them in a copy, and nothing else changes."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from pydantic import ValidationError
from training_lab import Killed, stop_at

from spectrain.data.batches import live_batch
from spectrain.decoding import generate_batch, generate_plain
from spectrain.drafters.adapters import Adapter, LoraSettings
from spectrain.drafters.language_model import LanguageModelConfig, LanguageModelDrafter
from spectrain.drafters.medusa import MedusaConfig, MedusaDrafter
from spectrain.drafters.objective import DrafterLoss, LossConfig
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler
from spectrain.interop.language_model import from_drafter
from spectrain.shapes import Chain, StaticTree
from spectrain.target import Target
from spectrain.training import OptimConfig, Trainer, TrainingConfig

LORA = {"rank": 4, "alpha": 8}
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [0, 0, 0]]


def built(target: Target, *, trained: float = 0.0, seed: int = 0, **settings: Any) -> Any:
    """A new drafter; ``trained`` is the size of what its adapters are then filled with."""
    torch.manual_seed(seed)
    config = LanguageModelConfig(**{"lora": LORA, **settings})
    drafter = LanguageModelDrafter.build(config, target, torch.zeros(target.vocab_size))
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "lora_" in name:
                parameter.add_(trained * torch.randn_like(parameter))
    return drafter


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS, use_cache=False).logits[0]


def values(module: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name


# --- what is there ----------------------------------------------------------------------------------------------------


def test_at_first_it_says_what_its_start_says(tiny_target, architecture):
    target = tiny_target(architecture)
    drafter, start = built(target), built(target, lora=None)
    assert torch.equal(logits(drafter.model), logits(start.model))
    assert type(drafter.model) is type(start.model)
    assert_same(values(drafter.as_saved().model), values(start.model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_adapters_alone_train_in_every_linear_layer_but_the_head(tiny_target, dtype):
    drafter = built(tiny_target("llama", dtype=dtype), layers=(0, 3))
    trained = {name for name, parameter in drafter.named_parameters() if parameter.requires_grad}
    linears = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
               "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip
    names = {f"model.model.layers.{i}.{linear}.lora_{side}.default.weight"
             for i in range(2) for linear in linears for side in "AB"}  # fmt: skip
    assert trained == names
    assert {parameter.dtype for parameter in drafter.parameters()} == {torch.float32}
    (group,) = drafter.parameter_groups()
    assert len(group["params"]) == len(names)
    layer = drafter.model.model.layers[0].mlp.up_proj
    assert layer.lora_A["default"].weight.shape == (4, 32)
    assert layer.scaling["default"] == 2.0
    drafter.train()
    assert not any(module.training for module in drafter.model.modules())  # no dropout, whatever asks for training


@pytest.mark.parametrize("tied", [True, False])
def test_merged_says_the_same_and_what_trains_is_not_touched(tiny_target, architecture, tied):
    drafter = built(tiny_target(architecture, tie_word_embeddings=tied), trained=0.2)
    before, start = values(drafter), logits(built(tiny_target(architecture, tie_word_embeddings=tied)).model)
    plain = drafter.as_saved().model
    assert not any("lora" in name for name, _ in plain.named_modules())
    assert type(plain) is type(drafter.model)
    torch.testing.assert_close(logits(plain), logits(drafter.model))
    assert (logits(plain) - start).abs().max() > 0.1
    assert (plain.get_input_embeddings().weight is plain.get_output_embeddings().weight) == tied
    assert plain.config.tie_word_embeddings == tied
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.zero_()
    assert_same(values(drafter), before)
    assert (drafter.model.get_input_embeddings().weight is drafter.model.get_output_embeddings().weight) == tied


def test_a_layer_is_the_formula(tiny_target):
    drafter = built(tiny_target("llama"), layers=(2,), trained=0.3)
    layer = drafter.model.model.layers[0].self_attn.q_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    merged = drafter.as_saved().model.model.layers[0].self_attn.q_proj.weight
    torch.testing.assert_close(merged, layer.base_layer.weight + 8 / 4 * b @ a)


@pytest.mark.parametrize("start", [{"layers": (0, 3)}, {"start": "new", "shape": {"num_hidden_layers": 1}}], ids=str)
def test_wherever_it_starts(tiny_target, start):
    target = tiny_target("llama", dtype=torch.float32)
    drafter = built(target, trained=0.1, **start)
    torch.testing.assert_close(logits(drafter.as_saved().model), logits(drafter.model), rtol=1e-4, atol=1e-4)
    assert torch.equal(logits(built(target, **start).model), logits(built(target, **start, lora=None).model))


def test_a_smaller_model_is_adapted_too(tiny_target, tiny_model, word_tokenizer, tmp_path):
    small = tiny_model("qwen3", layers=2, hidden=16, rows=29, dtype=torch.float32, tie_word_embeddings=True)
    small.save_pretrained(tmp_path)
    word_tokenizer(24).save_pretrained(tmp_path)
    drafter = built(tiny_target("llama", layers=2), start=str(tmp_path))
    assert all(("lora_" in name) == parameter.requires_grad for name, parameter in drafter.named_parameters())
    torch.testing.assert_close(logits(drafter.as_saved().model), logits(small)[:, :24])


def test_settings_are_checked():
    for wrong in ({"rank": 0}, {"alpha": 0}, {"dropout": 0.1}):
        with pytest.raises(ValidationError, match=next(iter(wrong))):
            LoraSettings.model_validate(wrong)
    with pytest.raises(ValidationError, match="a new one starts at random, which is stored nowhere"):
        LanguageModelConfig(start="new", shape={"num_hidden_layers": 2}, lora=LoraSettings(keep_adapter=True))


def test_a_rank_beyond_a_layer_is_refused_by_the_layers_name(tiny_target):
    target = tiny_target("llama", dtype=torch.float32)
    layer = next(m for name, m in target.model.named_modules() if name.endswith("0.self_attn.k_proj"))
    built(target, layers=(0,), lora={"rank": min(layer.weight.shape)})
    with pytest.raises(
        SpectrainError, match=r"drafter\.lora\.rank: found \d+, but layer model\.layers\.0\.self_attn\."
    ):
        built(target, layers=(0,), lora={"rank": min(layer.weight.shape) + 1})


def test_a_model_without_linear_layers_is_refused_by_name(tiny_model):
    model = tiny_model("llama", layers=1)
    model.model.layers = torch.nn.ModuleList()
    with pytest.raises(SpectrainError, match=r"no adapter fits a LlamaForCausalLM: .*leave drafter\.lora out"):
        Adapter(model, LoraSettings())


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def toy(tiny_target, make_rows):
    """A target with padded rows and tied embeddings, an adapted drafter, and a batch."""
    target = tiny_target("llama", padding=8, dtype=torch.float32, tie_word_embeddings=True)
    return target, built(target, layers=(0, 3, 6), trained=0.05), live_batch(target, make_rows(target, 5))


def loss_of(target: Target, drafter: Any, batch: Any) -> torch.Tensor:
    return DrafterLoss(drafter.train(), target.head, LossConfig())(batch, [1 / int(batch.answer_BT.sum() or 1)])


def test_gradients_are_in_the_adapters_only_and_those_of_the_full_formula(toy):
    """The gradient of A and B is that of the merged weight, through alpha / rank B A."""
    target, drafter, batch = toy
    loss_of(target, drafter, batch).backward()
    assert all((parameter.grad is not None) == parameter.requires_grad for parameter in drafter.parameters())
    whole = LanguageModelDrafter(drafter.config, drafter.as_saved().model.requires_grad_(True))
    whole.bind(target)
    loss_of(target, whole, batch).backward()
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.2.mlp.down_proj"):
        layer, gradient = drafter.model.get_submodule(name), whole.model.get_submodule(name).weight.grad
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        torch.testing.assert_close(a.grad, 2 * b.T @ gradient, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(b.grad, 2 * gradient @ a.T, rtol=1e-3, atol=1e-4)


def test_a_batch_with_nothing_supervised_gives_zero_gradients_and_not_none(toy):
    target, drafter, batch = toy
    loss = loss_of(target, drafter, replace(batch, answer_BT=torch.zeros_like(batch.answer_BT)))
    loss.backward()
    assert loss.item() == 0.0
    for parameter in drafter.parameter_groups()[0]["params"]:
        assert parameter.grad is not None
        assert not parameter.grad.any()


def test_the_loss_falls_and_only_the_adapters_move(toy):
    target, drafter, batch = toy
    before, optimizer = values(drafter), torch.optim.AdamW(drafter.parameter_groups(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = loss_of(target, drafter, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, before[name]) == ("lora_" not in name), name
    merged = LanguageModelDrafter(drafter.config, drafter.as_saved().model)
    merged.bind(target)
    torch.testing.assert_close(loss_of(target, merged, batch), loss_of(target, drafter, batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_an_interrupted_run_ends_bit_equal_to_the_unbroken_one(tiny_target, make_rows, make_store, tmp_path, tied):
    """Bundles that are merged and saved on the way leave no trace."""
    target = tiny_target("llama", dtype=torch.float32, layers=3, tie_word_embeddings=tied)
    store = make_store(tmp_path / "features", target, make_rows(target, 6))

    def trained(folder: str, stop: int | None = None, every: int = 2, seed: int = 0) -> dict[str, torch.Tensor]:
        AcceleratorState._reset_state(True)
        drafter = built(target, layers=(0, 2), seed=seed)

        def save(path: Any) -> None:
            path.mkdir()
            from_drafter(drafter, "org/target", [])

        trainer = Trainer(
            drafter, target.head, store, store, loss=LossConfig(), optim=OptimConfig(lr=1e-2),
            config=TrainingConfig(epochs=2, micro_batch_tokens=20, checkpoint_every=every, keep=9, validate_every=99),
            folder=tmp_path / folder, save_bundle=save, settings={},
        )  # fmt: skip
        if stop is not None:
            with pytest.raises(Killed):
                stop_at(trainer, stop + 1).run()
        else:
            trainer.run()
        AcceleratorState._reset_state(True)
        return values(drafter)

    unbroken = trained("unbroken", every=99)
    assert any(tensor.any() for name, tensor in unbroken.items() if "lora_B" in name)
    assert_same(trained("saved often", every=1), unbroken)
    trained("broken", stop=3)
    assert_same(trained("broken", seed=7), unbroken)  # the checkpoint's adapters, not those it was built with


# --- warm start -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [{"lora": None}, {}], ids=["plain", "adapted"])
@pytest.mark.parametrize("lora", [None, LORA], ids=["to plain", "to adapted"])
def test_a_warm_start_takes_what_the_other_says(tiny_target, other, lora):
    target = tiny_target("llama", dtype=torch.float32, tie_word_embeddings=True)
    old, new = built(target, layers=(0, 3), trained=0.2, **other), built(target, layers=(2, 7), seed=1, lora=lora)
    with torch.no_grad():
        old.model.get_input_embeddings().weight.mul_(1.5)
    before, start = values(old), logits(new.model)
    assert new.warm_start(old, target) == ()
    torch.testing.assert_close(logits(new.model), logits(old.model), rtol=1e-4, atol=1e-4)
    assert (logits(new.model) - start).abs().max() > 0.1
    assert_same(values(old), before)
    assert new.model.get_input_embeddings().weight is new.model.get_output_embeddings().weight
    adapters = {name: parameter for name, parameter in new.named_parameters() if "lora_" in name}
    assert len(adapters) == (0 if lora is None else 2 * 7 * 2)
    assert not any(parameter.any() for name, parameter in adapters.items() if "lora_B" in name)
    if lora is not None:
        assert all(parameter.requires_grad == (name in adapters) for name, parameter in new.named_parameters())
        assert_same(values(new.as_saved().model), values(old.as_saved().model))


def test_what_does_not_fit_a_warm_start_is_refused(tiny_target):
    target = tiny_target("llama", dtype=torch.float32)
    for wrong, message in [
        (built(target, layers=(0,)), r"model\.model\.layers\.1\.\S+ is None in the bundle, \["),
        (
            MedusaDrafter.build(MedusaConfig(), target, torch.zeros(24)),
            "found drafter type 'medusa', expected 'language_model'",
        ),
    ]:
        with pytest.raises(SpectrainError, match=message):
            built(target, layers=(0, 3)).warm_start(wrong, target)
    with pytest.raises(SpectrainError, match="no draft vocabulary to remap"):
        built(target).warm_start(built(target), target, remap=True)
    with pytest.raises(SpectrainError, match=r"keep_adapter .* give the bundle's folder as drafter\.start"):
        built(target, lora={"keep_adapter": True}).warm_start(built(target), target)


# --- decoding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [Chain(3), StaticTree(((0,), (1,), (0, 0), (0, 1)))], ids=["chain", "tree"])
def test_greedy_is_plain_with_adapters_and_with_them_merged(tiny_target, shape):
    target = tiny_target("llama", layers=3)
    drafter = built(target, layers=(0, 1, 2), trained=0.05)
    merged = LanguageModelDrafter(drafter.config, drafter.as_saved().model)
    merged.bind(target)
    settings: dict[str, Any] = {"sampler": Sampler(), "max_new_tokens": 12, "eos_ids": ()}
    both = [generate_batch(target, d, PROMPTS, seeds=range(3), shape=shape, **settings) for d in (drafter, merged)]
    for prompt, mine, theirs in zip(PROMPTS, *both, strict=True):
        assert mine.tokens == theirs.tokens == generate_plain(target, prompt, **settings).tokens
        assert [one.accepted for one in mine.rounds] == [one.accepted for one in theirs.rounds]
    assert sum(one.accepted for result in both[0] for one in result.rounds) > 0


def test_after_every_round_the_state_is_a_fresh_prefill(tiny_target, tools):
    target, dice = tiny_target("llama", layers=4), random.Random(0)
    drafter, texts = built(target, layers=(0, 3), trained=0.1).eval(), [[*prompt, 11] for prompt in PROMPTS]
    state, generator = tools.observed(drafter, target, texts), torch.Generator().manual_seed(0)
    for _ in range(5):
        fresh = tools.observed(drafter, target, texts)
        assert state.lengths == fresh.lengths == [len(text) for text in texts]
        torch.testing.assert_close(state.root_B1H, fresh.root_B1H)
        uniforms_BN = torch.rand(3, 3, generator=generator, dtype=torch.float64)
        drafted = drafter.propose(state, Sampler(1.0), Chain(3), [3] * 3, uniforms_BN).tokens_BN.tolist()
        longer = [[*text, *row[: dice.randint(0, 3)], dice.randrange(24)]
                  for text, row in zip(texts, drafted, strict=True)]  # fmt: skip
        drafter.observe(state, tools.told(target, longer, [len(t) for t in texts], [len(t) for t in longer]))
        texts = longer
