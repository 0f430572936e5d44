"""Say whether two tokenizers are the same, and where they part: python scripts/check.py A B."""

from spectrain.check import check
from spectrain.cli import script

if __name__ == "__main__":
    script(check, "scripts/check.py")
