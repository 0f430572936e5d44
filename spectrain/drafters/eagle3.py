"""EAGLE-3 (2503.01840): one decoder layer over fused target features, trained by simulating its own drafting.

Position t holds the target's features of token t together with the embedding of token t+1 and predicts token t+2. At
draft depth d the same position predicts token t+2+d: it is fed the token before, and its own output of depth d-1 in
place of features it cannot have yet.

Shapes: B batch, T positions, K draft length, H hidden, F = taps x H, D draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import Cache, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from spectrain.cache import cached_length, new_cache, rollback
from spectrain.drafters.base import DepthOutput, DrafterConfig, DraftOutput, Proposal, TrainableDrafter
from spectrain.drafters.draft_layer import DraftLayer, KeysValues, depth_attention, packed_positions, take_positions
from spectrain.drafters.vocabulary import draft_vocabulary, target_ids
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler, draw
from spectrain.losses import supervised
from spectrain.target import FeatureBatch, Features, Target, check_taps, default_taps

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
    """Decode state of one request: what was observed but not yet read, and the cache of what was."""

    cache: Cache
    length: int = 0
    """Positions of the cache that rest on target features; what lies beyond was drafted."""
    tokens: list[int] = field(default_factory=list)
    """Tokens that follow the unread features, one each (the first token of a request has no feature before it)."""
    features: list[Tensor] = field(default_factory=list)
    started: bool = False


class Eagle3Drafter(TrainableDrafter):
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

    def start(self) -> Eagle3State:
        return Eagle3State(new_cache(self.layer_config))

    def observe(self, state: Eagle3State, ids: Sequence[int], features: Features) -> None:
        new = list(ids)
        if not state.started:  # the very first token has no feature before it to stand beside
            new, state.started = new[1:], True
        state.tokens.extend(new)
        state.features.append(features.taps_BTF)

    @torch.inference_mode()
    def propose(self, state: Eagle3State, sampler: Sampler, length: int, uniforms_K: Tensor) -> Proposal:
        hidden_BTH = self._read(state)
        tokens: list[Tensor] = []
        laws: list[Tensor] = []
        for step in range(length):
            if step:
                hidden_BTH = self._step(tokens[-1][None], hidden_BTH, state.length + step - 1, state.cache)
            column, q_D = self._choose(hidden_BTH[0, -1], sampler, uniforms_K[step])
            tokens.append(self._columns[column].view(1))
            if q_D is not None:
                laws.append(q_D.new_zeros(self.layer_config.vocab_size).index_copy_(0, self._columns, q_D))
        return Proposal(torch.cat(tokens), torch.stack(laws) if laws else None)

    def _read(self, state: Eagle3State) -> Tensor:
        """Run the layer over what was observed since the last proposal; hidden state of the last position [1, 1, H]."""
        if state.cache.layers:
            rollback(state.cache, state.length)
        device = self.fc.weight.device
        tokens_1T = torch.tensor([state.tokens], device=device)
        hidden_BTH = self.fc(torch.cat(state.features, dim=1).to(self.fc.weight.dtype))
        hidden_BTH = self._step(tokens_1T, hidden_BTH, state.length, state.cache)
        state.length = cached_length(state.cache)
        state.tokens, state.features = [], []
        return hidden_BTH[:, -1:]

    def _step(self, ids_1T: Tensor, hidden_1TH: Tensor, position: int, cache: Cache) -> Tensor:
        layer, new = self.layer, ids_1T.shape[1]
        positions_1T = torch.arange(position, position + new, device=ids_1T.device)[None]
        rotary = self.rotary(hidden_1TH, positions_1T)
        x_1TH = layer.attention_input(self.embed(ids_1T), hidden_1TH)
        q = layer.self_attn.queries(x_1TH, rotary)
        k, v = cache.update(*layer.self_attn.keys_values(x_1TH, rotary), 0)
        mask = None
        if new > 1:
            mask = torch.ones(new, k.shape[2], dtype=torch.bool, device=k.device).tril(k.shape[2] - new)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return layer.finish(hidden_1TH, attended)

    def _choose(self, hidden_H: Tensor, sampler: Sampler, uniform: Tensor) -> tuple[Tensor, Tensor | None]:
        """The column drawn, and the law it was drawn from (None at T=0: a point mass)."""
        logits_D = self.lm_head(self.norm(hidden_H)).float()
        if sampler.greedy:
            return logits_D.argmax(), None
        q_D = sampler.probabilities(logits_D)
        return draw(q_D, uniform), q_D
