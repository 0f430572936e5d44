from __future__ import annotations

import importlib.util
import json
import sys

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from spectrain.errors import SpectrainError
from spectrain.interop import gguf as conversion
from spectrain.interop.gguf import convert_gguf, package_folder

MISREAD = Version(transformers.__version__) < Version("5.18")
reads_gguf = pytest.mark.skipif(MISREAD, reason="this transformers misreads byte-level GGUF tokenizers, and is refused")
LAYERS, HIDDEN, INNER, HEADS, KEY_HEADS = 2, 32, 64, 4, 2


def write_gguf(path):
    """A random two-layer Llama with a byte-level tokenizer of 261 tokens."""
    gguf = pytest.importorskip("gguf")
    random = np.random.default_rng(0)
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll"]
    tokens += ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 258 + [3, 3, 3])
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(259)
    writer.add_eos_token_id(260)
    writer.add_chat_template("{{ messages }}")

    def add(name, *shape):
        writer.add_tensor(name, random.normal(0, 0.1, shape).astype(np.float32))

    add("token_embd.weight", len(tokens), HIDDEN)
    add("output_norm.weight", HIDDEN)
    for layer in range(LAYERS):
        keys = HIDDEN // HEADS * KEY_HEADS
        shapes = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (keys, HIDDEN), "attn_v": (keys, HIDDEN)}
        shapes |= {"attn_output": (HIDDEN, HIDDEN), "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,)}
        shapes |= {"ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER)}
        for name, shape in shapes.items():
            add(f"blk.{layer}.{name}.weight", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.F32.gguf")


@reads_gguf
def test_the_folder_is_a_plain_model_with_the_same_logits(source, tmp_path):
    folder = convert_gguf(source.parent, tmp_path / "plain")
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert not any(key.startswith("_") for key in config)
    assert config["rope_parameters"]["rope_theta"] == 5000.0
    assert (folder / "model.safetensors").is_file()
    assert not list(folder.glob("*.gguf"))
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]
    saved = AutoModelForCausalLM.from_pretrained(folder).eval()
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name).eval()
    assert all(parameter.dtype == torch.float32 for parameter in saved.parameters())
    ids = torch.tensor([[5, 100, 256, 3, 260]])
    with torch.inference_mode():
        assert torch.equal(saved(ids).logits, loaded(ids).logits)
    assert saved.generation_config.eos_token_id == loaded.generation_config.eos_token_id
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("he", add_special_tokens=False) == [256]
    assert tokenizer.chat_template == "{{ messages }}"


def as_old_versions(source):
    """The tiny file's tokenizer as transformers 5.16 reads it: its end is its start."""
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.eos_token = tokenizer.bos_token
    return tokenizer


def test_a_library_that_takes_another_end_is_refused(source, tmp_path, monkeypatch):
    misread = as_old_versions(source)
    if not MISREAD:
        monkeypatch.setattr(conversion.AutoTokenizer, "from_pretrained", lambda *_, **__: misread)
    with pytest.raises(SpectrainError, match=r"tiny\.F32\.gguf says eos_token_id 260, and transformers 5.* takes 259"):
        convert_gguf(source, tmp_path / "plain")
    assert not list(tmp_path.iterdir())


@reads_gguf
def test_a_conversion_that_changes_the_logits_leaves_nothing(source, tmp_path, monkeypatch):
    plain = conversion._plain

    def changed(loaded):
        model = plain(loaded)
        with torch.no_grad():
            model.model.norm.weight[0] += 1e-3
        return model

    monkeypatch.setattr(conversion, "_plain", changed)
    with pytest.raises(SpectrainError, match="logits of the saved model are off by"):
        convert_gguf(source, tmp_path / "plain")
    assert not list(tmp_path.iterdir())


def test_bad_sources_and_destinations_are_named(source, tmp_path):
    with pytest.raises(SpectrainError, match=r"nowhere\.gguf does not exist"):
        convert_gguf(tmp_path / "nowhere.gguf", tmp_path / "out")
    with pytest.raises(SpectrainError, match=r"expected one \.gguf file, found none"):
        convert_gguf(tmp_path, tmp_path / "out")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"not a model, but long enough to have a header")
    with pytest.raises(SpectrainError, match=r"found a\.gguf, b\.gguf; name the file"):
        convert_gguf(tmp_path, tmp_path / "out")
    with pytest.raises(SpectrainError, match=r"a\.gguf: transformers cannot read this GGUF"):
        convert_gguf(tmp_path / "a.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(SpectrainError, match="exists: remove it"):
        convert_gguf(source, tmp_path)


def test_a_missing_gguf_package_is_explained(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name))
    with pytest.raises(SpectrainError, match=r"pip install 'spectrain\[gguf\]'"):
        convert_gguf(tmp_path, tmp_path / "out")


def test_a_package_is_found_without_being_imported(tmp_path, monkeypatch):
    (tmp_path / "only_data").mkdir()
    (tmp_path / "only_data" / "__init__.py").write_text("import a_dependency_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert package_folder("only-data") == tmp_path / "only_data"
    assert "only_data" not in sys.modules
    for name in ("surely-not-installed", "../x", "json.decoder", "this"):
        with pytest.raises(SpectrainError, match="is not installed"):
            package_folder(name)
