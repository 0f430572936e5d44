"""The server's own environment: a folder with the packages that constraints-serving.txt pins, made once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from spectrain.errors import SpectrainError
from spectrain.files import file_digest

MARK = ".installed"
# What pip says when the fault lies with what it asks, not with this machine.
_REFUSED = re.compile(
    r"No matching distribution found for (?P<package>\S+)|Could not find a version|HTTP error|HTTPError|Max retries"
    r"|NewConnectionError|ConnectionError|ReadTimeout|ConnectTimeout|SSLError"
)


class UnavailableError(Exception):
    """The registry does not provide a package; the message names it and ends in pip's own words."""


def serving_python(folder: Path, pins: Path) -> Path:
    """The interpreter of the environment in ``folder``, made first where it is not there or has other pins.

    Raises UnavailableError where the registry cannot provide it, SpectrainError where pip fails otherwise.
    """
    python, mark, digest = (folder / "bin" / "python").absolute(), folder / MARK, file_digest(pins)
    if mark.is_file() and mark.read_text(encoding="utf-8") == digest:
        return python
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    mark.unlink(missing_ok=True)
    for arguments in install_steps(pins):
        print(f"{folder}: pip install {' '.join(arguments)}", flush=True)
        install(python, arguments)
    mark.write_text(digest, encoding="utf-8")
    return python


def install_steps(pins: Path) -> list[list[str]]:
    """What pip installs, in order: torch first, with what it needs; then the whole list as it stands.

    The list leaves out torchvision, torchaudio and torchcodec, which the server requires and text does not need.
    """
    torch = next((line for line in pins.read_text(encoding="utf-8").splitlines() if line.startswith("torch==")), None)
    if torch is None:
        raise SpectrainError(f"{pins} pins no torch; expected a line torch==VERSION")
    return [["pip>=25"], ["-c", str(pins), torch], ["--no-deps", "-r", str(pins)]]


def install(python: Path, arguments: list[str]) -> None:
    """Run pip; see ``serving_python`` for the errors."""
    run = subprocess.run(
        [str(python), "-m", "pip", "install", "--quiet", *arguments],
        stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if run.returncode == 0:
        return
    errors = [line for line in run.stderr.splitlines() if not line.startswith("WARNING")]
    said, refused = "\n".join(errors[-5:]), list(_REFUSED.finditer(run.stderr))
    named = [match["package"] for match in refused if match["package"]]
    if refused:
        raise UnavailableError(f"{named[-1] if named else arguments[-1]} cannot be had here; pip says:\n{said}")
    raise SpectrainError(f"pip install {' '.join(arguments)} failed: {said}")
