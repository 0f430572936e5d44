"""Models without weights: what a target and a drafter hold and compute, counted by running their own code on the meta
device, where a tensor has a shape and no values.

Shapes: B batch, T positions, H hidden, F = taps x H, V vocabulary rows, D columns of a head.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PreTrainedConfig

from spectrain.attention import Masks
from spectrain.drafters import DrafterConfig, TrainableDrafter, family_of
from spectrain.drafters.base import Auxiliary, DepthOutput, DraftOutput
from spectrain.errors import SpectrainError
from spectrain.head_loss import CHUNK
from spectrain.heads import OutputHead
from spectrain.target import FeatureBatch, Target

META = torch.device("meta")
ATTENTION: Any = torch.nn.functional.scaled_dot_product_attention
PRODUCTS: tuple[Any, ...] = (
    torch.nn.functional.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, ATTENTION
)  # fmt: skip
PHASES = 1000  # optimizer steps of an imagined training: how finely its progress is told


class Blueprint(Target):
    """A target from its configuration alone. It knows shapes; what it computes has no values.

    ``tokenizer_size`` is how many ids exist; without a tokenizer at hand, every vocabulary row counts as one.
    """

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype, *, name: str = "target",
                 tokenizer_size: int | None = None) -> None:  # fmt: skip
        # Not Target's own: it asks the tokenizer, and tries the model out.
        try:
            with META:
                self.model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        except Exception as error:  # each architecture checks its own settings in its own way
            raise SpectrainError(
                f"no causal language model can be made from the config of {name!r}: {error}"
            ) from error
        self.model = self.model.eval().requires_grad_(False)
        self.tokenizer = cast(Any, None)
        self.name, self.folder, self.revision = name, None, None
        self.config = self.model.config.get_text_config(decoder=True)
        self.tokenizer_size = min(tokenizer_size or self.vocab_size, self.vocab_size)
        self._masks = Masks(self.config)
        self._taps, self._identity, self._streams, self._hooks = (), None, {}, []


def blueprint_drafter(config: DrafterConfig, target: Blueprint) -> TrainableDrafter:
    """The drafter that a recipe would train, through its own ``build``."""
    counts_V = torch.zeros(target.vocab_size, dtype=torch.long)
    with Tally(), META:
        drafter = cast(TrainableDrafter, family_of(config).build(config, target, counts_V))
    return drafter.train()


def parameters(module: Any) -> int:
    """Values that a module holds in parameters, tied ones once."""
    return sum(parameter.numel() for parameter in module.parameters())


class Tally(TorchDispatchMode):
    """Bytes alive on the meta device, and their peak. What counts or chooses, ids, positions, masks, keeps its values
    and stands beside what has none: so a mask chooses as many rows as it really would."""

    def __init__(self, *held: Any) -> None:
        super().__init__()
        self.now = self.peak = 0
        # What these modules hold is counted elsewhere.
        tensors = [tensor for module in held for tensor in (*module.parameters(), *module.buffers())]
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet(tensor.untyped_storage() for tensor in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves((args, kwargs))):
            args, kwargs = tree_map(_moved, (_chosen(func, args), kwargs))
        elif kwargs.get("device") == META and _counts(func, args, kwargs):
            kwargs = {**kwargs, "device": torch.device("cpu")}
        out = func(*args, **kwargs)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.is_meta:
                self._hold(leaf.untyped_storage())
        return out

    def _hold(self, storage: Any) -> None:
        if storage not in self._seen:
            self._seen.add(storage)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, storage.nbytes())

    def _drop(self, size: int) -> None:
        self.now -= size


def _counts(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a factory, or a copy to another device, gives whole numbers or truth values."""
    if func.overloadpacket is torch.ops.aten._to_copy:
        dtype = kwargs.get("dtype") or args[0].dtype
    else:
        whole = func.overloadpacket is torch.ops.aten.arange and all(isinstance(arg, int) for arg in args)
        dtype = kwargs.get("dtype") or (torch.long if whole else torch.get_default_dtype())
    return not dtype.is_floating_point


def _chosen(func: Any, args: Any) -> Any:
    """Masks among the indices as the numbers of what they choose, while they still have values."""
    if func.overloadpacket not in (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_):
        return args
    indices: list[Any] = []
    for index in args[1]:
        indices += index.nonzero(as_tuple=True) if index is not None and index.dtype == torch.bool else (index,)
    return (args[0], indices, *args[2:])


def _moved(leaf: Any) -> Any:
    return leaf.to(META) if isinstance(leaf, Tensor) and not leaf.is_meta else leaf


class Kernels(TorchFunctionMode):
    """What the meta device lacks: attention without a mask that never holds its scores, and, with ``half``, autocast
    to bfloat16 of matrix products and attention."""

    def __init__(self, half: bool = False) -> None:
        super().__init__()
        self.half = half

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.half and func in PRODUCTS:
            args, kwargs = tree_map(_halved, (args, kwargs))
        if func is ATTENTION and len(args) == 3 and kwargs.get("attn_mask") is None:
            return _attention(*args)
        return func(*args, **kwargs)


def _halved(leaf: Any) -> Any:
    return leaf.bfloat16() if isinstance(leaf, Tensor) and leaf.dtype == torch.float32 else leaf


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = (x.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(1, 2) for x in (k, v))
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]


@dataclass(frozen=True)
class Step:
    """One micro-batch of training, heads apart: operations of forward and backward together, and of the forward alone;
    bytes alive after the forward (the batch and what is kept for the backward), and at their peak, gradients of the
    parameters included; whether the target is trained too."""

    flops: int
    forward_flops: int
    kept_bytes: int
    peak_bytes: int
    moves_target: bool
    heads: tuple[HeadRows, ...]


@dataclass(frozen=True)
class HeadRows:
    """States of all depths that share a head of D columns and H values; at how many ``places`` the target's law is
    asked for them; whether the head's own weight is trained, and whether its columns are a choice of the target's."""

    rows: int
    places: int
    columns: int
    width: int
    trained: bool
    reduced: bool

    @property
    def forward_flops(self) -> int:
        """Logits alone."""
        return 2 * self.columns * self.width * self.rows

    @property
    def flops(self) -> int:
        """Logits, the gradient of the states, and that of the weight where it is trained."""
        return self.forward_flops * (3 if self.trained else 2)

    @property
    def teacher_flops(self) -> int:
        """The target's law on the same columns, where it is not stored."""
        return 2 * self.columns * self.width * self.places


def training_step(drafter: TrainableDrafter, target: Blueprint, *, rows: int, length: int, answer: int,
                  feature_dtype: torch.dtype, half: bool, depths: int | None = None,
                  accumulate: bool = False, progress: float = 1.0) -> Step:  # fmt: skip
    """Run a drafter's training forward and backward over ``rows`` rows of ``length`` tokens, of which the last
    ``answer`` are answer tokens, at this share of the training. With ``accumulate`` there are gradients of an earlier
    micro-batch."""
    drafter.set_progress(max(1, round(progress * PHASES)), PHASES)
    for parameter in drafter.parameters():
        parameter.grad = torch.empty_like(parameter) if accumulate and parameter.requires_grad else None
    earlier = sum(p.grad.nbytes for p in drafter.parameters() if p.grad is not None)
    tally, forward, whole = Tally(drafter, target.model), FlopCounterMode(display=False), FlopCounterMode(display=False)
    with tally, whole:
        batch = _batch(drafter, target, rows, length, answer, feature_dtype)
        with forward, Kernels(half):
            output = drafter(batch, depths)
        heads = _heads(output)
        moves = output.teacher is not None
        total = sum(d.hidden_BTH.float().sum() for d in (*output.depths, *output.auxiliary))
        del output, batch
        kept = tally.now
        if isinstance(total, Tensor) and total.requires_grad:
            total.backward()
    drafter.zero_grad(set_to_none=True)
    return Step(whole.get_total_flops(), forward.get_total_flops(), kept, earlier + tally.peak,
                moves, heads)  # fmt: skip


def _heads(output: DraftOutput) -> tuple[HeadRows, ...]:
    states: list[DepthOutput | Auxiliary] = [*output.depths, *output.auxiliary]
    heads = []
    for head_DH in {id(state.head_DH): state.head_DH for state in states}.values():
        places: set[tuple[int, int]] = set()
        rows = 0
        for state in states:
            if state.head_DH is head_DH:
                found = [(row, at + state.shift) for row, at in state.mask_BT.nonzero().tolist()]
                rows, places = rows + len(found), places | set(found)
        reduced = output.columns_D is not None
        heads.append(HeadRows(rows, len(places), head_DH.shape[0], head_DH.shape[1], head_DH.requires_grad, reduced))
    return tuple(heads)


class _PaperBatch(FeatureBatch):
    """A batch whose laws are products without values: the real ones leave autocast, which the meta device lacks."""

    def as_seen(self, hidden_BTH: Tensor, head: OutputHead) -> FeatureBatch:
        hidden_BTH = hidden_BTH.detach()
        asked_NH = hidden_BTH[torch.nn.functional.pad(self.answer_BT[:, 1:], (0, 1))]
        for part_CH in asked_NH.split(CHUNK):
            torch.mm(part_CH.to(head.weight_VH.dtype), head.weight_VH.T)
        return replace(self, hidden_BTH=hidden_BTH)


def _batch(drafter: TrainableDrafter, target: Blueprint, rows: int, length: int, answer: int,
           dtype: torch.dtype) -> FeatureBatch:  # fmt: skip
    ids_BT = torch.zeros(rows, length, dtype=torch.long)
    answer_BT = torch.zeros(rows, length, dtype=torch.bool)
    answer_BT[:, length - answer :] = True
    size = target.hidden_size
    return _PaperBatch(
        ids_BT=ids_BT,
        answer_BT=answer_BT,
        hidden_BTH=torch.empty(rows, length, size, dtype=dtype, device=META),
        taps_BTF=torch.empty(rows, length, len(drafter.tap_layers) * size, dtype=dtype, device=META),
        log_normaliser_BT=torch.empty(rows, length, device=META),
        greedy_BT=torch.zeros(rows, length, dtype=torch.long),
    )


@dataclass(frozen=True)
class Pass:
    """A forward of the target's layers: operations, and peak bytes of what it computes."""

    flops: int
    peak_bytes: int


def target_pass(target: Blueprint, rows: int, length: int, taps: Sequence[int] = ()) -> Pass:
    """The target over ``rows`` x ``length`` tokens, its head apart."""
    target.tap(taps)
    tally, counter = Tally(target.model), FlopCounterMode(display=False)
    with Kernels(), tally, counter:
        target.forward(torch.zeros(rows, length, dtype=torch.long))
    return Pass(counter.get_total_flops(), tally.peak)


def cache_bytes(target: Blueprint) -> int:
    """Keys and values that one position keeps in all layers."""
    cache, length = target.new_cache(), 8
    with Tally():
        target.forward(torch.zeros(1, length, dtype=torch.long), cache=cache)
    return cache.bytes() // length
