"""Train the drafter of a recipe: accelerate launch scripts/train.py RECIPE key=value."""

from spectrain.cli import script, train

if __name__ == "__main__":
    script(train, "scripts/train.py")
