"""Compare greedy output with plain decoding: python eval/exactness.py --target NAME --traffic FILE --bundle DIR."""

from spectrain.cli import script
from spectrain.measuring_commands import exactness

if __name__ == "__main__":
    script(exactness, "eval/exactness.py")
