"""EAGLE (2401.15077): one decoder layer that predicts the target's next feature; the target's own head reads it.

The feature of a token is the target's last hidden state after the final norm. The layer reads the embedding of token
t+1 and the feature of token t, joined to one state, and its output is the feature of token t+1 as far as it can tell:
what the frozen head makes of it is the law of token t+2, and what the next draft token goes on from. Training asks for
both, the feature and the law. Trees that grow by confidence (EAGLE-2, 2406.16858) are a way to decode with the same
weights.

Shapes: B batch, T positions, H hidden, D ids that exist, V vocabulary rows of the target.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from spectrain.drafters.draft_layer import DraftLayer
from spectrain.drafters.feature_drafter import FeatureDrafter, FeatureDrafterConfig, layer_config
from spectrain.errors import SpectrainError
from spectrain.heads import columns_of, with_one
from spectrain.target import FeatureBatch, Features, Target

NOISE_LENGTH = 512  # tokens of the row for which the width of the noise is stated


class EagleConfig(FeatureDrafterConfig):
    """Settings of an EAGLE drafter; sizes not given here are the target's.

    The paper trains one depth, and weighs the regression to the target's features 1 and the law 0.1:
    ``loss: {terms: {forward_kl: 0.1}, regression: 1}``.
    """

    type: Literal["eagle"] = "eagle"
    noise: float = Field(
        0.1,
        ge=0,
        description=f"uniform noise within +-noise on the target's features in training, on a row of {NOISE_LENGTH} "
        "tokens; in proportion more on shorter ones",
    )


class EagleDrafter(FeatureDrafter):
    """The EAGLE drafter. Its parameters carry the names that serving engines read."""

    config: EagleConfig
    predicts_features = True

    def __init__(self, config: EagleConfig, layer: LlamaConfig) -> None:
        super().__init__(config, layer)
        H = layer.hidden_size
        self.fc = nn.Linear(2 * H, H, bias=False)
        self.layers = nn.ModuleList([DraftLayer(layer, H)])  # no norm before the attention
        self.rotary = LlamaRotaryEmbedding(layer)
        self._head: tuple[Tensor, ...] = ()
        self._columns: Tensor | None = None

    @classmethod
    def build(cls, config: EagleConfig, target: Target, counts_V: Tensor) -> EagleDrafter:
        """A new drafter for ``target``, its weights random; ``counts_V`` is not needed."""
        drafter = cls(config, layer_config(config, target))
        drafter.bind(target)
        drafter.copy_embedding(target)
        return drafter.to(target.device)

    def bind(self, target: Target) -> None:
        """Borrow the target's embedding, and its head on the ids that exist."""
        super().bind(target)
        head = target.head.first(target.head.size)
        self._head, self.cap, self.columns = (head.folded(),), head.cap, head.size
        self._columns = columns_of(head.size, target.vocab_size, head.weight_VH.device)

    def read(self, features: Features | FeatureBatch) -> Tensor:
        return features.hidden_BTH.to(self.fc.weight.dtype)

    def training_features(self, batch: FeatureBatch) -> Tensor:
        """The target's features, in training with noise: decoding feeds predictions, which are never quite right.

        Its width goes by the length of the row. What lies behind the last answer is never trained on, so it is no part
        of that.
        """
        feature_BTH = self.read(batch)
        if not self.training or not self.config.noise:
            return feature_BTH
        place_T = torch.arange(1, batch.answer_BT.shape[1] + 1, device=batch.answer_BT.device)
        length_B = (batch.answer_BT.bool() * place_T).amax(1).clamp(min=1)
        width_B = self.config.noise * NOISE_LENGTH / length_B
        return feature_BTH + (2 * torch.rand_like(feature_BTH) - 1) * width_B[:, None, None]

    def feed(self, embedded_BTH: Tensor, hidden_BTH: Tensor) -> tuple[Tensor, Tensor]:
        joined_BTH = self.fc(torch.cat([embedded_BTH, hidden_BTH], -1))
        return joined_BTH, joined_BTH

    def head_state(self, hidden_XH: Tensor) -> Tensor:
        return with_one(hidden_XH, self.head())

    def head(self) -> Tensor:
        if not self._head:
            raise SpectrainError("this drafter borrows the target's head: call bind(target) first")
        return self._head[0]

    def vocabulary(self) -> tuple[int, Tensor | None]:
        return int(self.layer_config.vocab_size), self._columns
