"""What a machine has, as plain facts: packages, devices, cores, memory, disks, the launcher and the Hub.

Whatever is broken here is a fact, too: nothing of this raises because of it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

UNLIMITED = 1 << 60  # what version 1 of cgroups calls no limit is a number near 2^63
SWITCHES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")


@dataclass(frozen=True)
class Package:
    """A dependency: the version that is here (None: none) and those that are supported, as pip writes them."""

    name: str
    found: str | None
    wanted: str


@dataclass(frozen=True)
class Device:
    """An accelerator; memory in bytes, None where it does not say."""

    name: str
    bf16: bool
    memory: int | None = None
    free: int | None = None


@dataclass(frozen=True)
class Driver:
    """NVIDIA's: the newest CUDA that it runs, and why it cannot be asked, if it cannot."""

    version: str = ""
    cuda: str = ""
    fault: str = ""


@dataclass(frozen=True)
class Disk:
    """A place that is written to; ``free`` in bytes."""

    what: str
    path: Path
    free: int
    writable: bool


@dataclass(frozen=True)
class Machine:
    """``cores`` are those that this process may use, ``threads`` those that torch starts. Memory is in bytes, of the
    machine or of the cgroup, whichever is less. ``launcher``: what Accelerate's file says, or why it cannot be read."""

    packages: tuple[Package, ...] = ()
    torch_fault: str = ""
    torch_cuda: str | None = None
    driver: Driver | None = None
    devices: tuple[Device, ...] = ()
    cpu_bf16: bool | None = None
    processors: int = 1
    cores: float = 1
    threads: int = 1
    omp_threads: str | None = None
    memory: int = 0
    memory_free: int = 0
    shared_memory: int | None = None
    disks: tuple[Disk, ...] = ()
    launcher_file: Path = Path("default_config.yaml")
    launcher: Mapping[str, Any] | str | None = None
    offline: tuple[str, ...] = ()
    token: bool = False
    hub_fault: str | None = None  # None: not asked; empty: it answers


def observe(places: Mapping[str, Path], *, online: bool = False) -> Machine:
    """The machine at hand. ``places`` are what is written to besides the Hub's cache and temporary files."""
    token = Path(os.environ.get("HF_TOKEN_PATH", _home() / "token")).expanduser()
    cores, memory, free = limits()
    launcher = _home() / "accelerate" / "default_config.yaml"
    return Machine(
        packages=packages(),
        driver=_driver(),
        cpu_bf16=_cpu_bf16(),
        processors=os.cpu_count() or 1,
        cores=cores,
        omp_threads=os.environ.get("OMP_NUM_THREADS"),
        memory=memory,
        memory_free=free,
        shared_memory=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
        disks=disks(places),
        launcher_file=launcher,
        launcher=_settings(launcher),
        offline=tuple(name for name in SWITCHES if os.environ.get(name, "0").lower() not in ("", "0", "false", "no")),
        token=bool(os.environ.get("HF_TOKEN")) or token.is_file(),
        hub_fault=_ask_hub() if online else None,
        **_torch(),
    )


def packages() -> tuple[Package, ...]:
    """Python and everything that spectrain's own metadata asks for, beyond its extras."""
    from packaging.requirements import Requirement

    wanted = [Requirement(line) for line in metadata.requires("spectrain") or ()]
    here = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    python = Package("python", here, metadata.metadata("spectrain")["Requires-Python"])
    needed = (w for w in wanted if w.marker is None or w.marker.evaluate({"extra": ""}))
    return (python, *(Package(w.name, _version(w.name), str(w.specifier)) for w in needed))


def disks(places: Mapping[str, Path]) -> tuple[Disk, ...]:
    cache = Path(os.environ.get("HF_HUB_CACHE", _home() / "hub")).expanduser()
    written = {**places, "Hub cache": cache, "temporary files": Path(tempfile.gettempdir())}
    return tuple(_disk(what, path) for what, path in written.items())


def _home() -> Path:
    """Where Hugging Face's libraries keep what is theirs; they need not be installed to say so."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    return Path(home).expanduser()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _torch() -> dict[str, Any]:
    try:
        import torch

        found: list[Device] = []
        if torch.cuda.is_available():
            for index in range(torch.cuda.device_count()):
                free, total = torch.cuda.mem_get_info(index)
                bf16 = torch.cuda.get_device_capability(index) >= (8, 0) or torch.version.hip is not None
                found.append(Device(torch.cuda.get_device_name(index), bf16, total, free))
        elif torch.backends.mps.is_available():
            found.append(Device("Apple GPU (mps)", True, torch.mps.recommended_max_memory()))
        elif torch.accelerator.is_available():
            kind = torch.accelerator.current_accelerator()
            found += [Device(f"{kind} {index}", True) for index in range(torch.accelerator.device_count())]
        return {"devices": tuple(found), "threads": torch.get_num_threads(), "torch_cuda": torch.version.cuda}
    except Exception as error:  # a broken installation fails in many ways, and which one is what is asked here
        return {"torch_fault": f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"}


def _driver() -> Driver | None:
    """None where there is no tool of NVIDIA's."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        done = subprocess.run([tool], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Driver(fault=str(error))
    if done.returncode:
        return Driver(fault=(done.stdout + done.stderr).strip().splitlines()[0])
    version = re.search(r"Driver Version:\s*([\d.]+)", done.stdout)
    cuda = re.search(r"CUDA(?: \w+)? Version:\s*([\d.]+)", done.stdout)
    return Driver(version[1] if version else "", cuda[1] if cuda else "")


def _cpu_bf16() -> bool | None:
    """Whether matrix products in bfloat16 are the CPU's own; None where it does not say."""
    text = _text(Path("/proc/cpuinfo"))
    return None if text is None else any(flag in text for flag in ("avx512_bf16", "amx_bf16", " bf16"))


def _disk(what: str, path: Path) -> Disk:
    """Of a folder that is not there yet, the nearest one that is."""
    there = path.absolute()
    while not there.exists():
        there = there.parent
    return Disk(what, path, shutil.disk_usage(there).free, os.access(there, os.W_OK | os.X_OK) and there.is_dir())


def _settings(path: Path) -> Mapping[str, Any] | str | None:
    if not path.is_file():
        return None
    try:
        import yaml

        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except Exception as error:  # yaml may be missing, the file unreadable, no text or no YAML
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    return found if isinstance(found, dict) else f"it holds {type(found).__name__}, not keys"


def _ask_hub() -> str:
    try:
        import httpx

        address = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        httpx.head(address, timeout=10, follow_redirects=True).raise_for_status()
    except Exception as error:  # proxies, certificates, names, refusals: each has its own kind
        return f"{type(error).__name__}: {error}"
    return ""


# --- what a container leaves --------------------------------------------------------------------------------------


def limits(root: Path = Path("/")) -> tuple[float, int, int]:
    """Cores that may be used, bytes of memory and free ones: the machine's, or the least that a cgroup leaves."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    memory, free = _memory(root)
    for group in _groups(root):
        quota = (_text(group / "cpu.max") or "max").split()
        quota = (
            quota if len(quota) == 2 else [_text(group / f"cpu.cfs_{name}_us") or "-1" for name in ("quota", "period")]
        )
        if quota[0].strip().isdigit():
            cores = min(cores, int(quota[0]) / int(quota[1]))
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            most = (_text(group / limit) or "").strip()
            if most.isdigit() and int(most) < UNLIMITED:
                memory = min(memory, int(most))
                free = min(free, int(most) - int(_text(group / used) or 0) + _reclaimable(group))
    return cores, memory, free


def _groups(root: Path) -> Iterator[Path]:
    """Every cgroup that this process is in, with its ancestors; in a container the paths are the outside's."""
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        top = root / "sys/fs/cgroup" / controllers
        place = top / path.strip("/")
        yield from (folder for folder in (place, *place.parents) if folder.is_relative_to(top))


def _memory(root: Path) -> tuple[int, int]:
    rows = (line.split() for line in (_text(root / "proc/meminfo") or "").splitlines())
    sizes = {row[0].rstrip(":"): int(row[1]) << 10 for row in rows if len(row) > 1}
    if "MemTotal" in sizes:
        return sizes["MemTotal"], sizes.get("MemAvailable", sizes["MemTotal"])
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total, total


def _reclaimable(group: Path) -> int:
    """Files that are only cached count as used, and are given up when memory is asked for."""
    rows = dict(line.split() for line in (_text(group / "memory.stat") or "").splitlines())
    return int(rows.get("total_inactive_file", rows.get("inactive_file", 0)))


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None
