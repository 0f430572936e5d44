"""EAGLE-3 (2503.01840): one decoder layer over fused target features, trained by simulating its own drafting.

Position t holds the target's features of token t together with the embedding of token t+1 and predicts token t+2. At
draft depth d the same position predicts token t+2+d: it is fed the token before, and its own output of depth d-1 in
place of features it cannot have yet.

Shapes: B batch, T positions, W nodes of a level, H hidden, F = taps x H, D draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from spectrain.attention import Masks
from spectrain.cache import KeyValueCache, last_positions
from spectrain.drafters.base import Committed, DepthOutput, DrafterConfig, DraftOutput, TrainableDrafter
from spectrain.drafters.draft_layer import DraftLayer, KeysValues, depth_attention, packed_positions, take_positions
from spectrain.drafters.growth import GrowingDrafter, below
from spectrain.drafters.vocabulary import draft_vocabulary, target_ids
from spectrain.errors import SpectrainError
from spectrain.losses import supervised
from spectrain.shapes import Layout
from spectrain.target import FeatureBatch, Target, check_taps, default_taps

LLAMA_LAYER = {
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
}


class Eagle3Config(DrafterConfig):
    """Settings of an EAGLE-3 drafter; sizes not given here are the target's."""

    type: Literal["eagle3"] = "eagle3"
    depths: int = Field(7, ge=1, le=16, description="training-time-test steps")
    draft_vocab_size: int = Field(8192, ge=1, description="columns of the draft head; most frequent answer tokens")
    tap_layers: tuple[int, ...] | None = Field(
        None, min_length=3, max_length=3, description="target layers to read; default 2, L//2, L-3"
    )
    start: Literal["random", "target_layer"] = Field(
        "random", description="target_layer copies the target's last layer"
    )
    intermediate_size: int | None = Field(None, ge=1, description="width of the MLP; default the target's")

    def taps(self, target: Target) -> tuple[int, ...]:
        if self.tap_layers is None:
            return default_taps(target.num_layers)
        return check_taps(self.tap_layers, target.num_layers)


def layer_config(config: Eagle3Config, target: Target) -> LlamaConfig:
    """The drafter's own layer in Llama's terms: the target's sizes, rotary settings and context length."""
    source = target.config
    rope = getattr(source, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0}
    heads = source.num_attention_heads
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=config.intermediate_size
        or getattr(source, "intermediate_size", None)
        or 4 * target.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=getattr(source, "num_key_value_heads", None) or heads,
        head_dim=getattr(source, "head_dim", None) or target.hidden_size // heads,
        hidden_act="silu",
        rms_norm_eps=getattr(source, "rms_norm_eps", 1e-6),
        max_position_embeddings=source.max_position_embeddings,
        rope_parameters=dict(rope),
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )


@dataclass
class Eagle3State:
    """Decode state of B requests: the cache, of which ``lengths`` positions rest on target features and what lies
    beyond was drafted; the output there; and the nodes drafted last, with theirs."""

    cache: KeyValueCache
    lengths: list[int]
    root_B1H: Tensor | None = None
    layout: Layout | None = None
    hidden_BWH: Tensor | None = None


class Eagle3Drafter(GrowingDrafter, TrainableDrafter):
    """The EAGLE-3 drafter. Its parameters carry the names that serving engines read."""

    config: Eagle3Config

    def __init__(self, config: Eagle3Config, layer: LlamaConfig, taps: tuple[int, ...], columns_D: Tensor) -> None:
        super().__init__()
        self.config, self.layer_config, self.tap_layers = config, layer, taps
        H, D = layer.hidden_size, columns_D.numel()
        self.fc = nn.Linear(len(taps) * H, H, bias=False)
        self.layers = nn.ModuleList([DraftLayer(layer)])
        self.norm = LlamaRMSNorm(H, layer.rms_norm_eps)
        self.lm_head = nn.Linear(H, D, bias=False)
        self.rotary = LlamaRotaryEmbedding(layer)
        self.d2t = nn.Buffer(columns_D - torch.arange(D))
        self.t2d = nn.Buffer(torch.zeros(layer.vocab_size, dtype=torch.bool).index_fill_(0, columns_D, True))
        self._columns = nn.Buffer(target_ids(self.d2t), persistent=False)
        self._embedding: tuple[Tensor, ...] = ()
        self._masks, self.columns = Masks(layer), D

    @classmethod
    def build(cls, config: Eagle3Config, target: Target, counts_V: Tensor) -> Eagle3Drafter:
        """A new drafter for ``target``; ``counts_V`` counts the answer tokens of the training rows."""
        columns_D = draft_vocabulary(counts_V, config.draft_vocab_size, target.tokenizer_size)
        drafter = cls(config, layer_config(config, target), config.taps(target), columns_D)
        drafter.bind(target)
        if config.start == "target_layer":
            drafter.copy_target_layer(target)
        return drafter.to(target.device)

    def bind(self, target: Target) -> None:
        if target.hidden_size != self.layer_config.hidden_size or target.vocab_size != self.layer_config.vocab_size:
            raise SpectrainError(
                f"drafter made for hidden size {self.layer_config.hidden_size} and {self.layer_config.vocab_size} "
                f"vocabulary rows, target has {target.hidden_size} and {target.vocab_size}"
            )
        self._embedding = (target.embedding_weight.detach(),)

    @torch.no_grad()
    def copy_target_layer(self, target: Target) -> None:
        """Start as the target's last layer reading the highest tap, its final norm, and its head's rows.

        The embedding half of the projections and the lower taps start at zero, so the drafter begins with what the
        target would have made of the feature alone.
        """
        last: Any = target.layers[-1]
        mine = self.layer
        foreign = {name for name, _ in last.named_parameters()} - LLAMA_LAYER
        try:
            if foreign:
                raise AttributeError(f"it has {sorted(foreign)[0]}")
            for name in ("q_proj", "k_proj", "v_proj"):
                weight = getattr(mine.self_attn, name).weight
                weight.zero_()
                weight[:, self.layer_config.hidden_size :].copy_(getattr(last.self_attn, name).weight)
            mine.self_attn.o_proj.weight.copy_(last.self_attn.o_proj.weight)
            mine.mlp.load_state_dict(last.mlp.state_dict())
            mine.hidden_norm.weight.copy_(last.input_layernorm.weight)
            mine.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
            self.norm.weight.copy_(target.model.base_model.norm.weight)
        except (AttributeError, RuntimeError) as error:
            raise SpectrainError(
                f"drafter.start=target_layer needs a target with Llama-shaped layers, {type(target.model).__name__} "
                f"is not ({error}); use drafter.start=random"
            ) from error
        self.fc.weight.zero_()
        self.fc.weight[:, -self.layer_config.hidden_size :].copy_(torch.eye(self.layer_config.hidden_size))
        self.lm_head.weight.copy_(target.head_weight[self._columns])

    @property
    def layer(self) -> DraftLayer:
        """The one decoder layer (in a list, because that is how servers name its weights)."""
        return cast(DraftLayer, self.layers[0])

    def load_weights(self, tensors: dict[str, Tensor]) -> None:
        """Replace all weights and the draft vocabulary; ``tensors`` has exactly the names of ``state_dict()``."""
        self.load_state_dict(tensors, strict=True)
        self._columns.copy_(target_ids(self.d2t))

    def embed(self, ids_BT: Tensor) -> Tensor:
        if not self._embedding:
            raise SpectrainError("this drafter borrows the target's embedding: call bind(target) first")
        return nn.functional.embedding(ids_BT, self._embedding[0]).to(self.fc.weight.dtype)

    # --- training ---------------------------------------------------------------------------------------------

    def shifts(self, depths: int | None = None) -> tuple[int, ...]:
        return tuple(2 + depth for depth in range(depths or self.config.depths))

    def forward(self, batch: FeatureBatch, depths: int | None = None) -> DraftOutput:
        """Every position gives its depth-0 key and value; all else is computed where something is supervised."""
        layer, shifts = self.layer, self.shifts(depths)
        at_BM, real_BM = packed_positions(supervised(batch.answer_BT, shifts[0]))
        fused_BTH = self.fc(batch.taps_BTF.to(self.fc.weight.dtype))
        # The wrapped tail lies outside every mask.
        x_BTH = layer.attention_input(self.embed(batch.ids_BT.roll(-1, dims=1)), fused_BTH)
        everywhere_BT = torch.arange(x_BTH.shape[1], device=x_BTH.device)[None]
        context = layer.self_attn.keys_values(x_BTH, self.rotary(x_BTH, everywhere_BT))
        hidden_BMH, own = take_positions(fused_BTH, at_BM), list[KeysValues]()
        outputs = []
        for depth, shift in enumerate(shifts):
            follower_BM = batch.ids_BT.gather(1, (at_BM + 1 + depth).clamp(max=batch.ids_BT.shape[1] - 1))
            x_BMH = layer.attention_input(self.embed(follower_BM), hidden_BMH)
            rotary = self.rotary(x_BMH, at_BM + depth)
            if depth:
                own.append(layer.self_attn.keys_values(x_BMH, rotary))
            attended = depth_attention(layer.self_attn.queries(x_BMH, rotary), context, own, at_BM)
            hidden_BMH = layer.finish(hidden_BMH, attended)
            outputs.append(self._depth_output(batch, shift, hidden_BMH, at_BM, real_BM))
        return DraftOutput(tuple(outputs), self._columns)

    def _depth_output(self, batch: FeatureBatch, shift: int, hidden_BMH: Tensor, at_BM: Tensor,
                      real_BM: Tensor) -> DepthOutput:  # fmt: skip
        normed_NH = self.norm(hidden_BMH[real_BM])
        row_N = real_BM.nonzero(as_tuple=True)[0]
        hidden_BTH = normed_NH.new_zeros(*batch.ids_BT.shape, normed_NH.shape[-1])
        hidden_BTH = hidden_BTH.index_put((row_N, at_BM[real_BM]), normed_NH)
        return DepthOutput(hidden_BTH, self.lm_head.weight, shift, supervised(batch.answer_BT, shift))

    # --- decoding ---------------------------------------------------------------------------------------------

    def start(self, first: Sequence[int]) -> Eagle3State:
        return Eagle3State(KeyValueCache(len(first)), [0] * len(first))

    @torch.inference_mode()
    def observe(self, state: Eagle3State, committed: Committed) -> None:
        state.cache.rollback(state.lengths)
        counts = committed.counts
        hidden_BTH = self.fc(committed.features.taps_BTF.to(self.fc.weight.dtype))
        layout = Layout.row(hidden_BTH.shape[1], hidden_BTH.device)
        hidden_BTH = self._step(committed.tokens_BT, hidden_BTH, state.cache, layout)
        state.lengths = [length + count for length, count in zip(state.lengths, counts, strict=True)]
        state.cache.rollback(state.lengths)
        state.root_B1H = last_positions(hidden_BTH, counts)

    def root(self, state: Eagle3State) -> Tensor:
        if state.root_B1H is None:
            raise SpectrainError("nothing was observed yet: an EAGLE-3 drafter starts from the target's features")
        state.cache.rollback(state.lengths)
        state.layout, state.hidden_BWH = None, state.root_B1H
        return self._logits(state.root_B1H)

    def extend(self, state: Eagle3State, tokens_BW: Tensor, parents_BW: Tensor) -> Tensor:
        assert state.hidden_BWH is not None
        above_BWH = take_positions(state.hidden_BWH, parents_BW)
        state.layout = below(state.layout, parents_BW)
        state.hidden_BWH = self._step(tokens_BW, above_BWH, state.cache, state.layout)
        return self._logits(state.hidden_BWH)

    def select(self, state: Eagle3State, rows: Sequence[int]) -> None:
        state.cache.select(rows)
        state.lengths = [state.lengths[row] for row in rows]
        if state.root_B1H is not None:
            state.root_B1H = state.root_B1H[list(rows)]

    def memory(self, state: Eagle3State) -> int:
        return state.cache.bytes()

    def vocabulary(self) -> tuple[int, Tensor]:
        return int(self.layer_config.vocab_size), self._columns

    def _step(self, ids_BT: Tensor, hidden_BTH: Tensor, cache: KeyValueCache, layout: Layout) -> Tensor:
        layer, arguments = self.layer, self._masks.arguments(layout, cache, hidden_BTH.dtype)
        rotary = self.rotary(hidden_BTH, arguments["position_ids"])
        x_BTH = layer.attention_input(self.embed(ids_BT), hidden_BTH)
        q = layer.self_attn.queries(x_BTH, rotary)
        cache.prepare(ids_BT.shape[1], ids_BT.device)
        k, v = cache.update(*layer.self_attn.keys_values(x_BTH, rotary), 0)
        cache.advance(ids_BT.shape[1])
        mask = arguments.get("attention_mask")
        causal = mask is None and q.shape[2] > 1  # the first positions, into an empty cache
        attended = nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=True)
        return layer.finish(hidden_BTH, attended)

    def _logits(self, hidden_BWH: Tensor) -> Tensor:
        return self.lm_head(self.norm(hidden_BWH)).float()
