"""Draft models as plain transformers folders: bit-equal out and in, strict on every key and tensor."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from spectrain import interop
from spectrain.bundle import load_drafter, save_drafter
from spectrain.decoding import generate
from spectrain.drafters.language_model import LanguageModelConfig, LanguageModelDrafter
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler
from spectrain.interop import language_model
from spectrain.interop.language_model import from_checkpoint, from_drafter, to_drafter
from spectrain.manifest import read_manifest
from spectrain.shapes import Chain
from spectrain.target import Target

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
KINDS = [("llama", {}), ("qwen3", {}), ("gpt2", {}), ("gpt_neox", {}), ("mistral", {}), ("gemma2", {}),
         ("mixtral", {"num_local_experts": 4, "num_key_value_heads": 2})]  # fmt: skip


def built(target: Target, **settings: Any) -> Any:
    return LanguageModelDrafter.build(LanguageModelConfig(**settings), target, torch.zeros(target.vocab_size))


@pytest.fixture
def drafter(tiny_target):
    return built(tiny_target("llama", layers=4, dtype=torch.float32), layers=(1, 3))


@pytest.fixture
def checkpoint(drafter):
    config, tensors = from_drafter(drafter, "org/target", ["LlamaForCausalLM"])
    return json.loads(json.dumps(config)), tensors


def refuse(config, tensors, match):
    with pytest.raises(SpectrainError, match=match):
        from_checkpoint(config, tensors, "here")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("architecture", "extra"), KINDS, ids=[kind for kind, _ in KINDS])
def test_the_folder_is_what_transformers_writes_and_reads(tiny_target, tmp_path, architecture, extra, tied):
    target = tiny_target(architecture, layers=4, dtype=torch.float32, tie_word_embeddings=tied, **extra)
    drafter = built(target, layers=(1, 3))
    config, tensors = from_drafter(drafter, "org/target", [architecture])
    (tmp_path / "ours").mkdir()
    interop.write_checkpoint(tmp_path / "ours", config, tensors)
    drafter.model.save_pretrained(tmp_path / "theirs")
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    told = [json.loads((tmp_path / side / "config.json").read_text()) for side in ("ours", "theirs")]
    assert told[0] == told[1]
    attention = drafter.model.config._attn_implementation
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation=attention).eval()
    with torch.no_grad():
        want = drafter.model(IDS).logits
        assert torch.equal(plain(IDS).logits, want)
        settings, read = from_checkpoint(interop.read_config(tmp_path / "ours"), ours, "here")
        again = to_drafter(settings, read, drafter.config.model_dump(mode="json"))
        assert torch.equal(again.model(IDS).logits, want)
    assert interop.format_of(tmp_path / "ours") is language_model
    assert (again.model.get_input_embeddings().weight is again.model.get_output_embeddings().weight) == tied
    assert again.config == drafter.config
    assert again.state_dict().keys() == drafter.state_dict().keys()
    assert all(torch.equal(again.state_dict()[name], value) for name, value in drafter.state_dict().items())


def test_tied_weights_are_stored_once_and_untied_ones_twice(tiny_target):
    """C26: a missing head is an error unless it is truly tied, and a second one where it is tied too."""
    target = tiny_target("llama", layers=2, dtype=torch.float32, tie_word_embeddings=True)
    config, tensors = from_drafter(built(target), "org/target", [])
    assert "lm_head.weight" not in tensors
    embedding = tensors["model.embed_tokens.weight"]
    refuse(config, {**tensors, "lm_head.weight": embedding.clone()}, r"unknown tensor lm_head\.weight \[24, 32\]")
    refuse({**config, "tie_word_embeddings": False}, tensors, r"tensor lm_head\.weight is missing")
    untied, both = from_drafter(built(tiny_target("llama", layers=2, dtype=torch.float32)), "org/target", [])
    assert both["lm_head.weight"].data_ptr() != both["model.embed_tokens.weight"].data_ptr()
    refuse({**untied, "tie_word_embeddings": True}, both, r"unknown tensor lm_head\.weight")


def test_every_missing_extra_or_misshapen_tensor_is_named(checkpoint):
    config, tensors = checkpoint
    from_checkpoint(config, tensors, "here")
    for name, tensor in tensors.items():
        rest = {other: value for other, value in tensors.items() if other != name}
        refuse(config, rest, rf"here: tensor {name} is missing")
        refuse(
            config, {**tensors, name: torch.zeros(tensor.shape[0] + 1, *tensor.shape[1:])}, rf"here: tensor {name} is "
        )
    extra = {**tensors, "norm.weight": tensors["model.norm.weight"]}
    refuse(config, extra, r"unknown tensor norm\.weight \[32\]\. Did you mean model\.norm\.weight\?")
    refuse({**config, "num_hidden_layers": 3}, tensors, r"tensor model\.layers\.2\.\S+ is missing")
    refuse({**config, "num_hidden_layers": 1}, tensors, r"unknown tensor model\.layers\.1\.")


def test_wrong_types_are_named(checkpoint):
    config, tensors = checkpoint
    half = {**tensors, "model.norm.weight": tensors["model.norm.weight"].bfloat16()}
    refuse(config, half, r"model\.norm\.weight is torch\.bfloat16, model\.embed_tokens\.weight is torch\.float32")
    refuse(config, {**tensors, "lm_head.weight": tensors["lm_head.weight"].long()}, r"lm_head\.weight is torch\.int64")


def test_keys_of_the_configuration_are_strict(checkpoint):
    config, tensors = checkpoint
    refuse({**config, "rms_norm_esp": 1.0}, tensors, "unknown key 'rms_norm_esp'.*Did you mean 'rms_norm_eps'")
    refuse({**config, "auto_map": {"AutoModel": "x.Y"}}, tensors, "unknown key 'auto_map'")
    refuse({**config, "quantization_config": {"bits": 4}}, tensors, "unknown key 'quantization_config'")
    refuse({**config, "hidden_size": "wide"}, tensors, r"here: config\.json: .*hidden_size")
    refuse({**config, "architectures": ["Eagle3"]}, tensors, r"expected a causal language model .*\['Eagle3'\]")
    for key in ("architectures", "model_type"):
        refuse({name: value for name, value in config.items() if name != key}, tensors, f"key '{key}' is missing")


@pytest.mark.parametrize(
    ("architectures", "model_type"),
    [
        (["LlamaForCausalLM"], "qwen3"),
        (["LlamaForCausalLMEagle3"], "llama"),
        (["LlamaForCausalLM"], None),
        (None, "llama"),
    ],
)
def test_what_is_no_causal_language_model_is_not_recognised(checkpoint, architectures, model_type):
    config, _ = checkpoint
    assert interop.format_of_config(config, "here") is language_model
    with pytest.raises(SpectrainError, match=r"unknown drafter checkpoint.*: .*transformers causal language model"):
        interop.format_of_config({**config, "architectures": architectures, "model_type": model_type}, "here")


def test_what_a_foreign_checkpoint_added_to_its_configuration_is_left_out(drafter):
    drafter.model.config.transformers_js = {"dtype": "q4"}
    config, tensors = from_drafter(drafter, "org/target", [])
    assert "transformers_js" not in config
    from_checkpoint(config, tensors, "here")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bundle_brings_the_drafter_back(chat_target, tmp_path, dtype):
    drafter = built(chat_target, layers=(0, 3, 7)).to(dtype)
    save_drafter(
        tmp_path / "bundle", drafter, target=chat_target.identity(), tokenizer=chat_target.tokenizer, sampler={},
        recipe={}, data_digests={}, eos_ids=chat_target.eos_ids,
    )  # fmt: skip
    manifest = read_manifest(tmp_path / "bundle")
    assert manifest.drafter == {**drafter.config.model_dump(mode="json"), "layers": [0, 3, 7]}
    assert (manifest.taps, manifest.tap_convention, manifest.draft_vocabulary_digest) == (None, None, None)
    assert manifest.storage_dtype == str(dtype).removeprefix("torch.")
    again, contents, notes = load_drafter(tmp_path / "bundle", chat_target)
    assert notes == ()
    assert contents.config["dtype"] == manifest.storage_dtype
    assert again.columns == chat_target.tokenizer_size
    assert all(torch.equal(again.state_dict()[name], value) for name, value in drafter.state_dict().items())
    if dtype != torch.float32:
        return  # the cast above also cast its rotary frequencies, which no checkpoint holds
    answers = [
        generate(chat_target, one, [10, 20, 30], sampler=Sampler(1.0), max_new_tokens=12, shape=Chain(3), seed=seed)
        for one, seed in itertools.product((drafter, again), (1, 2))
    ]
    assert [one.tokens for one in answers[:2]] == [one.tokens for one in answers[2:]]
