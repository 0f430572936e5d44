"""Split chats, let the target answer them, store its features: python scripts/prepare.py RECIPE key=value."""

from spectrain.cli import prepare, script

if __name__ == "__main__":
    script(prepare, "scripts/prepare.py")
