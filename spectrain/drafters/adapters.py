"""Low-rank adapters on a draft model (LoRA, 2106.09685), through peft: a small part trains, the rest stays as it was.

A layer W x becomes W x + (alpha / rank) B A x, with B zero at the start, so that nothing changes at first. There is no
dropout: a drafter is trained as it decodes, or it would learn a law that it never draws from.

The model that trains is never merged. Adding B A to W and taking it away again leaves rounding errors behind, and a run
that goes on from a checkpoint would no longer be the unbroken one. What is saved is merged in a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, LoraModel, get_peft_model_state_dict
from pydantic import BaseModel, ConfigDict, Field
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from spectrain.errors import SpectrainError

NAME = "default"


class LoraSettings(BaseModel):
    """Adapters in all linear layers but the head. They alone train, in float32."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    rank: int = Field(16, ge=1, description="inner size of the adapter of each linear layer")
    alpha: float = Field(32.0, gt=0, description="an adapter's output is scaled by alpha / rank")
    keep_adapter: bool = Field(
        False, description="also write adapter/ into the bundle, in peft's layout, to be put over the start again"
    )


def check_rank(key: str, rank: int, layers: Iterable[tuple[str, nn.Module]]) -> None:
    """SpectrainError, naming the first linear layer whose smaller side is below ``rank``: an adapter of that rank would
    hold more than the layer itself. ``key`` is the rank's key in a recipe."""
    for name, layer in layers:
        if isinstance(layer, nn.Linear | Conv1D) and rank > min(layer.weight.shape):
            sides = " x ".join(map(str, layer.weight.shape))
            raise SpectrainError(
                f"{key}: found {rank}, but layer {name} is {sides}; give at most {min(layer.weight.shape)}"
            )


class Adapter:
    """Adapters inside ``model``, which keeps its class; its own weights are frozen."""

    def __init__(self, model: PreTrainedModel, settings: LoraSettings) -> None:
        head = model.get_output_embeddings()
        check_rank("drafter.lora.rank", settings.rank, ((n, m) for n, m in model.named_modules() if m is not head))
        config = LoraConfig(
            r=settings.rank,
            lora_alpha=cast(int, settings.alpha),  # peft divides it by the rank, whatever kind of number it is
            lora_dropout=0.0,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        )
        try:
            self._tuner = LoraModel(model, config, NAME)
        except ValueError as error:
            raise SpectrainError(
                f"no adapter fits a {type(model).__name__}: {error}; leave drafter.lora out to train the whole model"
            ) from error
        model.eval()

    def merged(self) -> PreTrainedModel:
        """A plain model that says the same, and shares nothing with the one that trains."""
        with torch.no_grad():
            plain: PreTrainedModel = cast(Any, copy.deepcopy(self._tuner)).merge_and_unload()
        return plain.eval()

    def removed(self) -> PreTrainedModel:
        """The model as it was before the adapters, without them."""
        plain: PreTrainedModel = cast(Any, self._tuner).unload()
        return plain

    def save(self, folder: Path, base: str | None, revision: str | None) -> None:
        """Adapter weights and settings as ``peft.PeftModel.from_pretrained`` reads them. ``base`` names the model they
        belong to, if it is stored anywhere."""
        # Looking for trained embeddings, of which there are none, would ask the Hub about the base model.
        tensors = get_peft_model_state_dict(self._tuner, adapter_name=NAME, save_embedding_layers=False)
        config = cast(LoraConfig, copy.copy(self._tuner.peft_config[NAME]))
        config.base_model_name_or_path, config.revision, config.inference_mode = base, revision, True
        config.target_modules = sorted(config.target_modules or ())  # a set: its order would change the file every time
        folder.mkdir(parents=True, exist_ok=True)
        named = {f"base_model.{name}": tensor.cpu().contiguous() for name, tensor in tensors.items()}
        save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(str(folder))
