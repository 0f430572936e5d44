"""The benchmarks as commands. Heavy imports wait until one runs, so that ``--help`` is instant."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spectrain.cli_options import command_parser, one, option
from spectrain.errors import SpectrainError
from spectrain.files import atomic_file, write_json

OUTPUT = "runs/benchmarks"
TARGET = "targets/smollm2-135m-instruct"
TRAFFIC = ("recipes/traffic/narrow_heldout.jsonl", "recipes/traffic/open_heldout.jsonl")
RECIPE = "recipes/smollm2-135m-instruct/eagle3.yaml"
VARIANTS = tuple(
    f"{depths}-depths-{columns}: drafter.depths={depths} drafter.draft_vocab_size={columns}"
    for columns in (8192, 49152)
    for depths in (3, 7)
)


def decoding(arguments: Sequence[str], name: str = "decoding") -> None:
    """Decoding speed, or peak memory, beside transformers' own decoders."""
    parser = command_parser(
        name,
        "Tokens per second of greedy decoding, plain and speculative, beside transformers' generate: the same target,\n"
        "prompts, draft model and draft length, in turn in one process; with intervals over prompts, and whether all\n"
        "outputs are the same tokens. The draft model is the target's first, middle and last layer: untrained, so the\n"
        "ratio tells about the decoders, not about the drafter. With --memory: peak memory of one long answer instead.",
        f"{name} --bundle runs/quickstart/bundle --conversations 8 --k 5",
    )
    _what_decodes(parser, "decoding.json, or memory.json")
    option(parser, "--conversations", default=8)
    option(parser, "--k", "one", default="5")
    parser.add_argument("--tree-nodes", type=int, default=15, metavar="N",
                        help="of the bundle's dynamic tree (default: %(default)s)")  # fmt: skip
    parser.add_argument("--memory", action="store_true", help="measure peak memory, not speed")
    parser.add_argument("--memory-tokens", type=int, default=2048, metavar="N",
                        help="length of that answer (default: %(default)s)")  # fmt: skip
    options = parser.parse_args(arguments)
    options.k = one(options.k, "--k")
    _at_least(options, 1, "tree_nodes", "max_new_tokens", "memory_tokens")
    _at_least(options, 2, "conversations", why="an interval over chats needs as many")
    (_memory if options.memory else _speed)(options)


def batching(arguments: Sequence[str], name: str = "batching") -> None:
    """Speculation by batch size: what verification costs, what it yields, and where it stops paying."""
    parser = command_parser(
        name,
        "What a verification of k+1 tokens costs beside a plain step, tokens per second with and without speculation,\n"
        "and the largest batch at which it still pays, all by batch size. Batches are drawn from the chats; requests\n"
        "that end leave their batch. A plot lies beside the numbers.",
        f"{name} --bundle runs/quickstart/bundle --batch 1,2,4,8 --k 3,5",
    )
    _what_decodes(parser, "batching.json and batching.png")
    option(parser, "--batch", default="1,2,4,8,16")
    option(parser, "--k", default="1,3,5,7")
    option(parser, "--batch-groups", default=6)
    option(parser, "--context", default="256")
    parser.add_argument("--repeats", type=int, default=15, metavar="N",
                        help="forwards for each verification cost (default: %(default)s)")  # fmt: skip
    options = parser.parse_args(arguments)
    _at_least(options, 1, "repeats", "max_new_tokens")
    _at_least(options, 2, "batch_groups", why="an interval over batches needs as many")
    _load(options)


def training(arguments: Sequence[str], name: str = "training") -> None:
    """Speed and memory of training steps, beside steps that hold all logits at once."""
    parser = command_parser(
        name,
        "Tokens per second and peak memory of a recipe's training step, beside the plain way to write it, which holds\n"
        "the target's law and the drafter's logits of every position at once. Both train the same drafter on the same\n"
        "features, in turn, each in a process of its own; that they agree on loss and gradient is checked first. The\n"
        "text is random tokens, and the loss forward KL: neither matters to the time.",
        f"{name} {RECIPE} --variant 'long: drafter.depths=7' --step-tokens 4096 --row-tokens 2048",
    )
    option(parser, "recipe", "its target and drafter count", nargs="?", default=RECIPE)
    option(parser, "--variant", otherwise="3 and 7 depths at 8,192 and at 49,152 columns")
    parser.add_argument("--step-tokens", type=int, default=2048, metavar="N",
                        help="of a step (default: %(default)s)")  # fmt: skip
    option(parser, "--row-tokens", default=512)
    option(parser, "--answer-share", "at the end of each row", default=1.0)
    parser.add_argument("--steps", type=int, default=8, metavar="N",
                        help="each way, after one to warm up (default: %(default)s)")  # fmt: skip
    option(parser, "--seed", "tokens and order")
    option(parser, "--output", "training.json", required=False, default=OUTPUT)
    options = parser.parse_args(arguments)
    _check_training(options)
    _training(options)


# --- each of them -------------------------------------------------------------------------------------------------


def _speed(options: argparse.Namespace) -> None:
    from spectrain.evaluation import speed

    target, conversations, trained = _loaded(options)
    tree = speed.widest_tree(options.k, options.tree_nodes)
    entries = speed.contenders(target, options.k, speed.small_draft(target), trained, tree)
    prompts = _prompts(target, conversations, options.conversations, options)
    samples = speed.measure(target, entries, prompts, options.max_new_tokens, options.seed)
    document = {**_head("decoding", options, target), **speed.summarise(samples, entries), "samples": samples}
    _finish("decoding", document, options, speed.render(document))


def _memory(options: argparse.Namespace) -> None:
    from spectrain.evaluation import memory

    document = memory.measure(
        memory.Job(memory.PLAIN, options.target, options.bundle, tuple(options.traffic), options.k,
                   options.memory_tokens, options.dtype, options.seed)
    )  # fmt: skip
    _finish("memory", document, options, memory.render(document))


def _load(options: argparse.Namespace) -> None:
    from spectrain.drafters.ngram import NgramConfig, NgramDrafter
    from spectrain.evaluation.contenders import contenders
    from spectrain.evaluation.load import Load, check_context, measure_batch
    from spectrain.evaluation.load_config import LoadConfig
    from spectrain.evaluation.load_picture import draw_load
    from spectrain.evaluation.load_summary import render, summarise_load

    target, conversations, trained = _loaded(options)
    drafters = {"ngram": NgramDrafter(NgramConfig()), **({trained.config.type: trained} if trained else {})}
    prompts = _prompts(target, conversations, None, options)
    config = LoadConfig(batch=options.batch, context=options.context, groups=options.batch_groups,
                        repeats=options.repeats)  # fmt: skip
    load = Load(contenders(drafters, options.k), prompts, config, options.max_new_tokens, options.seed)
    check_context(target, load)
    lines = [measure_batch(target, load, size) for size in sorted(set(options.batch))]
    head = _head("batching", options, target)
    document = {**head, "title": f"{head['target']}, greedy, on {head['machine']['device']}", **summarise_load(lines),
                "raw": lines}  # fmt: skip
    path = _finish("batching", document, options, render(document))
    with atomic_file(path.with_suffix(".png")) as partial, partial.open("wb") as file:
        draw_load(document, file)
    print(f"picture: {path.with_suffix('.png')}")


def _training(options: argparse.Namespace) -> None:
    from spectrain.ablation import parse_variant
    from spectrain.config import load_recipe
    from spectrain.evaluation.training_speed import Job, measure, render

    jobs = []
    for variant in map(parse_variant, options.variant or VARIANTS):
        recipe = load_recipe(options.recipe, variant.overrides)
        if not recipe.drafter.trainable:
            raise SpectrainError(f"{options.recipe}: drafter {recipe.drafter.type} has nothing to train")
        jobs.append(Job(variant.name, recipe.target.name, recipe.target.dtype, recipe.drafter, options.step_tokens,
                        options.row_tokens, options.answer_share, options.seed))  # fmt: skip
    document = measure(jobs, options.steps)
    _finish("training", document, options, render(document))


def _check_training(options: argparse.Namespace) -> None:
    _at_least(options, 2, "steps")
    _at_least(options, 16, "row_tokens")
    _at_least(options, options.row_tokens, "step_tokens")
    if options.step_tokens % options.row_tokens:
        raise SpectrainError(
            f"--step-tokens {options.step_tokens}: expected a multiple of --row-tokens, {options.row_tokens}: rows are "
            "whole"
        )
    if not 0.1 <= options.answer_share <= 1:
        raise SpectrainError(f"--answer-share {options.answer_share}: expected a number from 0.1 to 1")


# --- what they share ----------------------------------------------------------------------------------------------


def _what_decodes(parser: argparse.ArgumentParser, files: str) -> None:
    parser.add_argument("target", nargs="?", default=TARGET, help="folder or Hub id (default: %(default)s)")
    option(parser, "--bundle", "measured too")
    option(parser, "--traffic", "their last turns are answered", otherwise="those of recipes/traffic/")
    parser.set_defaults(traffic=list(TRAFFIC))
    option(parser, "--max-new-tokens", default=64)
    option(parser, "--dtype")
    option(parser, "--seed", "the choice and order")
    option(parser, "--output", files, required=False, default=OUTPUT)


def _loaded(options: argparse.Namespace) -> tuple[Any, Any, Any]:
    """The target, the chats, and the bundle's drafter (None without one)."""
    from transformers.utils import logging

    from spectrain.bundle import load_drafter
    from spectrain.data.conversations import load_conversations
    from spectrain.target import load_target

    logging.set_verbosity_error()  # generate() would tell of flags that greedy decoding ignores, every time
    conversations = load_conversations(options.traffic)
    target = load_target(options.target, dtype=options.dtype)
    if options.bundle is None:
        return target, conversations, None
    trained, _, notes = load_drafter(options.bundle, target)
    for note in notes:
        print(f"note: {note}", flush=True)
    return target, conversations, trained


def _prompts(target: Any, conversations: Any, count: int | None, options: argparse.Namespace) -> Any:
    from spectrain.evaluation.workbench import prompts_of

    return prompts_of(target, conversations, count, options.max_new_tokens, options.seed)


def _head(benchmark: str, options: argparse.Namespace, target: Any) -> dict[str, Any]:
    from spectrain.evaluation.workbench import machine, shown_name

    settings = {name: value for name, value in vars(options).items() if name not in ("target", "bundle", "output")}
    about = {"target": shown_name(options.target), "machine": machine(target.device, target.dtype)}
    return {"benchmark": benchmark, **about, "settings": settings}


def _finish(benchmark: str, document: dict[str, Any], options: argparse.Namespace, text: str) -> Path:
    path = Path(options.output, f"{benchmark}.json")
    write_json(path, document)
    print(f"{text}\n\nmeasured: {path}")
    return path


def _at_least(options: argparse.Namespace, least: int, *names: str, why: str = "") -> None:
    for name in names:
        if (value := getattr(options, name)) < least:
            reason = f": {why}" if why else ""
            raise SpectrainError(
                f"--{name.replace('_', '-')} {value}: expected a whole number of at least {least}{reason}"
            )
