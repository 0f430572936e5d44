"""Joules from counters that are none of ours: fakes in their place."""

import sys
from types import SimpleNamespace

import pytest
import torch

from spectrain.evaluation import energy
from spectrain.evaluation.energy import Meter, energy_counter

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _afresh():
    energy_counter.cache_clear()
    yield
    energy_counter.cache_clear()


def zone(folder, name, kind="package-0", microjoules=0, most=1000_000_000):
    path = folder / name
    path.mkdir(parents=True)
    (path / "name").write_text(f"{kind}\n")
    (path / "max_energy_range_uj").write_text(f"{most}\n")
    (path / "energy_uj").write_text(f"{microjoules}\n")
    return path / "energy_uj"


@pytest.fixture
def powercap(tmp_path, monkeypatch):
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    return tmp_path


def test_all_packages_are_counted_once(powercap):
    first = zone(powercap, "intel-rapl:0", microjoules=5_000_000)
    second = zone(powercap, "intel-rapl:1", "package-1")
    others = [zone(powercap, "intel-rapl:0:0", "core"), zone(powercap, "intel-rapl-mmio:0"),
              zone(powercap, "intel-rapl:2", "psys")]  # fmt: skip
    counter = energy_counter(CPU)
    start = counter()
    first.write_text("7500000")
    second.write_text("1000000")
    for other in others:
        other.write_text("900000000")
    assert counter() - start == pytest.approx(3.5)


def test_a_counter_that_starts_again_goes_on(powercap):
    """At its own range, as often as it likes."""
    file = zone(powercap, "intel-rapl:0", microjoules=990_000_000)
    meter = Meter(energy_counter(CPU))
    meter.start()
    file.write_text("10000000")
    assert meter.stop() == pytest.approx(20.0)
    meter.start()
    for microjoules in (500_000_000, 100_000_000, 50_000_000):
        file.write_text(str(microjoules))
        with meter.left_out():
            pass
    assert meter.stop() == pytest.approx(490 + 600 + 950)


@pytest.mark.parametrize("fault", ["none", "unreadable", "no number"])
def test_a_cpu_without_counters_has_no_energy(powercap, fault):
    if fault != "none":
        file = zone(powercap, "intel-rapl:0")
        file.write_text("") if fault == "no number" else file.unlink()
    assert energy_counter(CPU) is None
    meter = Meter(energy_counter(CPU))
    meter.start()
    with meter.left_out():
        pass
    assert meter.stop() is None


def test_a_counter_that_fails_on_the_way_leaves_the_answer_without(powercap):
    file = zone(powercap, "intel-rapl:0")
    meter = Meter(energy_counter(CPU))
    meter.start()
    kept = file.read_text()
    file.unlink()
    with meter.left_out():
        pass
    file.write_text(kept)
    assert meter.stop() is None
    meter.start()
    assert meter.stop() == 0.0  # the next answer has its own


def test_what_is_left_out_is_in_no_answer():
    reads = iter([10.0, 12.0, 15.0, 21.0])
    meter = Meter(lambda: next(reads))
    meter.start()
    with meter.left_out():
        pass
    assert meter.stop() == 21.0 - 10.0 - (15.0 - 12.0)


class FakeError(Exception): ...


def fake_nvml(**changes):
    """As nvidia-ml-py has it: millijoules since the driver was loaded."""
    known = {
        "NVMLError": FakeError,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: {"GPU-aa-bb": "handle"}[uuid],
        "nvmlDeviceGetTotalEnergyConsumption": lambda handle: {"handle": 123_456}[handle],
    }
    return SimpleNamespace(**{**known, **changes})


def fails(*_):
    raise FakeError("Not Supported")


@pytest.fixture
def properties(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="aa-bb"))


def test_an_nvidia_device_counts_for_itself(monkeypatch, properties):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    assert energy_counter(GPU)() == pytest.approx(123.456)


@pytest.mark.parametrize("name", ["nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetTotalEnergyConsumption"])
def test_an_nvidia_device_that_does_not_report_has_no_energy(monkeypatch, properties, name):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(**{name: fails}))
    assert energy_counter(GPU) is None


def test_without_the_extra_or_on_other_devices_there_is_no_energy(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert energy_counter(GPU) is None
    assert energy_counter(torch.device("meta")) is None
