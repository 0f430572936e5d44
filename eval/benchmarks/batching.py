"""Where speculation stops paying as batches grow: python eval/benchmarks/batching.py TARGET --bundle DIR."""

from spectrain.cli import script
from spectrain.evaluation.benchmarks import batching

if __name__ == "__main__":
    script(batching, "eval/benchmarks/batching.py")
