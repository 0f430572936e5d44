"""Taps are where the convention says (case C10), the head reads what is stored (C11), padding is no token (C05)."""

import re
from functools import cache as once
from functools import partial
from typing import Any

import pytest
import torch
from paths import paths_of
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from spectrain import weights
from spectrain.drafters.eagle3 import Eagle3Config
from spectrain.errors import SpectrainError
from spectrain.shapes import Layout
from spectrain.taps import check_taps, default_taps
from spectrain.target import Target, load_target, resolve_model

SMALL: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}


def tokens(count, seed=0, rows=1):
    return torch.randint(0, 24, (rows, count), generator=torch.Generator().manual_seed(seed))


# --- taps -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def counting_target(tiny_target):
    return once(lambda architecture: build_counting(tiny_target(architecture)))


def build_counting(target):
    """Eight layers that compute nothing; after them a hook adds 10^k behind layer k."""
    with torch.no_grad():
        for parameter in target.model.parameters():
            parameter.zero_()
    for k, layer in enumerate(target.layers):

        def add(_module, _args, output, k=k):
            return (output[0] + 10.0**k, *output[1:]) if isinstance(output, tuple) else output + 10.0**k

        layer.register_forward_hook(add)
    return target


@pytest.mark.parametrize("taps", [(0,), (1,), (7,), (2, 4, 5), (0, 1, 2, 3, 4, 5, 6, 7)])
def test_tap_k_is_the_sum_of_the_blocks_before_k(counting_target, architecture, taps):
    target = counting_target(architecture)
    target.tap(taps)
    cache = target.new_cache()
    for ids in (tokens(5), tokens(1), tokens(3)):  # a prefill, a step, a verification
        streams = target.forward(ids, cache=cache).taps_BTF.view(1, ids.shape[1], len(taps), 32)
        for column, k in enumerate(taps):
            assert (streams[:, :, column] == (10**k - 1) // 9).all(), f"tap {k}"


def test_taps_are_the_librarys_hidden_states(tiny_target, architecture):
    target = tiny_target(architecture)
    target.tap(range(8))
    ids = tokens(11, rows=2)
    want = target.model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    got = target.forward(ids)
    torch.testing.assert_close(got.taps_BTF, torch.cat(want[:8], dim=-1), rtol=0, atol=0)
    torch.testing.assert_close(got.hidden_BTH, want[-1], rtol=0, atol=0)


def test_taps_can_be_changed_and_taken_off(tiny_target):
    target = tiny_target()
    ids = tokens(6)
    target.tap((1, 2))
    both = target.forward(ids).taps_BTF
    target.tap((2,))
    assert torch.equal(target.forward(ids).taps_BTF, both[..., 32:])
    target.tap(())
    assert target.forward(ids).taps_BTF.shape == (1, 6, 0)
    assert not any(layer._forward_pre_hooks for layer in target.layers)


def test_tapping_the_same_layers_again_is_for_nothing(tiny_target):
    """A decoder taps for every batch; its hooks, and what was compiled around them, may stay."""
    target = tiny_target(layers=4)
    target.tap((1, 3))
    hooks = [list(layer._forward_pre_hooks) for layer in target.layers]
    target.tap([1, 3])
    assert [list(layer._forward_pre_hooks) for layer in target.layers] == hooks
    target.tap((3,))
    assert [len(layer._forward_pre_hooks) for layer in target.layers] == [0, 0, 0, 1]


def test_features_are_sliced_by_position(tiny_target):
    target = tiny_target()
    target.tap((3,))
    features = target.forward(tokens(9))
    part = features[2:5]
    assert torch.equal(part.hidden_BTH, features.hidden_BTH[:, 2:5])
    assert torch.equal(part.taps_BTF, features.taps_BTF[:, 2:5])


@pytest.mark.parametrize(("layers", "taps"), [(7, (2, 3, 4)), (8, (2, 4, 5)), (30, (2, 15, 27)), (32, (2, 16, 29))])
def test_default_taps(layers, taps):
    assert default_taps(layers) == taps
    assert check_taps(taps, layers) == taps


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5, 6])
def test_default_taps_need_seven_layers(layers):
    with pytest.raises(
        SpectrainError, match=f"at least 7 layers, this one has {layers}.*three distinct ascending"
    ) as e:
        default_taps(layers)
    offered = re.search(r"for instance \[(.*)\]", str(e.value))
    assert (offered is None) == (layers < 4)
    if offered:  # it works as it stands, and no server needs what comes before the first layer
        taps = tuple(map(int, offered[1].split(",")))
        assert check_taps(taps, layers) == Eagle3Config(tap_layers=taps).tap_layers
        assert taps[0] > 0


def test_a_shallow_target_wants_its_taps_given(tiny_target):
    target = tiny_target(layers=4)
    with pytest.raises(SpectrainError, match="at least 7 layers, this one has 4"):
        Eagle3Config().taps(target)
    assert Eagle3Config(tap_layers=(0, 1, 3)).taps(target) == (0, 1, 3)


@pytest.mark.parametrize("taps", [(), (2, 2, 5), (5, 4, 2), (-1, 2, 3), (2, 4, 8)])
def test_bad_taps_are_refused_with_the_range_and_the_convention(tiny_target, taps):
    target = tiny_target()
    checks = [lambda: check_taps(taps, 8)]
    if taps:  # a config wants three
        checks.append(lambda: Eagle3Config(tap_layers=taps).taps(target))
    for check in checks:
        with pytest.raises(SpectrainError, match=r"8 layers; expected values from 0 to 7: .*stream entering layer k"):
            check()
    if taps:
        with pytest.raises(SpectrainError, match=r"^taps .* are not distinct ascending layers"):
            target.tap(taps)


# --- rows and trees ---------------------------------------------------------------------------------------------


def test_a_trees_features_are_those_of_plain_forwards(tiny_target, architecture):
    """States and taps of every node of case C19, behind prompts of unlike lengths in one cache."""
    target = tiny_target(architecture, layers=4)
    target.tap((0, 1, 3))
    parents, lengths = [-1, 0, 0, 1, 1, 2], (7, 2, 4)
    read, round_BM, cache = tokens(7, rows=3), tokens(7, seed=1, rows=3), target.new_cache(3)
    target.forward(read, cache=cache)
    cache.rollback(lengths)
    features = target.forward(round_BM, cache=cache, layout=Layout.tree(torch.tensor([parents] * 3), 3))
    assert features.taps_BTF.shape == (3, 7, 3 * 32)
    for row, length in enumerate(lengths):
        for node, path in enumerate([[], *paths_of(parents)]):
            places = [0, *(n + 1 for n in path)]
            want = target.forward(torch.cat([read[row, :length], round_BM[row, places]])[None])
            for got, plain in ((features.hidden_BTH, want.hidden_BTH), (features.taps_BTF, want.taps_BTF)):
                torch.testing.assert_close(got[row, node], plain[0, -1], rtol=1e-5, atol=1e-5)


def test_without_a_cache_right_padding_does_no_harm(tiny_target, architecture):
    target = tiny_target(architecture, layers=4)
    target.tap((2,))
    read = tokens(9, rows=2)
    whole, short = target.forward(read), target.forward(read[1:, :5])
    torch.testing.assert_close(whole.hidden_BTH[1:, :5], short.hidden_BTH, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole.taps_BTF[1:, :5], short.taps_BTF, rtol=1e-5, atol=1e-5)


def test_a_new_cache_has_a_row_for_every_request(tiny_target):
    target = tiny_target(layers=2)
    assert target.new_cache().lengths == [0]
    cache = target.new_cache(4)
    target.forward(tokens(3, rows=4), cache=cache)
    assert cache.lengths == [3] * 4


@torch.inference_mode()
def rounds_of(target, count):
    """A prefill, and so many rounds of a tree and of a step each, at lengths that go apart."""
    cache, parents, features = target.new_cache(3), torch.tensor([[-1, 0, 0, 1, 1, 2]] * 3), []
    features.append(target.forward(tokens(9, rows=3), cache=cache))
    cache.rollback([4, 9, 6])
    for number in range(count):
        before = list(cache.lengths)
        layout = Layout.tree(parents, 3)
        features.append(target.forward(tokens(7, number + 1, rows=3), cache=cache, layout=layout))
        cache.keep(before, [[0, 1, 4], [0, 2, 6], [0]])
        features.append(target.forward(tokens(1, number + 9, rows=3), cache=cache))
    return features


def test_compiled_parts_compute_the_same_and_are_compiled_once(tiny_target, monkeypatch):
    """Traced as for a compiler, and run without one. No length of a cache is part of what is compiled."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counted = torch._dynamo.utils.counters["stats"]
    target = tiny_target(layers=3)
    target.tap((0, 2))
    want = rounds_of(target, 4)
    target.compile()
    before = counted["unique_graphs"]
    got = [rounds_of(target, 1), rounds_of(target, 4)]
    assert counted["unique_graphs"] > before
    traced = counted["unique_graphs"]
    for run in (*got, rounds_of(target, 4)):
        for one, other in zip(run, want, strict=False):
            torch.testing.assert_close(one.hidden_BTH, other.hidden_BTH, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(one.taps_BTF, other.taps_BTF, rtol=1e-6, atol=1e-6)
    assert counted["unique_graphs"] == traced


# --- the head ---------------------------------------------------------------------------------------------------


def test_the_head_of_the_last_hidden_state_is_the_models_law(tiny_target, architecture):
    target = tiny_target(architecture)
    ids = tokens(9, rows=2)
    want = target.model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(target.logits(target.forward(ids).hidden_BTH), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2"])
def test_a_tied_head_too(tiny_target, architecture):
    target = tiny_target(architecture, tie_word_embeddings=True)
    assert target.head_weight.data_ptr() == target.embedding_weight.data_ptr()
    ids = tokens(9)
    want = target.model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(target.logits(target.forward(ids).hidden_BTH), want, rtol=1e-6, atol=1e-6)


def test_the_stream_before_the_final_norm_would_give_another_law(tiny_target):
    """What makes the test above one: the norm's weights are not 1, so reading the wrong state shows."""
    target = tiny_target()
    norm = target.model.model.norm
    assert (norm.weight - 1).abs().max() > 0.1
    seen = []
    norm.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    hidden = target.forward(tokens(9)).hidden_BTH
    assert not torch.allclose(target.logits(seen[-1]), target.logits(hidden), atol=0.1)


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_the_heads_columns_are_the_laws_columns(tiny_target, architecture):
    target = tiny_target(architecture, padding=5)
    hidden = target.forward(tokens(9)).hidden_BTH
    columns = torch.tensor([1, 2, 9, 23])
    torch.testing.assert_close(target.head.columns(columns).logits(hidden), target.logits(hidden)[..., columns])
    torch.testing.assert_close(target.head.columns(None).logits(hidden), target.logits(hidden))


def test_a_biased_head_is_part_of_the_law(tiny_model, word_tokenizer):
    config = CONFIG_MAPPING["phi"](**SMALL)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    torch.nn.init.normal_(model.lm_head.bias)
    target = Target(model, word_tokenizer(24), name="phi")
    hidden = target.forward(tokens(6)).hidden_BTH
    want = model(input_ids=tokens(6)).logits
    torch.testing.assert_close(target.logits(hidden), want)
    columns = torch.tensor([0, 7, 8])
    torch.testing.assert_close(target.head.columns(columns).logits(hidden), want[..., columns])


@pytest.mark.parametrize("size", [1.0, 1e-4])
@pytest.mark.parametrize(
    ("model_type", "scale"), [("cohere", {"logit_scale": 0.0625}), ("granite", {"logits_scaling": 8.0})]
)
def test_scaled_logits_are_refused_by_name_however_small(word_tokenizer, model_type, scale, size):
    settings: dict[str, Any] = {**SMALL, "tie_word_embeddings": False, **scale}
    config = CONFIG_MAPPING[model_type](**settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    torch.nn.init.normal_(model.lm_head.weight, std=size)
    with pytest.raises(SpectrainError, match=f"logits of a {type(model).__name__} are not its output embedding"):
        Target(model, word_tokenizer(24), name=model_type)


# --- padding ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [0, 1, 40])
def test_padded_rows_have_no_probability(tiny_target, padding):
    target = tiny_target(padding=padding)
    assert target.tokenizer_size == 24
    assert target.vocab_size == 24 + padding
    logits = target.logits(target.forward(tokens(7)).hidden_BTH)
    assert logits.shape == (1, 7, 24 + padding)
    assert (logits[..., 24:] == -torch.inf).all()
    assert logits[..., :24].isfinite().all()
    want = target.model(input_ids=tokens(7)).logits
    torch.testing.assert_close(logits[..., :24], want[..., :24])


def test_a_tokenizer_with_more_ids_than_rows_is_refused(tiny_model, word_tokenizer):
    with pytest.raises(SpectrainError, match=r"token 'w24' has id 24, but the model has 24 embedding rows"):
        Target(tiny_model("llama", layers=2), word_tokenizer(25), name="short")


# --- what it is -------------------------------------------------------------------------------------------------


def test_sizes(tiny_target):
    target = tiny_target("gpt2", layers=5, hidden=16, vocab=20, padding=4, dtype=torch.float32)
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (5, 16, 24)
    assert (target.dtype, target.device.type) == (torch.float32, "cpu")
    assert len(target.layers) == 5


def test_it_is_frozen_and_in_inference_mode(tiny_target):
    target = tiny_target()
    assert not target.model.training
    assert not any(p.requires_grad for p in target.model.parameters())
    assert target.forward(tokens(3)).hidden_BTH.is_inference()


@pytest.mark.parametrize(
    ("declared", "own", "eos"),
    [(None, None, ()), (5, None, (5,)), (None, 7, (7,)), ([9, 5], 7, (5, 7, 9)), ([7, 5], 7, (5, 7))],
)
def test_eos_ids_come_from_the_generation_config_and_the_tokenizer(tiny_target, declared, own, eos):
    target = tiny_target(eos=own, layers=2)
    target.model.generation_config.eos_token_id = declared
    assert target.eos_ids == eos


def test_a_target_not_from_a_folder_has_no_stored_identity(tiny_target):
    with pytest.raises(SpectrainError, match="'llama' was not loaded from a folder"):
        tiny_target().identity()


@pytest.fixture
def saved(tmp_path, tiny_model, word_tokenizer):
    tiny_model("llama", layers=2, dtype=torch.float32).save_pretrained(tmp_path)
    word_tokenizer(24, 3).save_pretrained(tmp_path)
    return tmp_path


def test_a_saved_target_loads_with_the_same_law(saved, tiny_target):
    target, made = load_target(str(saved)), tiny_target(layers=2, dtype=torch.float32)
    assert (target.folder, target.revision, target.eos_ids) == (saved, None, (3,))
    torch.testing.assert_close(target.forward(tokens(8)).hidden_BTH, made.forward(tokens(8)).hidden_BTH)
    assert load_target(str(saved), dtype="bfloat16").dtype is torch.bfloat16
    assert target.identity() == load_target(str(saved)).identity()


@pytest.mark.parametrize("dtype", ["float31", "nn", "Tensor"])
def test_an_unknown_dtype_is_refused(saved, dtype):
    with pytest.raises(SpectrainError, match=f"target.dtype '{dtype}' is not a torch dtype"):
        load_target(str(saved), dtype=dtype)


def test_bad_folders_are_named(saved, tmp_path):
    with pytest.raises(SpectrainError, match="target folder '/no/such' does not exist"):
        resolve_model("/no/such")
    (saved / "model.safetensors").unlink()
    with pytest.raises(SpectrainError, match="does not load"):
        load_target(str(saved))
    (saved / "config.json").unlink()
    with pytest.raises(SpectrainError, match=r"has no config\.json"):
        load_target(str(saved))


def test_a_missing_weight_is_refused_by_name(tiny_target, tmp_path):
    """transformers would fill it with random values and go on."""
    target = tiny_target("llama", dtype=torch.float32)
    target.model.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    load_target(str(tmp_path), device="cpu")
    weights = load_file(tmp_path / "model.safetensors")
    gone = next(name for name in weights if name.endswith("mlp.up_proj.weight"))
    save_file({n: t for n, t in weights.items() if n != gone}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(SpectrainError, match=rf"weight {gone} is missing"):
        load_target(str(tmp_path), device="cpu")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(SpectrainError, match="does not load"):
        load_target(str(tmp_path), device="cpu")


def test_a_target_without_a_tokenizer_is_refused(tiny_target, tmp_path):
    tiny_target("llama", dtype=torch.float32).model.save_pretrained(tmp_path)
    with pytest.raises(SpectrainError, match=r"tokenizer|does not load"):
        load_target(str(tmp_path), device="cpu")


def test_a_spread_target_says_the_same(chat_folder, chat_target):
    """On a CPU all of it lies in one place, but behind the hooks that move things between devices."""
    spread = load_target(str(chat_folder), device_map="auto")
    ids = torch.arange(6)[None]
    for target in (spread, chat_target):
        target.tap((2, 4))
    found, want = spread.forward(ids), chat_target.forward(ids)
    assert torch.equal(found.hidden_BTH, want.hidden_BTH)
    assert torch.equal(found.taps_BTF, want.taps_BTF)
    chat_target.tap(())


def test_what_is_borrowed_of_a_spread_target_lies_in_one_place(tiny_target):
    target = tiny_target("llama", dtype=torch.float32)
    target._device = torch.device("meta")  # the only other device that every machine has
    target._copies = {}
    assert target.device.type == "meta"
    assert target.head_weight is target.head_weight
    assert {target.head_weight.device, target.head.weight_VH.device, target.embedding_weight.device} == {target.device}
    target.tap((2, 4))
    features = target.forward(torch.arange(4)[None])
    assert features.hidden_BTH.device == features.taps_BTF.device == target.device


def test_a_bar_of_weights_is_shown_only_where_they_take_a_while(chat_folder, monkeypatch, capsys):
    load_target(str(chat_folder))
    assert "Loading weights" not in capsys.readouterr().err
    monkeypatch.setattr(weights, "SHOWN", 0)
    load_target(str(chat_folder))
    assert "Loading weights" in capsys.readouterr().err
