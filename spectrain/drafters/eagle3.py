"""EAGLE-3 (2503.01840): one decoder layer over fused target features, trained by simulating its own drafting.

Its feature of a token are three of the target's streams, fused; it has a norm and a reduced head of its own.

Shapes: B batch, T positions, H hidden, F = taps x H, D draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from spectrain.drafters.base import TrainableDrafter
from spectrain.drafters.draft_layer import WideDraftLayer
from spectrain.drafters.feature_drafter import FeatureDrafter, FeatureDrafterConfig, layer_config
from spectrain.drafters.vocabulary import draft_vocabulary, remapped_rows, target_ids
from spectrain.errors import SpectrainError
from spectrain.taps import check_taps, default_taps
from spectrain.target import FeatureBatch, Features, Target

LLAMA_LAYER = {
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
}


class Eagle3Config(FeatureDrafterConfig):
    """Settings of an EAGLE-3 drafter; sizes not given here are the target's."""

    type: Literal["eagle3"] = "eagle3"
    depths: int = Field(7, ge=1, le=16, description="training-time-test steps")
    draft_vocab_size: int = Field(
        8192, ge=1, description="columns of the draft head at most: the most frequent answer tokens, or all there are"
    )
    tap_layers: tuple[int, ...] | None = Field(
        None, min_length=3, max_length=3, description="target layers to read; default 2, L//2, L-3"
    )
    start: Literal["random", "target_layer"] = Field(
        "random", description="target_layer copies the target's last layer"
    )

    def taps(self, target: Target) -> tuple[int, ...]:
        if self.tap_layers is None:
            return default_taps(target.num_layers)
        return check_taps(self.tap_layers, target.num_layers, "drafter.tap_layers")

    @property
    def limits(self) -> tuple[None, int]:
        """The tokens of its vocabulary, any number of them."""
        return None, self.draft_vocab_size


class Eagle3Drafter(FeatureDrafter):
    """The EAGLE-3 drafter. Its parameters carry the names that serving engines read."""

    config: Eagle3Config

    def __init__(self, config: Eagle3Config, layer: LlamaConfig, taps: tuple[int, ...], columns_D: Tensor) -> None:
        super().__init__(config, layer)
        H, D = layer.hidden_size, columns_D.numel()
        self.tap_layers, self.columns = taps, D
        self.fc = nn.Linear(len(taps) * H, H, bias=False)
        self.layers = nn.ModuleList([WideDraftLayer(layer)])
        self.norm = LlamaRMSNorm(H, layer.rms_norm_eps)
        self.lm_head = nn.Linear(H, D, bias=False)
        self.rotary = LlamaRotaryEmbedding(layer)
        self.d2t = nn.Buffer(columns_D - torch.arange(D))
        self.t2d = nn.Buffer(torch.zeros(layer.vocab_size, dtype=torch.bool).index_fill_(0, columns_D, True))
        self._columns = nn.Buffer(target_ids(self.d2t), persistent=False)

    @classmethod
    def build(cls, config: Eagle3Config, target: Target, counts_V: Tensor) -> Eagle3Drafter:
        """A new drafter for ``target``; ``counts_V`` counts the answer tokens of the training rows."""
        columns_D = draft_vocabulary(counts_V, config.draft_vocab_size, target.tokenizer_size)
        drafter = cls(config, layer_config(config, target), config.taps(target), columns_D)
        drafter.bind(target)
        drafter.copy_embedding(target)
        if config.start == "target_layer":
            drafter.copy_target_layer(target)
        return drafter.to(target.device)

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

    def came_to(self) -> dict[str, int]:
        """The tokens of its vocabulary: a target may have fewer than were asked for."""
        return {"draft_vocab_size": int(self.d2t.numel())}

    @property
    def layer(self) -> WideDraftLayer:
        return cast(WideDraftLayer, self.layers[0])

    def load_weights(self, tensors: dict[str, Tensor]) -> None:
        """Replace all weights and the draft vocabulary; ``tensors`` has exactly the names of ``state_dict()``."""
        self.load_state_dict(tensors, strict=True)
        self._columns.copy_(target_ids(self.d2t))

    def warm_start(self, other: TrainableDrafter, target: Target, *, remap: bool = False) -> tuple[str, ...]:
        """Keep the other's draft vocabulary, whatever was counted for this one; or, with ``remap``, this one's.

        Then the head's rows of tokens in both are the other's, and those of new tokens are the target's.
        """
        if not isinstance(other, Eagle3Drafter):
            return super().warm_start(other, target)
        if other.tap_layers != self.tap_layers:
            raise SpectrainError(
                f"the bundle reads the target's layers {list(other.tap_layers)}, this recipe's drafter "
                f"{list(self.tap_layers)}; set drafter.tap_layers={list(other.tap_layers)}"
            )
        if not remap and other.columns != self.columns:
            raise SpectrainError(
                f"the bundle's draft vocabulary has {other.columns} tokens, this recipe asks for "
                f"{self.columns}; set drafter.draft_vocab_size={other.columns} to keep it, or warm_start.remap=true to "
                "count a new one"
            )
        theirs, notes = self.weights_of(other, target)
        if remap:
            head_DH, new = remapped_rows(other.lm_head.weight, other._columns, target.head_weight, self._columns)
            theirs |= {"lm_head.weight": head_DH, "d2t": self.d2t, "t2d": self.t2d}
            notes = (*notes, f"{new} of {self.columns} tokens of the new draft vocabulary were not in the "
                             "bundle's; their rows of the head start as the target's")  # fmt: skip
        self.take_weights(theirs)
        self._columns.copy_(target_ids(self.d2t))
        return notes

    def read(self, features: Features | FeatureBatch) -> Tensor:
        return self.fc(features.taps_BTF.to(self.fc.weight.dtype))

    def feed(self, embedded_BTH: Tensor, hidden_BTH: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer.attention_input(embedded_BTH, hidden_BTH), hidden_BTH

    def head_state(self, hidden_XH: Tensor) -> Tensor:
        return self.norm(hidden_XH)

    def head(self) -> Tensor:
        return self.lm_head.weight

    def vocabulary(self) -> tuple[int, Tensor]:
        return int(self.layer_config.vocab_size), self._columns
