"""A target that is trained together with its drafter: low-rank adapters in its layers, and the model they make of it.

The target that everything else holds stays as it was: the adapters count only while ``states`` runs, and the model
with them merged is built anew when it is saved. LoRA is 2106.09685; training it jointly with heads is Medusa-2
(2401.10774).

Shapes: B batch, T positions, H hidden.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, LoraModel
from peft.tuners.lora.layer import LoraLayer
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from spectrain.drafters.adapters import check_rank
from spectrain.errors import SpectrainError
from spectrain.target import Target

ADAPTER = "default"


class JointConfig(BaseModel):
    """How the target is trained with its drafter. It becomes another model: what it says is no longer what the
    original said, by as much as the report's drift tells."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    rank: int = Field(32, ge=1, description="of the adapter of each linear layer")
    alpha: float = Field(16.0, gt=0, description="the adapter's output is scaled by alpha / rank")
    anchor: float = Field(
        5.0,
        ge=0,
        description="weight of KL(original || moved target) beside the drafter's loss (paper: 1 to 0.2)",
    )
    warmup: float = Field(0.5, ge=0, lt=1, description="share of all steps that train the drafter alone")
    lr_scale: float = Field(0.25, gt=0, description="learning rate of the adapters, in that of the drafter")

    def check(self, target: Target) -> None:
        """SpectrainError where the layers of ``target`` cannot carry these adapters."""
        wanted = set(_linear_layers(target))
        found = (pair for pair in target.model.named_modules() if pair[0] in wanted)
        check_rank("drafter.joint.rank", self.rank, found)


class MovingTarget:
    """Adapters in the linear layers of a target. Its own parameters stay frozen and as they were."""

    def __init__(self, target: Target, config: JointConfig) -> None:
        if any(isinstance(module, LoraLayer) for module in target.model.modules()):
            raise SpectrainError(f"target {target.name!r} already carries adapters; load it anew")
        config.check(target)
        names = _linear_layers(target)
        lora = LoraConfig(r=config.rank, lora_alpha=config.alpha, lora_dropout=0.0, target_modules=names)  # type: ignore[arg-type]
        self.target = target
        self._tuner = LoraModel(target.model, lora, ADAPTER)
        modules = target.model.named_modules()
        self._layers: dict[str, Any] = {name: module for name, module in modules if isinstance(module, LoraLayer)}
        target.model.eval()
        for parameter in self.parameters().values():
            parameter.data = parameter.data.float()  # small steps are lost in half precision
        self._count(False)

    def parameters(self) -> dict[str, nn.Parameter]:
        """The adapters' weights by name. Names are free of dots, as a dictionary of parameters wants them."""
        named = self.target.model.named_parameters()
        return {name.replace(".", "-"): parameter for name, parameter in named if "lora_" in name}

    def states(self, ids_BT: Tensor) -> Tensor:
        """The moved target's last hidden states [B, T, H] after the final norm, with gradient to the adapters."""
        self._count(True)
        try:
            hidden_BTH: Tensor = self.target.model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
            return hidden_BTH
        finally:
            self._count(False)

    def _count(self, yes: bool) -> None:
        # Disabling adapters would also take their gradients away before the backward pass.
        for layer in self._layers.values():
            layer.set_scale(ADAPTER, float(yes))

    def save(self, folder: Path) -> None:
        """The moved target as a plain model folder, its tokenizer beside it."""
        model, source = self._merged(), self.target
        model.save_pretrained(folder)
        if source.model.generation_config is not None:
            source.model.generation_config.save_pretrained(folder)
        source.tokenizer.save_pretrained(folder)

    @torch.no_grad()
    def _merged(self) -> Any:
        """A model of the target's class and dtype on the CPU. One tensor at a time is added to in float32."""
        merged: dict[str, Tensor] = {}
        self._count(True)  # an adapter that does not count has no weight to add
        try:
            for name, tensor in self.target.model.state_dict().items():
                layer = self._layers.get(name.removesuffix(".base_layer.weight"))
                if layer is not None:
                    tensor = (tensor.float() + layer.get_delta_weight(ADAPTER).float()).to(tensor.dtype)
                if "lora_" not in name:
                    merged[name.replace(".base_layer.", ".")] = tensor.cpu()
        finally:
            self._count(False)
        with torch.device("meta"):
            model = type(self.target.model)(self.target.model.config)
        model.load_state_dict(merged, strict=True, assign=True)
        model.tie_weights()
        return model


def _linear_layers(target: Target) -> list[str]:
    """Every linear layer of the decoder layers, by its name in the model."""
    prefix = next(name for name, module in target.model.named_modules() if module is target.layers)
    found = [name for name, m in target.layers.named_modules() if isinstance(m, nn.Linear | Conv1D)]
    if not found:
        raise SpectrainError(
            f"the layers of a {type(target.model).__name__} hold no linear layers that adapters could be put into; "
            "train the drafter on the frozen target"
        )
    return [f"{prefix}.{name}" for name in found]
