"""The frozen target: hidden-state taps, the head, and the law of the next token.

Shapes: B batch, T positions, H hidden, F = taps x H, V vocabulary rows of the head, K of the likeliest tokens.

The last hidden state is the one *after* the final norm: it is what the head reads. What a tap is: ``taps``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from spectrain.attention import Masks, cached_forward, check_attention
from spectrain.cache import KeyValueCache, cache_argument, check_reversible
from spectrain.errors import SpectrainError
from spectrain.heads import OutputHead
from spectrain.identity import TargetIdentity, check_rows, target_identity, tokenizer_size
from spectrain.shapes import Layout
from spectrain.taps import check_taps
from spectrain.weights import floating_dtype, loading, resolve_model, stored_bytes


@dataclass(frozen=True)
class Features:
    """What the target says about a run of positions: ``hidden_BTH`` after the final norm, ``taps_BTF`` side by side."""

    hidden_BTH: Tensor
    taps_BTF: Tensor

    def __getitem__(self, positions: slice) -> Features:
        return Features(self.hidden_BTH[:, positions], self.taps_BTF[:, positions])


@dataclass(frozen=True)
class FeatureBatch:
    """Rows right-padded to one length. ``answer_BT`` marks answer tokens, end of turn included.

    ``hidden_BTH`` is the target's last hidden state after the final norm: head(hidden[t]) is the law of token t+1, and
    ``log_normaliser_BT[t]`` its logsumexp over the full vocabulary; ``greedy_BT[t]`` its argmax. Both are only filled
    where token t+1 is an answer token, and so are ``top_ids_BTK`` and ``top_log_p_BTK``, its K likeliest tokens with
    their log-probabilities over the full vocabulary (None where they were not stored).
    """

    ids_BT: Tensor
    answer_BT: Tensor
    hidden_BTH: Tensor
    taps_BTF: Tensor
    log_normaliser_BT: Tensor
    greedy_BT: Tensor
    top_ids_BTK: Tensor | None = None
    top_log_p_BTK: Tensor | None = None

    def as_seen(self, hidden_BTH: Tensor, head: OutputHead) -> FeatureBatch:
        """This batch for a target with these last hidden states, after the final norm, and this ``head``: the same
        tokens and taps, other laws. Nothing flows back into the states; likeliest tokens are not kept."""
        asked_BT = nn.functional.pad(self.answer_BT[:, 1:], (0, 1))
        summary = head.summary(hidden_BTH.detach()[asked_BT])
        normaliser_BT, greedy_BT = torch.zeros_like(self.log_normaliser_BT), torch.zeros_like(self.greedy_BT)
        normaliser_BT[asked_BT] = summary.log_normaliser_N.to(normaliser_BT.dtype)
        greedy_BT[asked_BT] = summary.greedy_N
        return replace(self, hidden_BTH=hidden_BTH.detach(), log_normaliser_BT=normaliser_BT, greedy_BT=greedy_BT,
                       top_ids_BTK=None, top_log_p_BTK=None)  # fmt: skip


class Target:
    """A causal language model that is never trained here, with its tokenizer.

    ``tokenizer_size`` bounds the ids that exist: rows of the head beyond it are padding and get a logit of -inf.

    A model that is spread over devices reads ids from ``device`` and answers there, where copies of its embedding and
    head lie for whoever borrows them.
    """

    _device: torch.device | None = None

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, name: str,
                 folder: Path | None = None, revision: str | None = None,
                 device: torch.device | None = None) -> None:  # fmt: skip
        check_reversible(model.config)
        self._device, self._copies = device, dict[int, Tensor]()
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name, self.folder, self.revision = name, folder, revision
        self.config = model.config.get_text_config(decoder=True)
        check_rows(tokenizer, self.head_weight.shape[0])
        self.tokenizer_size = tokenizer_size(tokenizer)
        cache_argument(model.base_model)
        self._masks = Masks(self.config)
        self._taps: tuple[int, ...] = ()
        self._identity: TargetIdentity | None = None
        self._streams: dict[int, Tensor] = {}
        self._hooks: list[Any] = []
        check_attention(self.model, self.config)
        self._check_head()

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        """Rows of the head, padding included."""
        return int(self.head_weight.shape[0])

    @property
    def device(self) -> torch.device:
        return self._device or self.head_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head_weight.dtype

    @property
    def head_weight(self) -> Tensor:
        return self._here(self.model.get_output_embeddings().weight)

    @property
    def head(self) -> OutputHead:
        head, cap = self.model.get_output_embeddings(), getattr(self.config, "final_logit_softcapping", None)
        bias = getattr(head, "bias", None)
        return OutputHead(
            self.head_weight.detach(), None if bias is None else self._here(bias), cap, self.tokenizer_size
        )

    @property
    def embedding_weight(self) -> Tensor:
        return self._here(self.model.get_input_embeddings().weight)

    def _here(self, weight: Tensor) -> Tensor:
        """A frozen weight on ``device``, copied once where it lies elsewhere."""
        if self._device is None or weight.device == self._device:
            return weight
        if id(weight) not in self._copies:
            self._copies[id(weight)] = weight.detach().to(self._device)
        return self._copies[id(weight)]

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every id that ends an answer, from the generation config and the tokenizer."""
        declared = getattr(self.model.generation_config, "eos_token_id", None)
        listed = declared if isinstance(declared, (list, tuple)) else [declared]
        return tuple(sorted({int(i) for i in (*listed, self.tokenizer.eos_token_id) if i is not None}))

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, in order: the one module list as long as the config says."""
        found = [
            m for m in self.model.base_model.modules() if isinstance(m, nn.ModuleList) and len(m) == self.num_layers
        ]
        if not found:
            raise SpectrainError(
                f"no list of {self.num_layers} decoder layers in a {type(self.model).__name__}; taps need one"
            )
        return found[0]

    def identity(self) -> TargetIdentity:
        """Architecture, config and weights of this target; reads the stored weights once."""
        if self.folder is None:
            raise SpectrainError(
                f"target {self.name!r} was not loaded from a folder, so its weights have no stored identity"
            )
        if self._identity is None:
            self._identity = target_identity(self.folder, name=self.name, revision=self.revision)
        return self._identity

    def tap(self, taps: Sequence[int]) -> None:
        """From now on ``forward`` also returns the streams entering these layers, concatenated in ascending order."""
        wanted = check_taps(taps, self.num_layers) if taps else ()
        if wanted == self._taps:
            return
        self._taps = wanted
        for hook in self._hooks:
            hook.remove()
        self._hooks = [self._watch(index, self.layers[index]) for index in self._taps]

    def _watch(self, index: int, layer: nn.Module) -> Any:
        def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._streams[index] = args[0] if args else kwargs["hidden_states"]

        return layer.register_forward_pre_hook(keep, with_kwargs=True)

    def new_cache(self, batch: int = 1) -> KeyValueCache:
        return KeyValueCache(batch)

    @torch.inference_mode()
    def forward(self, ids_BT: Tensor, *, cache: KeyValueCache | None = None, layout: Layout | None = None) -> Features:
        """Run the layers over ``ids_BT``, after what ``cache`` holds. The head is not applied: see ``logits``.

        ``layout`` says where tokens behind a cache stand: one after another (the default) or in a tree. Rows of unlike
        lengths are right-padded.
        """
        if cache is None:
            hidden = self.model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
        else:
            hidden = cached_forward(self.model.base_model, self._masks, ids_BT, cache, layout)
        hidden = hidden.to(self.device)
        streams = [self._streams.pop(index).to(self.device) for index in self._taps]
        return Features(hidden, torch.cat(streams, dim=-1) if streams else hidden[..., :0])

    @torch.inference_mode()
    def logits(self, hidden_XH: Tensor) -> Tensor:
        """[..., H] after the final norm -> [..., V] next-token logits; padded vocabulary rows are -inf."""
        return self.head.logits(hidden_XH)

    def compile(self) -> None:
        """Let torch compile the layers' norms and MLPs on first use (it needs a C++ compiler; half a minute)."""
        for part in (part for layer in self.layers for part in layer.children()):
            if not hasattr(part, "layer_idx"):  # attention's index would be compiled in, anew for every layer
                part.compile(dynamic=True)

    def _check_head(self) -> None:
        """The head must be a plain function of the last hidden state; some architectures scale in between."""
        ids = torch.arange(4, device=self.device).remainder(self.tokenizer_size)[None]
        with torch.inference_mode():
            want = self.model(input_ids=ids, use_cache=False).logits[..., : self.tokenizer_size]
        got = self.logits(self.forward(ids).hidden_BTH)[..., : self.tokenizer_size]
        # Beside the size of the logits: a scale of 1/16 must show even where they are all small.
        if not float((got - want).abs().max()) <= 1e-2 * float(want.abs().max()):
            raise SpectrainError(
                f"the logits of a {type(self.model).__name__} are not its output embedding applied to its last hidden "
                "state (scaled or biased logits?); this architecture is not supported as a target"
            )


def _device(name: str | None) -> torch.device:
    if name is None:
        return (torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None) or torch.device(
            "cpu"
        )
    try:
        return torch.empty(0, device=name).device
    except Exception as error:  # each backend has its own way to say that it is not there
        raise SpectrainError(f"device {name!r} cannot be used here: {error}; use cpu, or leave it out") from error


def load_target(name: str, *, revision: str | None = None, dtype: str = "float32", device: str | None = None,
                attention: str | None = None, device_map: str | None = None) -> Target:  # fmt: skip
    """Load a causal language model and its tokenizer from a folder or the Hub; no remote code is ever run.

    ``dtype`` is a floating torch dtype by name; ``device`` defaults to the first accelerator, or the CPU; ``attention``
    to SDPA, or to eager attention where the scores have a soft cap, which SDPA would drop. ``device_map`` ("auto")
    spreads the layers over the accelerators that there are; what the target says comes back on ``device``.
    """
    folder, commit = resolve_model(name, revision)
    if not (folder / "config.json").is_file():
        raise SpectrainError(f"target folder {str(folder)!r} has no config.json; expected a transformers model folder")
    place, kind = _device(device), floating_dtype(dtype)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config(decoder=True)
        capped = getattr(config, "attn_logit_softcapping", None)
        model: Any
        loaded: dict[str, Any]
        with loading(stored_bytes(folder)):
            model, loaded = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]
                folder,
                dtype=kind,
                attn_implementation=attention or ("eager" if capped else None),
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                device_map=device_map,
            )
    except Exception as error:  # each library that reads a part of the folder raises its own kinds
        raise SpectrainError(f"target {name!r} does not load: {type(error).__name__}: {error}") from error
    for fault in ("missing_keys", "mismatched_keys"):
        if loaded[fault]:  # transformers would go on with random values in their place
            first = sorted(map(str, loaded[fault]))[0]
            raise SpectrainError(f"target {name!r}: weight {first} is {fault.split('_')[0]}; fetch the model again")
    if not tokenizer.get_vocab():
        raise SpectrainError(
            f"target {name!r} has no tokenizer files; put tokenizer.json and its config beside the model"
        )
    if device_map is None:
        return Target(model.to(place), tokenizer, name=name, folder=folder, revision=commit)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise SpectrainError(f"target {name!r} does not fit the accelerators here; use bfloat16, or more of them")
    return Target(model, tokenizer, name=name, folder=folder, revision=commit, device=place)
