"""Draft models as plain transformers folders: bit-equal out and in, strict on every key and tensor."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from spectrain import interop
from spectrain.bundle import Belonging, load_drafter, read_bundle, save_drafter
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
    save_drafter(tmp_path / "bundle", drafter, Belonging.to(chat_target))
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


# --- adapters ---------------------------------------------------------------------------------------------------------


def adapted(target: Target, **settings: Any) -> Any:
    """A drafter with adapters that say something."""
    torch.manual_seed(0)
    drafter = built(target, **settings)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "lora_" in name:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return drafter


def save(folder: Any, drafter: Any, target: Target) -> Any:
    save_drafter(folder, drafter, Belonging.to(target))
    return folder


@pytest.mark.parametrize("tied", [True, False])
def test_adapters_are_merged_in_what_is_written(tiny_target, tmp_path, tied):
    target = tiny_target("llama", layers=4, dtype=torch.float32, tie_word_embeddings=tied)
    drafter = adapted(target, layers=(1, 3), lora={"rank": 4})
    config, tensors = from_drafter(drafter, "org/target", ["LlamaForCausalLM"])
    assert tensors.keys() == from_drafter(built(target, layers=(1, 3)), "org/target", [])[1].keys()
    assert config.get("tie_word_embeddings", False) == tied
    (tmp_path / "bundle").mkdir()
    interop.write_checkpoint(tmp_path / "bundle", config, tensors)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "bundle")
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, drafter.model(IDS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("start", ["target_layers", "smaller model"])
def test_a_bundle_of_adapters_is_a_plain_one_and_keeps_them_where_asked(chat_folder, chat_target, tmp_path, start):
    settings = {"layers": (0, 3, 7)} if start == "target_layers" else {"start": str(chat_folder)}
    drafter = adapted(chat_target, **settings, lora={"rank": 4, "alpha": 8, "keep_adapter": True})
    folder = save(tmp_path / "bundle", drafter, chat_target)
    names = {"adapter/adapter_config.json", "adapter/adapter_model.safetensors"}
    assert {name for name in read_manifest(folder).files if "/" in name} == names
    again, _, notes = load_drafter(folder, chat_target)
    assert notes == ()
    assert again.config == drafter.config
    assert not any("lora_" in name for name, _ in again.named_parameters())  # and it is not wrapped again
    assert all(parameter.requires_grad for parameter in again.parameters())
    plain = drafter.as_saved().model.state_dict()
    assert all(torch.equal(tensor, plain[name]) for name, tensor in again.model.state_dict().items())
    told = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert (told["peft_type"], told["r"], told["lora_alpha"], told["lora_dropout"]) == ("LORA", 4, 8, 0)
    assert told["base_model_name_or_path"] == settings.get("start")
    base: Any = built(chat_target, **settings).model
    with torch.no_grad():
        before = base(IDS).logits
        over: Any = PeftModel.from_pretrained(base, str(folder / "adapter"))
        torch.testing.assert_close(over(IDS).logits, again.model(IDS).logits, rtol=1e-4, atol=1e-4)
        assert (over(IDS).logits - before).abs().max() > 0.01
    answers = [
        generate(chat_target, one, [10, 20, 30], sampler=Sampler(), max_new_tokens=12, shape=Chain(3))
        for one in (drafter, again)
    ]
    assert answers[0].tokens == answers[1].tokens
    with (folder / "adapter" / "adapter_config.json").open("a") as file:
        file.write(" ")
    with pytest.raises(SpectrainError, match=r"adapter/adapter_config\.json was changed"):
        read_bundle(folder)


def test_without_keep_adapter_a_bundle_is_the_model_alone(chat_target, tmp_path):
    folder = save(tmp_path / "bundle", adapted(chat_target, layers=(0, 7), lora={"rank": 2}), chat_target)
    assert not (folder / "adapter").exists()
    assert read_manifest(folder).drafter["lora"] == {"rank": 2, "alpha": 32.0, "keep_adapter": False}


def test_adapters_start_anew_over_a_loaded_bundle(chat_target, tmp_path):
    """Its model is merged already: it neither carries adapters nor gets its own ones again."""
    folder = save(tmp_path / "bundle", adapted(chat_target, layers=(0, 7), lora={"rank": 2}), chat_target)
    old, new = load_drafter(folder, chat_target)[0], adapted(chat_target, layers=(1, 6), lora={"rank": 3})
    new.warm_start(old, chat_target)
    with torch.no_grad():
        torch.testing.assert_close(new.model(IDS).logits, old.model(IDS).logits)
    assert {name.rsplit(".", 3)[1] for name, p in new.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}


def test_a_bundle_is_a_start_for_the_next(chat_target, tmp_path):
    """Folder and tokenizer are a plain model's."""
    first = adapted(chat_target, layers=(0, 7), lora={"rank": 2, "keep_adapter": True})
    folder = save(tmp_path / "bundle", first, chat_target)
    second = built(chat_target, start=str(folder), lora={"rank": 4})
    with torch.no_grad():
        torch.testing.assert_close(second.model(IDS).logits, first.model(IDS).logits, rtol=1e-4, atol=1e-4)


def test_a_new_model_is_saved_as_any(chat_target, tmp_path):
    drafter = built(chat_target, start="new", shape={"num_hidden_layers": 2, "hidden_size": 16})
    again = load_drafter(save(tmp_path / "bundle", drafter, chat_target), chat_target)[0]
    assert again.config == drafter.config
    assert all(torch.equal(again.state_dict()[name], value) for name, value in drafter.state_dict().items())
