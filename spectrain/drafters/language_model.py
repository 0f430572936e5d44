"""A small language model as the drafter, distilled from the target on its own traffic (DistillSpec, 2310.08461).

It starts as a few of the target's own layers, as a smaller model with the same tokenizer, or at random in a size of its
own, and has an embedding and a head of its own. All of it trains, or adapters in its linear layers alone. Position t
reads token t and predicts token t+1, as the target does. Its vocabulary is the whole one, because no server reads a
reduced one; rows beyond the tokenizer's ids are padding on both sides and never drafted.

Shapes: B batch, T positions, W nodes of a level, H hidden, D ids that exist, V vocabulary rows of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor
from transformers import PreTrainedModel

from spectrain.attention import Masks, cached_forward, context
from spectrain.cache import KeyValueCache, last_positions, right_padded
from spectrain.drafters.adapters import Adapter, LoraSettings
from spectrain.drafters.base import Committed, DepthOutput, DrafterConfig, DraftOutput, Proposal, TrainableDrafter
from spectrain.drafters.draft_models import cut_layers, kept_layers, smaller_model
from spectrain.drafters.growth import GrowingDrafter, below
from spectrain.drafters.new_model import new_model, new_settings
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler
from spectrain.heads import OutputHead, columns_of, with_one
from spectrain.identity import common_prefix
from spectrain.losses import supervised
from spectrain.shapes import Layout, Shape
from spectrain.target import FeatureBatch, Target

TARGET_LAYERS, NEW = "target_layers", "new"
ADAPTER_FOLDER = "adapter"
"""Folder of a bundle that holds the adapters by themselves, where they were to be kept."""


class LanguageModelConfig(DrafterConfig):
    """Settings of a small draft model; everything else about it comes from where it starts."""

    type: Literal["language_model"] = "language_model"
    start: str = Field(
        TARGET_LAYERS,
        description="target_layers, new, or a folder or Hub id of a smaller model with the same tokenizer",
    )
    revision: str | None = Field(None, description="commit of the smaller model on the Hub")
    layers: tuple[int, ...] | None = Field(
        None, min_length=1, description="the target's layers to keep; default the first, the middle and the last"
    )
    shape: dict[str, Any] | None = Field(
        None,
        min_length=1,
        description="of a new model: settings that differ from the target's, as its config names them",
    )
    lora: LoraSettings | None = Field(None, description="train adapters alone; the bundle's model has them merged")

    @model_validator(mode="after")
    def _belong_together(self) -> LanguageModelConfig:
        if self.shape is not None and self.start != NEW:
            raise ValueError(f"shape is that of a new model, but start is {self.start!r}; give one of the two")
        if self.shape is None and self.start == NEW:
            raise ValueError("a new model needs a shape, or it is as big as the target: {num_hidden_layers: 2}")
        if self.start == NEW and self.lora is not None and self.lora.keep_adapter:
            raise ValueError(
                "lora.keep_adapter keeps adapters that belong over where the model starts, but a new one starts at "
                "random, which is stored nowhere; leave keep_adapter out"
            )
        if self.layers is not None and self.start != TARGET_LAYERS:
            raise ValueError(f"layers are the target's, but start is {self.start!r}; give one of the two")
        if self.revision is not None and self.start in (TARGET_LAYERS, NEW):
            raise ValueError(f"revision belongs to a smaller model, but start is {self.start}; leave revision out")
        return self

    def taps(self, target: Target) -> tuple[int, ...]:
        """None; layers and sizes that the target cannot have are refused before anything is computed."""
        if self.start == TARGET_LAYERS:
            self.kept(target)
        if self.shape is not None:
            new_settings(target, self.shape)
        return ()

    def context(self, target: Target) -> int | None:
        """A new model may have been given a shorter one."""
        return None if self.shape is None else context(new_settings(target, self.shape))

    def kept(self, target: Target) -> tuple[int, ...]:
        """The target's layers that the draft model starts from."""
        return kept_layers(target, self.layers)


@dataclass
class LanguageModelState:
    """Decode state of B requests: the cache, of which ``lengths`` positions are committed tokens; what it holds beyond
    them was drafted. ``unread`` are committed tokens not in the cache yet."""

    cache: KeyValueCache
    unread: list[list[int]]
    lengths: list[int]
    root_B1H: Tensor | None = None
    layout: Layout | None = None
    chain: list[Tensor] = field(default_factory=list)
    """Drafted tokens [B, 1] in the cache, one after another; none once a tree has branched."""


class LanguageModelDrafter(GrowingDrafter, TrainableDrafter):
    """A causal language model that goes on from its own tokens."""

    config: LanguageModelConfig

    def __init__(self, config: LanguageModelConfig, model: PreTrainedModel) -> None:
        super().__init__()
        self.config, self.model = config, model.eval()
        self._masks, self._context = Masks(model.config), context(model.config)
        self._vocabulary = 0
        self._adapter: Adapter | None = None

    @classmethod
    def build(cls, config: LanguageModelConfig, target: Target, counts_V: Tensor) -> LanguageModelDrafter:
        """A new drafter for ``target``, as good as where it starts; ``counts_V`` is not needed."""
        if config.start == TARGET_LAYERS:
            model = cut_layers(target, config.kept(target))
        elif config.shape is not None:
            model = new_model(target, config.shape)
        else:
            model = smaller_model(config.start, config.revision, target)
        drafter = cls(config, model)
        drafter._adapt()
        drafter.bind(target)
        return drafter.to(target.device)

    def bind(self, target: Target) -> None:
        """Nothing is borrowed: only the ids that exist and the width of the target's laws are noted."""
        rows = self.model.get_output_embeddings().weight.shape[0]
        if rows < target.tokenizer_size:
            raise SpectrainError(
                f"the draft model has {rows} vocabulary rows, the target's tokenizer {target.tokenizer_size} ids; "
                "a draft model needs a row for every id"
            )
        self.columns, self._vocabulary = target.tokenizer_size, target.vocab_size

    def train(self, mode: bool = True) -> LanguageModelDrafter:
        """The model inside stays as in decoding: dropout would have it learn a law that it never draws from."""
        super().train(mode)
        self.model.eval()
        return self

    # --- adapters ---------------------------------------------------------------------------------------------

    def _adapt(self) -> None:
        """Put fresh adapters into the model, if there are to be any."""
        if self.config.lora is not None:
            self._adapter = Adapter(self.model, self.config.lora)

    def as_saved(self) -> LanguageModelDrafter:
        """With its model as a server loads it: its own, or with adapters a copy in which they are merged."""
        return self if self._adapter is None else LanguageModelDrafter(self.config, self._adapter.merged())

    def write_more(self, folder: Path) -> None:
        """The adapters by themselves, where they were to be kept and are not merged yet."""
        config = self.config
        if self._adapter is not None and config.lora is not None and config.lora.keep_adapter:
            base = None if config.start == TARGET_LAYERS else config.start
            self._adapter.save(folder / ADAPTER_FOLDER, base, config.revision)

    def warm_start(self, other: TrainableDrafter, target: Target, *, remap: bool = False) -> tuple[str, ...]:
        """As every drafter. Adapters of ``other`` count as merged; those of this one start anew over its weights."""
        other = other.as_saved()
        if self._adapter is None or self.config.lora is None:
            return super().warm_start(other, target, remap=remap)
        if self.config.lora.keep_adapter:
            raise SpectrainError(
                "drafter.lora.keep_adapter keeps adapters that belong over drafter.start, but these would "
                "belong over the bundle; leave one of the two out, or give the bundle's folder as drafter.start"
            )
        self.model, self._adapter = self._adapter.removed(), None
        notes = super().warm_start(other, target, remap=remap)
        self._adapt()
        return notes

    def head(self) -> OutputHead:
        """Its head on the D ids that exist."""
        if self.columns is None:
            raise SpectrainError("this drafter does not know which ids exist: call bind(target) first")
        layer, size = self.model.get_output_embeddings(), self.columns
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        return OutputHead(layer.weight, getattr(layer, "bias", None), cap, size).first(size)

    # --- training ---------------------------------------------------------------------------------------------

    def shifts(self, depths: int | None = None) -> tuple[int, ...]:
        return tuple(1 + depth for depth in range(depths or 1))

    def forward(self, batch: FeatureBatch, depths: int | None = None) -> DraftOutput:
        """One depth to train. Depth d of more says what a decoder would draft once d tokens were accepted.

        They are then the tokens of the row, so that is the first depth, d positions later.
        """
        if self._context is not None and batch.ids_BT.shape[1] > self._context:
            raise SpectrainError(
                f"a row has {batch.ids_BT.shape[1]} tokens, the draft model a context of {self._context}; "
                "lower data.max_length, or start from a model with a longer context"
            )
        head, hidden_BTH = self.head(), self.model.base_model(input_ids=batch.ids_BT, use_cache=False).last_hidden_state
        head_DH = head.folded()
        hidden_BTH = with_one(hidden_BTH, head_DH)
        outputs = [
            DepthOutput(
                hidden_BTH.roll(-depth, dims=1) if depth else hidden_BTH,  # the wrapped tail lies outside every mask
                head_DH,
                shift,
                supervised(batch.answer_BT, shift),
                head.cap,
            )
            for depth, shift in enumerate(self.shifts(depths))
        ]
        return DraftOutput(tuple(outputs), columns_of(head.size, self._vocabulary, head_DH.device))

    # --- decoding ---------------------------------------------------------------------------------------------

    def start(self, first: Sequence[int]) -> LanguageModelState:
        return LanguageModelState(KeyValueCache(len(first)), [[token] for token in first], [0] * len(first))

    @torch.inference_mode()
    def observe(self, state: LanguageModelState, committed: Committed) -> None:
        """Read what the cache does not hold yet; of an accepted chain that is mostly its end alone."""
        kept = self._kept(state, committed.tokens)
        rows = [[*first, *new[n:]] for first, new, n in zip(state.unread, committed.tokens, kept, strict=True)]
        state.cache.rollback([length + n for length, n in zip(state.lengths, kept, strict=True)])
        counts = [len(row) for row in rows]
        ids_BT = right_padded(rows, committed.tokens_BT.device)
        lengths = [length + count for length, count in zip(state.cache.lengths, counts, strict=True)]
        hidden_BTH = cached_forward(self.model.base_model, self._masks, ids_BT, state.cache, None)
        state.cache.rollback(lengths)
        state.lengths, state.unread, state.chain = lengths, [[] for _ in rows], []
        state.root_B1H = last_positions(hidden_BTH, counts)

    def _kept(self, state: LanguageModelState, tokens: list[list[int]]) -> list[int]:
        """How many of the new tokens each row's cache holds, because they were drafted; never the last one, whose
        state is needed."""
        if not state.chain:
            return [0] * len(tokens)
        # The target has read the proposal by now, so this waits for nothing.
        drafted = torch.cat(state.chain, 1).tolist()
        return [common_prefix(chain, new[:-1]) for chain, new in zip(drafted, tokens, strict=True)]

    def propose(self, state: LanguageModelState, sampler: Sampler, shape: Shape, limits: Sequence[int],
                uniforms_BN: Tensor) -> Proposal:  # fmt: skip
        """As every growing drafter, but nothing for a request that would leave the draft model's context."""
        if self._context is None:
            return super().propose(state, sampler, shape, limits, uniforms_BN)
        # The last drafted token is never read.
        ends = [n + min(shape.depth, limit) - 1 for n, limit in zip(state.lengths, limits, strict=True)]
        fits = [end <= self._context for end in ends]
        if not any(fits):
            return Proposal(torch.empty_like(uniforms_BN[:, :0], dtype=torch.long))
        proposal = super().propose(state, sampler, shape, limits, uniforms_BN)
        if all(fits):
            return proposal
        return replace(proposal, counts=[proposal.tokens_BN.shape[1] if fit else 0 for fit in fits])

    def root(self, state: LanguageModelState) -> Tensor:
        if state.root_B1H is None:
            raise SpectrainError("nothing was observed yet: a draft model goes on from committed tokens")
        state.cache.rollback(state.lengths)
        state.layout, state.chain = None, []
        return self.head().logits(state.root_B1H)

    def extend(self, state: LanguageModelState, tokens_BW: Tensor, parents_BW: Tensor) -> Tensor:
        state.layout = below(state.layout, parents_BW)
        state.chain = [*state.chain, tokens_BW] if state.layout.chain else []
        hidden_BWH = cached_forward(self.model.base_model, self._masks, tokens_BW, state.cache, state.layout)
        return self.head().logits(hidden_BWH)

    def select(self, state: LanguageModelState, rows: Sequence[int]) -> None:
        kept = list(rows)
        state.cache.select(kept)
        state.lengths, state.unread = [state.lengths[row] for row in kept], [state.unread[row] for row in kept]
        state.chain = [tokens_B1[kept] for tokens_B1 in state.chain]
        if state.root_B1H is not None:
            state.root_B1H = state.root_B1H[kept]

    def memory(self, state: LanguageModelState) -> int:
        return state.cache.bytes()

    def vocabulary(self) -> tuple[int, None]:
        return self._vocabulary, None
