"""What of a machine stands in the way, and what mends it. Every check takes facts and returns findings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.specifiers import SpecifierSet

from spectrain.estimate_table import GIB, size
from spectrain.machine import Device, Machine

SMALL_DISK, SMALL_SHARED_MEMORY = GIB, GIB
Level = Literal["ok", "change", "fault"]


@dataclass(frozen=True)
class Finding:
    """``change``: it works, and would work better otherwise. ``fault``: it does not work. ``mend`` is what to do."""

    level: Level
    about: str
    found: str
    mend: str = ""


@dataclass(frozen=True)
class Subject:
    """A recipe or a bundle, as far as a machine has to hold it. Bytes; None where nothing is known of them.

    ``place`` is where the target's files are; ``trouble`` says what of them cannot be read. ``memory`` is the largest
    stage's, of a process; ``disk`` what a run writes, of which ``held`` is there already; ``target_bytes`` its weights.
    ``chats``: what of them cannot be used, and what to do.
    """

    name: str
    target: str
    place: Literal["folder", "Hub cache", "Hub"]
    trouble: str = ""
    dtype: str = "float32"
    precision: str = "no"
    output: Path | None = None
    memory: int | None = None
    disk: int | None = None
    held: int = 0
    target_bytes: int = 0
    unknown: str = ""
    chats: tuple[str, str] = ("", "")


def examine(machine: Machine, subject: Subject | None = None) -> list[Finding]:
    """Every finding about a machine, and about what is to run on it."""
    checks = [versions, torch_build, devices, threads, memory, shared_memory, disks, launcher, hub]
    found = [finding for check in checks for finding in check(machine)]
    return found + list(fit(machine, subject) if subject is not None else ())


def usable(findings: Sequence[Finding]) -> bool:
    return all(finding.level != "fault" for finding in findings)


# --- the machine --------------------------------------------------------------------------------------------------


def versions(machine: Machine) -> Iterator[Finding]:
    for package in machine.packages:
        mend = f"pip install '{package.name}{package.wanted}'"
        if package.name == "python":
            mend = f"python{package.wanted.removeprefix('>=')} -m venv .venv, and install spectrain there"
        if package.found is None:
            yield Finding("fault", package.name, f"not installed; {package.wanted} is needed", mend)
        elif not SpecifierSet(package.wanted).contains(package.found, prereleases=True):
            yield Finding("fault", package.name, f"{package.found}; {package.wanted} is supported", mend)
        else:
            yield Finding("ok", package.name, f"{package.found} ({package.wanted})")


def torch_build(machine: Machine) -> Iterator[Finding]:
    """Whether torch loads, and whether its build and NVIDIA's driver belong together."""
    index = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/"
    driver = machine.driver
    if machine.torch_fault:
        yield Finding("fault", "torch", f"does not load: {machine.torch_fault}", "pip install --force-reinstall torch")
    elif driver is not None and driver.fault:
        level: Level = "ok" if machine.devices else "change"
        yield Finding(level, "driver", f"nvidia-smi fails: {driver.fault}", "" if machine.devices else "nvidia-smi")
    elif driver is not None and machine.torch_cuda is None and not machine.devices:
        newest = f"cuXYZ (your driver runs CUDA up to {driver.cuda})"
        yield Finding("change", "driver", f"NVIDIA's driver {driver.version} is here, but torch is a build for CPUs",
                      index + newest)  # fmt: skip
    elif driver is not None and machine.torch_cuda is not None and not machine.devices:
        found = f"torch is built for CUDA {machine.torch_cuda}, the driver {driver.version} runs up to {driver.cuda}"
        if _number(machine.torch_cuda) > _number(driver.cuda):
            yield Finding("change", "driver", found, f"{index}cuXYZ of a CUDA up to {driver.cuda}, or a newer driver")
        else:
            yield Finding("change", "driver", f"{found}, yet no device shows", "unset CUDA_VISIBLE_DEVICES")
    elif driver is not None:
        yield Finding("ok", "driver", f"{driver.version}, CUDA up to {driver.cuda}; torch's CUDA {machine.torch_cuda}")


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def devices(machine: Machine) -> Iterator[Finding]:
    for index, device in enumerate(machine.devices):
        yield Finding("ok", f"device {index}", _described(device))
    if not machine.devices and not machine.torch_fault:
        bf16 = {True: ", bfloat16 by its own instructions", False: ", bfloat16 only emulated", None: ""}
        yield Finding("ok", "device", f"CPU{bf16[machine.cpu_bf16]}; no accelerator")


def _described(device: Device) -> str:
    room = [] if device.memory is None else [f"{size(device.memory)} of memory"]
    room += [] if device.free is None else [f"{size(device.free)} free"]
    return ", ".join([device.name, *room, "bfloat16" if device.bf16 else "no bfloat16"])


def threads(machine: Machine) -> Iterator[Finding]:
    """Threads beyond the cores of a container fight for them, which is slower than too few."""
    cores = max(1, math.floor(machine.cores))
    may = f"{machine.cores:g} of {machine.processors} cores may be used"
    said = "OMP_NUM_THREADS is not set" if machine.omp_threads is None else f"OMP_NUM_THREADS={machine.omp_threads}"
    found, mend = f"torch uses {machine.threads} ({said}); {may}", f"export OMP_NUM_THREADS={cores}"
    idle = not machine.devices and machine.threads < cores
    better = machine.threads > cores or idle
    yield Finding("change" if better else "ok", "threads", found, mend if better else "")


def memory(machine: Machine) -> Iterator[Finding]:
    yield Finding("ok", "memory", f"{size(machine.memory)}, {size(machine.memory_free)} free")


def shared_memory(machine: Machine) -> Iterator[Finding]:
    """What processes of one machine exchange goes through it; containers begin with 64 MiB."""
    if machine.shared_memory is None:
        return
    small = machine.shared_memory < SMALL_SHARED_MEMORY and len(machine.devices) > 1
    yield Finding("change" if small else "ok", "/dev/shm", size(machine.shared_memory),
                  "docker run --shm-size=8g, or --ipc=host" if small else "")  # fmt: skip


def disks(machine: Machine) -> Iterator[Finding]:
    variables = {"Hub cache": "export HF_HOME=DIR", "temporary files": "export TMPDIR=DIR"}
    for disk in machine.disks:
        where = f"{disk.path}: {size(disk.free)} free"
        other = variables.get(disk.what, "output=DIR, on another disk")
        if not disk.writable:
            yield Finding("fault", disk.what, f"{disk.path} cannot be written to", other)
        elif disk.free < SMALL_DISK:
            yield Finding("change", disk.what, where, f"free some, or {other}")
        else:
            yield Finding("ok", disk.what, where)


def launcher(machine: Machine) -> Iterator[Finding]:
    """What ``accelerate launch`` does without options of its own; spectrain alone does not read it."""
    settings, path = machine.launcher, machine.launcher_file
    if settings is None:
        yield Finding("ok", "launcher", "accelerate launch has no settings file and chooses by itself")
        return
    if isinstance(settings, str):
        yield Finding("change", "launcher", f"{path} cannot be read: {settings}", "accelerate config")
        return
    here, processes = len(machine.devices), settings.get("num_processes") or 1
    kind, on_cpu = str(settings.get("distributed_type", "NO")).upper(), bool(settings.get("use_cpu"))
    alone = (settings.get("num_machines") or 1) == 1
    wrong = ""
    if on_cpu and here:
        wrong = f"use_cpu leaves {here} device(s) idle"
    elif not on_cpu and not here and (kind in ("MULTI_GPU", "FSDP", "DEEPSPEED", "MEGATRON_LM")):
        wrong = f"distributed_type {kind} asks for devices, and there are none"
    elif alone and not on_cpu and here and processes > here:
        wrong = f"num_processes {processes}, and {here} device(s) are here"
    elif alone and on_cpu and processes > machine.cores:
        wrong = f"num_processes {processes} on {machine.cores:g} cores"
    elif settings.get("mixed_precision") == "bf16" and here and not all(d.bf16 for d in machine.devices):
        wrong = "mixed_precision bf16, which a device here does not have"
    if wrong:
        yield Finding("change", "launcher", f"{path}: {wrong}", "accelerate config")
    else:
        yield Finding("ok", "launcher", f"{path}: {processes} process(es), {kind}")


def hub(machine: Machine) -> Iterator[Finding]:
    """A token is only said to be there or not."""
    token = "a token is here" if machine.token else "no token: publishing and gated models need one (hf auth login)"
    if machine.offline:
        yield Finding("ok", "Hub", f"{' and '.join(machine.offline)} set: nothing is fetched; {token}")
    elif machine.hub_fault:
        mend = "export HF_ENDPOINT or HTTPS_PROXY, or HF_HUB_OFFLINE=1 to do without"
        yield Finding("change", "Hub", f"does not answer: {machine.hub_fault}; {token}", mend)
    else:
        asked = "not asked (--online asks)" if machine.hub_fault is None else "answers"
        yield Finding("ok", "Hub", f"{asked}; {token}")


# --- what is to run on it -----------------------------------------------------------------------------------------


def fit(machine: Machine, subject: Subject) -> Iterator[Finding]:
    """Whether the target can be had and what is to be made has room."""
    yield from _target(machine, subject)
    found, mend = subject.chats
    if found:
        yield Finding("fault", "chats", found, mend)
    if subject.unknown:
        yield Finding("change", "estimate", subject.unknown, f"spectrain estimate {subject.name} --tokens N ...")
    if subject.memory is not None:
        yield _memory(machine, subject.memory)
    if subject.disk is not None:
        yield _disk(machine, subject)
    half = [subject.dtype] * ("bfloat16" in subject.dtype) + ["training.precision=bf16"] * (subject.precision == "bf16")
    slow = not all(device.bf16 for device in machine.devices) if machine.devices else machine.cpu_bf16 is False
    if half and slow:
        yield Finding("change", "precision", f"{' and '.join(half)}, which a device here only emulates",
                      "target.dtype=float32 training.precision=no")  # fmt: skip


def _target(machine: Machine, subject: Subject) -> Iterator[Finding]:
    if subject.trouble:
        yield Finding("fault", "target", f"{subject.target}: {subject.trouble}", "target.name=FOLDER or a Hub id")
        return
    if subject.place != "Hub":
        where = "a folder here" if subject.place == "folder" else f"in the {subject.place}"
        yield Finding("ok", "target", f"{subject.target} is {where}")
        return
    cache = next((disk for disk in machine.disks if disk.what == "Hub cache"), None)
    if machine.offline:
        yield Finding("fault", "target", f"{subject.target} is not in the Hub cache, and {machine.offline[0]} is set",
                      f"env -u {' -u '.join(machine.offline)} hf download {subject.target}")  # fmt: skip
    elif cache is not None and cache.free < subject.target_bytes:
        yield Finding("fault", "target", f"{subject.target} takes {size(subject.target_bytes)}, its cache has "
                      f"{size(cache.free)}", "export HF_HOME=DIR")  # fmt: skip
    else:
        yield Finding("ok", "target", f"{subject.target} will be fetched from the Hub")


def _memory(machine: Machine, needed: int) -> Finding:
    rooms = [(d.memory, d.free or d.memory) for d in machine.devices if d.memory is not None]
    total, free = min(rooms) if rooms else (machine.memory, machine.memory_free)
    found = f"its largest stage takes {size(needed)}; {size(free)} of {size(total)} are free"
    mend = "spectrain estimate says what to lower"
    level: Level = "fault" if needed > total else "change" if needed > free else "ok"
    return Finding(level, "memory of the run", found, mend if needed > free else "")


def _disk(machine: Machine, subject: Subject) -> Finding:
    disk = next(disk for disk in machine.disks if disk.path == subject.output)
    needed = max(0, (subject.disk or 0) - subject.held)
    found = f"it writes {size(needed)}; {disk.path} has {size(disk.free)}"
    lacks = needed > disk.free
    return Finding("fault" if lacks else "ok", "disk of the run", found, "output=DIR, on a larger disk" * lacks)


# --- told ---------------------------------------------------------------------------------------------------------


def render(findings: Sequence[Finding]) -> str:
    width = max(len(finding.about) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<6}  {finding.about:<{width}}  {finding.found}")
        lines += [f"{'':<6}  {'':<{width}}  -> {finding.mend}"] if finding.mend else []
    count = {level: sum(finding.level == level for finding in findings) for level in ("change", "fault")}
    verdict = f"not usable: {count['fault']} thing(s) must change" if count["fault"] else "usable"
    better = f"; {count['change']} would better be changed" if count["change"] else ""
    return "\n".join([*lines, "", verdict + better])
