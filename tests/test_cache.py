"""Rows of a ragged cache go on as if each were alone, whatever was rolled back, kept or dropped (case C21).

Shapes: B rows of the batch, T new positions, C columns of the cache.
"""

import random
from functools import cache as once
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import paths_of
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from spectrain.cache import BufferedLayer, KeyValueCache, cache_argument, check_reversible, last_positions
from spectrain.errors import SpectrainError
from spectrain.shapes import Layout
from spectrain.target import Target

TAPS = (0, 3, 7)
ARCHITECTURES = ["gemma2", "gpt2", "gpt_neox", "llama", "mistral", "qwen3"]


def tokens(count, seed=0, rows=1):
    return torch.randint(0, 24, (rows, count), generator=torch.Generator().manual_seed(seed))


def same(got, want):
    """Norms and softmax run in float32 in places, so float64 models agree to a few float32 roundings."""
    torch.testing.assert_close(got.hidden_BTH, want.hidden_BTH, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.taps_BTF, want.taps_BTF, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def deep(tiny_target):
    return once(tiny_target)


@pytest.fixture
def target(deep, architecture):
    target = deep(architecture)
    target.tap(TAPS)
    return target


@pytest.fixture(scope="module")
def shallow(tiny_target):
    """Two layers of an architecture: enough to show what a row has seen."""
    return once(lambda architecture: tiny_target(architecture, layers=2))


# --- rollback -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 1, 4, 9, 14])
def test_a_forward_after_rollback_equals_a_recomputation(target, kept):
    read, more = tokens(14), tokens(8, seed=1)
    cache = target.new_cache()
    target.forward(read, cache=cache)
    cache.rollback(kept)
    assert cache.lengths == [kept]
    got = target.forward(more, cache=cache)
    want = target.forward(torch.cat([read[:, :kept], more], dim=1))
    same(got, want[kept:])
    assert cache.lengths == [kept + 8]


def test_any_series_of_appends_and_rollbacks_equals_a_recomputation(target, monkeypatch):
    monkeypatch.setattr(BufferedLayer, "ROOM", 3)  # so that buffers grow in the middle of it
    rng = random.Random(0)
    cache, ids = target.new_cache(), torch.empty(1, 0, dtype=torch.long)
    for step in range(12):
        new = tokens(rng.randint(1, 6), seed=step)
        got, ids = target.forward(new, cache=cache), torch.cat([ids, new], dim=1)
        same(got, target.forward(ids)[ids.shape[1] - new.shape[1] :])
        keep = ids.shape[1] - rng.randint(0, min(4, ids.shape[1]))
        cache.rollback(keep)
        ids = ids[:, :keep]
        assert cache.lengths == [keep]


@torch.inference_mode()
def test_what_was_rolled_back_is_never_read_again(target):
    read, more = tokens(12), tokens(3, seed=1)
    cache = target.new_cache()
    target.forward(read, cache=cache)
    cache.rollback(7)
    for layer in cache.layers:  # any use of a stale entry would poison the result
        layer._keys[..., 7:, :] = torch.nan
        layer._values[..., 7:, :] = torch.nan
    got = target.forward(more, cache=cache)
    assert got.hidden_BTH.isfinite().all()
    same(got, target.forward(torch.cat([read[:, :7], more], dim=1))[7:])


@torch.inference_mode()
def test_nor_is_it_where_a_longer_companion_keeps_its_columns_in_sight(target):
    """Row 0 holds 5 positions beside 11 of row 1. What is overwritten may hold NaN; what stays in sight, any number."""
    read, more = tokens(12, rows=2), tokens(3, seed=1, rows=2)
    cache = target.new_cache(2)
    target.forward(read, cache=cache)
    cache.rollback([5, 11])
    for layer in cache.layers:
        for buffer in (layer._keys, layer._values):
            buffer[0, :, 5:8], buffer[1, :, 11:] = torch.nan, torch.nan
            buffer[0, :, 8:] = 1e30
    got = target.forward(more, cache=cache)
    assert got.hidden_BTH.isfinite().all()
    for row, length in enumerate((5, 11)):
        alone = torch.cat([read[row, :length], more[row]])[None]
        torch.testing.assert_close(
            got.hidden_BTH[row], target.forward(alone).hidden_BTH[0, length:], rtol=1e-5, atol=1e-5
        )


def test_rollback_to_nothing_leaves_an_empty_cache(target):
    cache = target.new_cache()
    assert (cache.lengths, cache.longest, cache.get_seq_length()) == ([0], 0, 0)
    cache.rollback(0)  # nothing to forget is no error
    target.forward(tokens(9), cache=cache)
    assert cache.bytes() > 0
    cache.rollback(0)
    assert (cache.lengths, cache.longest, cache.get_seq_length()) == ([0], 0, 0)
    assert cache.bytes() == 0
    assert all(layer.keys.shape[-2] == 0 for layer in cache.layers)
    same(target.forward(tokens(5, seed=3), cache=cache), target.forward(tokens(5, seed=3)))


def test_one_row_may_be_emptied_beside_others(target):
    cache = target.new_cache(3)
    read, more = tokens(6, rows=3), tokens(4, seed=1, rows=3)
    target.forward(read, cache=cache)
    cache.rollback([6, 0, 2])
    got = target.forward(more, cache=cache)
    for row, length in enumerate((6, 0, 2)):
        want = target.forward(torch.cat([read[row, :length], more[row]])[None])
        torch.testing.assert_close(got.taps_BTF[row], want.taps_BTF[0, length:], rtol=1e-5, atol=1e-5)
    assert cache.lengths == [10, 4, 6]


@pytest.mark.parametrize("length", [10, 1000, -1])
def test_rollback_beyond_what_is_held_is_an_error_and_changes_nothing(tiny_target, length):
    target = tiny_target()
    cache = target.new_cache()
    target.forward(tokens(9), cache=cache)
    with pytest.raises(SpectrainError, match=f"cache of 9 positions back to {length}; expected 0 to 9"):
        cache.rollback(length)
    assert cache.lengths == [9]
    cache.rollback(9)
    assert cache.lengths == [9]


def test_a_row_that_holds_less_is_an_error_whatever_its_companions_hold():
    cache = filled([[1, 2, 3, 4], [5, 6]], heads=1, size=1)
    for lengths, found in (([4, 3], "2 positions back to 3"), ([5, 2], "4 positions back to 5")):
        with pytest.raises(SpectrainError, match=found):
            cache.rollback(lengths)
        assert cache.lengths == [4, 2]
    with pytest.raises(SpectrainError, match="2 positions back to 3"):
        cache.rollback(3)  # one length is meant for every row
    with pytest.raises(ValueError, match="zip"):
        cache.rollback([1])


def test_rollback_of_an_empty_cache_beyond_zero_is_an_error(tiny_target):
    with pytest.raises(SpectrainError, match="cache of 0 positions back to 1"):
        tiny_target().new_cache().rollback(1)


@pytest.mark.parametrize("architecture", ["mistral", "gemma2"])
def test_windows_slide_although_every_key_is_kept(tiny_target, architecture):
    """Position 19 of a one-layer model sees five positions: no earlier token matters, the nearest do."""
    target = tiny_target(architecture, layers=1)
    ids = tokens(20)
    cache = target.new_cache()
    target.forward(ids[:, :12], cache=cache)
    last = target.forward(ids[:, 12:], cache=cache).hidden_BTH[:, -1]
    assert cache.lengths == [20]
    for position, matters in [(0, False), (14, False), (15, True), (18, True)]:
        other = ids.clone()
        other[0, position] = (other[0, position] + 1) % 24
        changed = target.forward(other).hidden_BTH[:, -1]
        assert torch.allclose(changed, last, atol=1e-6) != matters


@torch.inference_mode()
def test_our_cache_and_the_librarys_own_give_the_same_states(tiny_target, architecture):
    target = tiny_target(architecture)
    ids, body = tokens(18), target.model.base_model
    theirs, ours = DynamicCache(config=target.model.config), target.new_cache()
    for start, stop in [(0, 9), (9, 10), (10, 11), (11, 14), (14, 18)]:
        got = target.forward(ids[:, start:stop], cache=ours).hidden_BTH
        arguments = {"input_ids": ids[:, start:stop], "use_cache": True, cache_argument(body): theirs}
        torch.testing.assert_close(got, body(**arguments).last_hidden_state, rtol=1e-5, atol=1e-5)


# --- ragged rows ----------------------------------------------------------------------------------------------------


def test_right_padded_prompts_are_as_good_as_alone(target):
    """Their padding is rolled back; the state of each row's last real position is at hand."""
    read, counts, more = tokens(11, rows=4), [4, 11, 1, 7], tokens(3, seed=1, rows=4)
    cache = target.new_cache(4)
    features = target.forward(read, cache=cache)
    cache.rollback(counts)
    assert (cache.uniform, cache.longest) == (False, 11)
    last_B1H = last_positions(features.hidden_BTH, counts)
    got = target.forward(more, cache=cache)
    for row, count in enumerate(counts):
        want = target.forward(torch.cat([read[row, :count], more[row]])[None])
        torch.testing.assert_close(last_B1H[row], want.hidden_BTH[0, count - 1 : count], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got.hidden_BTH[row], want.hidden_BTH[0, count:], rtol=1e-5, atol=1e-5)


def test_the_last_of_rows_that_are_not_padded():
    states = torch.randn(2, 5, 3)
    assert torch.equal(last_positions(states, [5, 5]), states[:, 4:])
    assert torch.equal(last_positions(states, [2, 5]), torch.stack([states[0, 1:2], states[1, 4:5]]))


class Rows:
    """A cache beside the tokens that its rows hold; every forward is compared with a recomputation of each row."""

    def __init__(self, target: Any, prompts: list[list[int]]) -> None:
        self.target, self.cache, self.held = target, target.new_cache(len(prompts)), [[] for _ in prompts]
        width = max(map(len, prompts))
        self.run(torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts]))
        self.rollback([len(prompt) for prompt in prompts])

    def run(self, ids_BT: torch.Tensor) -> None:
        got = self.target.forward(ids_BT, cache=self.cache).hidden_BTH
        for row, new in enumerate(ids_BT.tolist()):
            self.held[row] = self.held[row] + new
            self.compare(got[row], self.held[row], len(new))

    def compare(self, got_TH: torch.Tensor, ids: list[int], count: int) -> None:
        want = self.target.forward(torch.tensor([ids])).hidden_BTH[0, -count:]
        torch.testing.assert_close(got_TH, want, rtol=1e-5, atol=1e-5)

    def rollback(self, lengths: list[int]) -> None:
        self.cache.rollback(lengths)
        self.held = [ids[:length] for ids, length in zip(self.held, lengths, strict=True)]

    @torch.inference_mode()  # as the decoder does: what was written so can only be moved so
    def keep(self, ids_BM: torch.Tensor, parents: list[int], ends: list[int]) -> None:
        """Run a tree and keep in each row the path that ends at one of its nodes (-1: the first token alone)."""
        before, paths = list(self.cache.lengths), [[], *paths_of(parents)]
        layout = Layout.tree(torch.tensor([parents] * len(ids_BM)), len(parents))
        got = self.target.forward(ids_BM, cache=self.cache, layout=layout).hidden_BTH
        kept = [[0, *(node + 1 for node in paths[end + 1])] for end in ends]
        self.cache.keep(before, kept)
        for row, path in enumerate(kept):
            self.held[row] = [*self.held[row], *ids_BM[row, path].tolist()]
            self.compare(got[row, path], self.held[row], len(path))

    def select(self, rows: list[int]) -> None:
        self.cache.select(rows)
        self.held = [self.held[row] for row in rows]

    def check(self) -> None:
        """Every row's keys and values are those of a cache that read its tokens, and nothing else, at once."""
        assert self.cache.lengths == [len(ids) for ids in self.held]
        for row, ids in enumerate(self.held):
            if not ids:
                continue
            fresh = self.target.new_cache()
            self.target.forward(torch.tensor([ids]), cache=fresh)
            for mine, own in zip(self.cache.layers, fresh.layers, strict=True):
                torch.testing.assert_close(mine.keys[row, :, : len(ids)], own.keys[0], rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(mine.values[row, :, : len(ids)], own.values[0], rtol=1e-5, atol=1e-5)


def any_tree(draw, most=6):
    parents: list[int] = []
    for node in range(draw(st.integers(1, most))):
        parents.append(draw(st.integers(-1, node - 1)))
    return parents


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@given(data=st.data())
@settings(max_examples=12, deadline=None, derandomize=True)
def test_any_order_of_rounds_leaves_each_row_as_if_it_were_alone(shallow, architecture, data):
    draw, room = data.draw, BufferedLayer.ROOM
    BufferedLayer.ROOM = 4  # so that buffers grow on the way
    try:
        counts = draw(st.lists(st.integers(1, 8), min_size=1, max_size=3))
        rows = Rows(shallow(architecture), [tokens(count, seed)[0].tolist() for seed, count in enumerate(counts)])
        for _ in range(draw(st.integers(1, 5))):
            B, seed = len(rows.held), draw(st.integers(0, 99))
            step = draw(st.sampled_from(["run", "keep", "keep", "rollback", "select"]))
            if step == "run":
                rows.run(tokens(draw(st.integers(1, 4)), seed, B))
            elif step == "keep":
                parents = any_tree(draw)
                ends = [draw(st.integers(-1, len(parents) - 1)) for _ in range(B)]
                rows.keep(tokens(len(parents) + 1, seed, B), parents, ends)
            elif step == "rollback":
                rows.rollback([draw(st.integers(max(0, length - 6), length)) for length in rows.cache.lengths])
            else:
                rows.select(draw(st.lists(st.integers(0, B - 1), min_size=1, max_size=4)))
            rows.check()
        rows.run(tokens(2, 100, len(rows.held)))
    finally:
        BufferedLayer.ROOM = room


# --- kept paths -----------------------------------------------------------------------------------------------------


def column(value: int, heads: int, size: int) -> torch.Tensor:
    return torch.arange(heads * size).view(heads, size) + 100.0 * value


def write(cache: KeyValueCache, new: list[list[int]], heads: int, size: int, layers: int = 2) -> None:
    """Append to every row columns that carry these numbers."""
    cache.prepare(len(new[0]), torch.device("cpu"))
    for layer in range(layers):
        keys = torch.stack([torch.stack([column(v, heads, size) for v in row], 1) for row in new]) + 0.25 * layer
        values = torch.stack([torch.stack([column(v, heads, size + 1) for v in row], 1) for row in new]) - 0.25 * layer
        cache.update(keys, -values, layer)
    cache.advance(len(new[0]))


def held(cache: KeyValueCache, heads: int, size: int) -> list[list[int]]:
    """The numbers in each row, after checking that they stand so in every head of keys and values of every layer."""
    found = []
    for row, length in enumerate(cache.lengths):
        numbers = [int(v) // 100 for v in cache.layers[0].keys[row, 0, :length, 0]]
        for number, layer in enumerate(cast(list[BufferedLayer], cache.layers)):
            for c, value in enumerate(numbers):
                assert torch.equal(layer.keys[row, :, c], column(value, heads, size) + 0.25 * number)
                assert torch.equal(layer.values[row, :, c], 0.25 * number - column(value, heads, size + 1))
        found.append(numbers)
    return found


def filled(rows: list[list[int]], heads: int = 2, size: int = 3) -> KeyValueCache:
    cache, width = KeyValueCache(len(rows)), max(map(len, rows))
    write(cache, [[*row, *[99] * (width - len(row))] for row in rows], heads, size)
    cache.rollback([len(row) for row in rows])
    return cache


@given(data=st.data())
@settings(max_examples=80, deadline=None, derandomize=True)
def test_the_columns_are_exactly_those_that_were_kept(data):
    """Any order of writes, rollbacks, keeps and selections, beside plain lists; values are wider than keys."""
    draw, next_value = data.draw, iter(range(1, 10_000))
    want = [[next(next_value) for _ in range(draw(st.integers(1, 5)))] for _ in range(draw(st.integers(1, 4)))]
    cache = filled(want)
    for _ in range(draw(st.integers(1, 8))):
        step, B, before = draw(st.sampled_from(["write", "keep", "rollback", "select"])), len(want), list(cache.lengths)
        if step in ("write", "keep"):
            count = draw(st.integers(1, 5))
            new = [[next(next_value) for _ in range(count)] for _ in range(B)]
            write(cache, new, 2, 3)
            kept = [list(range(count))] * B
            if step == "keep":
                kept = [sorted(draw(st.sets(st.integers(0, count - 1)))) for _ in range(B)]
                cache.keep(before, kept)
            want = [[*row, *(n[i] for i in path)] for row, n, path in zip(want, new, kept, strict=True)]
        elif step == "rollback":
            lengths = [draw(st.integers(0, length)) for length in before]
            cache.rollback(lengths)
            want = [row[:length] for row, length in zip(want, lengths, strict=True)]
        else:
            rows = draw(st.lists(st.integers(0, B - 1), min_size=1, max_size=4))
            cache.select(rows)
            want = [list(want[row]) for row in rows]
        assert held(cache, 2, 3) == want


def test_a_kept_path_goes_on_as_a_prefill_of_its_tokens(target):
    """Of the tree of case C19 each row keeps another leaf."""
    parents = [-1, 0, 0, 1, 1, 2]
    rows = Rows(target, [tokens(count, seed)[0].tolist() for seed, count in enumerate((9, 3, 6, 1))])
    rows.keep(tokens(7, seed=5, rows=4), parents, [3, 5, 4, -1])
    assert rows.cache.lengths == [9 + 4, 3 + 4, 6 + 4, 1 + 1]
    rows.check()
    rows.run(tokens(3, seed=6, rows=4))


def test_keys_and_values_of_unlike_sizes(word_tokenizer):
    """Multi-head latent attention: what is cached as keys is not as wide as what is cached as values."""
    settings: dict[str, Any] = {"vocab_size": 24, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "first_k_dense_replace": 2,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))}  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["deepseek_v3"](**settings)).double()
    rows = Rows(Target(model, word_tokenizer(24), name="latent"), [[1, 2, 3], [4, 5, 6, 7, 8]])
    layer = rows.cache.layers[0]
    assert layer.keys.shape[-1] != layer.values.shape[-1]
    rows.keep(tokens(4, rows=2), [-1, 0, 0], [2, 1])
    rows.check()


# --- buffers --------------------------------------------------------------------------------------------------------


def test_a_step_appends_in_place_until_the_room_is_used_up(tiny_target, monkeypatch):
    monkeypatch.setattr(BufferedLayer, "ROOM", 6)
    target = tiny_target(layers=2)
    cache, ids = target.new_cache(), tokens(30)
    places, moved = [], []
    for at in range(20):
        target.forward(ids[:, at : at + 1], cache=cache)
        places.append([layer._keys.data_ptr() for layer in cache.layers])
        assert all(layer.keys.data_ptr() == layer._keys.data_ptr() for layer in cache.layers)
        if at and places[-1] != places[-2]:
            moved.append(at)
    assert moved == [7, 14]  # 1 + 6 columns, then 8 + 6, then 15 + 6


def test_new_room_holds_numbers(monkeypatch):
    """A masked column gets no weight, but no weight of NaN is NaN."""
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, shape: self.new_full(shape, torch.nan))
    cache = KeyValueCache(2)
    for _ in range(3):
        write(cache, [[1], [2]], 1, 1, layers=1)
        layer = cast(BufferedLayer, cache.layers[0])
        assert layer._keys.shape[-2] > 200
        assert layer._keys.isfinite().all()
        assert layer._values.isfinite().all()
        layer._keys, layer._values = layer.keys, layer.values  # no room left: the next write grows


def test_bytes_count_the_filled_columns_only(tiny_target):
    target = tiny_target(layers=3)  # two key heads of 8, in float64
    cache = target.new_cache()
    target.forward(tokens(11), cache=cache)
    assert cache.bytes() == 3 * 2 * 11 * 2 * 8 * 8
    cache.rollback(4)
    assert cache.bytes() == 3 * 2 * 4 * 2 * 8 * 8
    wide = target.new_cache(5)
    target.forward(tokens(11, rows=5), cache=wide)
    wide.rollback([2, 0, 4, 1, 3])  # as wide as the longest row
    assert wide.bytes() == 5 * cache.bytes()
    wide.select([3, 0])
    assert wide.bytes() == 2 * cache.bytes() // 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_holds_what_the_model_computes_in(tiny_target, dtype):
    target = tiny_target("qwen3", layers=2, dtype=dtype)
    cache = target.new_cache(2)
    target.forward(tokens(5, rows=2), cache=cache)
    cache.rollback([5, 3])
    features = target.forward(tokens(2, rows=2), cache=cache)
    assert features.hidden_BTH.dtype == dtype
    assert {tensor.dtype for layer in cache.layers for tensor in (layer.keys, layer.values)} == {dtype}


# --- rows of the batch ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [[2], [0, 2], [2, 1], [1, 1, 0]])
def test_selected_rows_go_on_as_if_they_had_been_alone(target, rows):
    ids, more = tokens(9, rows=3), tokens(4, seed=1, rows=len(rows))
    cache = target.new_cache(3)
    target.forward(ids, cache=cache)
    cache.rollback([8, 5, 7])
    cache.select(rows)
    lengths = [[8, 5, 7][row] for row in rows]
    assert cache.lengths == lengths
    got = target.forward(more, cache=cache)
    for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        want = target.forward(torch.cat([ids[row, :length], more[number]])[None])
        torch.testing.assert_close(got.taps_BTF[number], want.taps_BTF[0, length:], rtol=1e-5, atol=1e-5)


def test_the_longest_row_takes_its_columns_along():
    cache = filled([[1, 2, 3, 4, 5], [6, 7]])
    cache.select([1])
    assert (cache.longest, cache.uniform, cache.layers[0].keys.shape[-2]) == (2, True, 2)
    assert held(cache, 2, 3) == [[6, 7]]


def test_a_row_that_was_doubled_is_two_rows():
    cache = filled([[1, 2]])
    cache.select([0, 0])
    write(cache, [[3], [4]], 2, 3)
    assert held(cache, 2, 3) == [[1, 2, 3], [1, 2, 4]]


# --- what cannot be rolled back -------------------------------------------------------------------------------------

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
        check_reversible(config)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mistral", "gemma2", "gpt_oss", "llama4_text"])
def test_attention_of_every_kind_is_not(model_type):
    check_reversible(CONFIG_MAPPING[model_type]())


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
