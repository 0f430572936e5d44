"""Whether what was written is what was trained: a fresh process reads it back and has to draft the same.

What could go wrong unseen: a weight left out that loading fills in, a name that two tensors share, a setting that only
the running process knows. Both processes answer the same few positions, on the same borrowed parts of the target; the
laws of their draft tokens have to be equal bit by bit, and so do the tokens.

Shapes: B = 1 request, T positions, H hidden, F tapped features, K draft length.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spectrain.bundle import read_bundle, unbound_drafter
from spectrain.drafters.base import Committed, TrainableDrafter
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler
from spectrain.interop.layouts import TargetParts, drafter_of, read_layout
from spectrain.manifest import MANIFEST_FILE
from spectrain.shapes import Chain
from spectrain.target import Features, Target

POSITIONS, DRAFTED = 6, 3
_PARTS, _ANSWERS = "parts.safetensors", "answers.safetensors"
_SHOWN = 800  # characters of a failed process's last words


def check_reload(folder: Path, drafter: TrainableDrafter, target: Target, *, name: Path | None = None) -> None:
    """SpectrainError unless a fresh process makes the same drafter of a bundle, or of a checkpoint in a known layout.

    ``drafter`` lies on the target's device and is bound to it, before and after. ``name`` is what messages call a
    folder that is not in its place yet.
    """
    name = name or folder
    device = str(target.device)
    saved, training = drafter.as_saved(), drafter.training
    with tempfile.TemporaryDirectory(prefix="spectrain-") as work:
        TargetParts.of(target).save(Path(work) / _PARTS)
        process = _start(folder, Path(work), device)
        try:
            expected = answers(saved.eval(), TargetParts.load(Path(work) / _PARTS, device))
        finally:
            drafter.bind(target)
            drafter.train(training)
            _, said = process.communicate()
        if process.returncode != 0:
            raise SpectrainError(
                f"{name} does not load in a fresh process, so it is not kept: {said.strip()[-_SHOWN:]}"
            )
        found = load_file(Path(work) / _ANSWERS)
    _compare(name, expected, found)


def answers(drafter: TrainableDrafter, parts: TargetParts) -> dict[str, Tensor]:
    """What a drafter that borrows ``parts`` drafts after a few made-up positions: tokens and their laws."""
    drafter.bind(cast(Target, parts))
    device, generator = parts.device, torch.Generator().manual_seed(0)
    tokens = torch.randint(parts.tokenizer_size, (1, POSITIONS + 1), generator=generator)
    kind, width = parts.head_weight.dtype, parts.hidden_size

    def states(size: int) -> Tensor:
        return torch.randn(1, POSITIONS, size, generator=generator).to(device, kind)

    features = Features(states(width), states(width * len(drafter.tap_layers)))
    depth = min(DRAFTED, drafter.deepest or DRAFTED)
    uniforms_BK = torch.rand(1, depth, generator=generator, dtype=torch.float64).to(device)
    found: dict[str, Tensor] = {}
    for name, sampler in {"greedy": Sampler(), "sampled": Sampler(1.0)}.items():
        state = drafter.start([int(tokens[0, 0])])
        drafter.observe(state, Committed([tokens[0, 1:].tolist()], tokens[:, 1:].to(device), features))
        proposal = drafter.propose(state, sampler, Chain(depth), [depth], uniforms_BK)
        found[f"{name} tokens"] = proposal.tokens_BN.cpu()
        if proposal.q is not None:
            found[f"{name} laws"] = proposal.q.cpu()
    return {name: tensor.contiguous().clone() for name, tensor in found.items()}


def _compare(where: Path, expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    for name in sorted({*expected, *found}, reverse=True):  # tokens before the laws that explain them
        ours, theirs = expected.get(name), found.get(name)
        if ours is None or theirs is None or ours.shape != theirs.shape:
            shapes = [None if side is None else list(side.shape) for side in (ours, theirs)]
            told = f"are {shapes[1]}, expected {shapes[0]}"
        elif not torch.equal(ours, theirs):
            told = f"differ by up to {float((ours.double() - theirs.double()).abs().max()):.3g}"
        else:
            continue
        raise SpectrainError(
            f"{where}, read back in a fresh process, is not the drafter that was written, so it is not kept: the "
            f"{name} of made-up positions {told}. Try again; if it stays so, this is a fault of spectrain"
        )


def _start(folder: Path, work: Path, device: str) -> subprocess.Popen[str]:
    """The fresh process, which works while this one does; with as many threads, on which rounding may depend."""
    settings = {"device": device, "threads": torch.get_num_threads(), "precision": torch.get_float32_matmul_precision()}
    # -P: not another spectrain that happens to lie in the working folder, but the one that is running here.
    command = [sys.executable, "-P", "-m", "spectrain.reload", str(folder.resolve()), str(work), json.dumps(settings)]
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)


def _read(folder: Path, parts: TargetParts) -> TrainableDrafter:
    if (folder / MANIFEST_FILE).is_file():
        return unbound_drafter(read_bundle(folder))
    return drafter_of(*read_layout(folder, parts), str(folder))


def main(arguments: Sequence[str]) -> None:
    """``python -m spectrain.reload FOLDER WORK SETTINGS``: the fresh process's part."""
    folder, work, settings = Path(arguments[0]), Path(arguments[1]), cast(dict[str, Any], json.loads(arguments[2]))
    torch.set_num_threads(settings["threads"])
    torch.set_float32_matmul_precision(settings["precision"])
    try:
        parts = TargetParts.load(work / _PARTS, settings["device"])
        drafter = _read(folder, parts).to(settings["device"]).eval()
        save_file(answers(drafter, parts), work / _ANSWERS)
    except SpectrainError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
