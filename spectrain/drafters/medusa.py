"""Medusa (2401.10774): heads on the target, each of which says one token further ahead than the one before.

Head d at position t reads the target's last hidden state there, after the final norm, and predicts token t+2+d from it
alone: what was drafted before makes no difference to it. So every head is computed once a round, and all nodes of a
depth share its law. Drawing each node from that law on its own is exact: it is the law that the node was drawn from.

A head is W2 (h + SiLU(W1 h + b)), at first with W1 and b zero and W2 as the target's head, so it says what that says.

The target is frozen (Medusa-1), or trained with the heads by low-rank adapters and saved beside them (Medusa-2): then
the heads are warmed up on the target as it is, and later the moved target is held to the original's law, which is the
one that the features' rows have, while the heads are held to the moved target's.

Shapes: B batch, T positions, W nodes of a level, K heads that are asked, H hidden, V vocabulary rows of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from spectrain.cache import last_positions
from spectrain.drafters.base import (
    Auxiliary,
    Committed,
    DepthOutput,
    DrafterConfig,
    DraftOutput,
    Proposal,
    TrainableDrafter,
)
from spectrain.drafters.growth import GrowingDrafter
from spectrain.drafters.joint import JointConfig, MovingTarget
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler
from spectrain.heads import OutputHead, columns_of
from spectrain.losses import supervised
from spectrain.shapes import Shape
from spectrain.target import FeatureBatch, Target
from spectrain.weights import OWN_TARGET

MOST_HEADS = MOST_LAYERS = 8


class MedusaConfig(DrafterConfig):
    """Settings of Medusa heads; sizes are the target's.

    ``head`` says what W2 is. "own": a trained copy of the target's head for each, as in the paper: V x H parameters a
    head to train, to store, and to read for every draft token. "shared": all heads read through the target's, frozen;
    a bundle holds one head, and a round reads it once. Shared is the default because it pays on a big vocabulary: at
    V = 49,152 and H = 576 an own head is 85 times as large as its block.
    """

    type: Literal["medusa"] = "medusa"
    heads: int = Field(4, ge=1, le=MOST_HEADS, description="tokens that can be drafted ahead, one a head")
    layers: int = Field(1, ge=1, le=MOST_LAYERS, description="residual SiLU layers of a head")
    head: Literal["own", "shared"] = Field("shared", description="train a copy of the target's head each, or share it")
    joint: JointConfig | None = Field(None, description="also train the target, which then becomes another model")

    def taps(self, target: Target) -> tuple[int, ...]:
        """None; a target that does not fit is refused before anything is computed."""
        _check_head(target)
        if self.joint is not None:
            self.joint.check(target)
        return ()

    @property
    def limits(self) -> tuple[int, None]:
        """One token a head."""
        return self.heads, None


def _check_head(target: Target) -> None:
    if target.head.bias_V is not None:
        raise SpectrainError(
            f"the head of a {type(target.model).__name__} has a bias, and Medusa heads have none in the layout that "
            "servers read; choose another drafter for this target"
        )


class ResidualBlock(nn.Module):
    """h + SiLU(W1 h + b), once a layer; the identity while W1 and b are zero."""

    def __init__(self, size: int, layers: int) -> None:
        super().__init__()
        place = torch.get_default_device()
        self.layers = nn.ModuleList(nn.utils.skip_init(nn.Linear, size, size, device=place) for _ in range(layers))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, hidden_XH: Tensor) -> Tensor:
        for layer in self.layers:
            hidden_XH = hidden_XH + nn.functional.silu(layer(hidden_XH))
        return hidden_XH


@dataclass
class MedusaState:
    """Decode state of B requests: the target's state before the pending token; and, while a proposal is made, the
    logits of every head that it needs and which of them comes next."""

    hidden_B1H: Tensor | None = None
    wanted: int = MOST_HEADS
    logits_BKV: Tensor | None = None
    level: int = 0


class MedusaDrafter(GrowingDrafter, TrainableDrafter):
    """Heads on the target's last hidden state. Its parameters carry the names that servers read."""

    config: MedusaConfig

    def __init__(self, config: MedusaConfig, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.config, self.hidden_size, self.vocab_size = config, hidden_size, vocab_size
        self.deepest = config.heads
        self.blocks = nn.ModuleList(ResidualBlock(hidden_size, config.layers) for _ in range(config.heads))
        own = config.heads if config.head == "own" else 0
        self.lm_heads = nn.ModuleList(
            nn.utils.skip_init(nn.Linear, hidden_size, vocab_size, bias=False, device=torch.get_default_device())
            for _ in range(own)
        )
        self._target_head: tuple[OutputHead, ...] = ()
        self._expected: tuple[Tensor, ...] = ()
        self.adapter = nn.ParameterDict()  # of the target, while it is trained too
        self._moving: MovingTarget | None = None
        self._jointly = False

    @classmethod
    def build(cls, config: MedusaConfig, target: Target, counts_V: Tensor) -> MedusaDrafter:
        """A new drafter for ``target`` that says what the target says; ``counts_V`` is not needed."""
        drafter = cls(config, target.hidden_size, target.vocab_size)
        drafter.bind(target)
        with torch.no_grad():
            for head in drafter.lm_heads:
                cast(nn.Linear, head).weight.copy_(target.head_weight)
        drafter = drafter.to(target.device)
        if config.joint is not None:
            drafter._moving, drafter.shardable = MovingTarget(target, config.joint), False
            drafter.adapter.update(drafter._moving.parameters())
        return drafter

    def expect_head(self, weight_VH: Tensor) -> None:
        """Bind from now on only to a target whose head this is: a shared head was stored with the drafter."""
        self._expected = (weight_VH,)

    def bind(self, target: Target) -> None:
        """Share the target's head, or take its soft cap and the ids that exist for heads of its own."""
        _check_head(target)
        if (target.hidden_size, target.vocab_size) != (self.hidden_size, self.vocab_size):
            raise SpectrainError(
                f"Medusa heads made for hidden size {self.hidden_size} and {self.vocab_size} vocabulary rows, "
                f"target has {target.hidden_size} and {target.vocab_size}"
            )
        for weight_VH in self._expected:
            _check_same(weight_VH, target.head_weight)
        self._expected, self._target_head, self.columns = (), (target.head,), target.tokenizer_size

    def borrowed(self) -> OutputHead:
        """The target's head."""
        if not self._target_head:
            raise SpectrainError("Medusa heads need their target's head: call bind(target) first")
        return self._target_head[0]

    def heads(self, count: int) -> list[OutputHead]:
        """The first ``count`` heads, all V rows of each; a shared one is the same object every time."""
        shared = self.borrowed()
        if self.config.head == "shared":
            return [shared] * count
        own = [cast(nn.Linear, head).weight for head in self.lm_heads[:count]]
        return [OutputHead(weight_VH, None, shared.cap, shared.size) for weight_VH in own]

    # --- training ---------------------------------------------------------------------------------------------

    def shifts(self, depths: int | None = None) -> tuple[int, ...]:
        """One for each head; there are none beyond the last."""
        return tuple(2 + depth for depth in range(min(depths or self.config.heads, self.config.heads)))

    def set_progress(self, step: int, total: int) -> None:
        """Heads alone at first, then with the target."""
        joint = self.config.joint
        self._jointly = self._moving is not None and joint is not None and step > joint.warmup * total

    def auxiliary_shifts(self) -> tuple[int, ...]:
        """The moved target's own next token, once it moves."""
        return (1,) if self._jointly else ()

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The heads, and the target's adapters with a rate of their own."""
        adapter = list(self.adapter.values()) if self._moving is not None else []
        own = {id(p) for p in adapter}
        groups = [{"params": [p for p in self.parameters() if id(p) not in own], "lr_scale": 1.0}]
        if self.config.joint is not None and adapter:
            groups.append({"params": adapter, "lr_scale": self.config.joint.lr_scale})
        return groups

    def write_more(self, folder: Path) -> None:
        """The moved target."""
        if self._moving is not None:
            self._moving.save(folder / OWN_TARGET)

    def warm_start(self, other: TrainableDrafter, target: Target, *, remap: bool = False) -> tuple[str, ...]:
        """The heads alone: adapters belong to the target that they were trained in."""
        if self._moving is None or not isinstance(other, MedusaDrafter):
            return super().warm_start(other, target, remap=remap)
        plain = MedusaDrafter(self.config, self.hidden_size, self.vocab_size)
        TrainableDrafter.warm_start(plain, other, target, remap=remap)
        self.load_state_dict(plain.state_dict(), strict=False)
        return ()

    def forward(self, batch: FeatureBatch, depths: int | None = None) -> DraftOutput:
        """Every head at every position. While the target moves, on its states and held to its law."""
        if self._moving is None:
            return self._read(batch, batch.hidden_BTH, depths)
        if not self._jointly:
            # The adapters take part without effect, or processes would wait for their gradients for ever.
            nothing = sum((parameter.sum() * 0.0 for parameter in self.adapter.values()), start=torch.zeros(()))
            return self._read(batch, batch.hidden_BTH + nothing.to(batch.hidden_BTH), depths)
        shared, moved_BTH = self.borrowed(), self._moving.states(batch.ids_BT)
        output = self._read(batch, moved_BTH, depths)
        head_DH, anchor = shared.weight_VH[: shared.size], cast(JointConfig, self.config.joint).anchor
        auxiliary = Auxiliary(moved_BTH, head_DH, 1, supervised(batch.answer_BT, 1), anchor, shared.cap)
        return replace(output, teacher=batch.as_seen(moved_BTH, shared), auxiliary=(auxiliary,))

    def _read(self, batch: FeatureBatch, hidden_BTH: Tensor, depths: int | None) -> DraftOutput:
        shifts = self.shifts(depths)
        shared, hidden_BTH = self.borrowed(), hidden_BTH.to(self._dtype)
        heads = self.heads(len(shifts))
        # The loss takes the depths of one head together, and knows a head by its tensor: cut a shared one once.
        cut = {id(head.weight_VH): head.first(shared.size).weight_VH for head in heads}
        outputs = tuple(
            DepthOutput(block(hidden_BTH), cut[id(head.weight_VH)], shift, supervised(batch.answer_BT, shift), head.cap)
            for block, head, shift in zip(self.blocks, heads, shifts, strict=False)
        )
        return DraftOutput(outputs, columns_of(shared.size, self.vocab_size, hidden_BTH.device))

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.blocks.parameters()).dtype

    # --- decoding ---------------------------------------------------------------------------------------------

    def start(self, first: Sequence[int]) -> MedusaState:
        return MedusaState()

    def observe(self, state: MedusaState, committed: Committed) -> None:
        # A view would keep the states of the whole prompt.
        state.hidden_B1H = last_positions(committed.features.hidden_BTH, committed.counts).clone()

    def propose(self, state: MedusaState, sampler: Sampler, shape: Shape, limits: Sequence[int],
                uniforms_BN: Tensor) -> Proposal:  # fmt: skip
        """As every growing drafter; the heads that this proposal needs are computed at once."""
        state.wanted = min(shape.depth, max(limits))
        proposal = super().propose(state, sampler, shape, limits, uniforms_BN)
        state.logits_BKV = None
        return proposal

    def root(self, state: MedusaState) -> Tensor:
        if state.hidden_B1H is None:
            raise SpectrainError("nothing was observed yet: Medusa heads read the target's hidden state")
        count = min(state.wanted, self.config.heads)
        hidden_BKH = torch.cat([block(state.hidden_B1H.to(self._dtype)) for block in self.blocks[:count]], 1)
        if self.config.head == "shared":
            state.logits_BKV = self.borrowed().logits(hidden_BKH)
        else:
            each = zip(self.heads(count), hidden_BKH.split(1, dim=1), strict=True)
            state.logits_BKV = torch.cat([head.logits(hidden) for head, hidden in each], 1)
        state.level = 0
        return state.logits_BKV[:, :1]

    def extend(self, state: MedusaState, tokens_BW: Tensor, parents_BW: Tensor) -> Tensor:
        """The next head's logits, the same for all nodes of the level."""
        assert state.logits_BKV is not None
        state.level += 1
        return state.logits_BKV[:, state.level, None]

    def select(self, state: MedusaState, rows: Sequence[int]) -> None:
        if state.hidden_B1H is not None:
            state.hidden_B1H = state.hidden_B1H[list(rows)]

    def memory(self, state: MedusaState) -> int:
        return 0 if state.hidden_B1H is None else state.hidden_B1H.nbytes

    def vocabulary(self) -> tuple[int, None]:
        return self.vocab_size, None


def _check_same(stored_VH: Tensor, head_VH: Tensor) -> None:
    """Equal but for the precision that either is kept in."""
    stored_VH, head_VH = stored_VH.to(head_VH.device).float(), head_VH.float()
    if not torch.allclose(stored_VH, head_VH, rtol=2**-7, atol=1e-7):
        gap = float((stored_VH - head_VH).abs().max())
        raise SpectrainError(f"the head stored with these Medusa heads, lm_heads.0.weight, is not this target's: they "
                             f"differ by up to {gap:.3g}. Load the target that the heads were trained for")  # fmt: skip
