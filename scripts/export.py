"""Write a bundle as a checkpoint of another format: python scripts/export.py BUNDLE FORMAT DIR."""

from spectrain.checkpoint_commands import export_bundle
from spectrain.cli import script

if __name__ == "__main__":
    script(export_bundle, "scripts/export.py")
