"""spectrain: train a speculator for your language model, prove it exact, and measure whether it pays."""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spectrain.exact.penalties import Penalties
    from spectrain.shapes import Chain, DynamicTree, StaticTree
    from spectrain.speculator import Answer, Piece, Speculator, generate, load_bundle, stream

_HOMES = {
    "spectrain.speculator": ("Answer", "Piece", "Speculator", "generate", "load_bundle", "stream"),
    "spectrain.shapes": ("Chain", "DynamicTree", "StaticTree"),
    "spectrain.exact.penalties": ("Penalties",),
}
__version__ = metadata.version("spectrain")
__all__ = ["Answer", "Chain", "DynamicTree", "Penalties", "Piece", "Speculator", "StaticTree", "generate",
           "load_bundle", "stream"]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Found when asked for, so that ``import spectrain`` and ``--help`` do not wait for torch."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'spectrain' has no attribute {name!r}")
