"""What a checkpoint or a drafter may need of its target: embedding and head, and how they are called.

Small enough to be handed to another process, where the whole target would be too much.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from spectrain.heads import OutputHead
from spectrain.target import Target

_KEY = "target"


@dataclass(frozen=True)
class TargetParts:
    """Borrowed from a target; the names are those of ``Target``, so that a drafter can be bound to it."""

    name: str
    architecture: str
    num_layers: int
    embedding_weight: Tensor
    head: OutputHead

    @classmethod
    def of(cls, target: Target) -> TargetParts:
        architecture = type(target.model).__name__
        return cls(target.name, architecture, target.num_layers, target.embedding_weight.detach(), target.head)

    @property
    def head_weight(self) -> Tensor:
        return self.head.weight_VH

    @property
    def vocab_size(self) -> int:
        return int(self.head_weight.shape[0])

    @property
    def hidden_size(self) -> int:
        return int(self.head_weight.shape[1])

    @property
    def tokenizer_size(self) -> int:
        return self.head.size

    @property
    def device(self) -> torch.device:
        return self.head_weight.device

    def save(self, path: Path) -> None:
        """Write them as safetensors; a tied head is stored once."""
        tied = self.head_weight.data_ptr() == self.embedding_weight.data_ptr()
        tensors = {"embedding": self.embedding_weight}
        tensors |= {} if tied else {"head": self.head_weight}
        tensors |= {} if self.head.bias_V is None else {"bias": self.head.bias_V}
        facts = {"name": self.name, "architecture": self.architecture, "num_layers": self.num_layers,
                 "cap": self.head.cap, "size": self.head.size}  # fmt: skip
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(plain, path, metadata={_KEY: json.dumps(facts)})

    @classmethod
    def load(cls, path: Path, device: str) -> TargetParts:
        """Read what ``save`` wrote, each tensor into memory of its own: rounding may depend on where it lies."""
        with safe_open(path, "pt") as file:
            facts = json.loads(file.metadata()[_KEY])
            tensors = {name: file.get_tensor(name).clone().to(device) for name in file.keys()}  # noqa: SIM118
        weight_VH = tensors.get("head", tensors["embedding"])
        head = OutputHead(weight_VH, tensors.get("bias"), facts["cap"], facts["size"])
        return cls(facts["name"], facts["architecture"], facts["num_layers"], tensors["embedding"], head)
