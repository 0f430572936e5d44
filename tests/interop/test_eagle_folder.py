"""EAGLE checkpoints: what vLLM reads, nothing else, and back again bit for bit."""

from __future__ import annotations

import pytest
import torch
from tiny import proposed
from transformers import AutoConfig, LlamaConfig

from spectrain.bundle import Belonging, Trained, load_drafter, read_bundle, save_drafter
from spectrain.drafters.eagle import EagleConfig, EagleDrafter
from spectrain.errors import SpectrainError
from spectrain.identity import target_identity
from spectrain.interop import eagle, format_for, format_of_config, read_config, read_tensors, write_checkpoint
from spectrain.interop.eagle import EagleSettings, from_checkpoint, from_drafter, to_checkpoint, to_drafter

LAYER = "layers.0."
TENSORS = {
    "fc.weight": [32, 64],
    f"{LAYER}self_attn.q_proj.weight": [32, 32],
    f"{LAYER}self_attn.k_proj.weight": [16, 32],
    f"{LAYER}self_attn.v_proj.weight": [16, 32],
    f"{LAYER}self_attn.o_proj.weight": [32, 32],
    f"{LAYER}post_attention_layernorm.weight": [32],
    f"{LAYER}mlp.gate_proj.weight": [64, 32],
    f"{LAYER}mlp.up_proj.weight": [64, 32],
    f"{LAYER}mlp.down_proj.weight": [32, 64],
}
TRAINED = Trained({"temperature": 0.0})


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target(layers=2, padding=8, dtype=torch.float32, context=77)


def built(target, **settings):
    torch.manual_seed(0)
    drafter = EagleDrafter.build(EagleConfig(**settings), target, torch.zeros(target.vocab_size))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return drafter


@pytest.fixture
def checkpoint(target):
    return from_drafter(built(target), "org/target", ["LlamaForCausalLM"])


def refuse(config, tensors, match):
    with pytest.raises(SpectrainError, match=match):
        from_checkpoint(config, tensors, "here")


def test_the_configuration_and_the_names_are_those_that_vllm_reads(checkpoint):
    config, tensors = checkpoint
    assert config == {
        "architectures": ["EagleLlamaForCausalLM"], "model_type": "llama", "bias": False, "vocab_size": 32,
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False,
        "mlp_bias": False, "max_position_embeddings": 77, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == TENSORS


def test_transformers_reads_the_configuration_as_a_llama_without_biases(checkpoint, tmp_path):
    """As a server does; it takes the key ``bias`` for one of the attention."""
    write_checkpoint(tmp_path, *checkpoint)
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, LlamaConfig)
    assert (config.bias, config.attention_bias, config.mlp_bias) == (False, False, False)
    assert (config.num_hidden_layers, config.head_dim, config.vocab_size) == (1, 8, 32)
    assert config.rope_parameters["rope_theta"] == 10000.0


def test_round_trip_through_a_folder_is_bit_equal(target, checkpoint, tmp_path):
    config, tensors = checkpoint
    write_checkpoint(tmp_path, config, tensors)
    assert format_of_config(read_config(tmp_path), "here") is eagle
    settings, read = from_checkpoint(read_config(tmp_path), read_tensors(tmp_path), "here")
    assert settings.taps == ()
    assert set(read) == set(tensors)
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    assert eagle.draft_vocabulary(read) is None
    drafter = to_drafter(settings, read, None)
    assert format_for(drafter) is eagle
    drafter.bind(target)
    again, their = from_drafter(drafter, "org/target", ["LlamaForCausalLM"])
    assert again == config
    assert all(torch.equal(their[name], tensors[name]) for name in tensors)


def test_a_bundle_gives_the_drafter_back(chat_target, tmp_path):
    drafter = built(chat_target, depths=2, noise=0.3)
    identity = target_identity(chat_target.folder, name=str(chat_target.folder))
    save_drafter(tmp_path / "bundle", drafter, Belonging(identity, chat_target.tokenizer), TRAINED)
    loaded, contents, notes = load_drafter(tmp_path / "bundle", chat_target)
    assert notes == ()
    assert not loaded.training
    manifest = contents.manifest
    assert (manifest.checkpoint_format, manifest.draft_vocabulary_digest) == ("vllm eagle", None)
    assert manifest.drafter == {
        "type": "eagle",
        "depths": 2,
        "noise": 0.3,
        "intermediate_size": None,
        "embedding": "target",
    }
    assert manifest.taps == ()
    assert manifest.tap_convention == eagle.TAP_CONVENTION
    assert "after the final norm" in manifest.tap_convention
    assert loaded.config == drafter.config
    for mine, theirs in zip(proposed(loaded, chat_target), proposed(drafter, chat_target), strict=True):
        assert torch.equal(mine, theirs)
    assert loaded.head().data_ptr() == chat_target.head_weight.data_ptr()


def test_a_bundle_records_which_feature_it_reads(chat_target, tmp_path):
    """Another convention is another drafter: the states before the final norm, say."""
    identity = target_identity(chat_target.folder, name=str(chat_target.folder))
    save_drafter(tmp_path / "b", built(chat_target), Belonging(identity, chat_target.tokenizer), TRAINED)
    path = tmp_path / "b" / "spectrain.json"
    path.write_text(path.read_text().replace("after the final norm", "before the final norm"))
    with pytest.raises(SpectrainError, match="tap_convention is 'no taps: the feature is the last hidden state after"):
        read_bundle(tmp_path / "b")


def test_every_missing_extra_or_misshapen_tensor_is_named(checkpoint):
    config, tensors = checkpoint
    for name, tensor in tensors.items():
        rest = {other: value for other, value in tensors.items() if other != name}
        refuse(config, rest, f"here: tensor {name} is missing")
        refuse(config, {**tensors, name: torch.zeros((tensor.shape[0] + 1, *tensor.shape[1:]))}, f"tensor {name} is ")
    for name in ("fc.bias", "layers.0.input_layernorm.weight", "norm.weight", "lm_head.weight", "model.fc.weight"):
        refuse(config, {**tensors, name: torch.zeros(32)}, f"here: unknown tensor {name} ")
    half = {**tensors, f"{LAYER}mlp.up_proj.weight": tensors[f"{LAYER}mlp.up_proj.weight"].bfloat16()}
    refuse(config, half, r"up_proj\.weight is torch\.bfloat16, fc\.weight is torch\.float32")
    refuse(config, {**tensors, "fc.weight": tensors["fc.weight"].long()}, r"fc\.weight is torch\.int64")


def test_an_embedding_beside_the_weights_is_the_targets_and_is_left_out(target, checkpoint):
    """The original and some servers want one; here it is borrowed."""
    config, tensors = checkpoint
    settings, read = from_checkpoint(config, {**tensors, "embed_tokens.weight": torch.zeros(32, 32)}, "here")
    drafter = to_drafter(settings, read, {"type": "eagle", "depths": 3})
    assert set(drafter.state_dict()) == set(TENSORS)
    assert drafter.config == EagleConfig(depths=3)
    refuse(config, {**tensors, "embed_tokens.weight": torch.zeros(24, 32)}, r"embed_tokens\.weight is \[24, 32\]")


@pytest.mark.parametrize("key", ["architectures", "bias", *eagle.LAYER_KEYS])
def test_every_key_is_required(checkpoint, key):
    """An absent ``bias`` means that there is one to the original."""
    config, tensors = checkpoint
    refuse({name: value for name, value in config.items() if name != key}, tensors, f"key '{key}' is missing")


def test_keys_of_the_configuration_are_strict(checkpoint):
    config, tensors = checkpoint
    for change, match in {
        ("bias", True): "bias is True; only false is supported: vLLM has no bias in fc",
        ("attention_bias", True): "attention_bias is True; only False",
        ("num_hidden_layers", 2): "num_hidden_layers is 2; only 1",
        ("model_type", "qwen2"): "model_type is 'qwen2'; only 'llama'",
        ("rope_parameters", None): "rope_parameters must give rope_theta",
        ("logit_scale", 2.0): "unknown key 'logit_scale'",
        ("biass", False): "unknown key 'biass'.*Did you mean 'bias'",
    }.items():
        refuse({**config, change[0]: change[1]}, tensors, match)
    refuse({**config, "architectures": ["LlamaForCausalLMEagle"]}, tensors, r"expected \['EagleLlamaForCausalLM'\]")
    assert from_checkpoint({**config, "transformers_version": "5.0", "dtype": "float32"}, tensors, "here")


def test_bad_drafters_are_refused_when_writing(target, checkpoint):
    _, tensors = checkpoint
    layer = built(target).layer_config.to_dict()
    with pytest.raises(SpectrainError, match=r"the EAGLE drafter: tensor fc\.weight is missing"):
        to_checkpoint(EagleSettings(layer), {name: value for name, value in tensors.items() if name != "fc.weight"})
    with pytest.raises(SpectrainError, match="the EAGLE drafter: num_hidden_layers is 2"):
        to_checkpoint(EagleSettings({**layer, "num_hidden_layers": 2}), tensors)


def test_an_embedding_of_its_own_that_is_missing_is_named(checkpoint):
    config, tensors = checkpoint
    settings, read = from_checkpoint(config, tensors, "here")
    with pytest.raises(SpectrainError, match=r"an embedding of its own, but tensor embed_tokens\.weight is missing"):
        eagle.to_drafter(settings, read, {"type": "eagle", "embedding": "own"})
