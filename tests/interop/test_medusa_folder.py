"""Medusa checkpoints: what vLLM reads, nothing else, and back again bit for bit."""

from __future__ import annotations

import json

import pytest
import torch
from tiny import proposed

from spectrain.bundle import Belonging, Trained, load_drafter, save_drafter
from spectrain.drafters.medusa import MedusaConfig, MedusaDrafter
from spectrain.errors import SpectrainError
from spectrain.files import file_digest, write_json
from spectrain.identity import target_identity
from spectrain.interop import format_for, format_of_config, medusa, read_config, read_tensors, write_checkpoint
from spectrain.interop.medusa import from_checkpoint, from_drafter, to_drafter

HEADS = ["own", "shared"]
BLOCKS = {f"blocks.{i}.layers.{j}.{name}" for i in range(3) for j in range(2) for name in ("weight", "bias")}


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target(layers=2, padding=8, dtype=torch.float32)


def built(target, **settings):
    config = MedusaConfig(**{"heads": 3, "layers": 2, **settings})
    drafter = MedusaDrafter.build(config, target, torch.zeros(target.vocab_size))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return drafter


@pytest.fixture(params=HEADS)
def checkpoint(target, request):
    return from_drafter(built(target, head=request.param), "org/target", ["LlamaForCausalLM"])


def refuse(config, tensors, match):
    with pytest.raises(SpectrainError, match=match):
        from_checkpoint(config, tensors, "here")


@pytest.mark.parametrize("head", HEADS)
def test_the_configuration_and_the_names_are_those_that_vllm_reads(target, head):
    config, tensors = from_drafter(built(target, head=head), "org/target", ["LlamaForCausalLM"])
    assert config == {
        "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": 32, "vocab_size": 32,
        "num_heads": 3, "num_hidden_layers": 2, "medusa_fc_bias": True, "original_lm_head": head == "shared",
    }  # fmt: skip
    heads = {"lm_heads.0.weight"} if head == "shared" else {f"lm_heads.{i}.weight" for i in range(3)}
    assert set(tensors) == BLOCKS | heads
    assert tensors["lm_heads.0.weight"].shape == (32, 32)
    if head == "shared":
        assert torch.equal(tensors["lm_heads.0.weight"], target.head_weight)
    # vLLM renames any such key, so there must be one of each.
    assert [key for key in config if "num" in key and "heads" in key] == ["num_heads"]
    assert [key for key in config if "num" in key and "layers" in key] == ["num_hidden_layers"]


def test_round_trip_through_a_folder_is_bit_equal(target, checkpoint, tmp_path):
    config, tensors = checkpoint
    write_checkpoint(tmp_path, config, tensors)
    assert format_of_config(read_config(tmp_path), "here") is medusa
    settings, read = from_checkpoint(read_config(tmp_path), read_tensors(tmp_path), "here")
    assert (settings.heads, settings.layers, settings.bias, settings.taps) == (3, 2, True, None)
    assert set(read) == set(tensors)
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    assert medusa.draft_vocabulary(read) is None
    drafter = to_drafter(settings, read, None)
    drafter.bind(target)
    again, their = from_drafter(drafter, "org/target", ["LlamaForCausalLM"])
    assert again == config
    assert all(torch.equal(their[name], tensors[name]) for name in tensors)
    assert format_for(drafter) is medusa


@pytest.mark.parametrize("head", HEADS)
def test_a_bundle_gives_the_drafter_back(chat_target, tmp_path, head):
    drafter = built(chat_target, head=head, heads=2)
    identity = target_identity(chat_target.folder, name=str(chat_target.folder))
    save_drafter(
        tmp_path / "bundle", drafter, Belonging(identity, chat_target.tokenizer), Trained({"temperature": 0.0})
    )
    loaded, contents, notes = load_drafter(tmp_path / "bundle", chat_target)
    assert notes == ()
    assert contents.manifest.checkpoint_format == "vllm medusa"
    assert contents.manifest.drafter == {
        "type": "medusa", "heads": 2, "layers": 2, "head": head, "joint": None,
    }  # fmt: skip
    assert loaded.config == drafter.config
    for mine, theirs in zip(proposed(loaded, chat_target, 2), proposed(drafter, chat_target, 2), strict=True):
        assert torch.equal(mine, theirs)
    if head == "own":
        assert all(h.weight.untyped_storage().nbytes() == 4 * h.weight.numel() for h in loaded.lm_heads)
    else:
        assert not loaded.lm_heads
        assert loaded.borrowed().weight_VH.data_ptr() == chat_target.head_weight.data_ptr()


def test_a_shared_head_of_another_target_is_found_when_they_are_bound(target, tiny_target):
    config, tensors = from_drafter(built(target), "org/target", ["LlamaForCausalLM"])
    drafter = to_drafter(*from_checkpoint(config, tensors, "here"), None)
    with pytest.raises(SpectrainError, match=r"lm_heads\.0\.weight, is not this target's"):
        drafter.bind(tiny_target(layers=2, padding=8, dtype=torch.float32, seed=1))


def test_heads_without_biases_are_heads_with_biases_of_zero(target):
    """As the layout's own default has it."""
    drafter = built(target, head="own")
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
    config, tensors = from_drafter(drafter, "org/target", [])
    bare = {name: tensor for name, tensor in tensors.items() if not name.endswith("bias")}
    refuse({**config, "medusa_fc_bias": False}, tensors, r"unknown tensor blocks\.0\.layers\.0\.bias")
    refuse(config, bare, r"tensor blocks\.0\.layers\.0\.bias is missing")
    short = {key: value for key, value in config.items() if key not in ("medusa_fc_bias", "original_lm_head")}
    loaded = to_drafter(*from_checkpoint(short, bare, "here"), None)
    loaded.bind(target)
    for mine, theirs in zip(proposed(loaded, target), proposed(drafter, target), strict=True):
        assert torch.equal(mine, theirs)


def test_every_missing_extra_or_misshapen_tensor_is_named(checkpoint):
    config, tensors = checkpoint
    for name, tensor in tensors.items():
        rest = {other: value for other, value in tensors.items() if other != name}
        refuse(config, rest, f"here: tensor {name} is missing")
        refuse(config, {**tensors, name: torch.zeros(tensor.shape[0] + 1, *tensor.shape[1:])}, f"tensor {name} is ")
    refuse(config, {**tensors, "token_map": torch.arange(8)}, "unknown tensor token_map")
    original = {**tensors, "0.0.linear.weight": tensors["blocks.0.layers.0.weight"]}
    refuse(config, original, r"unknown tensor 0\.0\.linear\.weight")
    extra = {**tensors, "lm_heads.3.weight": tensors["lm_heads.0.weight"]}
    refuse(config, extra, r"unknown tensor lm_heads\.3\.weight")


def test_wrong_types_are_named(checkpoint):
    config, tensors = checkpoint
    half = {**tensors, "blocks.1.layers.0.bias": tensors["blocks.1.layers.0.bias"].bfloat16()}
    refuse(config, half, r"blocks\.1\.layers\.0\.bias is torch\.bfloat16, blocks\.0\.layers\.0\.weight is torch\.float")
    refuse(config, {**tensors, "lm_heads.0.weight": torch.zeros(32, 32).long()}, r"lm_heads\.0\.weight is torch\.int64")
    heads = {name: tensor.bfloat16() for name, tensor in tensors.items() if name.startswith("lm_heads")}
    from_checkpoint(config, {**tensors, **heads}, "here")  # a shared head keeps the target's precision


def test_keys_of_the_configuration_are_strict(checkpoint):
    config, tensors = checkpoint
    for key in ("architectures", "model_type", "hidden_size", "vocab_size", "num_heads", "num_hidden_layers"):
        refuse({name: value for name, value in config.items() if name != key}, tensors, f"key '{key}' is missing")
    for key, value, match in [
        ("medusa_num_heads", 3, "unknown key 'medusa_num_heads'.*Did you mean 'num_heads'"),
        ("num_attention_heads", 3, "unknown key 'num_attention_heads'"),
        ("num_heads", 9, "num_heads is 9; expected a whole number from 1 to 8"),
        ("num_heads", True, "num_heads is True"),
        ("num_hidden_layers", 0, "num_hidden_layers is 0; expected a whole number from 1 to 8"),
        ("hidden_size", "32", "hidden_size is '32'; expected a whole number of at least 1"),
        ("vocab_size", 31, r"tensor lm_heads\.0\.weight is \[32, 32\], but the configuration asks for \[31, 32\]"),
        ("truncated_vocab_size", 16, "truncated_vocab_size is 16; only 32 is supported"),
        ("logit_scale", 0.5, r"logit_scale is 0\.5; only 1 is supported"),
        ("medusa_fc_bias", 1, "medusa_fc_bias is 1; expected true or false"),
        ("original_lm_head", None, "original_lm_head is None; expected true or false"),
        ("architectures", ["Medusa"], r"expected \['MedusaModel'\] with 'medusa', found \['Medusa'\]"),
        ("model_type", "llama", "found .*with model_type 'llama'"),
    ]:
        refuse({**config, key: value}, tensors, match)
    inert = {"torch_dtype": "float16", "transformers_version": "4.38", "topk": 10, "truncated_vocab_size": 32}
    from_checkpoint({**config, **inert, "logit_scale": 1.0}, tensors, "here")


def test_a_manifest_that_says_otherwise_is_refused(target):
    settings, tensors = from_checkpoint(*from_drafter(built(target), "org/target", []), "here")
    for wrong in ({"heads": 2}, {"layers": 1}, {"head": "own"}):
        manifest = {"type": "medusa", "heads": 3, "layers": 2, "head": "shared", **wrong}
        with pytest.raises(SpectrainError, match=r"the manifest says .* of these Medusa heads"):
            to_drafter(settings, tensors, manifest)


def test_a_shared_head_is_not_written_without_its_target(target):
    loose = MedusaDrafter(MedusaConfig(), 32, 32)
    with pytest.raises(SpectrainError, match=r"call bind\(target\) first"):
        from_drafter(loose, "org/target", [])


def test_a_bundle_with_an_unknown_architecture_key_does_not_load(chat_target, tmp_path):
    """Also when the manifest lists the changed file."""
    folder, identity = tmp_path / "bundle", target_identity(chat_target.folder, name=str(chat_target.folder))
    save_drafter(folder, built(chat_target), Belonging(identity, chat_target.tokenizer))
    write_json(folder / "config.json", {**read_config(folder), "num_key_value_heads": 4})
    manifest = json.loads((folder / "spectrain.json").read_text())
    manifest["files"]["config.json"] = file_digest(folder / "config.json")
    write_json(folder / "spectrain.json", manifest)
    with pytest.raises(SpectrainError, match="unknown key 'num_key_value_heads'"):
        load_drafter(folder, chat_target)
