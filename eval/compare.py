"""Rank bundles on held-out chats, or set reports side by side.

python eval/compare.py BUNDLE BUNDLE --traffic FILE --output DIR
python eval/compare.py A.json B.json --output DIR
"""

from spectrain.cli import compare, script

if __name__ == "__main__":
    script(compare, "eval/compare.py")
