"""Print how vLLM, SGLang and transformers serve a bundle: python scripts/serve_command.py BUNDLE."""

from spectrain.checkpoint_commands import serve_command
from spectrain.cli import script

if __name__ == "__main__":
    script(serve_command, "scripts/serve_command.py")
