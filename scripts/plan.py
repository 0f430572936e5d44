"""Whether speculation would pay, from a few numbers: python scripts/plan.py --alpha .7 --c .1 --v 1.2."""

from spectrain.cli import script
from spectrain.plan import plan

if __name__ == "__main__":
    script(plan, "scripts/plan.py")
