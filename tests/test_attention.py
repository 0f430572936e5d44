"""A tree's node comes out as a plain forward of its own path, whatever the architecture (case C19), or is refused.

Shapes: B rows of the batch, N nodes, M = N + 1 rows of a round (the pending token first), H hidden.
"""

from functools import cache as once
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import paths_of
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    Llama4TextConfig,
    Llama4TextModel,
    RwkvConfig,
    RwkvForCausalLM,
)

from spectrain.attention import Masks, cached_forward, check_attention, context, layer_kinds
from spectrain.cache import KeyValueCache, cache_argument
from spectrain.errors import SpectrainError
from spectrain.shapes import ABSENT, Layout

C19 = [-1, 0, 0, 1, 1, 2]
DEEP = [-1, 0, 1, 2, 3, 4, 5, 6]  # deeper than the tiny models' windows
BUSHY = [-1, -1, 0, 0, 2, 2, 4, 4, 6, 8, 9]  # as deep, but a node's column is far behind its position
LENGTHS = (9, 3, 1)  # of which one is longer than the windows
KINDS = [(name, "sdpa") for name in ("gpt2", "gpt_neox", "llama", "mistral", "qwen3")]
KINDS += [(name, "eager") for name, _ in KINDS] + [("gemma2", "eager")]  # SDPA cannot cap scores


def tokens(count, seed=0, rows=1):
    return torch.randint(0, 24, (rows, count), generator=torch.Generator().manual_seed(seed))


def close(got, want):
    """Norms and eager softmax run in float32."""
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def body(tiny_model):
    """The layers of a tiny model of four, with one way to compute attention."""

    @once
    def build(architecture, attention="sdpa"):
        model = tiny_model(architecture, layers=4)
        model.set_attn_implementation("eager" if architecture == "gemma2" else attention)
        return model.base_model

    return build


class Round:
    """Prompts of unlike lengths in one cache, and behind each its pending token and a tree."""

    def __init__(self, body, parents, *, lengths=LENGTHS, seed=0):
        self.body, self.masks, self.parents = body, Masks(body.config), parents
        self.prompts = [tokens(length, seed + row)[0] for row, length in enumerate(lengths)]
        self.nodes_BM = tokens(1 + len(parents[0]), seed + 50, len(lengths))

    def prefilled(self):
        """A cache of the prompts, right-padded and rolled back."""
        cache, width = KeyValueCache(len(self.prompts)), max(map(len, self.prompts))
        padded = [torch.cat([prompt, prompt.new_zeros(width - len(prompt))]) for prompt in self.prompts]
        cached_forward(self.body, self.masks, torch.stack(padded), cache, None)
        cache.rollback([len(prompt) for prompt in self.prompts])
        return cache

    def states(self, nodes_BM=None):
        """Of every row of the round [B, M, H], all at once."""
        layout = Layout.tree(torch.tensor(self.parents), len(self.parents[0]))
        nodes_BM = self.nodes_BM if nodes_BM is None else nodes_BM
        return cached_forward(self.body, self.masks, nodes_BM, self.prefilled(), layout)

    @torch.inference_mode()
    def plain(self, row, node):
        """The state that a plain forward of the prompt and the path to a node ends with; node -1 is the pending one."""
        path = [0] if node < 0 else [0, *(n + 1 for n in paths_of(self.parents[row])[node])]
        whole = torch.cat([self.prompts[row], self.nodes_BM[row, path]])[None]
        return self.body(input_ids=whole, use_cache=False).last_hidden_state[0, -1]

    def check(self):
        got_BMH = self.states()
        for row, parents in enumerate(self.parents):
            for node, parent in enumerate([-1, *parents], -1):
                if parent != ABSENT:
                    close(got_BMH[row, node + 1], self.plain(row, node))


# --- trees ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("architecture", "attention"), KINDS)
def test_every_node_is_a_plain_forward_of_its_path(body, architecture, attention):
    Round(body(architecture, attention), [C19] * len(LENGTHS)).check()


@pytest.mark.parametrize("parents", [DEEP, BUSHY], ids=["deep", "bushy"])
def test_so_it_is_in_narrow_and_in_bushy_trees(body, architecture, parents):
    Round(body(architecture), [parents] * len(LENGTHS)).check()


def test_rows_of_a_batch_may_have_unlike_trees_with_nodes_left_out(body):
    trees = [[-1, 0, 1, ABSENT, 2, 4], [ABSENT, -1, 1, -1, ABSENT, 3], [-1, -1, 1, 2, 2, 4]]
    for architecture in ("llama", "gemma2"):
        Round(body(architecture), trees).check()


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2"])
@given(data=st.data())
@settings(max_examples=10, deadline=None, derandomize=True)
def test_any_trees_behind_any_prompts(body, architecture, data):
    draw, count = data.draw, data.draw(st.integers(1, 7))
    lengths = draw(st.lists(st.integers(1, 8), min_size=1, max_size=3))
    trees = [[draw(st.integers(-1, node - 1)) for node in range(count)] for _ in lengths]
    Round(body(architecture), trees, lengths=lengths, seed=draw(st.integers(0, 99))).check()


@pytest.mark.parametrize(("architecture", "attention"), KINDS)
def test_changing_a_sibling_changes_nothing(body, architecture, attention):
    """Node 2 of the case has a sibling, node 1, and a child, node 5: only it and its child hear of another token."""
    round_ = Round(body(architecture, attention), [C19] * len(LENGTHS))
    other_BM = round_.nodes_BM.clone()
    other_BM[:, 3] = (other_BM[:, 3] + 1) % 24
    before, after = round_.states(), round_.states(other_BM)
    hears = torch.tensor([False, False, False, True, False, False, True])  # the pending token, then the nodes
    assert torch.equal(before[:, ~hears], after[:, ~hears])
    assert ((before - after)[:, hears].abs().amax(-1) > 1e-3).all()


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mistral", "gemma2"])
def test_a_tree_run_level_by_level_is_the_tree_at_once(body, architecture):
    """As drafters grow it. Of unlike parents in every row."""
    picks = [[[0, 0], [0, 0], [0, 0]], [[0, 1, 1], [1, 1, 0], [0, 0, 0]], [[2], [0], [1]]]
    parents = [[-1, -1, *p, q] for p, q in zip(picks[1], [p[0] + 2 for p in picks[2]], strict=True)]
    round_ = Round(body(architecture), parents)
    whole, cache, layout, start = round_.states(), round_.prefilled(), Layout.row(1, torch.device("cpu")), 0
    for pick in ([[0]] * 3, *picks):
        if start:
            layout = layout.below(torch.tensor(pick))
        stop = start + len(pick[0])
        got = cached_forward(round_.body, round_.masks, round_.nodes_BM[:, start:stop], cache, layout)
        close(got, whole[:, start:stop])
        start = stop
    assert cache.lengths == [length + 7 for length in LENGTHS]


@pytest.mark.parametrize("architecture", ["mistral", "gemma2"])
def test_a_mask_without_the_window_would_show(body, architecture):
    """What makes the tests above ones for windows: eight nodes deep, the first is out of the last one's sight."""
    round_ = Round(body(architecture), [DEEP] * len(LENGTHS))
    assert "sliding_attention" in round_.masks.kinds
    round_.masks._window = 100
    assert (round_.states()[0, -1] - round_.plain(0, 7)).abs().max() > 1e-3


def test_a_row_after_another_needs_no_layout(body, architecture):
    """Chunks of any length behind ragged prompts."""
    round_ = Round(body(architecture), [DEEP] * len(LENGTHS))
    cache = round_.prefilled()
    for start, stop in ((0, 1), (1, 2), (2, 7), (7, 9)):
        got = cached_forward(round_.body, round_.masks, round_.nodes_BM[:, start:stop], cache, None)
        for row in range(len(LENGTHS)):
            for at in range(start, stop):
                close(got[row, at - start], round_.plain(row, at - 1))


# --- chunked attention ----------------------------------------------------------------------------------------------

CHUNK = 4


@pytest.fixture(scope="module")
def chunked():
    """Llama 4's text layers: three see their own chunk of four positions, one sees everything."""
    sizes: dict[str, Any] = {"vocab_size": 24, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Llama4TextConfig(
        **sizes, head_dim=8, intermediate_size=32, intermediate_size_mlp=32, num_hidden_layers=4, num_local_experts=2,
        attention_chunk_size=CHUNK, **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    )  # fmt: skip
    torch.manual_seed(0)
    layers = Llama4TextModel(config).eval()
    for parameter in layers.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layers


@pytest.mark.parametrize("parents", [C19, DEEP], ids=["case", "deep"])
def test_nodes_see_their_own_chunk(chunked, parents):
    """Chunks end at positions, not at columns: siblings stand in the same one, wherever they are written."""
    assert layer_kinds(chunked.config) == ("chunked_attention", "full_attention")
    Round(chunked, [parents] * len(LENGTHS)).check()


def test_a_mask_without_chunks_would_show(chunked):
    round_ = Round(chunked, [C19] * len(LENGTHS))
    round_.masks._chunk = 100
    assert (round_.states()[0, -1] - round_.plain(0, 5)).abs().max() > 1e-3


# --- what is given to the layers ------------------------------------------------------------------------------------


def given_arguments(config, lengths, layout, dtype=torch.float32):
    cache = KeyValueCache(len(lengths))
    cache.lengths = list(lengths)
    return Masks(config).arguments(layout, cache, dtype)


def test_no_mask_is_built_where_the_usual_one_will_do():
    """A mask costs memory, and attention its fastest kernels."""
    llama, mistral = CONFIG_MAPPING["llama"](), CONFIG_MAPPING["mistral"](sliding_window=5)
    cpu = torch.device("cpu")
    assert given_arguments(llama, [0, 0], Layout.row(7, cpu)).keys() == {"position_ids"}
    assert given_arguments(mistral, [0, 0], Layout.row(7, cpu)).keys() == {"position_ids"}
    assert given_arguments(llama, [6, 6], Layout.row(1, cpu)).keys() == {"position_ids"}
    for config, lengths, layout in (
        (llama, [6, 5], Layout.row(1, cpu)),  # one row must not see the other's stale column
        (llama, [6, 6], Layout.row(2, cpu)),
        (llama, [6], Layout.row(2, cpu)),
        (llama, [0], Layout.tree(torch.tensor([[-1, -1]]), 1)),
        (mistral, [6, 6], Layout.row(1, cpu)),  # which sees five of the seven
    ):
        assert given_arguments(config, lengths, layout).keys() == {"position_ids", "attention_mask"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_mask_is_added_to_the_scores(dtype):
    layout = Layout.tree(torch.tensor([[-1, -1], [-1, 0]]), 2)
    got = given_arguments(CONFIG_MAPPING["llama"](), [2, 1], layout, dtype)
    assert got["position_ids"].tolist() == [[2, 3, 3], [1, 2, 3]]
    assert got["attention_mask"].dtype == dtype
    seen = [
        [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 1]],
        [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]],
    ]
    assert (got["attention_mask"] == 0).int().tolist() == [[rows] for rows in seen]
    assert (got["attention_mask"] == -torch.inf).int().tolist() == [[(1 - torch.tensor(r)).tolist()] for r in seen]


def test_models_of_several_kinds_get_a_mask_for_each():
    config = CONFIG_MAPPING["gemma2"](sliding_window=2, num_hidden_layers=2)
    assert layer_kinds(config) == ("full_attention", "sliding_attention")
    masks = given_arguments(config, [3], Layout.row(1, torch.device("cpu")))["attention_mask"]
    assert {kind: (mask == 0).int().flatten().tolist() for kind, mask in masks.items()} == {
        "full_attention": [1, 1, 1, 1],
        "sliding_attention": [0, 0, 1, 1],
    }
    assert layer_kinds(CONFIG_MAPPING["mistral"](sliding_window=7)) == ("sliding_attention",)
    assert layer_kinds(CONFIG_MAPPING["mistral"](sliding_window=None)) == ("full_attention",)
    assert layer_kinds(CONFIG_MAPPING["gpt2"]()) == ("full_attention",)


def test_the_context_is_the_positions_that_a_request_may_fill():
    assert context(CONFIG_MAPPING["llama"](max_position_embeddings=77)) == 77
    assert context(CONFIG_MAPPING["gpt2"](n_positions=55)) == 55
    long = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    sizes: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "pad_token_id": None}
    sizes |= {"max_position_embeddings": 99, "original_max_position_embeddings": 32}
    assert context(CONFIG_MAPPING["phi3"](**sizes, rope_parameters=long)) == 32
    assert context(CONFIG_MAPPING["bloom"]()) is None


def test_nodes_beyond_the_context_do_no_harm(tiny_model):
    """A companion may draft on where a row's context ends. Learned positions end there; what lies before is exact."""
    layers = tiny_model("gpt2", layers=2, context=12).base_model
    round_ = Round(layers, [DEEP, DEEP], lengths=(9, 3))
    got_BMH = round_.states()
    assert got_BMH.isfinite().all()
    for row, last in ((0, 1), (1, 7)):  # 9 committed, the pending token, nodes 0 and 1: that is 12
        for node in range(-1, last + 1):
            close(got_BMH[row, node + 1], round_.plain(row, node))


# --- the probe ------------------------------------------------------------------------------------------------------


def check(model):
    check_attention(model, model.config)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_no_reason_to_refuse(tiny_model, architecture, dtype):
    check(tiny_model(architecture, dtype=dtype))


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
        check(model)


ALIBI: dict[str, dict[str, Any]] = {
    "bloom": {"vocab_size": 24, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mpt": {"vocab_size": 24, "d_model": 32, "n_layers": 2, "n_heads": 4},
}


@pytest.mark.parametrize("model_type", sorted(ALIBI))
def test_positions_that_cannot_be_given_are_refused_by_name(model_type):
    """ALiBi counts columns: a tree's siblings would stand one behind the other."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**ALIBI[model_type])).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    with pytest.raises(SpectrainError, match=f"a {type(model).__name__} does not "):
        check(model)


def test_attention_that_looks_ahead_is_refused_by_name():
    torch.manual_seed(0)
    config = BertConfig(vocab_size=24, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    model = BertLMHeadModel(config).eval()  # not is_decoder: it sees both sides
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    with pytest.raises(SpectrainError, match="BertLMHeadModel does not go on from a rolled-back cache"):
        check(model)


def test_a_model_that_stumbles_over_the_mask_is_refused_by_name(tiny_model):
    model = tiny_model("llama", layers=2)
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda _module, _args, kwargs: kwargs["attention_mask"].unexpected, with_kwargs=True
    )
    with pytest.raises(SpectrainError, match=r"LlamaForCausalLM does not run with a mask .*AttributeError: .*unexp"):
        check(model)


def without(name):
    """A hook that takes an argument of a forward away."""

    def hook(_module, args, kwargs):
        return args, {**kwargs, name: None}

    return hook


@pytest.mark.parametrize("name", ["attention_mask", "position_ids"])
def test_a_model_that_does_not_obey_is_refused_by_name(tiny_model, name):
    model = tiny_model("llama", layers=2)
    check(model)
    model.model.register_forward_pre_hook(without(name), with_kwargs=True)
    with pytest.raises(SpectrainError, match="LlamaForCausalLM does not go on from a rolled-back cache"):
        check(model)


def test_a_model_that_keeps_no_cache_is_refused_by_name(tiny_model):
    model = tiny_model("llama", layers=2)
    for layer in model.model.layers:
        layer.register_forward_pre_hook(without(cache_argument(layer)), with_kwargs=True)
    with pytest.raises(SpectrainError, match=r"LlamaForCausalLM keeps nothing in its cache"):
        check(model)


def test_a_state_that_survives_a_rollback_is_refused_by_name(tiny_model):
    """A recurrence that no config mentions: each forward starts with the last state of the one before."""
    model, held = tiny_model("llama", layers=2), torch.zeros(1, 1, 32, dtype=torch.float64)

    def remember(_module, _args, output):
        nonlocal held
        output, held = output + held, output[:1, -1:].detach()
        return output

    model.model.layers[0].mlp.register_forward_hook(remember)
    with pytest.raises(SpectrainError, match="LlamaForCausalLM does not go on from a rolled-back cache"):
        check(model)


def test_states_that_are_no_numbers_are_refused_by_name(tiny_model):
    model = tiny_model("llama", layers=2)
    with torch.no_grad():
        model.model.norm.weight[3] = torch.nan
    with pytest.raises(SpectrainError, match=r"LlamaForCausalLM .* differ by nan"):
        check(model)
