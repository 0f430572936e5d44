"""Speed and memory of training steps beside plain ones: python eval/benchmarks/training.py RECIPE --variant '...'."""

from spectrain.benchmarks import training
from spectrain.cli import script

if __name__ == "__main__":
    script(training, "eval/benchmarks/training.py")
