"""One recipe in several variants and seeds: which setting is better, or whether no difference was found.

All runs share the recipe's prepared answers and features and take as many optimizer steps. They are measured on the
held-out rows, teacher-forced. A run that is finished is not repeated, one that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from spectrain.bundle import load_drafter
from spectrain.checkpoints import Metrics
from spectrain.config import Recipe, load_recipe
from spectrain.distributed import processes
from spectrain.drafters.scoring import score_batch
from spectrain.errors import SpectrainError
from spectrain.evaluation.variants import RowScores, compare, markdown
from spectrain.files import file_digest, json_digest, write_json
from spectrain.manifest import MANIFEST_FILE
from spectrain.pipeline import Prepared, Run
from spectrain.preflight import check_training

SETTLES_STEPS = ("epochs", "steps", "micro_batch_tokens", "accumulation")
SCORES = "heldout_scores.json"


@dataclass(frozen=True)
class Variant:
    """A name and the overrides that go by it."""

    name: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Ablation:
    """What was asked for. Run ``name-seed`` trains into ``output/name-seed``; ``overrides`` hold for all."""

    recipe: Path
    overrides: tuple[str, ...]
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    output: Path
    progress: bool = True

    def folder(self, variant: Variant, seed: int) -> Path:
        return self.output / f"{variant.name}-{seed}"

    def recipe_of(self, variant: Variant, seed: int) -> Recipe:
        # Of its last step: the best one is chosen on the rows that the runs are compared on.
        everywhere = ["training.select=last", *self.overrides]
        base = load_recipe(self.recipe, self.overrides)
        places = {"output": self.folder(variant, seed), "prepared": base.prepared or base.output}
        own = [f"{key}={json.dumps(str(place))}" for key, place in places.items()]
        return load_recipe(self.recipe, [*everywhere, *variant.overrides, f"training.seed={seed}", *own])


def parse_variant(text: str) -> Variant:
    """``NAME: key.path=value ...``, quoted as in a shell; without overrides it is the recipe as it is."""
    name, colon, rest = text.partition(":")
    wanted = "expected NAME: key.path=value ..., for instance 'high: optim.lr=2e-3'"
    if not colon or not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name.strip()):
        raise SpectrainError(f"--variant {text!r}: {wanted}; a name has letters, digits and any of _ . -")
    try:
        overrides = tuple(shlex.split(rest))
    except ValueError as error:
        raise SpectrainError(f"--variant {text!r}: {error}; {wanted}") from None
    if broken := [part for part in overrides if not re.match(r"[^=\s]+=", part)]:
        raise SpectrainError(
            f"--variant {text!r}: {broken[0]!r} is no override; {wanted}, values with spaces in quotes"
        )
    return Variant(name.strip(), overrides)


def run_ablation(ablation: Ablation) -> Path:
    """Train and measure whatever is not there yet, compare, and leave ``ablation.json`` in the output folder.

    SpectrainError before anything is trained for variants or seeds given twice, for variants of other data, another
    target or another number of steps, and for whatever a recipe may be wrong in.
    """
    base = Run(load_recipe(ablation.recipe, ablation.overrides), progress=ablation.progress)
    runs = [(variant, seed) for seed in ablation.seeds for variant in ablation.variants]
    _check(ablation, base.recipe, runs)
    prepared = base.prepare()
    rows = prepared.heldout_rows
    del base.target  # every run loads its own
    scores: dict[str, list[RowScores]] = {variant.name: [] for variant in ablation.variants}
    for number, (variant, seed) in enumerate(runs, 1):
        base.say(f"run {number} of {len(runs)}: {variant.name}, seed {seed}")
        scores[variant.name].append(_trained_and_measured(ablation, variant, seed, prepared))
    steps = {name: [one.steps for one in found] for name, found in scores.items()}
    if len({tuple(found) for found in steps.values()}) > 1:  # seeds may differ: each packs batches of its own
        raise SpectrainError(f"variants differ in optimizer steps, by seed: {steps}; nothing is compared")
    document = {
        "recipe": ablation.recipe.name,
        "overrides": list(ablation.overrides),
        "variants": {variant.name: list(variant.overrides) for variant in ablation.variants},
        "seeds": list(ablation.seeds),
        "steps": next(iter(steps.values())),
        **compare(scores, [row.conversation for row in rows], [row.kind for row in rows]),
    }
    path = ablation.output / "ablation.json"
    write_json(path, document)
    return path


def _check(ablation: Ablation, base: Recipe, runs: Sequence[tuple[Variant, int]]) -> None:
    """What would only show after hours, before anything is trained."""
    for what, values in (("--variant", [v.name for v in ablation.variants]), ("--seeds", [*map(str, ablation.seeds)])):
        if not values or len(set(values)) < len(values):
            raise SpectrainError(f"{what}: found {', '.join(values) or 'none'}, expected one or more, each once")
    if processes().num_processes > 1:
        raise SpectrainError("an ablation is one process; start it with python, not with accelerate launch or torchrun")
    first = ablation.recipe_of(*runs[0])
    for variant, seed in runs:
        recipe, who = ablation.recipe_of(variant, seed), f"variant {variant.name!r}"
        if Path(recipe.output).resolve() == Path(base.output).resolve():
            raise SpectrainError(f"--output: {base.output} is the recipe's own output; choose another folder")
        for part in ("target", "data", "regenerate"):
            if getattr(recipe, part) != getattr(base, part):
                raise SpectrainError(f"{who} changes {part}, but all train on the recipe's own prepared rows; "
                                     f"override it for all, after the recipe")  # fmt: skip
        for key in SETTLES_STEPS:
            found, wanted = getattr(recipe.training, key), getattr(first.training, key)
            if found != wanted:
                raise SpectrainError(f"{who} has training.{key} = {found}, {runs[0][0].name!r} has {wanted}, but all "
                                     "take as many steps; override it for all, after the recipe")  # fmt: skip
        check_training(recipe)


def _trained_and_measured(ablation: Ablation, variant: Variant, seed: int, prepared: Prepared) -> RowScores:
    """One run from wherever it stands to its scores, which lie beside what they were measured with."""
    recipe, path = ablation.recipe_of(variant, seed), ablation.folder(variant, seed) / SCORES
    settings = json_digest([recipe.model_dump(mode="json"), prepared.train_store.key, prepared.heldout_store.key])
    manifest = ablation.folder(variant, seed) / "bundle" / MANIFEST_FILE
    if path.is_file() and manifest.is_file():
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if (found["settings"], found["bundle"]) == (settings, file_digest(manifest)):
                return RowScores(**found["scores"])
        except (ValueError, KeyError, TypeError) as error:
            raise SpectrainError(f"{path} is damaged ({error!r}); delete it and run again") from error
    Run(recipe, progress=ablation.progress).train()
    scores = _measure(recipe, ablation.progress)
    write_json(path, {"settings": settings, "bundle": file_digest(manifest), "scores": asdict(scores)})
    return scores


def _measure(recipe: Recipe, progress: bool) -> RowScores:
    """Score a run's bundle row by row, with a target of its own: training may have changed the run's."""
    run = Run(recipe, progress=False)
    drafter, _, _ = load_drafter(run.bundle, run.target)
    store = run.prepare().heldout_store
    rows = tqdm(range(len(store)), desc="held-out rows", unit="row", disable=not progress)
    batches = (store.batch([row], run.target.device) for row in rows)
    found = [score_batch(drafter, batch, run.target.head, recipe.training.validation_depths) for batch in batches]
    steps = Metrics(run.folder / "training" / "metrics.jsonl").read()[-1]["step"]
    return RowScores([[*s.alpha, s.committed] for s in found], [[*s.positions, s.rounds] for s in found], steps)


def ablate(options: argparse.Namespace) -> Path:
    """Train, measure and print what was asked for; the path of ``ablation.json``."""
    if not re.fullmatch(r"\d+(,\d+)*", options.seeds):
        raise SpectrainError(f"--seeds {options.seeds!r}: expected whole numbers with commas, for instance 0,1,2")
    variants, seeds = tuple(map(parse_variant, options.variant)), tuple(map(int, options.seeds.split(",")))
    asked = Ablation(Path(options.recipe), tuple(options.overrides), variants, seeds, Path(options.output))
    path = run_ablation(asked)
    print(f"{markdown(json.loads(path.read_text(encoding='utf-8')))}\n\nnumbers: {path}")
    return path
