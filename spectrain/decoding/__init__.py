"""Exact decoding: plain and speculative, one request or many, chains and trees."""

from spectrain.decoding.autoregressive import generate_plain
from spectrain.decoding.decoder import Decoding, Emitted, generate, generate_batch
from spectrain.decoding.trace import Generation, Judged, Observer, Round

__all__ = [
    "Decoding",
    "Emitted",
    "Generation",
    "Judged",
    "Observer",
    "Round",
    "generate",
    "generate_batch",
    "generate_plain",
]
