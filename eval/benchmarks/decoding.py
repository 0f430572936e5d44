"""Decoding speed and memory beside transformers': python eval/benchmarks/decoding.py TARGET --bundle DIR."""

from spectrain.benchmarks import decoding
from spectrain.cli import script

if __name__ == "__main__":
    script(decoding, "eval/benchmarks/decoding.py")
