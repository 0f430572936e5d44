"""Prove the verification rules exact, in Fractions: python scripts/prove.py --cases 2000."""

from spectrain.cli import prove, script

if __name__ == "__main__":
    script(prove, "scripts/prove.py")
