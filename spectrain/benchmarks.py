"""The benchmarks as commands. Heavy imports wait until one runs, so that ``--help`` is instant."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spectrain.errors import SpectrainError
from spectrain.files import atomic_file, write_json

TARGET = "targets/smollm2-135m-instruct"
TRAFFIC = ("recipes/traffic/narrow_heldout.jsonl", "recipes/traffic/open_heldout.jsonl")


def _parser(name: str, text: str, example: str, output: str) -> argparse.ArgumentParser:
    codes = "exit codes: 0 done, 1 disk or permissions, 2 bad input, 130 interrupted"
    parser = argparse.ArgumentParser(
        prog=name, description=text, epilog=f"example:\n  {example}\n\n{codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("target", nargs="?", default=TARGET, help="folder or Hub id (default: %(default)s)")
    parser.add_argument("--bundle", metavar="DIR", help="a bundle of this target, folder or Hub id; measured too")
    parser.add_argument("--traffic", nargs="+", metavar="FILE", default=list(TRAFFIC),
                        help="chats whose answers are decoded (default: those of recipes/traffic/)")  # fmt: skip
    parser.add_argument("--max-new-tokens", type=int, default=64, help="of one answer, at most (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", help="dtype of the target (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice and order (default: %(default)s)")
    parser.add_argument("--output", metavar="FILE.json", help=f"where the numbers go (default: {output})")
    return parser


def decoding(arguments: Sequence[str], name: str = "decoding") -> None:
    """Decoding speed, or peak memory, beside transformers' own decoders."""
    speeds, memories = "runs/benchmarks/decoding.json", "runs/benchmarks/memory.json"
    parser = _parser(
        name,
        "Tokens per second of greedy decoding, plain and speculative, beside transformers' generate: the same target,\n"
        "prompts, draft model and draft length, in turn in one process; with intervals over prompts, and whether all\n"
        "outputs are the same tokens. The draft model is the target's first, middle and last layer: untrained, so the\n"
        "ratio tells about the decoders, not about the drafter. With --memory: peak memory of one long answer instead.",
        f"{name} --bundle runs/quickstart/bundle --prompts 8 --k 5",
        f"{speeds}, or {memories}",
    )
    parser.add_argument("--prompts", type=int, default=8, help="how many, spread over the kinds (default: %(default)s)")
    parser.add_argument("--k", type=int, default=5, help="draft tokens a round (default: %(default)s)")
    parser.add_argument(
        "--tree-nodes", type=int, default=15, help="of the bundle's dynamic tree (default: %(default)s)"
    )
    parser.add_argument("--memory", action="store_true", help="measure peak memory, not speed")
    parser.add_argument("--memory-tokens", type=int, default=2048, help="length of that answer (default: %(default)s)")
    options = parser.parse_args(arguments)
    _positive(options, "prompts", "k", "tree_nodes", "max_new_tokens", "memory_tokens")
    if options.prompts < 2:
        raise SpectrainError(f"--prompts {options.prompts}: an interval over prompts needs at least 2")
    if options.memory:
        _memory(options, memories)
    else:
        _speed(options, speeds)


def _speed(options: argparse.Namespace, output: str) -> None:
    from spectrain.evaluation import speed

    target, conversations, trained = _loaded(options)
    tree = speed.widest_tree(options.k, options.tree_nodes)
    entries = speed.contenders(target, options.k, speed.small_draft(target), trained, tree)
    prompts = _prompts(target, conversations, options.prompts, options)
    samples = speed.measure(target, entries, prompts, options.max_new_tokens, options.seed)
    document = {**_head("decoding", options, target), **speed.summarise(samples, entries), "samples": samples}
    _finish(document, options, output, speed.render(document))


def _memory(options: argparse.Namespace, output: str) -> None:
    from spectrain.evaluation import memory

    document = memory.measure(
        memory.Job(memory.PLAIN, options.target, options.bundle, tuple(options.traffic), options.k,
                   options.memory_tokens, options.dtype, options.seed)
    )  # fmt: skip
    _finish(document, options, output, memory.render(document))


def batching(arguments: Sequence[str], name: str = "batching") -> None:
    """Speculation by batch size: what verification costs, what it yields, and where it stops paying."""
    output = "runs/benchmarks/batching.json"
    parser = _parser(
        name,
        "What a verification of k+1 tokens costs beside a plain step, tokens per second with and without speculation,\n"
        "and the largest batch at which it still pays, all by batch size. Batches are drawn from the chats; requests\n"
        "that end leave their batch. A plot lies beside the numbers.",
        f"{name} --bundle runs/quickstart/bundle --batch 1,2,4,8 --k 3,5",
        output,
    )
    parser.add_argument("--batch", default="1,2,4,8,16", help="requests a batch, with commas (default: %(default)s)")
    parser.add_argument("--k", default="1,3,5,7", help="draft tokens a round, with commas (default: %(default)s)")
    parser.add_argument("--groups", type=int, default=6, help="batches of each size (default: %(default)s)")
    parser.add_argument("--context", type=int, default=256, help="cached tokens behind v (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="forwards for each v (default: %(default)s)")
    options = parser.parse_args(arguments)
    options.batch, options.k = _numbers(options.batch, "--batch"), _numbers(options.k, "--k")
    _positive(options, "groups", "context", "repeats", "max_new_tokens")
    if options.groups < 2:
        raise SpectrainError(f"--groups {options.groups}: an interval over batches needs at least 2")
    _load(options, output)


def _load(options: argparse.Namespace, output: str) -> None:
    from spectrain.drafters.ngram import NgramConfig, NgramDrafter
    from spectrain.evaluation.contenders import contenders
    from spectrain.evaluation.load import Load, check_context, measure_batch
    from spectrain.evaluation.load_config import LoadConfig
    from spectrain.evaluation.load_picture import draw_load
    from spectrain.evaluation.load_summary import render, summarise_load

    target, conversations, trained = _loaded(options)
    drafters = {"ngram": NgramDrafter(NgramConfig()), **({trained.config.type: trained} if trained else {})}
    prompts = _prompts(target, conversations, None, options)
    config = LoadConfig(batch=options.batch, context=(options.context,), groups=options.groups,
                        repeats=options.repeats)  # fmt: skip
    load = Load(contenders(drafters, options.k), prompts, config, options.max_new_tokens, options.seed)
    check_context(target, load)
    lines = [measure_batch(target, load, size) for size in options.batch]
    head = _head("batching", options, target)
    document = {**head, "title": f"{head['target']}, greedy, on {head['machine']['device']}", **summarise_load(lines),
                "raw": lines}  # fmt: skip
    path = _finish(document, options, output, render(document))
    with atomic_file(path.with_suffix(".png")) as partial, partial.open("wb") as file:
        draw_load(document, file)
    print(f"picture: {path.with_suffix('.png')}")


# --- what both do -------------------------------------------------------------------------------------------------


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


def _finish(document: dict[str, Any], options: argparse.Namespace, output: str, text: str) -> Path:
    path = Path(options.output or output)
    write_json(path, document)
    print(f"{text}\n\nmeasured: {path}")
    return path


def _positive(options: argparse.Namespace, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if value < 1:
            raise SpectrainError(f"--{name.replace('_', '-')} {value}: expected a whole number of at least 1")


def _numbers(text: str, flag: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise SpectrainError(f"{flag} {text!r}: expected whole numbers of at least 1 with commas, for instance 1,2,4")
    return sorted(set(found))
