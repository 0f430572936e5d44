"""One recipe in several variants and seeds: which setting is better, or whether no difference was found.

All runs share the recipe's prepared answers and features and take as many optimizer steps. They are compared on the
held-out rows, teacher-forced, conversation by conversation.

Shapes: V variants, S seeds, C conversations, K draft depths, R resamples.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from spectrain.bundle import load_drafter
from spectrain.checkpoints import Metrics
from spectrain.config import load_recipe
from spectrain.data.batches import collate
from spectrain.drafters.scoring import score_batch
from spectrain.errors import SpectrainError
from spectrain.files import write_json
from spectrain.pipeline import Prepared, Run
from spectrain.target import Target

SCHEMA = "spectrain.ablation/1"
EVERYTHING = "everything"
RESAMPLES = 4000
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Variant:
    """A name and what is overridden under it."""

    name: str
    overrides: tuple[str, ...]


def parse_variant(text: str) -> Variant:
    """``NAME: key=value key=value``; no override at all is the recipe as it is."""
    name, colon, rest = text.partition(":")
    name = name.strip()
    if not colon or not name or not name.replace("_", "").replace("-", "").isalnum():
        raise SpectrainError(
            f"--variant {text!r}: expected NAME: key.path=value ..., for instance 'high: optim.lr=2e-3'"
        )
    return Variant(name, tuple(rest.split()))


def run_ablation(recipe: Path, overrides: Sequence[str], variants: Sequence[Variant], seeds: Sequence[int],
                 output: Path, *, progress: bool = True) -> Path:  # fmt: skip
    """Train every variant with every seed into ``output/NAME-SEED`` and compare them; the path of ``ablation.json``.

    Finished runs are not repeated, interrupted ones go on. Raises SpectrainError for a variant or seed that is there
    twice, for variants that take unlike numbers of steps, and for whatever a recipe may be wrong in.
    """
    for what, values in (("--variant", [v.name for v in variants]), ("--seeds", list(map(str, seeds)))):
        if len(set(values)) < len(values) or not values:
            raise SpectrainError(f"{what}: found {', '.join(values) or 'none'}, expected each once and one at least")
    prepared = load_recipe(recipe, overrides).prepared or str(output / "prepared")

    def run_of(variant: Variant, seed: int) -> Run:
        folder = output / f"{variant.name}-{seed}"
        own = [f"training.seed={seed}", f"prepared={prepared}", f"output={folder}"]
        return Run(load_recipe(recipe, [*overrides, *variant.overrides, *own]), progress=progress)

    for variant, seed in product(variants, seeds):  # a mistake in the last one must not show after the others
        run_of(variant, seed)
    bundles: dict[tuple[str, int], Path] = {}
    steps: dict[str, int] = {}
    for variant, seed in product(variants, seeds):
        run = run_of(variant, seed)
        run.say(f"--- {variant.name}, seed {seed}")
        bundles[variant.name, seed] = run.train()
        steps[variant.name] = Metrics(run.folder / "training" / "metrics.jsonl").read()[-1]["step"]
    if len(set(steps.values())) > 1:
        raise SpectrainError(f"variants differ in optimizer steps, {steps}; compare runs of as many")
    judge = run_of(variants[0], seeds[0])
    document = compare_variants(bundles, judge.target, judge.prepare(), progress=progress)
    document |= {
        "recipe": recipe.name,
        "overrides": list(overrides),
        "variants": {variant.name: list(variant.overrides) for variant in variants},
        "steps": next(iter(steps.values())),
    }
    path = output / "ablation.json"
    write_json(path, document)
    return path


def compare_variants(bundles: Mapping[tuple[str, int], Path], target: Target, prepared: Prepared, *, depths: int = 5,
                    progress: bool = True) -> dict[str, Any]:  # fmt: skip
    """Acceptance probability at T=1 of every variant's bundles on the held-out rows, by kind, and their differences.

    ``bundles``: (variant, seed) → folder; every variant with the same seeds. Intervals resample conversations and
    seeds, both variants of a pair alike.
    """
    variants = list(dict.fromkeys(name for name, _ in bundles))
    seeds = [seed for name, seed in bundles if name == variants[0]]
    scores: dict[str, list[tuple[Floats, Floats]]] = {name: [] for name in variants}
    for name in tqdm([n for n in variants for _ in seeds], desc="held-out rows", unit="run", disable=not progress):
        bundle = bundles[name, seeds[len(scores[name])]]
        scores[name].append(_scores(bundle, target, prepared, depths))
    kinds = list({row.conversation: row.kind for row in prepared.heldout_rows}.values())
    groups = [*dict.fromkeys(kind.split("/")[0] for kind in kinds), EVERYTHING]
    measures = {"alpha_first": slice(0, 1), "alpha_all_depths": slice(None)}
    rows, differences = [], []
    for group in groups:
        chosen = np.array([group in (EVERYTHING, kind.split("/")[0]) for kind in kinds])
        if chosen.sum() < 2:
            continue
        for measure, part in measures.items():
            table = {name: _table(scores[name], chosen, part) for name in variants}
            draws = {name: _resampled(*table[name]) for name in variants}
            about = {"kind": group, "measure": measure}
            rows += [{**about, "variant": name, **_interval(_rate(*table[name]), draws[name])} for name in variants]
            differences += [
                {**about, "variant": a, "against": b,
                 **_interval(_rate(*table[a]) - _rate(*table[b]), draws[a] - draws[b])}
                for b, a in combinations(variants, 2)
            ]  # fmt: skip
    return {"schema": SCHEMA, "seeds": seeds, "conversations": len(kinds), "rows": rows, "differences": differences}


def _scores(bundle: Path, target: Target, prepared: Prepared, depths: int) -> tuple[Floats, Floats]:
    """Sums of acceptance probabilities and counts of positions [C, K], of all rows of a conversation."""
    drafter, _, _ = load_drafter(bundle, target)
    place = {name: i for i, name in enumerate(dict.fromkeys(row.conversation for row in prepared.heldout_rows))}
    sums_CK, counts_CK = np.zeros((2, len(place), len(drafter.shifts(depths))))
    for number, row in enumerate(prepared.heldout_rows):
        batch = collate(prepared.heldout_store, [number], target.device)
        found = score_batch(drafter, batch, target.head, depths)
        sums_CK[place[row.conversation]] += found.alpha
        counts_CK[place[row.conversation]] += found.positions
    return sums_CK, counts_CK


def _table(scores: Sequence[tuple[Floats, Floats]], chosen: Any, part: slice) -> tuple[Floats, Floats]:
    """Sums and counts [S, C] over the depths of ``part``, of the chosen conversations."""
    sums_SC, counts_SC = (np.stack([both[side][chosen][:, part].sum(1) for both in scores]) for side in (0, 1))
    return sums_SC, counts_SC


def _rate(sums_SC: Floats, counts_SC: Floats) -> float:
    return float(sums_SC.sum() / counts_SC.sum())


def _resampled(sums_SC: Floats, counts_SC: Floats, seed: int = 0) -> Floats:
    """The rate in every resample [R]: the same draws whatever is asked of them, so that pairs are paired."""
    rng = np.random.default_rng(seed)
    S, C = sums_SC.shape
    seed_RS = rng.multinomial(S, [1 / S] * S, size=RESAMPLES).astype(np.float64)
    chat_RC = rng.multinomial(C, [1 / C] * C, size=RESAMPLES).astype(np.float64)
    top, bottom = (np.einsum("rs,sc,rc->r", seed_RS, side, chat_RC, optimize=True) for side in (sums_SC, counts_SC))
    return np.asarray(top / bottom)


def _interval(value: float, draws_R: Floats) -> dict[str, float]:
    low, high = np.quantile(draws_R, [0.025, 0.975])
    return {"value": value, "low": float(low), "high": float(high)}


def in_words(difference: Mapping[str, Any]) -> str:
    """What a difference says of its variant."""
    if difference["low"] > 0:
        return "better"
    return "worse" if difference["high"] < 0 else "no difference found"


def markdown(document: Mapping[str, Any]) -> str:
    """The tables of a document."""
    names = {"alpha_first": "first depth", "alpha_all_depths": "all depths"}
    lines = [
        f"Acceptance probability α at T=1, teacher-forced on {document['conversations']} held-out rows; seeds "
        f"{', '.join(map(str, document['seeds']))}; 95% intervals over conversations and seeds.", "",
        "| kind | positions | variant | α | difference | |", "| --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    against = {(d["kind"], d["measure"], d["variant"]): d for d in reversed(document["differences"])}
    for row in document["rows"]:
        found = against.get((row["kind"], row["measure"], row["variant"]))
        told = ("", "") if found is None else (f"{_shown(found, '+')} to {found['against']}", in_words(found))
        cells = (row["kind"], names[row["measure"]], row["variant"], _shown(row), *told)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _shown(value: Mapping[str, float], sign: str = "") -> str:
    return f"{value['value']:{sign}.4f} ({value['low']:{sign}.4f} to {value['high']:{sign}.4f})"


def ablation(arguments: Sequence[str], name: str = "ablation") -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog=name, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Train variants of one recipe with several seeds on the same answers and features, and compare\n"
        "their acceptance probability on the held-out rows, with intervals over conversations and seeds. Finished\n"
        "runs are not repeated, interrupted ones go on.",
        epilog=f"example:\n  {name} recipes/smollm2-135m-instruct/medusa.yaml --output runs/losses \\\n"
        "      --variant 'kl: loss.terms={forward_kl:1}' --variant 'lk: loss.terms={lk_hybrid:1}' training.epochs=1",
    )  # fmt: skip
    parser.add_argument("recipe", help="a YAML recipe")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="of all variants")
    parser.add_argument("--variant", action="append", required=True, metavar="'NAME: key=value ...'",
                        help="a setting to try, several times; 'base:' is the recipe as it is")  # fmt: skip
    parser.add_argument("--seeds", default="0,1,2", help="training seeds, with commas (default: %(default)s)")
    parser.add_argument("--output", required=True, metavar="DIR", help="where runs and ablation.json go")
    options = parser.parse_intermixed_args(arguments)
    try:
        seeds = [int(seed) for seed in options.seeds.split(",")]
    except ValueError:
        raise SpectrainError(f"--seeds {options.seeds!r}: expected whole numbers with commas, such as 0,1,2") from None
    variants = [parse_variant(text) for text in options.variant]
    path = run_ablation(Path(options.recipe), options.overrides, variants, seeds, Path(options.output))
    print(f"{markdown(json.loads(path.read_text(encoding='utf-8')))}\n\nnumbers: {path}")
