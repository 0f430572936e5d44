"""Exact decoding: plain and speculative."""

from spectrain.decoding.autoregressive import generate_plain
from spectrain.decoding.decoder import generate
from spectrain.decoding.trace import Generation, Round

__all__ = ["Generation", "Round", "generate", "generate_plain"]
