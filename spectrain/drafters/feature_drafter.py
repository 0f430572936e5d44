"""What the drafters share that go on from the target's features: one decoder layer, fed with its own output.

Position t holds the target's feature of token t together with the embedding of token t+1 and predicts token t+2. At
draft depth d the same position predicts token t+2+d: it is fed the token before, and its own output of depth d-1 in
place of a feature it cannot have yet. Training simulates what decoding does, position for position.

Shapes: B batch, T positions, M queried positions of a row, W nodes of a level, N positions, H hidden, D columns.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from spectrain.attention import Masks
from spectrain.cache import KeyValueCache, last_positions
from spectrain.drafters.base import Committed, DepthOutput, DrafterConfig, DraftOutput, TrainableDrafter
from spectrain.drafters.draft_layer import DraftLayer, KeysValues, depth_attention, packed_positions, take_positions
from spectrain.drafters.growth import GrowingDrafter, below
from spectrain.errors import SpectrainError
from spectrain.heads import head_product, soft_capped
from spectrain.losses import supervised
from spectrain.shapes import Layout
from spectrain.target import FeatureBatch, Features, Target

SHAPING = ("num_attention_heads", "num_key_value_heads", "head_dim")
NOTED = ("rope_parameters", "rms_norm_eps")


class FeatureDrafterConfig(DrafterConfig):
    """Settings of every drafter with a layer of its own; sizes not given here are the target's."""

    depths: int = Field(1, ge=1, le=16, description="draft depths that training simulates")
    intermediate_size: int | None = Field(None, ge=1, description="width of the MLP; default the target's")
    embedding: Literal["target", "own"] = Field(
        "target", description="borrow the target's, frozen; or train a copy of it, V x H values more in the bundle"
    )

    @property
    def trained_depths(self) -> int:
        return self.depths


def layer_config(config: FeatureDrafterConfig, target: Target) -> LlamaConfig:
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
        # A Llama layer turns whole heads here; a server would turn a part of them if this key were copied.
        rope_parameters={key: value for key, value in rope.items() if key != "partial_rotary_factor"},
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )


@dataclass
class FeatureState:
    """Decode state of B requests: the cache, of which ``lengths`` positions rest on target features and what lies
    beyond was drafted; the output there; and the nodes drafted last, with theirs."""

    cache: KeyValueCache
    lengths: list[int]
    root_B1H: Tensor | None = None
    layout: Layout | None = None
    hidden_BWH: Tensor | None = None


class FeatureDrafter(GrowingDrafter, TrainableDrafter):
    """One decoder layer on the target's features. A family adds its weights, among them ``fc`` and ``layers``, and says
    what it reads of a feature, what its layer is fed, and what of the output its head reads."""

    config: FeatureDrafterConfig
    fc: nn.Linear
    layers: nn.ModuleList
    rotary: LlamaRotaryEmbedding
    cap: float | None = None
    """Soft cap of the head's logits."""
    predicts_features = False
    """Whether what the head reads is trained to be the target's own feature."""

    def __init__(self, config: FeatureDrafterConfig, layer: LlamaConfig) -> None:
        super().__init__()
        self.config, self.layer_config, self._masks = config, layer, Masks(layer)
        own = config.embedding == "own"
        self.embed_tokens = nn.Embedding(layer.vocab_size, layer.hidden_size) if own else None
        self._embedding: tuple[Tensor, ...] = ()  # in a tuple, or it would be one of the drafter's own weights

    @property
    def layer(self) -> DraftLayer:
        """The one decoder layer (in a list, because that is how servers name its weights)."""
        return cast(DraftLayer, self.layers[0])

    @abstractmethod
    def read(self, features: Features | FeatureBatch) -> Tensor:
        """The target's features as hidden states of the drafter [B, T, H]."""

    @abstractmethod
    def feed(self, embedded_BTH: Tensor, hidden_BTH: Tensor) -> tuple[Tensor, Tensor]:
        """What the layer's attention reads, and its residual, of tokens beside the hidden states before them."""

    @abstractmethod
    def head_state(self, hidden_XH: Tensor) -> Tensor:
        """What the head reads of the layer's output."""

    @abstractmethod
    def head(self) -> Tensor:
        """Weight of the head, the same tensor every time."""

    def bind(self, target: Target) -> None:
        if target.hidden_size != self.layer_config.hidden_size or target.vocab_size != self.layer_config.vocab_size:
            raise SpectrainError(
                f"drafter made for hidden size {self.layer_config.hidden_size} and {self.layer_config.vocab_size} "
                f"vocabulary rows, target has {target.hidden_size} and {target.vocab_size}"
            )
        self._embedding = (target.embedding_weight.detach(),)

    @torch.no_grad()
    def copy_embedding(self, target: Target) -> None:
        """Start an embedding of its own as the target's."""
        if self.embed_tokens is not None:
            self.embed_tokens.weight.copy_(target.embedding_weight)

    def embed(self, ids_BT: Tensor) -> Tensor:
        if self.embed_tokens is not None:
            return self.embed_tokens(ids_BT).to(self.fc.weight.dtype)
        if not self._embedding:
            raise SpectrainError("this drafter borrows the target's embedding: call bind(target) first")
        return nn.functional.embedding(ids_BT, self._embedding[0]).to(self.fc.weight.dtype)

    def warm_start(self, other: TrainableDrafter, target: Target, *, remap: bool = False) -> tuple[str, ...]:
        """Also from a drafter that borrowed the target's embedding, when this one trains its own."""
        if remap or not isinstance(other, FeatureDrafter):
            return super().warm_start(other, target, remap=remap)
        theirs, notes = self.weights_of(other, target)
        self.take_weights(theirs)
        return notes

    def weights_of(self, other: FeatureDrafter, target: Target) -> tuple[dict[str, Tensor], tuple[str, ...]]:
        """What this drafter takes of another one of its family, and notes on what the two do differently with it.

        Raises SpectrainError for another family, other heads of attention, or an embedding there is no place for.
        """
        self.check_family(other)
        notes, weights = [], dict(other.state_dict())
        for name in (*SHAPING, *NOTED):
            theirs, own = (getattr(drafter.layer_config, name) for drafter in (other, self))
            if theirs == own:
                continue
            if name in SHAPING:  # the shapes of the weights may agree all the same
                raise SpectrainError(f"{name} is {theirs} in the bundle, {own} in this recipe's drafter")
            notes.append(f"{name} is this target's, {own}; the bundle has {theirs}")
        if other.embed_tokens is not None and self.embed_tokens is None:
            raise SpectrainError(
                "the bundle has an embedding of its own, and its layer was trained with that; set drafter.embedding=own"
            )
        if self.embed_tokens is not None and other.embed_tokens is None:
            weights["embed_tokens.weight"] = target.embedding_weight.detach()
            notes.append("the bundle borrowed its target's embedding; a copy of this one's is trained")
        return weights, tuple(notes)

    # --- training ---------------------------------------------------------------------------------------------

    def shifts(self, depths: int | None = None) -> tuple[int, ...]:
        return tuple(2 + depth for depth in range(depths or self.config.depths))

    def training_features(self, batch: FeatureBatch) -> Tensor:
        """What depth 0 reads in the training forward; ``read`` unless a family disturbs it."""
        return self.read(batch)

    def forward(self, batch: FeatureBatch, depths: int | None = None) -> DraftOutput:
        """Every position gives its depth-0 key and value; all else is computed where something is supervised."""
        layer, shifts = self.layer, self.shifts(depths)
        at_BM, real_BM = packed_positions(supervised(batch.answer_BT, shifts[0]))
        feature_BTH = self.training_features(batch)
        # The wrapped tail lies outside every mask.
        x_BTX, _ = self.feed(self.embed(batch.ids_BT.roll(-1, dims=1)), feature_BTH)
        everywhere_BT = torch.arange(x_BTX.shape[1], device=x_BTX.device)[None]
        context = layer.self_attn.keys_values(x_BTX, self.rotary(x_BTX, everywhere_BT))
        hidden_BMH, own = take_positions(feature_BTH, at_BM), list[KeysValues]()
        outputs = []
        for depth, shift in enumerate(shifts):
            follower_BM = batch.ids_BT.gather(1, (at_BM + 1 + depth).clamp(max=batch.ids_BT.shape[1] - 1))
            x_BMX, residual_BMH = self.feed(self.embed(follower_BM), hidden_BMH)
            rotary = self.rotary(x_BMX, at_BM + depth)
            if depth:
                own.append(layer.self_attn.keys_values(x_BMX, rotary))
            attended = depth_attention(layer.self_attn.queries(x_BMX, rotary), context, own, at_BM)
            hidden_BMH = layer.finish(residual_BMH, attended)
            outputs.append(self._depth_output(batch, shift, hidden_BMH, at_BM, real_BM))
        return DraftOutput(tuple(outputs), self.vocabulary()[1])

    def _depth_output(self, batch: FeatureBatch, shift: int, hidden_BMH: Tensor, at_BM: Tensor,
                      real_BM: Tensor) -> DepthOutput:  # fmt: skip
        state_NH = self.head_state(hidden_BMH[real_BM])
        row_N = real_BM.nonzero(as_tuple=True)[0]
        state_BTH = state_NH.new_zeros(*batch.ids_BT.shape, state_NH.shape[-1])
        state_BTH = state_BTH.index_put((row_N, at_BM[real_BM]), state_NH)
        mask_BT = supervised(batch.answer_BT, shift)
        return DepthOutput(state_BTH, self.head(), shift, mask_BT, self.cap, self.predicts_features)

    # --- decoding ---------------------------------------------------------------------------------------------

    def start(self, first: Sequence[int]) -> FeatureState:
        return FeatureState(KeyValueCache(len(first)), [0] * len(first))

    @torch.inference_mode()
    def observe(self, state: FeatureState, committed: Committed) -> None:
        state.cache.rollback(state.lengths)
        counts, hidden_BTH = committed.counts, self.read(committed.features)
        layout = Layout.row(hidden_BTH.shape[1], hidden_BTH.device)
        hidden_BTH = self._step(committed.tokens_BT, hidden_BTH, state.cache, layout)
        state.lengths = [length + count for length, count in zip(state.lengths, counts, strict=True)]
        state.cache.rollback(state.lengths)
        state.root_B1H = last_positions(hidden_BTH, counts).clone()  # a view would keep all of a prompt

    def root(self, state: FeatureState) -> Tensor:
        if state.root_B1H is None:
            raise SpectrainError("nothing was observed yet: this drafter starts from the target's features")
        state.cache.rollback(state.lengths)
        state.layout, state.hidden_BWH = None, state.root_B1H
        return self._logits(state.root_B1H)

    def extend(self, state: FeatureState, tokens_BW: Tensor, parents_BW: Tensor) -> Tensor:
        assert state.hidden_BWH is not None
        above_BWH = take_positions(state.hidden_BWH, parents_BW)
        state.layout = below(state.layout, parents_BW)
        state.hidden_BWH = self._step(tokens_BW, above_BWH, state.cache, state.layout)
        return self._logits(state.hidden_BWH)

    def select(self, state: FeatureState, rows: Sequence[int]) -> None:
        state.cache.select(rows)
        state.lengths = [state.lengths[row] for row in rows]
        if state.root_B1H is not None:
            state.root_B1H = state.root_B1H[list(rows)]

    def memory(self, state: FeatureState) -> int:
        return state.cache.bytes()

    def _step(self, ids_BT: Tensor, hidden_BTH: Tensor, cache: KeyValueCache, layout: Layout) -> Tensor:
        layer, arguments = self.layer, self._masks.arguments(layout, cache, hidden_BTH.dtype)
        rotary = self.rotary(hidden_BTH, arguments["position_ids"])
        x_BTX, residual_BTH = self.feed(self.embed(ids_BT), hidden_BTH)
        q = layer.self_attn.queries(x_BTX, rotary)
        cache.prepare(ids_BT.shape[1], ids_BT.device)
        k, v = cache.update(*layer.self_attn.keys_values(x_BTX, rotary), 0)
        cache.advance(ids_BT.shape[1])
        mask = arguments.get("attention_mask")
        causal = mask is None and q.shape[2] > 1  # the first positions, into an empty cache
        attended = nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=True)
        return layer.finish(residual_BTH, attended)

    def _logits(self, hidden_BWH: Tensor) -> Tensor:
        head_DH = self.head()
        logits_BWD = head_product(self.head_state(hidden_BWH).to(head_DH.dtype), head_DH)
        return soft_capped(logits_BWD.float(), self.cap)
