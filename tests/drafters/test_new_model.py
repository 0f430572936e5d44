"""A random draft model of the target's architecture: what it takes over, what may be chosen, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from spectrain.data.batches import live_batch
from spectrain.decoding import generate, generate_plain
from spectrain.drafters.language_model import LanguageModelConfig, LanguageModelDrafter
from spectrain.drafters.new_model import new_settings
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler
from spectrain.shapes import Chain
from spectrain.target import Target

SHAPE = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24}


def built(target: Target, shape: dict[str, Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = LanguageModelConfig(start="new", shape=shape)
    return LanguageModelDrafter.build(config, target, torch.zeros(target.vocab_size))


@pytest.mark.parametrize("tied", [True, False])
def test_it_is_the_targets_architecture_in_another_size(tiny_target, tied):
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    target = tiny_target("llama", padding=5, context=96, rope_parameters=rope, tie_word_embeddings=tied)
    model, whole = built(target, SHAPE).model, target.model.config
    assert type(model) is type(target.model)
    changed = {key for key, value in model.config.to_dict().items() if value != whole.to_dict()[key]}
    assert changed - {"dtype"} == {*SHAPE, "head_dim"}
    assert {key: getattr(model.config, key) for key in SHAPE} == SHAPE
    assert model.config.head_dim == 4  # 16 / 4 heads, as 32 / 4 are 8 in the target
    assert len(model.get_input_embeddings().weight) == 29
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    assert model.config.rope_parameters == whole.rope_parameters
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_it_is_random_from_the_seed_and_never_in_half_precision(tiny_target, dtype):
    target = tiny_target("llama", dtype=dtype)
    first, again, other = (built(target, SHAPE, seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert not torch.equal(first["model.lm_head.weight"], other["model.lm_head.weight"])
    assert first["model.lm_head.weight"].dtype == torch.promote_types(dtype, torch.float32)


def test_of_every_architecture_it_learns_and_decodes(tiny_target, make_rows, tools, architecture):
    target = tiny_target(architecture, dtype=torch.float32)
    drafter = built(target, {"num_hidden_layers": 3, "hidden_size": 24})
    assert drafter.model.config.num_hidden_layers == 3
    losses = tools.train(drafter, target, live_batch(target, make_rows(target, 4)), 20, lr=1e-2)
    assert losses[-1] < 0.85 * losses[0]
    settings: dict[str, Any] = {"sampler": Sampler(), "max_new_tokens": 10, "eos_ids": ()}
    run = generate(target, drafter.eval(), [3, 1, 4], shape=Chain(3), **settings)
    assert run.tokens == generate_plain(target, [3, 1, 4], **settings).tokens
    assert sum(one.proposed for one in run.rounds) > 0


def test_the_common_names_serve_where_the_architecture_has_its_own(tiny_target):
    target = tiny_target("gpt2", layers=2)
    mine = new_settings(target, {"num_hidden_layers": 1, "hidden_size": 16})
    assert mine.to_dict() == new_settings(target, {"n_layer": 1, "n_embd": 16}).to_dict()
    assert (mine.n_layer, mine.n_embd, mine.n_head) == (1, 16, 4)
    with pytest.raises(SpectrainError, match=r"hidden_size says the same as another key of drafter\.shape, n_embd"):
        new_settings(target, {"n_embd": 16, "hidden_size": 16})


def test_heads_that_are_wide_by_themselves_stay_so(tiny_target):
    target = tiny_target("qwen3", head_dim=16)  # of 4 heads at width 32
    assert new_settings(target, {"hidden_size": 24}).head_dim == 16
    assert new_settings(target, {"hidden_size": 24, "head_dim": 8}).head_dim == 8


@pytest.mark.parametrize(("count", "kinds"), [(2, "sf"), (8, "sfsfsfsf"), (10, "sfsfsfsfsf")])
def test_kinds_of_layers_follow_and_repeat(tiny_target, count, kinds):
    found = new_settings(tiny_target("gemma2"), {"num_hidden_layers": count}).layer_types
    assert found == [{"s": "sliding_attention", "f": "full_attention"}[kind] for kind in kinds]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"hiden_size": 16}, r"drafter\.shape\.hiden_size is no setting of a LlamaForCausalLM\. Did you mean hidden_s"),
        ({"qqqq": 16}, r"drafter\.shape\.qqqq is no setting .* There are: .*intermediate_size, .*num_hidden_layers"),
        ({"vocab_size": 12}, r"drafter\.shape\.vocab_size cannot be chosen: .* target's vocabulary rows"),
        ({"eos_token_id": 3}, r"drafter\.shape\.eos_token_id cannot be chosen"),
        ({"architectures": ["X"]}, r"drafter\.shape\.architectures cannot be chosen"),
        ({"model_type": "qwen3"}, r"drafter\.shape\.model_type cannot be chosen"),
        ({"hidden_size": 30}, r"hidden_size 30 is no multiple of num_attention_heads 4; .*: 1, 2, 3, 5, 6"),
        ({"num_attention_heads": 5}, "hidden_size 32 is no multiple of num_attention_heads 5"),
        ({"num_attention_heads": 1}, "num_attention_heads 1 is no multiple of num_key_value_heads 2; .*, one of 1$"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3.* one of 1, 2, 4$"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers is 0; expected a whole number of at least 1, as the target's 8"),
        ({"hidden_size": "16"}, r"drafter\.shape\.hidden_size is '16'; expected a whole number"),
        ({"hidden_size": True}, r"drafter\.shape\.hidden_size is True; expected a whole number"),
        ({"hidden_act": 3}, r"drafter\.shape \{'hidden_act': 3\} does not fit a LlamaForCausalLM: .*hidden_act"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_settings_that_cannot_be_are_refused_before_anything_is_computed(tiny_target, shape, message):
    with pytest.raises(SpectrainError, match=message):
        LanguageModelConfig(start="new", shape=shape).taps(tiny_target("llama"))


def test_a_model_that_does_not_run_is_refused(tiny_target):
    with pytest.raises(SpectrainError, match=r"drafter\.shape \{'head_dim': 3\} does not make a model that runs"):
        built(tiny_target("llama"), {"head_dim": 3})
    with pytest.raises(SpectrainError, match=r"'hidden_act': 'nothing'\} does not make a model that runs: .*nothing"):
        built(tiny_target("llama"), {"hidden_act": "nothing"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"start": "new"}, r"a new model needs a shape, .*\{num_hidden_layers: 2\}"),
        ({"shape": SHAPE}, "shape is that of a new model, but start is 'target_layers'"),
        ({"start": "org/model", "shape": SHAPE}, "shape is that of a new model, but start is 'org/model'"),
        ({"start": "new", "shape": {}}, "shape"),
        ({"start": "new", "shape": SHAPE, "layers": (0,)}, "layers are the target's, but start is 'new'"),
        ({"start": "new", "shape": SHAPE, "revision": "abc"}, "revision belongs to a smaller model, but start is new"),
    ],
)
def test_settings_that_do_not_belong_together_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        LanguageModelConfig.model_validate(settings)
