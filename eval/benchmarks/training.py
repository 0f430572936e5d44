"""Speed and memory of training steps beside plain ones: python eval/benchmarks/training.py RECIPE --variant '...'."""

from spectrain.cli import script
from spectrain.training_benchmark import training

if __name__ == "__main__":
    script(training, "eval/benchmarks/training.py")
