"""Variants of a recipe over several seeds: python eval/ablation.py RECIPE --variant "a: key=value" --output DIR."""

from spectrain.cli import ablation, script

if __name__ == "__main__":
    script(ablation, "eval/ablation.py")
