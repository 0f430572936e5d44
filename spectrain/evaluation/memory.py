"""Peak memory of a long generation, plain and with drafters, each in a process of its own.

A process's peak does not go down again, and what one run leaves in the allocator hides what the next one takes: so
every variant starts afresh. On an accelerator the allocator's own count is read, on a CPU the resident set's.
"""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from spectrain.bundle import load_drafter
from spectrain.data.conversations import load_conversations
from spectrain.decoding import Decoding
from spectrain.drafters.base import Committed, Drafter, Proposal
from spectrain.drafters.ngram import NgramConfig, NgramDrafter
from spectrain.evaluation.speed import GREEDY, small_draft
from spectrain.evaluation.wording import DASH, number
from spectrain.evaluation.workbench import machine, prompts_of, table
from spectrain.exact.sampler import Sampler
from spectrain.shapes import Chain, Shape
from spectrain.target import Target, load_target

MEBIBYTE = 1 << 20
PLAIN, NGRAM, DRAFT, BUNDLE = "plain", "ngram", "small draft", "bundle"


@dataclass(frozen=True)
class Job:
    """One generation of ``tokens`` tokens. ``variant`` is one of plain, ngram, small draft, bundle."""

    variant: str
    target: str
    bundle: str | None
    traffic: tuple[str, ...]
    k: int
    tokens: int
    dtype: str
    seed: int


class Gauge:
    """Memory in use and its peak, in bytes, of the device that the target is on."""

    def __init__(self, device: torch.device) -> None:
        self._allocator: Any = None if device.type == "cpu" else torch.get_device_module(device)

    def now(self) -> int:
        gc.collect()
        return int(self._allocator.memory_allocated()) if self._allocator else _resident("VmRSS")

    def reset(self) -> bool:
        """Count the peak from here on; False where the system cannot, so that it counts from the process's start."""
        if self._allocator:
            self._allocator.reset_peak_memory_stats()
            return True
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            return False
        return True

    def peak(self) -> int:
        return int(self._allocator.max_memory_allocated()) if self._allocator else _resident("VmHWM")


_STATUS = Path("/proc/self/status")


def _resident(field: str) -> int:
    """The resident set of this process, now (VmRSS) or at its peak (VmHWM)."""
    if _STATUS.exists():
        line = next(line for line in _STATUS.read_text(encoding="utf-8").splitlines() if line.startswith(field))
        return int(line.split()[1]) * 1024
    # Elsewhere only the peak is told, in bytes on macOS. A parent's peak may count as its child's: keep parents small.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Watched(Drafter):
    """A drafter, and the most that its state ever held."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter, self.most = drafter, 0
        self.config, self.tap_layers, self.trees = drafter.config, drafter.tap_layers, drafter.trees
        self.deepest, self.columns = drafter.deepest, drafter.columns

    def start(self, first: Sequence[int]) -> Any:
        return self._drafter.start(first)

    def observe(self, state: Any, committed: Committed) -> None:
        self._drafter.observe(state, committed)

    def propose(self, state: Any, sampler: Sampler, shape: Shape, limits: Sequence[int],
                uniforms_BN: torch.Tensor) -> Proposal:  # fmt: skip
        proposal = self._drafter.propose(state, sampler, shape, limits, uniforms_BN)
        self.most = max(self.most, self._drafter.memory(state))
        return proposal

    def select(self, state: Any, rows: Sequence[int]) -> None:
        self._drafter.select(state, rows)


def peak(job: Job) -> dict[str, Any]:
    """Peak bytes of one generation in this process. EOS never ends it."""
    target = load_target(job.target, dtype=job.dtype)
    (prompt,) = prompts_of(target, load_conversations(job.traffic), 1, job.tokens, job.seed)
    gauge = Gauge(target.device)
    loaded = gauge.now()
    drafter = _drafter(job, target)
    watched = Watched(drafter) if drafter else None
    with_drafter = gauge.now()
    since = "loaded" if gauge.reset() else "start"
    decoding = Decoding(target, watched, [prompt.ids], seeds=[0], sampler=GREEDY, max_new_tokens=job.tokens,
                        shape=Chain(job.k) if watched else None, eos_ids=(), timed=False)  # fmt: skip
    for _ in decoding:
        pass
    return {
        "variant": job.variant,
        "tokens": len(decoding.results[0].tokens),
        "rounds": len(decoding.results[0].rounds),
        "target_bytes": weight_bytes(target.model),
        "drafter_bytes": weight_bytes(drafter),
        "drafter_cache_bytes": watched.most if watched else 0,
        "loaded_bytes": loaded,
        "loaded_with_drafter_bytes": with_drafter,
        "peak_bytes": gauge.peak(),
        "peak_since": since,
        "machine": machine(target.device, target.dtype),
    }


def _drafter(job: Job, target: Target) -> Drafter | None:
    if job.variant == DRAFT:
        return small_draft(target)
    if job.variant == BUNDLE:
        assert job.bundle is not None
        return load_drafter(job.bundle, target)[0]
    return NgramDrafter(NgramConfig()) if job.variant == NGRAM else None


def weight_bytes(module: nn.Module | Drafter | None) -> int:
    """Bytes of parameters and buffers, shared ones once; none where there are no weights."""
    if not isinstance(module, nn.Module):
        return 0
    tensors = {t.data_ptr(): t for t in (*module.parameters(), *module.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def measure(job: Job, *, progress: bool = True) -> dict[str, Any]:
    """Every variant of ``job``, plain first, each in a fresh process; their peaks beside what they have to hold."""
    variants = [PLAIN, NGRAM, DRAFT, *([BUNDLE] if job.bundle else [])]
    rows = []
    for variant in tqdm(variants, desc="memory", unit="run", disable=not progress):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            rows.append(process.submit(peak, Job(**{**asdict(job), "variant": variant})).result())
    return {"benchmark": "memory", "settings": asdict(job), "machine": rows[0].pop("machine"), "rows": compared(rows)}


def compared(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row with ``growth_bytes`` over the loaded target, and its ``ratio`` to the plain peak plus what the drafter
    itself holds: weights and cache."""
    plain = rows[0]["peak_bytes"]
    return [
        {
            **{name: value for name, value in row.items() if name != "machine"},
            "growth_bytes": row["peak_bytes"] - row["loaded_bytes"],
            "ratio": row["peak_bytes"] / (plain + row["drafter_bytes"] + row["drafter_cache_bytes"]),
        }
        for row in rows
    ]


def render(document: dict[str, Any]) -> str:
    """The document as a Markdown table."""
    heads = ("decoder", "peak MiB", "over the loaded target", "drafter weights", "drafter cache", "÷ plain + drafter")
    columns = ("peak_bytes", "growth_bytes", "drafter_bytes", "drafter_cache_bytes")
    return table(heads, [[
        row["variant"], *(number(row[name] / MEBIBYTE, 1) if row[name] else DASH for name in columns),
        number(row["ratio"], 3),
    ] for row in document["rows"]])  # fmt: skip
