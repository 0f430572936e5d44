"""What is started in the server's environment: a program, a job, a result, a log."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spectrain.files import write_json


@dataclass(frozen=True)
class Server:
    """The environment's interpreter, and where jobs, results and logs go."""

    python: Path
    output: Path
    timeout: float

    def run(self, name: str, job: dict[str, Any], program: str = "engine.py") -> dict[str, Any] | str:
        """The result of ``program``, which lies beside this file, or the end of the log where it failed."""
        folder = self.output / name
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "job.json", job)
        command = [str(self.python), "-P", str(Path(__file__).with_name(program)),
                   str(folder / "job.json"), str(folder / "served.json")]  # fmt: skip
        own = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1",
               "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # fmt: skip
        inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        (folder / "served.json").unlink(missing_ok=True)
        with (folder / "log.txt").open("w", encoding="utf-8") as log:
            try:
                code = subprocess.run(command, env={**inherited, **own}, stdout=log, stderr=subprocess.STDOUT,
                                      timeout=self.timeout, check=False).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                return f"no result within {self.timeout:g} s; its log is {folder / 'log.txt'}"
        if code:
            lines = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
            return "\n".join([f"exit status {code}; the end of {folder / 'log.txt'}:", *lines[-5:]])
        return json.loads((folder / "served.json").read_text(encoding="utf-8"))
