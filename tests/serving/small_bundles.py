"""A bundle of every recipe of the demonstration target, trained just enough for some of its drafts to be accepted."""

from __future__ import annotations

import json
from pathlib import Path

from spectrain.config import load_recipe
from spectrain.data.conversations import load_conversations
from spectrain.evaluation.acceptance import choose
from spectrain.files import atomic_file, whole_lines
from spectrain.pipeline import Run

RECIPES = ("eagle3", "eagle", "medusa", "medusa2", "small_draft")
CHATS, HELDOUT = 40, 8
# One kind of traffic and steps of few tokens: acceptance comes sooner.
SHORT = ("regenerate.max_new_tokens=48", "training.epochs=20", "training.steps=40", "training.micro_batch_tokens=512",
         "training.validate_every=40", "training.checkpoint_every=40")  # fmt: skip
# So few steps move a target too little for anyone to see which one is served.
MOVED = {"medusa2": ("drafter.joint.warmup=0.5", "drafter.joint.lr_scale=4", "drafter.joint.anchor=0")}


def small_bundles(recipes: Path, traffic: Path, target: Path, output: Path) -> list[Path]:
    """The bundles, each under ``output``; those of an earlier, finished call are taken as they are."""
    sides = {}
    for side, count in (("train", CHATS), ("heldout", HELDOUT)):
        sides[side] = output / "traffic" / f"{side}.jsonl"
        write_some(traffic / f"narrow_{side}.jsonl", sides[side], count)
    overrides = [*SHORT, f"target.name={target}", f"prepared={output / 'prepared'}",
                 *(f"data.{side}=[{path}]" for side, path in sides.items())]  # fmt: skip
    found = []
    for name in RECIPES:
        run = Run(load_recipe(recipes / f"{name}.yaml", [*overrides, *MOVED.get(name, ()), f"output={output / name}"]))
        found.append(run.bundle if run.bundle.is_dir() else run.train())
    return found


def write_some(source: Path, path: Path, count: int) -> None:
    """``count`` chats of a JSON-lines file, spread over its kinds."""
    chosen = {chat.id for chat in choose(load_conversations(source), count, seed=0)}
    lines = [line for line in whole_lines(source) if json.loads(line)["id"] in chosen]
    with atomic_file(path) as partial:
        partial.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
