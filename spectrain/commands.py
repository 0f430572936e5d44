"""What the commands do once their options are parsed."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spectrain.attention import context
from spectrain.bundle import load_drafter, resolve_bundle
from spectrain.data.conversations import Conversation, load_conversations
from spectrain.data.dropped import Dropped
from spectrain.data.template import set_template_kwargs
from spectrain.distributed import processes
from spectrain.drafters import Drafter
from spectrain.drafters.ngram import NgramConfig, NgramDrafter
from spectrain.drafters.ranks import RANKS_FILE
from spectrain.errors import SpectrainError
from spectrain.evaluation.acceptance import choose
from spectrain.evaluation.bundles import Asked, compare_bundles, evaluate_bundle, parse_baselines
from spectrain.evaluation.entrants import resolve_bundles, shared_target
from spectrain.evaluation.exactness import ExactnessConfig, render
from spectrain.evaluation.exactness import compare as compare_outputs
from spectrain.evaluation.rank_tables import chat_ranks, render_ranks
from spectrain.evaluation.workbench import prompts_of, shown_name
from spectrain.exact.sampler import Sampler
from spectrain.files import write_json
from spectrain.identity import compare_targets
from spectrain.interop.gguf import convert_gguf as convert
from spectrain.interop.gguf import package_folder
from spectrain.manifest import TargetRecord, read_manifest, target_record, template_kwargs
from spectrain.measured_options import acceptance_settings, checked, trees
from spectrain.places import check_writable
from spectrain.target import Target, load_target
from spectrain.traffic import offering_to_drop, renderable
from spectrain.tree_options import static_trees

DROP = "--bad-rows drop"
Tell = Callable[[Mapping[str, Any], str], None]


def evaluate(options: argparse.Namespace) -> Path:
    """Measure a bundle on chat files; the path of acceptance.json."""
    config = acceptance_settings(options)
    with offering_to_drop(DROP):
        conversations, dropped = _chats(options)
        folder = resolve_bundle(options.bundle)
        target = _target(options, folder)
        conversations = _answerable(conversations, target, config.max_new_tokens, dropped)
        asked = Asked(conversations, config, Path(options.output), _traffic(options), (NgramConfig(),),
                      _counted(dropped))  # fmt: skip
        return evaluate_bundle(folder, target, asked, _original(options, folder, target))


def compare(options: argparse.Namespace) -> Path:
    """Measure several bundles and the baselines on chat files; the path of acceptance.json."""
    config, baselines = acceptance_settings(options), parse_baselines(options.baselines)
    with offering_to_drop(DROP):
        conversations, dropped = _chats(options)
        folders = resolve_bundles(options.bundles)
        target = _shared_target(options, folders)
        conversations = _answerable(conversations, target, config.max_new_tokens, dropped)
        asked = Asked(conversations, config, Path(options.output), _traffic(options), baselines, _counted(dropped))
        return compare_bundles(folders, target, asked)


def _chats(options: argparse.Namespace) -> tuple[list[Conversation], Dropped | None]:
    """The traffic, and where rows of it that cannot be used are counted, if they may be left out."""
    dropped = Dropped() if options.bad_rows == "drop" else None
    return load_conversations(options.traffic, dropped), dropped


def _answerable(conversations: list[Conversation], target: Target, max_new_tokens: int,
                dropped: Dropped | None) -> list[Conversation]:  # fmt: skip
    """Without the chats that the template refuses or that leave no room for an answer, where these are dropped."""
    if dropped is None:
        return conversations
    limit = context(target.config)
    room = None if limit is None else limit - max_new_tokens
    kept = renderable(conversations, target.tokenizer, room, None, dropped)
    if not kept:
        raise SpectrainError(f"every conversation is left out: {dropped}\n{dropped.listing()}")
    if dropped.total and processes().is_main_process:
        print(f"left out: {dropped}\n{dropped.listing()}", flush=True)
    return kept


def _counted(dropped: Dropped | None) -> dict[str, int]:
    return {} if dropped is None else dropped.by_reason()


def _traffic(options: argparse.Namespace) -> str:
    return ", ".join(Path(path).name for path in options.traffic)


def exactness(options: argparse.Namespace, tell: Tell) -> int:
    """Compare greedy output with plain decoding's; how many differences are faults."""
    folder = resolve_bundle(options.bundle) if options.bundle else None
    config = checked(
        ExactnessConfig,
        prompts=options.conversations,
        max_new_tokens=options.max_new_tokens,
        batch=options.batch,
        k=options.k,
        verification=tuple(options.verification.split(",")),
        tolerance=options.tolerance,
        seed=options.seed,
        **({"trees": static_trees(trees(options.tree), folder)} if options.tree else {}),
    )
    with offering_to_drop(DROP):
        conversations, dropped = _chats(options)
        target = _target(options, folder)
        conversations = _answerable(conversations, target, config.max_new_tokens, dropped)
        prompts = prompts_of(target, conversations, config.prompts, config.max_new_tokens, config.seed)
    drafters: dict[str, Drafter] = {"ngram": NgramDrafter(NgramConfig())}
    if folder is not None:
        drafter, contents, notes = load_drafter(folder, target)
        for note in notes:
            print(f"note: {note}", flush=True)
        drafters[contents.manifest.drafter["type"]] = drafter
    document = compare_outputs(target, drafters, prompts, config)
    tell({**document, "target": shown_name(target.name)}, render(document))
    return int(document["faults"])


def tree(options: argparse.Namespace) -> None:
    """Print a drafter's ranks and its best tree; into the bundle where that is a folder here."""
    samplers = [Sampler(t) for t in options.temperature]
    sizes = {"--nodes": options.nodes, "--conversations": options.conversations}
    low = next((flag for flag, value in sizes.items() if value is not None and value < 1), None)
    if low:
        raise SpectrainError(f"{low} {sizes[low]}: expected a whole number of at least 1")
    with offering_to_drop(DROP):
        found, dropped = _chats(options)
    conversations = choose(found, options.conversations, 0)
    folder = resolve_bundle(options.bundle)
    if Path(options.bundle).is_dir():
        check_writable("BUNDLE", folder)
    target = _target(options, folder)
    drafter, _, notes = load_drafter(folder, target)
    for note in notes:
        print(f"note: {note}", flush=True)
    with offering_to_drop(DROP):
        ranks = chat_ranks(target, drafter, conversations, samplers, dropped)
    print(render_ranks(ranks, samplers, options.nodes))
    if Path(options.bundle).is_dir():
        write_json(folder / RANKS_FILE, ranks)
        print(f"ranks: {folder / RANKS_FILE}")


def estimate(options: argparse.Namespace, tell: Tell) -> bool:
    """Tell what a recipe takes; whether it fits the device, where one was given."""
    from spectrain import estimate as counting  # not needed by the others
    from spectrain.config import load_recipe
    from spectrain.estimate_table import GIB, shortage, table
    from spectrain.rates import check_positive, rates
    from spectrain.workload import workload

    check_positive({"--device-memory": options.device_memory, "--tflops": options.tflops,
                    "--bandwidth": options.bandwidth})  # fmt: skip

    def say(what: str) -> None:
        print(f"estimate: {what} ...", file=sys.stderr, flush=True)

    path = Path(options.recipe)
    recipe = load_recipe(path, options.overrides)
    say(f"laying out {recipe.target.name} and its drafter without weights")
    target = counting.blueprint(recipe, counting.load_config(recipe, path, options.config))
    say("counting tokens")
    work = workload(recipe, tokens=options.tokens, answer_share=options.answer_share, row_tokens=options.row_tokens)
    say("taking the device's rates, as given or measured")
    speed = rates(target.dtype, tflops=options.tflops, bandwidth=options.bandwidth, utilisation=options.utilisation)
    say("running a training step on shapes alone")
    document = counting.estimate(recipe, target, work, speed, options.processes)
    room = None if options.device_memory is None else options.device_memory * GIB
    lack = None if room is None else shortage(document, room)
    tell({**document, "shortage": lack}, table(document, room))
    return lack is None


def train(options: argparse.Namespace) -> None:
    """Train a recipe; or say what that would do, once however many processes were started."""
    from spectrain.config import load_recipe  # not needed by the others, as what follows
    from spectrain.distributed import processes
    from spectrain.dry_run import dry_run
    from spectrain.pipeline import Run

    given = [flag for flag in ("tflops", "bandwidth") if getattr(options, flag) is not None]
    if given and not options.dry_run:
        raise SpectrainError(f"--{given[0]} tells --dry-run how fast a device is; add --dry-run, or leave it out")
    if not options.dry_run:
        Run(load_recipe(options.recipe, options.overrides)).train()
        processes().destroy_process_group()
    elif os.environ.get("RANK", "0") == "0":
        rates = {"tflops": options.tflops, "bandwidth": options.bandwidth}
        print(dry_run(Path(options.recipe), options.overrides, **rates))


def _target(options: argparse.Namespace, folder: Path | None) -> Target:
    """The target that was named, or else the one that the bundle belongs to."""
    if folder is None:
        return _named_target(options, None, "there is no bundle to say the target")
    manifest = read_manifest(folder)
    recorded = target_record(folder, manifest)
    target = _named_target(options, recorded, f"{folder} does not say which target it belongs to")
    set_template_kwargs(target.tokenizer, template_kwargs(manifest))
    return target


def _shared_target(options: argparse.Namespace, folders: dict[str, Path]) -> Target:
    """The target that was named, or else the one that the bundles go with or were derived from."""
    recorded = shared_target(folders)
    settings = {name: template_kwargs(read_manifest(folder)) for name, folder in folders.items()}
    (first, ours), *others = settings.items()
    other = next((name for name, theirs in others if theirs != ours), None)
    if other is not None:
        raise SpectrainError(
            f"{first} was trained on chats rendered with data.chat_template_kwargs {ours}, {other} with "
            f"{settings[other]}; compare bundles of the same prompts"
        )
    target = _named_target(options, recorded, f"{first} does not say which target it belongs to")
    set_template_kwargs(target.tokenizer, ours)
    return target


def _named_target(options: argparse.Namespace, recorded: TargetRecord | None, whose: str) -> Target:
    name = options.target or (recorded.name if recorded else None)
    if not name:
        raise SpectrainError(f"{whose}; name it with --target")
    revision = recorded.revision if recorded and name == recorded.name else None
    return load_target(name, revision=revision, dtype=options.dtype, device=str(processes().device))


def _original(options: argparse.Namespace, folder: Path, target: Target) -> Target | None:
    """What the bundle's own target was derived from, as far as it can be had; a note where it cannot."""
    recorded = read_manifest(folder).derived_from
    if recorded is None or compare_targets(recorded.identity, target.identity()).level != "different":
        return None  # nothing moved, or the target is the original itself
    try:
        if not recorded.name:
            raise SpectrainError("the bundle does not say its name")
        original = load_target(recorded.name, revision=recorded.revision, dtype=options.dtype)
        comparison = compare_targets(recorded.identity, original.identity())
        if comparison.level == "different":
            raise SpectrainError(f"{recorded.name} is another one: {comparison.first_difference}")
    except SpectrainError as error:
        print(f"note: drift is not measured, since the original is not at hand: {error}", flush=True)
        return None
    return original


def convert_gguf(options: argparse.Namespace) -> None:
    """Convert once; a finished folder is left alone."""
    destination = Path(options.destination)
    if (destination / "config.json").is_file() and (destination / "model.safetensors").is_file():
        print(f"{destination} is there already")
        return
    source = Path(options.file) if options.file else package_folder(options.package)
    convert(source, destination)
    print(f"target: {destination}")
