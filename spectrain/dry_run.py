"""What training a recipe would do, said before it does anything: rows, steps, memory, disk and time.

Sizes and times are those of ``estimate``. Steps are exact where the rows are known already: without ``regenerate``, or
once prepared.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from spectrain import estimate as counting
from spectrain.checkpoints import complete, read_progress
from spectrain.config import Recipe, load_recipe
from spectrain.data.conversations import encode_all, load_conversations
from spectrain.errors import SpectrainError
from spectrain.estimate_table import duration, size, table
from spectrain.foresight import few_steps
from spectrain.preflight import drafter_faults
from spectrain.rates import Rates, check_positive, rates
from spectrain.schedule import Curriculum
from spectrain.workload import COUNTS_FILE, Workload, local_tokenizer, usable_traffic, workload

UTILISATION = 0.4  # what `spectrain estimate` assumes unless told
EXACTLY = "exactly"


def dry_run(path: Path, overrides: Sequence[str], *, tflops: float | None = None,
            bandwidth: float | None = None) -> str:  # fmt: skip
    """A plan for a person, for as many processes as this was started in. Nothing is trained, prepared or written.

    ``tflops`` and ``bandwidth`` (GB/s) are of one device; what is not given is measured on the one at hand.
    """
    check_positive({"--tflops": tflops, "--bandwidth": bandwidth})
    recipe = load_recipe(path, overrides)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    target = counting.blueprint(recipe, counting.load_config(recipe, path))
    faults = drafter_faults(recipe, target)
    if faults:
        raise SpectrainError("\n".join(faults))
    try:
        work = workload(recipe)
    except SpectrainError as error:
        raise SpectrainError(f"--dry-run: {error}; these are options of spectrain estimate") from error
    lengths = row_lengths(recipe, work)
    exact = None if lengths is None else Curriculum(lengths, recipe.training, processes).total_steps()
    done = steps_done(recipe)
    if exact is not None and done >= exact:
        return "\n".join([*head(recipe, work, exact, EXACTLY, done), "training is done: nothing is left to estimate"])

    def speed() -> Rates:
        if tflops is None or bandwidth is None:
            print("dry run: measuring this machine ...", file=sys.stderr, flush=True)
        return rates(target.dtype, tflops=tflops, bandwidth=bandwidth, utilisation=UTILISATION)

    document = counting.estimate(recipe, target, work, speed, processes)
    steps, how = document["time"]["steps"], "about, since the rows are not known yet"
    if exact is not None:
        steps, how = exact, EXACTLY
        document["time"]["steps"] = steps
        document["assumptions"].remove(counting.PADDING)
        document["assumptions"].append("padding is not counted: real steps take somewhat longer")
    lines = [
        *head(recipe, work, steps, how, done),
        f"memory of a process in training: {size(document['memory']['training']['peak'])}",
        f"time of everything from the start: {duration(document['time']['total'])}",
    ]
    notes = [f"note: {note}" for note in few_steps(recipe, steps)]
    return "\n".join([*lines, *notes, "", table(document)])


def head(recipe: Recipe, work: Workload, steps: int, how: str, done: int) -> list[str]:
    """What is known without a device's speed; ``how`` well, of the steps."""
    return [
        "dry run: nothing is started, fetched or written",
        f"rows: {work.train.rows:,} to train on, {work.heldout.rows:,} held out; tokens {work.source}",
        f"optimizer steps: {steps:,} ({how}), {done:,} of them done; a validation every "
        f"{recipe.training.validate_every}, a checkpoint every {recipe.training.checkpoint_every}",
    ]


def row_lengths(recipe: Recipe, work: Workload) -> Sequence[int] | None:
    """Tokens of every training row, in order; None where they are not known without work or a tokenizer from afar."""
    if work.lengths is not None:
        return work.lengths
    prepared = recipe.prepared_data
    tokenizer = local_tokenizer(recipe) if (prepared / COUNTS_FILE).is_file() else None
    if tokenizer is None:
        return None
    given = recipe.regenerate is None
    chats = usable_traffic(recipe, tokenizer).train if given else load_conversations(prepared / "train.jsonl")
    rows, _ = encode_all(chats, tokenizer, recipe.data.max_length, drop_bad=recipe.data.bad_rows == "drop")
    return [len(row.ids) for row in rows]


def steps_done(recipe: Recipe) -> int:
    """Steps that a run would go on from."""
    found = complete(Path(recipe.output) / "training" / "checkpoints")
    return int(read_progress(found[-1])["step"]) if found else 0
