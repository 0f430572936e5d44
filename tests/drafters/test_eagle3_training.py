"""EAGLE-3's training forward is its own decoding: attention, positions, features and tokens of every depth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from spectrain.drafters.draft_layer import depth_attention, packed_positions, take_positions
from spectrain.drafters.eagle3 import Eagle3Config, Eagle3Drafter, layer_config
from spectrain.drafters.objective import DrafterLoss, LossConfig
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler
from spectrain.shapes import Chain
from spectrain.target import FeatureBatch

DEPTHS = 4


def built(tools, make_rows, target, **settings):
    """A float64 drafter, a batch of rows of several lengths, and the rows."""
    rows = make_rows(target, 3, answer=(5, 9))
    config = tools.config(Eagle3Config, depths=DEPTHS, **settings)
    drafter = tools.drafter(target, config, rows).double().eval()
    for parameter in drafter.parameters():  # norm weights that are not one, projections that matter
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return drafter, tools.batch(target, drafter, rows), rows


# --- attention ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_depth_attention_is_masked_attention_over_all_keys(depth, kv_heads):
    """A query sees the depth-0 keys up to its position, and its own index at every later depth."""
    generator = torch.Generator().manual_seed(0)
    B, heads, T, size = 2, 4, 9, 6
    at_BM = torch.tensor([[0, 1, 2, 5, 8], [3, 4, 7, 0, 1]])  # gaps, and a row padded with positions from the front
    M = at_BM.shape[1]

    def normal(count: int, length: int) -> torch.Tensor:
        return torch.randn(B, count, length, size, generator=generator, dtype=torch.float64).requires_grad_()

    q, context = normal(heads, M), (normal(kv_heads, T), normal(kv_heads, T))
    own = [(normal(kv_heads, M), normal(kv_heads, M)) for _ in range(depth)]
    sees = torch.zeros(B, 1, M, T + M * depth, dtype=torch.bool)
    for row, places in enumerate(at_BM.tolist()):
        for i, place in enumerate(places):
            sees[row, 0, i, : place + 1] = True
            for later in range(depth):
                sees[row, 0, i, T + later * M + i] = True
    k, v = (torch.cat(part, dim=2).repeat_interleave(heads // kv_heads, 1) for part in zip(context, *own, strict=True))
    want = (q @ k.transpose(-1, -2) / size**0.5).masked_fill(~sees, -torch.inf).softmax(-1) @ v
    got = depth_attention(q, context, own, at_BM)
    torch.testing.assert_close(got, want)
    upstream = torch.randn(want.shape, generator=generator, dtype=torch.float64)
    inputs = [q, *context, *(part for pair in own for part in pair)]
    for a, b in zip(*(torch.autograd.grad((x * upstream).sum(), inputs) for x in (got, want)), strict=True):
        torch.testing.assert_close(a, b)


def test_packed_positions_are_the_supervised_ones_in_order():
    mask = torch.tensor([[0, 1, 1, 0, 0, 1], [0, 0, 0, 0, 1, 0], [0] * 6], dtype=torch.bool)
    at_BM, real_BM = packed_positions(mask)
    assert [at[real].tolist() for at, real in zip(at_BM, real_BM, strict=True)] == [[1, 2, 5], [4], []]
    values = torch.arange(18.0).view(3, 6, 1)
    assert take_positions(values, at_BM)[real_BM].flatten().tolist() == [1.0, 2.0, 5.0, 10.0]
    at_BM, real_BM = packed_positions(mask[2:])
    assert at_BM.shape == (1, 1)
    assert not real_BM.any()


# --- training = decoding --------------------------------------------------------------------------------------------


@torch.inference_mode()
def decoded(drafter: Eagle3Drafter, state: Any, ids: list[int], position: int) -> list[torch.Tensor]:
    """Hidden states that decoding computes for ``position``, fed with the tokens of ``ids`` as its own draft."""
    drafter.root(state)
    found = [drafter.norm(state.root_B1H)[0, -1]]
    for token in ids[position + 2 : position + 1 + DEPTHS]:
        drafter.extend(state, torch.tensor([[token]]), torch.zeros(1, 1, dtype=torch.long))
        found.append(drafter.norm(state.hidden_BWH)[0, -1])
    return found


@pytest.mark.parametrize(
    ("architecture", "extra"),
    [
        ("llama", {"num_key_value_heads": 1}),
        ("llama", {"num_key_value_heads": 2}),
        ("llama", {"num_key_value_heads": 4}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}}),
        ("qwen3", {}),  # heads wider than hidden size / heads
        ("gpt2", {}),  # no rotary positions of its own
        ("gpt_neox", {}),  # rotary positions on a part of each head
    ],
)
def test_every_depth_of_training_is_what_decoding_computes(tools, make_rows, tiny_target, architecture, extra):
    target = tiny_target(architecture, **extra)
    drafter, _, rows = built(tools, make_rows, target)
    rows[1].mask[:] = [1] * len(rows[1].ids)  # from the first token on
    rows[2].mask[4:6] = [0, 0]  # two answers in one row
    batch = tools.batch(target, drafter, rows)
    with torch.no_grad():
        output = drafter(batch)
    compared = 0
    for number, row in enumerate(rows):
        for position in output.depths[0].mask_BT[number].nonzero()[:, 0].tolist():
            state = tools.observed(drafter, target, [row.ids[: position + 2]])
            for depth, hidden in zip(output.depths, decoded(drafter, state, row.ids, position), strict=False):
                if depth.mask_BT[number, position]:
                    torch.testing.assert_close(hidden, depth.hidden_BTH[number, position], rtol=1e-5, atol=1e-5)
                    compared += 1
    assert compared == sum(int(depth.mask_BT.sum()) for depth in output.depths) > 40


def test_a_proposal_is_what_training_says_of_the_same_tokens(tools, make_rows, tiny_target):
    """Through the public calls alone, after rounds of other proposals: the state carries nothing over."""
    target = tiny_target("llama")
    drafter, _, rows = built(tools, make_rows, target)
    uniforms = torch.zeros(1, DEPTHS, dtype=torch.float64)
    for row in rows:
        target.tap(drafter.tap_layers)
        features = target.forward(torch.tensor([row.ids]))
        state = drafter.start(row.ids[:1])
        seen = 2
        drafter.observe(state, tools.told(target, [row.ids], [1], [3]))
        for accepted in (0, 2, 1):
            drafted = drafter.propose(state, Sampler(), Chain(DEPTHS), [DEPTHS], uniforms).tokens_BN[0].tolist()
            ids = torch.tensor([[*row.ids[: seen + 1], *drafted]])
            T = ids.shape[1]
            taps = torch.cat([features.taps_BTF[:, :seen], torch.zeros(1, T - seen, features.taps_BTF.shape[-1])], 1)
            blank = torch.zeros(1, T)
            answers = (torch.arange(T) >= seen)[None]
            batch = FeatureBatch(ids, answers, torch.zeros(1, T, target.hidden_size), taps, blank, blank.long())
            with torch.no_grad():
                output = drafter(batch)
            for depth, token in zip(output.depths, drafted, strict=True):
                best = (depth.hidden_BTH[0, seen - 1] @ depth.head_DH.T).argmax()
                assert output.columns_D[best] == token
            drafter.observe(state, tools.told(target, [row.ids], [seen + 1], [seen + 2 + accepted]))
            seen += 1 + accepted


def test_supervised_positions_of_the_worked_example(tools, tiny_target, make_rows):
    """8 tokens, the answer is tokens 4 to 6: depth 0 trains positions 3 and 4, depth 1 position 3, depth 2 none."""
    target = tiny_target("llama", dtype=torch.float32)
    drafter, _, rows = built(tools, make_rows, target)
    row = next(row for row in rows if len(row.ids) >= 8)
    row = replace(row, ids=row.ids[:8], mask=[0, 0, 0, 0, 1, 1, 1, 0])
    batch = tools.batch(target, drafter.float(), [row])
    output = drafter(batch, 3)
    assert [depth.mask_BT[0].int().tolist() for depth in output.depths] == [
        [0, 0, 0, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0, 0, 0],
        [0] * 8,
    ]


def test_gradients_flow_back_through_every_depth(tools, make_rows, tiny_target):
    """The output of a depth is fed to the next one undetached."""
    target = tiny_target("llama")
    drafter, batch, _ = built(tools, make_rows, target)
    taps = batch.taps_BTF.clone().requires_grad_()
    deepest = drafter(FeatureBatch(**{**vars(batch), "taps_BTF": taps})).depths[-1]
    position = int(deepest.mask_BT[0].nonzero()[-1])
    (gradient,) = torch.autograd.grad(deepest.hidden_BTH[0, position].sum(), taps)
    assert (gradient[0, : position + 1].abs().sum(-1) > 0).all()
    assert not gradient[0, position + 1 :].any()  # and nothing of what is not known yet
    assert not gradient[1:].any()


def test_a_loss_on_the_last_depth_alone_reaches_every_weight(tools, make_rows, tiny_target):
    target = tiny_target("llama", dtype=torch.float32)
    drafter, batch, _ = built(tools, make_rows, target)
    DrafterLoss(drafter.float(), target.head, LossConfig())(batch, [0.0] * (DEPTHS - 1) + [1.0]).backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad.abs().sum() > 0, name


# --- building -------------------------------------------------------------------------------------------------------


def test_started_as_the_targets_last_layer_it_says_what_the_target_says(tools, make_rows, tiny_target):
    """With the last tap the stream that enters the last layer, depth 0 is that layer and the final norm."""
    target = tiny_target("llama")
    rows = make_rows(target, 2)
    config = Eagle3Config(depths=1, draft_vocab_size=24, tap_layers=(1, 4, 7), start="target_layer")
    drafter = tools.drafter(target, config, rows).double()
    batch = tools.batch(target, drafter, rows)
    depth = drafter(batch).depths[0]
    torch.testing.assert_close(depth.hidden_BTH[depth.mask_BT], batch.hidden_BTH[depth.mask_BT], rtol=1e-5, atol=1e-5)
    assert torch.equal(depth.head_DH.float(), target.head_weight.float())


def test_that_start_is_refused_for_a_target_of_another_shape(tools, make_rows, tiny_target):
    target = tiny_target("gpt_neox", dtype=torch.float32)
    with pytest.raises(SpectrainError, match=r"start=target_layer needs .* Llama-shaped layers, GPTNeoX"):
        tools.drafter(target, tools.config(Eagle3Config, start="target_layer"), make_rows(target, 1))


def test_sizes_rotary_settings_and_context_are_the_targets(tiny_target):
    rope = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
    target = tiny_target("llama", context=77, rope_parameters=rope, rms_norm_eps=1e-3)
    layer = layer_config(Eagle3Config(), target)
    assert {name: layer.rope_parameters[name] for name in rope} == rope
    assert (layer.max_position_embeddings, layer.rms_norm_eps) == (77, 1e-3)
    assert (layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim) == (4, 2, 8)
    assert layer.intermediate_size == target.config.intermediate_size
    assert layer_config(Eagle3Config(intermediate_size=48), target).intermediate_size == 48


def test_a_target_that_turns_a_part_of_each_head_gets_a_layer_that_turns_all_and_says_so(tiny_target):
    """What the layer computes is what a server is told."""
    target = tiny_target("gpt_neox", layers=8)
    assert target.config.rope_parameters["partial_rotary_factor"] == 0.25
    layer = layer_config(Eagle3Config(), target)
    assert "partial_rotary_factor" not in layer.rope_parameters
    assert len(LlamaRotaryEmbedding(layer).inv_freq) == layer.head_dim // 2


def test_default_taps_need_seven_layers(tiny_target):
    assert Eagle3Config().taps(tiny_target("llama", layers=8)) == (2, 4, 5)
    shallow = tiny_target("llama", layers=4)
    with pytest.raises(SpectrainError, match=r"at least 7 layers, this one has 4"):
        Eagle3Config().taps(shallow)
    assert Eagle3Config(tap_layers=(0, 1, 3)).taps(shallow) == (0, 1, 3)
    for wrong in ((1, 1, 2), (2, 1, 3), (1, 2, 4), (-1, 1, 2)):
        with pytest.raises(SpectrainError, match=r"^drafter\.tap_layers \[.*distinct ascending layers"):
            Eagle3Config(tap_layers=wrong).taps(shallow)
    for wrong in ((), (1, 2), (0, 1, 2, 3)):  # three, as the layout that servers read has it
        with pytest.raises(ValidationError, match="tap_layers"):
            Eagle3Config(tap_layers=wrong)


def test_it_does_not_bind_to_a_target_of_another_size(tools, make_rows, tiny_target):
    target = tiny_target("llama", dtype=torch.float32)
    drafter = tools.drafter(target, tools.config(Eagle3Config), make_rows(target, 1))
    with pytest.raises(SpectrainError, match=r"hidden size 32 and 24 vocabulary rows, target has 32 and 26"):
        drafter.bind(tiny_target("llama", vocab=26, dtype=torch.float32))
    drafter._embedding = ()
    with pytest.raises(SpectrainError, match=r"call bind\(target\) first"):
        drafter.embed(torch.tensor([[1]]))


def test_parameter_names_are_those_that_servers_read(tools, make_rows, tiny_target):
    target = tiny_target("llama", dtype=torch.float32)
    drafter = tools.drafter(target, tools.config(Eagle3Config), make_rows(target, 1))
    layer = "layers.0."
    assert set(drafter.state_dict()) == {
        "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d",
        *(f"{layer}self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"{layer}{name}.weight" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")),
        *(f"{layer}mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    }  # fmt: skip
    assert all(isinstance(p, nn.Parameter) and p.dtype == torch.float32 for p in drafter.parameters())


def test_starting_from_a_layer_that_does_more_than_llamas_is_refused(tiny_target):
    """Its query and key norms would be dropped without a word."""
    target = tiny_target("qwen3", dtype=torch.float32)
    config = Eagle3Config(start="target_layer", tap_layers=(0, 1, 2), draft_vocab_size=8)
    with pytest.raises(SpectrainError, match=r"self_attn\.k_norm\.weight.*use drafter\.start=random"):
        Eagle3Drafter.build(config, target, torch.zeros(target.vocab_size, dtype=torch.long))
