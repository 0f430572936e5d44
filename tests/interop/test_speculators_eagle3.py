from __future__ import annotations

import copy
import dataclasses
import json

import pytest
import torch
from transformers import LlamaConfig

from spectrain.errors import SpectrainError
from spectrain.interop import (
    format_of,
    format_of_config,
    read_config,
    read_tensors,
    speculators_eagle3,
    write_checkpoint,
)
from spectrain.interop.speculators_eagle3 import (
    LAYER_KEYS,
    draft_vocabulary,
    from_checkpoint,
    to_checkpoint,
)


@pytest.fixture
def checkpoint(make_eagle3):
    settings, tensors = make_eagle3()
    config, tensors = to_checkpoint(settings, tensors)
    return settings, copy.deepcopy(config), dict(tensors)


def from_folder(folder):
    return from_checkpoint(read_config(folder), read_tensors(folder), str(folder))


def refuse(config, tensors, match):
    with pytest.raises(SpectrainError, match=match):
        from_checkpoint(config, tensors, "here")


def test_the_configuration_says_all_that_vllm_reads(checkpoint):
    settings, config, _ = checkpoint
    assert config["architectures"] == ["Eagle3Speculator"]
    assert config["speculators_model_type"] == "eagle3"
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert (config["draft_vocab_size"], config["target_hidden_size"]) == (32, 8)
    for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "embed_requires_grad"):
        assert config[key] is False
    assert config["transformer_layer_config"] == settings.layer_config
    assert set(config["transformer_layer_config"]) == set(LAYER_KEYS)
    serving = config["speculators_config"]
    assert serving["proposal_methods"] == [
        {
            "proposal_type": "greedy",
            "speculative_tokens": 3,
            "verifier_accept_k": 1,
            "accept_tolerance": 0.0,
        }
    ]
    assert serving["verifier"] == {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]}


def test_a_whole_llama_configuration_is_cut_to_what_matters(make_eagle3):
    settings, tensors = make_eagle3()
    full = LlamaConfig(**settings.layer_config).to_dict()
    config, _ = to_checkpoint(dataclasses.replace(settings, layer_config=full), tensors)
    assert config["transformer_layer_config"] == settings.layer_config
    assert LlamaConfig(**config["transformer_layer_config"]).rope_parameters["rope_theta"] == 10000.0


def test_round_trip_through_a_folder_is_bit_equal(checkpoint, tmp_path):
    settings, config, tensors = checkpoint
    write_checkpoint(tmp_path, config, tensors)
    assert format_of(tmp_path) is speculators_eagle3
    read_settings, read = from_folder(tmp_path)
    assert read_settings == settings
    assert set(read) == set(tensors)
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


def test_a_reduced_head_keeps_its_shape_and_storage_beside_an_embedding(make_eagle3, tmp_path):
    settings, tensors = make_eagle3(vocabulary=100)
    embedding = torch.randn(100, 8, generator=torch.Generator().manual_seed(3))
    tensors["embed_tokens.weight"] = embedding
    tensors["lm_head.weight"] = embedding[:32]  # a view of the embedding's storage
    write_checkpoint(tmp_path, *to_checkpoint(settings, tensors))
    _, read = from_folder(tmp_path)
    assert read["lm_head.weight"].shape == (32, 8)
    assert torch.equal(read["lm_head.weight"], embedding[:32])
    assert torch.equal(read["embed_tokens.weight"], embedding)
    assert read["lm_head.weight"].data_ptr() != read["embed_tokens.weight"].data_ptr()
    read["lm_head.weight"].zero_()
    assert torch.equal(read["embed_tokens.weight"], embedding)
    hidden = torch.randn(4, 8, generator=torch.Generator().manual_seed(4))
    assert torch.equal(hidden @ from_folder(tmp_path)[1]["lm_head.weight"].T, hidden @ embedding[:32].T)


def test_d2t_holds_offsets(checkpoint):
    _, config, tensors = checkpoint
    ids = torch.arange(32) * 3
    assert torch.equal(draft_vocabulary(tensors), ids)
    refuse(config, {**tensors, "d2t": ids}, "d2t maps to ids 0 to 124|t2d")  # ids where offsets belong
    doubled = tensors["d2t"].clone()
    doubled[5] = doubled[4] - 1
    refuse(config, {**tensors, "d2t": doubled}, "draft token 5 maps to 12 after 12")
    refuse(config, {**tensors, "d2t": tensors["d2t"] + 250}, "outside the target's vocabulary of 300")
    refuse(config, {**tensors, "d2t": tensors["d2t"] - 1}, "ids -1 to 92")
    t2d = tensors["t2d"].clone()
    t2d[7] = True
    refuse(config, {**tensors, "t2d": t2d}, r"t2d\[7\] is True, but d2t says False")


def test_every_missing_extra_or_misshapen_tensor_is_named(checkpoint):
    _, config, tensors = checkpoint
    for name, tensor in tensors.items():
        rest = {other: value for other, value in tensors.items() if other != name}
        refuse(config, rest, f"here: tensor {name} is missing")
        grown = torch.zeros((tensor.shape[0] + 1, *tensor.shape[1:]), dtype=tensor.dtype)
        refuse(config, {**tensors, name: grown}, f"here: tensor {name} is ")
    extra = {**tensors, "model.fc.weight": tensors["fc.weight"]}
    refuse(config, extra, r"unknown tensor model\.fc\.weight \[8, 24\]\. Did you mean fc\.weight\?")


def test_wrong_types_are_named(checkpoint):
    _, config, tensors = checkpoint
    refuse(config, {**tensors, "d2t": tensors["d2t"].int()}, "d2t is torch.int32, expected torch.int64")
    refuse(config, {**tensors, "t2d": tensors["t2d"].to(torch.uint8)}, "t2d is torch.uint8")
    half = {**tensors, "norm.weight": tensors["norm.weight"].bfloat16()}
    refuse(config, half, r"norm\.weight is torch\.bfloat16, fc\.weight is torch\.float32")
    refuse(config, {**tensors, "lm_head.weight": tensors["lm_head.weight"].long()}, r"lm_head\.weight is")


@pytest.mark.parametrize("key", LAYER_KEYS)
def test_every_layer_key_is_required(checkpoint, key):
    _, config, tensors = checkpoint
    del config["transformer_layer_config"][key]
    refuse(config, tensors, f"transformer_layer_config: key '{key}' is missing")


def test_keys_of_the_configuration_are_strict(checkpoint):
    _, config, tensors = checkpoint
    required = ("norm_before_residual", "eagle_aux_hidden_state_layer_ids", "speculators_config")
    for key in required:
        refuse({name: value for name, value in config.items() if name != key}, tensors, f"'{key}' is missing")
    refuse({**config, "norm_before_residul": 1}, tensors, "unknown key 'norm_before_residul'.*'norm_before_resid")
    refuse({**config, "norm_before_residual": True}, tensors, "norm_before_residual is True; only false")
    refuse({**config, "fc_norm": True}, tensors, "fc_norm is True")
    layer = config["transformer_layer_config"]
    for mutation, match in {
        "attention_multiplier": "unknown key 'attention_multiplier'",
        "attention_bias": "attention_bias is 7",
        "num_hidden_layers": "num_hidden_layers is 7; only 1",
        "rope_parameters": "rope_parameters must give rope_theta",
    }.items():
        refuse({**config, "transformer_layer_config": {**layer, mutation: 7}}, tensors, match)
    refuse({**config, "draft_vocab_size": 301}, tensors, "draft_vocab_size is 301")
    refuse({**config, "speculators_config": {"algorithm": "eagle3"}}, tensors, "key 'default_proposal_method'")
    malformed = {**config["speculators_config"], "proposal_methods": []}
    refuse({**config, "speculators_config": malformed}, tensors, "malformed: IndexError")


@pytest.mark.parametrize("taps", [None, [], [2, 4], [4, 2, 5], [2, 2, 5], [-1, 2, 5], [0, 1, True]])
def test_taps_are_three_ascending_layers(checkpoint, taps):
    _, config, tensors = checkpoint
    config["eagle_aux_hidden_state_layer_ids"] = taps
    refuse(config, tensors, "must be three distinct ascending layer ids")


def test_bad_drafters_are_refused_when_writing(make_eagle3):
    settings, tensors = make_eagle3()
    with pytest.raises(SpectrainError, match="must be three distinct ascending"):
        to_checkpoint(dataclasses.replace(settings, taps=(5, 4, 2)), tensors)
    with pytest.raises(SpectrainError, match=r"tensor fc\.weight is missing"):
        to_checkpoint(settings, {name: value for name, value in tensors.items() if name != "fc.weight"})


def test_unknown_formats_and_broken_folders_are_explained(checkpoint, tmp_path):
    with pytest.raises(SpectrainError, match=r"architectures \['X'\].*Known formats: speculators eagle3"):
        format_of_config({"architectures": ["X"]}, "here")
    with pytest.raises(SpectrainError, match=r"has no config\.json"):
        format_of(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SpectrainError, match="is not JSON"):
        format_of(tmp_path)
    _, config, _ = checkpoint
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(SpectrainError, match=r"pytorch_model\.bin is a pickle and is not opened"):
        from_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10")
    with pytest.raises(SpectrainError, match="not a whole safetensors file"):
        from_folder(tmp_path)


def test_an_embedding_that_was_trained_has_to_be_there(make_eagle3, tmp_path):
    settings, tensors = make_eagle3(vocabulary=100)
    settings = dataclasses.replace(settings, embed_requires_grad=True)
    with pytest.raises(SpectrainError, match=r"tensor embed_tokens\.weight is missing; it should be \[100, 8\]"):
        to_checkpoint(settings, tensors)
    tensors["embed_tokens.weight"] = torch.randn(100, 8, generator=torch.Generator().manual_seed(3))
    config, tensors = to_checkpoint(settings, tensors)
    assert config["embed_requires_grad"] is True
    write_checkpoint(tmp_path, config, tensors)
    read_settings, read = from_folder(tmp_path)
    assert read_settings == settings
    drafter = speculators_eagle3.to_drafter(read_settings, read, None)
    assert drafter.config.embedding == "own"
    assert torch.equal(drafter.embed_tokens.weight, tensors["embed_tokens.weight"])
    del tensors["embed_tokens.weight"]
    refuse(config, tensors, r"here: tensor embed_tokens\.weight is missing")
    refuse({**config, "embed_requires_grad": "yes"}, tensors, "embed_requires_grad is 'yes', expected true or false")


def test_a_frozen_embedding_is_the_targets_and_is_left_to_it(make_eagle3):
    settings, tensors = make_eagle3(vocabulary=100)
    tensors["embed_tokens.weight"] = torch.zeros(100, 8)
    assert speculators_eagle3.to_drafter(settings, tensors, None).embed_tokens is None
    manifest = {"type": "eagle3", "embedding": "own", "draft_vocab_size": 32}
    with pytest.raises(SpectrainError, match=r"embed_requires_grad False, its manifest says drafter\.embedding 'own'"):
        speculators_eagle3.to_drafter(settings, tensors, manifest)
