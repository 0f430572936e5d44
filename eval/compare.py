"""Rank bundles of one target on held-out chats: python eval/compare.py BUNDLE BUNDLE --traffic FILE --output DIR."""

from spectrain.cli import compare, script

if __name__ == "__main__":
    script(compare, "eval/compare.py")
