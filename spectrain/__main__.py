"""``python -m spectrain`` is ``spectrain``."""

from spectrain.cli import main

main()
