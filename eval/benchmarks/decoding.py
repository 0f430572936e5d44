"""Decoding speed and memory beside transformers': python eval/benchmarks/decoding.py TARGET --bundle DIR."""

from spectrain.cli import script
from spectrain.evaluation.benchmarks import decoding

if __name__ == "__main__":
    script(decoding, "eval/benchmarks/decoding.py")
