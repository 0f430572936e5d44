"""Scripts run by several processes, as torchrun starts them on CPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def run_script(script: str, folder: Path, arguments: list[str], processes: int = 1, **variables: str) -> str:
    """Run ``script`` with the tests' folder as its first argument, and check that it succeeds; what it printed.

    Torch has one thread in each. ``variables`` are more of the environment.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "script.py"
    file.write_text(script, encoding="utf-8")
    others = {name: value for name, value in os.environ.items() if name not in {"WORLD_SIZE", "RANK", "LOCAL_RANK"}}
    ours = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS.parent)}
    environment = {**others, **ours, **variables}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(launcher if processes > 1 else []), str(file), str(TESTS), *arguments]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr[-5000:]
    return run.stdout
