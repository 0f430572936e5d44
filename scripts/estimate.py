"""What a recipe takes in memory, disk and time, before anything starts: python scripts/estimate.py RECIPE key=value."""

from spectrain.cli import estimate, script

if __name__ == "__main__":
    script(estimate, "scripts/estimate.py")
