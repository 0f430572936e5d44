"""Where speculation stops paying as batches grow: python eval/benchmarks/batching.py TARGET --bundle DIR."""

from spectrain.benchmarks import batching
from spectrain.cli import script

if __name__ == "__main__":
    script(batching, "eval/benchmarks/batching.py")
