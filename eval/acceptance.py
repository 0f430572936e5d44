"""Measure a bundle on held-out chats: python eval/acceptance.py BUNDLE --traffic FILE --output DIR."""

from spectrain.cli import evaluate, script

if __name__ == "__main__":
    script(evaluate, "eval/acceptance.py")
