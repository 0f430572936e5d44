"""Compare variants of a recipe over several seeds: python eval/benchmarks/ablation.py RECIPE --variant 'NAME: ...'."""

from spectrain.ablation import ablation
from spectrain.cli import script

if __name__ == "__main__":
    script(ablation, "eval/benchmarks/ablation.py")
