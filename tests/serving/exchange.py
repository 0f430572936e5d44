"""EAGLE-3 drafters exchanged with the public speculators library: it loads ours, and what it saves loads here.

Both sides read the target for themselves, each by its own conventions, and draft after every position of the same
texts. The logits have to agree, and so do the accepted prefixes.

Shapes: K depths, T positions, N of them inside answers, D draft vocabulary.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from ours import plain
from safetensors.torch import load_file
from server import Server
from torch import Tensor
from verdict import told

from spectrain.bundle import load_drafter
from spectrain.data.conversations import load_conversations
from spectrain.drafters.base import TrainableDrafter
from spectrain.evaluation.verdict import near_tie_gap
from spectrain.evaluation.workbench import prompts_of, table
from spectrain.exchange import export_checkpoint, import_checkpoint
from spectrain.heads import head_product
from spectrain.interop import format_of, speculators_eagle3
from spectrain.manifest import read_manifest
from spectrain.target import FeatureBatch, Target, load_target

LAYOUT = "vllm-eagle3"
ROWS, DEPTHS, STEPS = 4, 3, 40  # steps of the library's own training, so that its drafter accepts something


@dataclass
class Exchange:
    """One drafter on both sides; ``means`` are accepted tokens a position, theirs and ours."""

    name: str
    apart: float = 0.0
    equal: int = 0
    compared: int = 0
    means: tuple[float, float] = (0.0, 0.0)
    faults: list[str] = field(default_factory=list)


@dataclass
class Text:
    """A prompt with its answer, which begins at ``start``."""

    ids: list[int]
    start: int


def exchange(server: Server, bundles: Mapping[str, Path], options: argparse.Namespace) -> list[Exchange]:
    """Both ways with the first bundle in the library's format; none where there is no such bundle."""
    fitting = (path for path in bundles.values() if format_of(path) is speculators_eagle3)
    bundle = next((path for path in fitting if read_manifest(path).derived_from is None), None)
    if bundle is None:
        return []
    print("exchanging with the speculators library", flush=True)
    target = load_target(str(options.target), device="cpu")
    prompts = prompts_of(target, load_conversations(options.traffic), ROWS, options.max_new_tokens, 0)
    answers = plain(target, prompts, options.max_new_tokens)
    texts = [Text([*prompt.ids, *answer], len(prompt.ids)) for prompt, answer in zip(prompts, answers, strict=True)]
    place = server.output / "speculators"
    for made in ("exported", "saved", "imported"):
        shutil.rmtree(place / made, ignore_errors=True)
    export_checkpoint(bundle, LAYOUT, place / "exported", target)
    job = {"target": str(options.target), "folder": str(place / "exported"), "saved": str(place / "saved"),
           "rows": [text.ids for text in texts], "depths": DEPTHS, "steps": STEPS}  # fmt: skip
    result = server.run("speculators", job, "library.py")
    if isinstance(result, str):
        return [Exchange("speculators", faults=[f"speculators: {result}"])]
    import_checkpoint(place / "saved", place / "imported", target)
    library = f"speculators {result['speculators']}"
    return [
        compared(f"ours, loaded by {library}", load_file(place / "loaded.safetensors"), bundle, target, texts),
        compared(f"saved by {library}, imported", load_file(place / "saved.safetensors"), place / "imported", target,
                 texts),
    ]  # fmt: skip


def compared(name: str, theirs: Mapping[str, Tensor], bundle: Path, target: Target,
             texts: Sequence[Text]) -> Exchange:  # fmt: skip
    """What the library drafted beside what the bundle's drafter does here."""
    drafter = cast(TrainableDrafter, load_drafter(bundle, target)[0])
    found, prefixes = Exchange(name), list[Tensor]()
    for row, text in enumerate(texts):
        logits, tokens = drafted(drafter, target, text.ids)
        at = slice(text.start - 1, len(text.ids) - 1 - DEPTHS)  # every depth is about a token of the answer
        apart = (logits - theirs[f"{row} logits"])[:, : at.stop].abs().max()
        found.apart = max(found.apart, float(apart.nan_to_num(torch.inf)))
        both = [accepted(side[:, at], text.ids, at) for side in (theirs[f"{row} tokens"], tokens)]
        prefixes.append(torch.stack(both))
    judge(found, torch.cat(prefixes, dim=1))
    return found


@torch.no_grad()
def drafted(drafter: TrainableDrafter, target: Target, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Logits [K, T - 1, D] and tokens [K, T - 1] of every depth after every position."""
    ids_BT = torch.tensor([ids])
    target.tap(drafter.tap_layers)
    features = target.forward(ids_BT)
    nothing_BT = torch.zeros_like(ids_BT)
    batch = FeatureBatch(ids_BT, torch.ones_like(ids_BT, dtype=torch.bool), features.hidden_BTH, features.taps_BTF,
                         nothing_BT.float(), nothing_BT)  # fmt: skip
    output = drafter(batch, DEPTHS)
    logits = torch.stack([head_product(depth.hidden_BTH[0, :-1], depth.head_DH) for depth in output.depths])
    return logits, output.columns_D[logits.argmax(-1)]


def accepted(tokens_KN: Tensor, ids: list[int], at: slice) -> Tensor:
    """Accepted prefix length [N] of greedy drafts after the positions ``at``: how many are the text's own tokens."""
    text = torch.tensor(ids)
    right_KN = torch.stack([own == text[at.start + 2 + k : at.stop + 2 + k] for k, own in enumerate(tokens_KN)])
    return right_KN.int().cumprod(0).sum(0)


def judge(found: Exchange, prefixes_2N: Tensor) -> None:
    """Numbers of an exchange, and what is wrong with them; ``prefixes_2N`` are theirs and ours."""
    theirs, ours = prefixes_2N
    found.equal, found.compared = int((theirs == ours).sum()), theirs.numel()
    found.means = (float(theirs.float().mean()), float(ours.float().mean()))
    limit = near_tie_gap("float32")
    if not found.apart <= limit:
        found.faults.append(f"{found.name}: logits {found.apart:.2g} apart, expected at most {limit:g}")
    if found.equal < found.compared:
        found.faults.append(f"{found.name}: {found.compared - found.equal} of {found.compared} prefixes differ")
    if not theirs.any():
        found.faults.append(f"{found.name}: nothing was accepted, so no prefix was compared")


def render_exchanges(exchanges: Sequence[Exchange]) -> str:
    """The table of both ways."""
    if not exchanges:
        return "SKIPPED: nothing was exchanged with the speculators library; give a bundle of EAGLE-3"
    heads = ["EAGLE-3", "logits apart", "prefixes equal", "accepted tokens a position: theirs", "ours"]
    rows = [
        [e.name, f"{e.apart:.1e}", f"{e.equal}/{e.compared}", *(f"{mean:.3f}" for mean in e.means)] for e in exchanges
    ]
    return "\n".join([table(heads, rows), "", *told(exchanges, "both ways the same drafter")])
