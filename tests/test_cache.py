"""Rollback is exact on every architecture, and what cannot be rolled back is refused by name (case C21)."""

import random
from typing import Any, cast

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    DynamicCache,
    PreTrainedModel,
    RwkvConfig,
    RwkvForCausalLM,
)

from spectrain.cache import (
    BufferedLayer,
    cache_argument,
    cache_bytes,
    cached_length,
    check_reversible,
    check_rollback,
    new_cache,
    rollback,
    select_rows,
)
from spectrain.errors import SpectrainError

TAPS = (0, 3, 7)


def tokens(count, seed=0, rows=1):
    return torch.randint(0, 24, (rows, count), generator=torch.Generator().manual_seed(seed))


def same(got, want):
    """Norms and softmax run in float32 in places, so float64 models agree to a few float32 roundings."""
    torch.testing.assert_close(got.hidden_BTH, want.hidden_BTH, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.taps_BTF, want.taps_BTF, rtol=1e-5, atol=1e-5)


@pytest.fixture
def target(tiny_target, architecture):
    target = tiny_target(architecture)
    target.tap(TAPS)
    return target


@pytest.mark.parametrize("kept", [0, 1, 4, 9, 14])
def test_a_forward_after_rollback_equals_a_recomputation(target, kept):
    read, more = tokens(14), tokens(8, seed=1)
    cache = target.new_cache()
    target.forward(read, cache=cache)
    rollback(cache, kept)
    assert cached_length(cache) == kept
    got = target.forward(more, cache=cache)
    want = target.forward(torch.cat([read[:, :kept], more], dim=1))
    same(got, want[kept:])
    assert cached_length(cache) == kept + 8


def test_any_series_of_appends_and_rollbacks_equals_a_recomputation(target, monkeypatch):
    monkeypatch.setattr(BufferedLayer, "ROOM", 3)  # so that buffers grow in the middle of it
    rng = random.Random(0)
    cache, ids = target.new_cache(), torch.empty(1, 0, dtype=torch.long)
    for step in range(12):
        new = tokens(rng.randint(1, 6), seed=step)
        got, ids = target.forward(new, cache=cache), torch.cat([ids, new], dim=1)
        same(got, target.forward(ids)[ids.shape[1] - new.shape[1] :])
        keep = ids.shape[1] - rng.randint(0, min(4, ids.shape[1]))
        rollback(cache, keep)
        ids = ids[:, :keep]
        assert cached_length(cache) == keep


@torch.inference_mode()
def test_what_was_rolled_back_is_never_read_again(target):
    read, more = tokens(12), tokens(3, seed=1)
    cache = target.new_cache()
    target.forward(read, cache=cache)
    rollback(cache, 7)
    for layer in cache.layers:  # any use of a stale entry would poison the result
        layer._keys[..., 7:, :] = torch.nan
        layer._values[..., 7:, :] = torch.nan
    got = target.forward(more, cache=cache)
    assert got.hidden_BTH.isfinite().all()
    same(got, target.forward(torch.cat([read[:, :7], more], dim=1))[7:])


def test_rollback_to_nothing_leaves_an_empty_cache(target):
    cache = target.new_cache()
    assert cached_length(cache) == 0
    rollback(cache, 0)  # nothing to forget is no error
    target.forward(tokens(9), cache=cache)
    assert cache_bytes(cache) > 0
    rollback(cache, 0)
    assert cached_length(cache) == 0
    assert cache_bytes(cache) == 0
    assert all(layer.keys.shape[-2] == 0 for layer in cache.layers)
    same(target.forward(tokens(5, seed=3), cache=cache), target.forward(tokens(5, seed=3)))


@pytest.mark.parametrize("length", [10, 1000, -1])
def test_rollback_beyond_what_is_held_is_an_error_and_changes_nothing(tiny_target, length):
    target = tiny_target()
    cache = target.new_cache()
    target.forward(tokens(9), cache=cache)
    with pytest.raises(SpectrainError, match=f"cache of 9 positions back to {length}; expected 0 to 9"):
        rollback(cache, length)
    assert cached_length(cache) == 9
    rollback(cache, 9)
    assert cached_length(cache) == 9


def test_rollback_of_an_empty_cache_beyond_zero_is_an_error(tiny_target):
    with pytest.raises(SpectrainError, match="cache of 0 positions back to 1"):
        rollback(tiny_target().new_cache(), 1)


@pytest.mark.parametrize("architecture", ["mistral", "gemma2"])
def test_windows_slide_although_every_key_is_kept(tiny_target, architecture):
    """Position 19 of a one-layer model sees five positions: no earlier token matters, the nearest do."""
    target = tiny_target(architecture, layers=1)
    ids = tokens(20)
    cache = target.new_cache()
    target.forward(ids[:, :12], cache=cache)
    last = target.forward(ids[:, 12:], cache=cache).hidden_BTH[:, -1]
    assert cached_length(cache) == 20
    for position, matters in [(0, False), (14, False), (15, True), (18, True)]:
        other = ids.clone()
        other[0, position] = (other[0, position] + 1) % 24
        changed = target.forward(other).hidden_BTH[:, -1]
        assert torch.allclose(changed, last, atol=1e-6) != matters


def test_our_cache_and_the_librarys_own_give_the_same_states(tiny_target, architecture):
    target = tiny_target(architecture)
    ids = tokens(18)
    theirs, ours = DynamicCache(config=target.model.config), target.new_cache()
    for start, stop in [(0, 9), (9, 10), (10, 11), (11, 14), (14, 18)]:
        got = target.forward(ids[:, start:stop], cache=ours).hidden_BTH
        want = target.forward(ids[:, start:stop], cache=theirs).hidden_BTH
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_bytes_count_the_filled_positions_only(tiny_target):
    target = tiny_target(layers=3)  # two key heads of 8, in float64
    cache = target.new_cache()
    target.forward(tokens(11), cache=cache)
    assert cache_bytes(cache) == 3 * 2 * 11 * 2 * 8 * 8
    rollback(cache, 4)
    assert cache_bytes(cache) == 3 * 2 * 4 * 2 * 8 * 8


@pytest.mark.parametrize("rows", [[2], [0, 2], [2, 1], [1, 1, 0]])
def test_selected_rows_go_on_as_if_they_had_been_alone(target, rows):
    ids, more = tokens(9, rows=3), tokens(4, seed=1, rows=len(rows))
    cache = target.new_cache()
    target.forward(ids, cache=cache)
    rollback(cache, 8)
    select_rows(cache, torch.tensor(rows))
    assert cached_length(cache) == 8
    got = target.forward(more, cache=cache)
    same(got, target.forward(torch.cat([ids[rows, :8], more], dim=1))[8:])


RECURRENT = [
    "mamba",
    "mamba2",
    "falcon_mamba",
    "jamba",
    "bamba",
    "zamba",
    "zamba2",
    "falcon_h1",
    "minimax",
    "nemotron_h",
    "qwen3_next",
    "granitemoehybrid",
]


@pytest.mark.parametrize("model_type", RECURRENT)
def test_recurrent_configs_are_refused_by_name(model_type):
    with pytest.raises(SpectrainError, match=rf"model type '{model_type}' has .* cannot be rolled back"):
        check_reversible(CONFIG_MAPPING[model_type]())


def test_some_convolution_layers_among_attention_are_refused_by_name():
    layers: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    config = CONFIG_MAPPING["lfm2"](**layers)
    with pytest.raises(SpectrainError, match="'lfm2' has layers of type conv"):
        new_cache(config)


def tiny_recurrent(model_type):
    small: dict[str, Any] = {"vocab_size": 24, "hidden_size": 32, "num_hidden_layers": 3}
    if model_type == "rwkv":
        return RwkvForCausalLM(RwkvConfig(**small, attention_hidden_size=32, context_length=32))
    if model_type == "recurrent_gemma":
        small |= {"num_attention_heads": 4, "intermediate_size": 64, "lru_width": 32, "attention_window_size": 8}
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**small))


@pytest.mark.parametrize("model_type", ["mamba", "recurrent_gemma", "rwkv"])
def test_recurrent_models_are_refused_by_name_whatever_their_config_says(model_type):
    model = tiny_recurrent(model_type)
    with pytest.raises(SpectrainError, match=f"{type(model).__name__} .*cannot be rolled back"):
        check_rollback(model)


def test_attention_that_looks_ahead_is_refused_by_name():
    torch.manual_seed(0)
    config = BertConfig(vocab_size=24, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    model = BertLMHeadModel(config).eval()  # not is_decoder: it sees both sides
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    with pytest.raises(SpectrainError, match="BertLMHeadModel does not go on from a rolled-back cache"):
        check_rollback(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_no_reason_to_refuse(tiny_model, architecture, dtype):
    check_rollback(tiny_model(architecture, dtype=dtype))


def test_a_state_that_survives_a_rollback_is_refused_by_name(tiny_model):
    """A recurrence that no config mentions: each forward starts with the last state of the one before."""
    model, held = tiny_model("llama", layers=2), torch.zeros(1, 1, 32, dtype=torch.float64)

    def remember(_module, _args, output):
        nonlocal held
        output, held = output + held, output[:, -1:].detach()
        return output

    model.model.layers[0].mlp.register_forward_hook(remember)
    with pytest.raises(SpectrainError, match="LlamaForCausalLM does not go on from a rolled-back cache"):
        check_rollback(model)


def test_the_cache_argument_is_the_one_this_version_takes(tiny_model):
    class Old:
        def forward(self, input_ids, past_key_values=None): ...

    class New:
        def forward(self, input_ids, cache=None, past_key_values=None): ...

    class Neither:
        def forward(self, input_ids, state=None): ...

    old, new, neither = (cast(PreTrainedModel, model()) for model in (Old, New, Neither))
    assert cache_argument(old) == "past_key_values"
    assert cache_argument(new) == "cache"
    with pytest.raises(SpectrainError, match="a Neither takes no cache"):
        cache_argument(neither)
