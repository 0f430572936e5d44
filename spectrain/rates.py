"""How fast a device is: operations and bytes a second, as given or measured here."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from spectrain.errors import SpectrainError

PROBE_SECONDS = 0.5
LIMIT_SECONDS = 10  # of each probe, on a machine that others keep busy; a call that has begun is waited for


@dataclass(frozen=True)
class Rates:
    """Operations a second that matrix products reach, bytes a second that a matrix is read at, of one device; and the
    share of the operations that a training step reaches."""

    flops: float
    bandwidth: float
    utilisation: float
    source: str

    @property
    def effective(self) -> float:
        return self.flops * self.utilisation


def check_positive(given: Mapping[str, float | None]) -> None:
    """SpectrainError for a flag whose value is no finite number above 0."""
    for flag, value in given.items():
        if value is not None and not 0 < value < math.inf:
            raise SpectrainError(f"{flag} {value}: expected a finite number above 0")


def rates(dtype: torch.dtype, *, tflops: float | None, bandwidth: float | None, utilisation: float) -> Rates:
    """As given (TFLOP/s, GB/s); what is not given is measured on the device at hand, in about a second."""
    check_positive({"--tflops": tflops, "--bandwidth": bandwidth})
    if not 0 < utilisation <= 1:
        raise SpectrainError(f"--utilisation {utilisation}: expected a share above 0 up to 1")
    device = (torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None) or "cpu"
    place = torch.device(device)
    measured = [name for name, value in (("operations", tflops), ("bandwidth", bandwidth)) if value is None]
    flops = tflops * 1e12 if tflops is not None else measure_flops(dtype, place)
    read = bandwidth * 1e9 if bandwidth is not None else measure_bandwidth(dtype, place)
    where = f"{place.type}, {torch.get_num_threads()} threads" if place.type == "cpu" else str(place)
    source = f"{' and '.join(measured)} measured here ({where}), others as given" if measured else "as given"
    return Rates(flops, read, utilisation, source)


def measure_flops(dtype: torch.dtype, device: torch.device) -> float:
    """Operations a second of square matrix products."""
    size = 1024 if device.type == "cpu" else 8192
    a, b = (torch.rand(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 * _per_second(lambda: a @ b, device)


def measure_bandwidth(dtype: torch.dtype, device: torch.device) -> float:
    """Bytes a second at which a matrix too large for any cache is read by a product with one row."""
    rows = 16384 if device.type == "cpu" else 131072
    matrix, row = torch.rand(rows, 4096, device=device).to(dtype), torch.rand(4096, device=device).to(dtype)
    return matrix.nbytes * _per_second(lambda: matrix @ row, device)


def _per_second(work: Any, device: torch.device) -> float:
    def wait() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize()

    begun = time.perf_counter()
    work()
    wait()
    started, times = time.perf_counter(), 0
    if started - begun > LIMIT_SECONDS:  # the first call pays for more than its work, but it is what there is
        return 1 / (started - begun)
    while times < 2 or time.perf_counter() - started < PROBE_SECONDS:
        work()
        wait()
        times += 1
        if time.perf_counter() - begun > LIMIT_SECONDS:
            break
    return times / (time.perf_counter() - started)
