"""An estimate as text, and what to lower where it does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GIB = 1 << 30
# What makes a part of a stage smaller, best first; parts that no setting changes have none.
REMEDIES = {
    "cache": "regenerate.batch_size",
    "prompts": "regenerate.batch_size",
    "laws": "regenerate.batch_size",
    "forward": "data.max_length",
    "activations": "training.micro_batch_tokens",
    "live_features": "training.micro_batch_tokens",
    "head_chunk": "drafter.draft_vocab_size, where the drafter has one",
    "gradients": "the drafter's own size",
    "moments": "the drafter's own size",
    "drafter": "the drafter's own size",
}


def shortage(document: Mapping[str, Any], device_bytes: float) -> str | None:
    """Which stage does not fit the device, and what to lower first; None where all fit."""
    for stage, parts in document["memory"].items():
        if parts["peak"] <= device_bytes:
            continue
        need = f"{stage} needs {size(parts['peak'])} of {size(device_bytes)} a process"
        if parts["target"] >= device_bytes:
            alone = f"the target's weights alone take {size(parts['target'])}"
            return f"{need}: {alone}; use target.dtype=bfloat16, or a larger device"
        largest = max((name for name in parts if name in REMEDIES), key=parts.__getitem__)
        return f"{need}; lower {REMEDIES[largest]} first ({largest.replace('_', ' ')}: {size(parts[largest])})"
    return None


def table(document: Mapping[str, Any], device_bytes: float | None = None) -> str:
    """The estimate, for a person."""
    lines = [f"{document['drafter']} for {document['target']}, {document['processes']} process(es)", ""]
    lines += _section("parameters", {k: f"{v:,}" for k, v in document["parameters"].items()})
    for stage, parts in document["memory"].items():
        shown = {name.replace("_", " "): size(value) for name, value in parts.items() if value}
        lines += _section(f"memory of a process: {stage}", shown)
    disk = {name.replace("_", " "): size(value) for name, value in document["disk"].items()}
    lines += _section("disk", {**disk, "feature bytes per token": f"{document['disk']['feature_bytes_per_token']:,} B"})
    lines += _section("time", _times(document["time"]))
    rates, traffic = document["rates"], document["traffic"]
    counts = (f"{name}: {traffic[name]['rows']:,} rows, {traffic[name]['tokens']:,} tokens, "
              f"{traffic[name]['answer']:,} of answers" for name in ("train", "heldout"))  # fmt: skip
    lines += [
        "assumed:",
        f"  tokens {traffic['source']}",
        *(f"  {line}" for line in counts),
        f"  {rates['flops'] / 1e12:.4g} TFLOP/s at a utilisation of {rates['utilisation']:.0%}, "
        f"{rates['bandwidth'] / 1e9:.4g} GB/s ({rates['source']})",
        *(f"  {line}" for line in document["assumptions"]),
    ]
    if device_bytes is not None:
        lack = shortage(document, device_bytes)
        lines += ["", f"does not fit: {lack}" if lack else f"fits {size(device_bytes)}"]
    return "\n".join(lines)


def _section(title: str, values: Mapping[str, str]) -> list[str]:
    width = max(map(len, values.values()))
    return [f"{title}:", *(f"  {value:>{width}}  {name}" for name, value in values.items()), ""]


def _times(times: Mapping[str, float]) -> dict[str, str]:
    stages = {name: duration(times[name]) for name in ("answers", "features", "training", "validation", "total")}
    return {
        **stages,
        "optimizer steps": f"{times['steps']:,}",
        "operations a token in training": f"{times['training_flops_per_token']:.3g}",
        "tokens a second in training": f"{times['training_tokens_per_second']:,.0f}",
    }


def size(value: float) -> str:
    """Bytes in GiB; small ones in MiB."""
    return f"{value / GIB:.2f} GiB" if value >= GIB / 10 else f"{value / (1 << 20):.1f} MiB"


def duration(seconds: float) -> str:
    """Seconds in the unit that reads best."""
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"
