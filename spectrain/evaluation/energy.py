"""Energy of an answer, where the device counts it: NVIDIA's own total (NVML), or the packages of a CPU (RAPL).

Counters are those of the whole device: what else runs on it is in them, and what runs beside it is not. NVML's goes on
some ten to fifty times a second, so the energy of a short answer is coarse, though right on average.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

POWERCAP = Path("/sys/class/powercap")

Counter = Callable[[], float]
"""Joules since some moment; OSError where they cannot be read."""


class Meter:
    """Joules between ``start`` and ``stop``, without what was used inside ``left_out``; None where nothing counts."""

    def __init__(self, counter: Counter | None) -> None:
        self._counter = counter
        self._before: float | None = None
        self._outside = 0.0

    def start(self) -> None:
        self._before, self._outside = self._now(), 0.0

    def stop(self) -> float | None:
        before, now = self._before, self._now()
        self._before = None
        return None if before is None or now is None else max(0.0, now - before - self._outside)

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """What is done in here is not the answer's."""
        before = self._now()
        yield
        now = self._now()
        if before is None or now is None:
            self._before = None
        else:
            self._outside += now - before

    def _now(self) -> float | None:
        try:
            return self._counter() if self._counter else None
        except OSError:
            return None


@cache
def energy_counter(device: torch.device) -> Counter | None:
    """The counter of this device, or None where it has none that can be read (RAPL's are often root's alone)."""
    counter = _nvml(device) if device.type == "cuda" else _packages(POWERCAP) if device.type == "cpu" else None
    try:
        return counter if counter is not None and counter() >= 0 else None
    except OSError:
        return None


def _nvml(device: torch.device) -> Counter | None:
    """What an NVIDIA device has used since its driver was loaded; needs nvidia-ml-py (the extra ``energy``)."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        # By its own id: which number a device has differs between NVML and a process that sees some of them only.
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except pynvml.NVMLError:
        return None

    def joules() -> float:
        try:
            return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
        except pynvml.NVMLError as error:
            raise OSError(f"NVML reads no energy: {error}") from error

    return joules


class Packages:
    """The counters of all CPU packages as one that never falls: each starts again from 0 at its own range.

    They have to be read more often than they start again, which takes a busy server some minutes.
    """

    def __init__(self, zones: list[Path]) -> None:
        self._zones, self._joules = zones, 0.0
        self._ranges = [_microjoules(zone / "max_energy_range_uj") for zone in zones]
        self._last = [_microjoules(zone / "energy_uj") for zone in zones]

    def __call__(self) -> float:
        now = [_microjoules(zone / "energy_uj") for zone in self._zones]
        for before, after, most in zip(self._last, now, self._ranges, strict=True):
            self._joules += (after - before if after >= before else after - before + most) / 1e6
        self._last = now
        return self._joules


def _packages(powercap: Path) -> Counter | None:
    # Each package is there once more behind another interface (intel-rapl-mmio), and "psys" holds them all again.
    zones = [zone for zone in sorted(powercap.glob("intel-rapl:*")) if re.fullmatch(r"intel-rapl:\d+", zone.name)]
    try:
        packages = [zone for zone in zones if (zone / "name").read_text(encoding="ascii").startswith("package")]
        return Packages(packages) if packages else None
    except OSError:
        return None


def _microjoules(file: Path) -> int:
    try:
        return int(file.read_text(encoding="ascii"))
    except ValueError as error:
        raise OSError(f"{file} is no number") from error
