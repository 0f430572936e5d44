"""What of a recipe can be seen to be wrong from its files, the target's config.json and its tokenizer: all of it at
once, before weights are loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.tracking import get_available_trackers
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from spectrain.attention import context
from spectrain.blueprint import Blueprint
from spectrain.config import DataConfig, Recipe, TargetConfig
from spectrain.data.conversations import Conversation
from spectrain.data.template_variables import choose_template_kwargs
from spectrain.distributed import processes
from spectrain.drafters import family_of
from spectrain.errors import SpectrainError, told
from spectrain.evaluation.acceptance import prompt_ids
from spectrain.evaluation.contenders import AcceptanceConfig
from spectrain.evaluation.measurement import in_order
from spectrain.fetching import refused
from spectrain.identity import first_difference, tokenizer_size
from spectrain.interop import format_for_type
from spectrain.optimizer import check_optimizer
from spectrain.run_record import LATER, check_same_run, run_record
from spectrain.settings import ROWS
from spectrain.target import Target
from spectrain.weights import check_no_file


def check_recipe(recipe: Recipe) -> None:
    """SpectrainError with everything that is wrong, a line each.

    A target whose config.json or tokenizer cannot be read is not told here: loading it tells where it was looked for.
    """
    found = list(file_faults(recipe.data))
    try:
        tokenizer, config = load_tokenizer(recipe.target)
    except SpectrainError:
        tokenizer = config = None
    if recipe.drafter.trainable:
        found += told(lambda: format_for_type(family_of(recipe.drafter)))
    if config is not None:
        found += told(lambda: choose_template_kwargs(tokenizer, recipe.data.chat_template_kwargs))
        found += drafter_faults(recipe, on_paper(recipe, config, tokenizer))
    if found:
        raise SpectrainError("\n".join(found))


def check_training(recipe: Recipe) -> None:
    """SpectrainError where training this recipe would stop later for what its keys and its folder say already: nothing
    to train, another run's checkpoints, or a library that is not here."""
    if not recipe.drafter.trainable:
        family = recipe.drafter.type
        raise SpectrainError(f"drafter type {family!r} has nothing to train; measure it as one of the baselines")
    unknown = LATER if recipe.warm_start is None else (*LATER, "warm_start")
    check_same_run(training_folder(recipe), record_of(recipe), unknown)
    check_optimizer(recipe.optim)
    tracker = recipe.training.tracker
    if tracker not in ("none", *map(str, get_available_trackers())):  # Accelerate would go on without a word
        raise SpectrainError(
            f"training.tracker: {tracker} is not installed; pip install {tracker}, or set training.tracker=none"
        )


def training_folder(recipe: Recipe) -> Path:
    """Where its checkpoints and metrics lie."""
    return Path(recipe.output) / "training"


def record_of(recipe: Recipe, origin: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What the run of a recipe is recognised by, as far as nothing has to be prepared; see ``run_record``."""
    return run_record(recipe.drafter, recipe.loss, recipe.optim, recipe.training, processes().num_processes, origin)


def check_device(target: torch.device, training: torch.device) -> None:
    """A drafter in training borrows the target's embedding and head, so they have to lie where it does."""
    if (target.type, target.index or 0) != (training.type, training.index or 0):
        raise SpectrainError(
            f"target.device is {target}, but training runs on {training}; leave target.device out, or start training "
            "there (CUDA_VISIBLE_DEVICES=1, ACCELERATE_USE_CPU=true)"
        )


def check_same_rows(path: Path, counts: dict[str, dict[str, Any]]) -> None:
    """Whoever shares prepared answers and features trains on the same rows."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else counts
    for side, counted in counts.items():
        # Two recipes may reach the same files by different paths.
        theirs, ours = ({k: v for k, v in one.items() if k != "dropped_at"} for one in (found[side], counted))
        if theirs != ours:
            raise SpectrainError(
                f"{path.parent.parent} was prepared from other rows, its own against these: "
                f"{first_difference(theirs, ours, side, ROWS)}; give this recipe the same data, or choose another "
                "prepared folder or output"
            )


def check_measurable(target: Target, heldout: Sequence[Conversation], config: AcceptanceConfig) -> None:
    """SpectrainError for the first of the chats that will be measured that leaves no room for an answer."""
    for chat in in_order(heldout, config):
        prompt_ids(target, chat, config.max_new_tokens)


def load_tokenizer(target: TargetConfig) -> tuple[Any, PreTrainedConfig]:
    """The target's tokenizer and config.json, without weights."""
    check_no_file(target.name)
    try:
        where: dict[str, Any] = {"revision": target.revision, "trust_remote_code": False}
        tokenizer = AutoTokenizer.from_pretrained(target.name, **where)
        return tokenizer, AutoConfig.from_pretrained(target.name, **where)
    except Exception as error:  # each library that reads a part of the folder raises its own kinds
        raise SpectrainError(
            f"target {target.name!r}: its tokenizer and config.json do not load: "
            f"{refused(error, target.name, target.revision)}"
        ) from error


def file_faults(data: DataConfig) -> Iterator[str]:
    """Chat files that are not there, or have nothing in them."""
    for key in ("train", "heldout"):
        for name in getattr(data, key):
            path = Path(name)
            if not path.is_file():
                yield f"data.{key}: {name}: no such file; give the path of a .jsonl, .json or .parquet file"
            elif path.stat().st_size == 0:
                yield f"data.{key}: {name} is empty; give a file with chats"


def on_paper(recipe: Recipe, config: PreTrainedConfig, tokenizer: Any) -> Blueprint | None:
    """The target without weights; None for one that cannot be made of its config.json alone, where preparing asks the
    target itself."""
    try:
        return Blueprint(config, torch.float32, name=recipe.target.name, tokenizer_size=tokenizer_size(tokenizer))
    except SpectrainError:
        return None


def drafter_faults(recipe: Recipe, target: Target | None) -> list[str]:
    """What the target's sizes forbid of the drafter's settings; of an unknown target nothing is known."""
    if target is None:
        return []
    found = [*told(lambda: recipe.drafter.taps(target)), *told(lambda: check_context(recipe, target))]
    return list(dict.fromkeys(found))  # one mistake may stop both


def check_context(recipe: Recipe, target: Target) -> None:
    """SpectrainError where rows may be longer than the recipe's drafter can read."""
    longest, read = recipe.data.max_length, recipe.drafter.context(target)
    if read is not None and read < min(longest, context(target.config) or longest):
        raise SpectrainError(
            f"data.max_length: found {longest}, but this recipe's drafter has a context of {read} tokens; lower "
            "data.max_length, or give the drafter a longer context"
        )
