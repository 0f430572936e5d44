"""A bundle is done when a fresh process drafts the same with it: what would go unseen is caught, nothing is kept."""

from __future__ import annotations

import pytest
import torch
from reloading import Here

from spectrain import reload
from spectrain.bundle import Belonging, load_drafter, save_drafter
from spectrain.config import load_recipe
from spectrain.drafters.language_model import LanguageModelConfig, LanguageModelDrafter
from spectrain.drafters.medusa import MedusaConfig, MedusaDrafter
from spectrain.errors import SpectrainError
from spectrain.exchange import export_checkpoint
from spectrain.interop.layouts import TargetParts
from spectrain.pipeline import Run
from spectrain.reload import answers, check_reload


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(reload, "_start", Here)


@pytest.fixture
def bundle(finished_run):
    return finished_run / "run" / "bundle"


def saved(drafter, target, folder):
    save_drafter(folder, drafter, Belonging.to(target))
    return folder


@pytest.mark.slow
def test_a_run_and_an_export_are_read_back_in_fresh_processes(make_recipe, tmp_path):
    run = Run(load_recipe(make_recipe(tmp_path), ["training.epochs=1", "training.verify_bundle=true"]), progress=False)
    bundle = run.train()
    export_checkpoint(bundle, "sglang-eagle3", tmp_path / "exported", run.target)
    tensors = bundle / "model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"\x7f")
    drafter, _, _ = load_drafter(run.folder / "training/checkpoints" / _last(run) / "bundle", run.target)
    with pytest.raises(
        SpectrainError, match=r"does not load in a fresh process, so it is not kept: .*was changed after"
    ):
        check_reload(bundle, drafter, run.target)


def _last(run):
    return max(path.name for path in (run.folder / "training/checkpoints").iterdir() if (path / "bundle").is_dir())


@pytest.mark.parametrize("name", ["fc.weight", "lm_head.weight", "norm.weight", "layers.0.mlp.down_proj.weight"])
def test_a_weight_that_was_not_written_shows(here, bundle, chat_target, name):
    drafter, _, _ = load_drafter(bundle, chat_target)
    check_reload(bundle, drafter, chat_target)
    with torch.no_grad():
        drafter.state_dict()[name].mul_(1 + 1e-5)
    with pytest.raises(SpectrainError, match=r"not the drafter that was written, so it is not kept: the sampled laws"):
        check_reload(bundle, drafter, chat_target)


def test_tokens_are_compared_before_their_laws(here, bundle, chat_target):
    drafter, _, _ = load_drafter(bundle, chat_target)
    with torch.no_grad():
        drafter.lm_head.weight.mul_(-50)
    with pytest.raises(SpectrainError, match="the sampled tokens of made-up positions differ by up to"):
        check_reload(bundle, drafter, chat_target)


def test_the_drafter_is_as_it_was(here, bundle, chat_target):
    drafter, _, _ = load_drafter(bundle, chat_target)
    drafter.train()
    check_reload(bundle, drafter, chat_target)
    assert drafter.training
    assert drafter._embedding[0].data_ptr() == chat_target.embedding_weight.data_ptr()


def test_adapters_are_compared_as_they_are_merged(here, chat_target, tmp_path):
    config = LanguageModelConfig(layers=(0, 7), lora={"rank": 2})
    drafter = LanguageModelDrafter.build(config, chat_target, torch.ones(chat_target.vocab_size))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "lora" in name:
                parameter.normal_()
    folder = saved(drafter, chat_target, tmp_path / "bundle")
    check_reload(folder, drafter, chat_target)
    drafter.train()
    check_reload(folder, drafter, chat_target)


def test_shared_heads_are_the_targets(here, chat_target, tmp_path):
    drafter = MedusaDrafter.build(MedusaConfig(heads=2), chat_target, torch.ones(chat_target.vocab_size))
    folder = saved(drafter, chat_target, tmp_path / "bundle")
    check_reload(folder, drafter, chat_target)
    assert answers(drafter, TargetParts.of(chat_target))["sampled laws"].shape[1] == 2  # as many as it has heads


def test_parts_are_stored_whole(tiny_target, tmp_path):
    """Tied and untied heads, biases and caps, into memory of their own (CASES C26)."""
    for number, (kind, tied) in enumerate([("llama", True), ("llama", False), ("gemma2", True)]):
        target = tiny_target(kind, padding=3, dtype=torch.float32, tie_word_embeddings=tied)
        parts = TargetParts.of(target)
        parts.save(tmp_path / f"{number}.safetensors")
        read = TargetParts.load(tmp_path / f"{number}.safetensors", "cpu")
        assert torch.equal(read.embedding_weight, parts.embedding_weight)
        assert torch.equal(read.head_weight, parts.head_weight)
        assert (read.head.cap, read.tokenizer_size, read.num_layers) == (target.head.cap, 24, target.num_layers)
        assert (read.head_weight.data_ptr() == read.embedding_weight.data_ptr()) == tied


def test_a_run_whose_bundle_is_another_drafter_leaves_none(here, make_recipe, tmp_path, monkeypatch):
    overrides = ["training.epochs=1", "training.verify_bundle=true"]
    recipe = load_recipe(make_recipe(tmp_path), overrides)
    honest = reload.read_bundle

    def forgetful(folder):
        contents = honest(folder)
        contents.tensors["norm.weight"].fill_(1)
        return contents

    monkeypatch.setattr(reload, "read_bundle", forgetful)
    run = Run(recipe, progress=False)
    with pytest.raises(SpectrainError, match=r"run/bundle, read back in a fresh process, is not the drafter"):
        run.train()
    assert not run.bundle.exists()
    assert not [path for path in run.folder.iterdir() if path.name.endswith(".partial")]
    monkeypatch.setattr(reload, "read_bundle", honest)
    assert (Run(recipe, progress=False).train() / "model.safetensors").is_file()
