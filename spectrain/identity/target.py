"""A target's identity: what it computes, not where it was found."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from spectrain.errors import SpectrainError
from spectrain.files import json_digest
from spectrain.identity.comparison import Comparison
from spectrain.weights import weights_digest

# Keys of config.json that say where a model came from or how it is run, not which function it is.
_INFORMATIONAL = {"transformers_version", "dtype", "torch_dtype", "use_cache", "return_dict"}


@dataclass(frozen=True)
class TargetIdentity:
    """Architecture, configuration and weights; name and revision only say where they were found."""

    architecture: str
    config_digest: str
    weights_digest: str
    name: str | None = None
    revision: str | None = None

    @property
    def digest(self) -> str:
        """One digest of what the model computes: architecture, configuration, weights."""
        return json_digest([self.architecture, self.config_digest, self.weights_digest])


def target_identity(folder: Path, name: str | None = None, revision: str | None = None) -> TargetIdentity:
    """Take the identity of a plain transformers folder (a Hub snapshot or a local one)."""
    path = folder / "config.json"
    if not path.is_file():
        raise SpectrainError(f"{path} is missing: a target is a folder with config.json and safetensors")
    config = json.loads(path.read_text(encoding="utf-8"))
    function = {key: value for key, value in config.items() if key not in _INFORMATIONAL and key[0] != "_"}
    architecture = (config.get("architectures") or [config.get("model_type", "unknown")])[0]
    return TargetIdentity(architecture, json_digest(function), weights_digest(folder), name, revision)


def compare_targets(a: TargetIdentity, b: TargetIdentity) -> Comparison:
    """Different when architecture, weights or configuration differ; another revision is only noted."""
    shown = {
        field: f"target {field}: {getattr(a, field)} against {getattr(b, field)}"
        for field in ("architecture", "weights_digest", "config_digest", "revision")
        if getattr(a, field) != getattr(b, field)
    }
    revision = shown.pop("revision", "")
    noted = a.revision and b.revision and revision and not shown
    return Comparison(
        tuple(shown.values()), (f"{revision} (harmless: same weights and configuration)",) if noted else ()
    )
