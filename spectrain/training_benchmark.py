"""The benchmark of training as a command. Heavy imports wait until it runs, so that ``--help`` is instant."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from spectrain.cli_options import command_parser
from spectrain.errors import SpectrainError
from spectrain.files import write_json

RECIPE = "recipes/smollm2-135m-instruct/eagle3.yaml"
OUTPUT = "runs/benchmarks/training.json"
VARIANTS = tuple(
    f"{depths}-depths-{columns}: drafter.depths={depths} drafter.draft_vocab_size={columns}"
    for columns in (8192, 49152)
    for depths in (3, 7)
)


def training(arguments: Sequence[str], name: str = "training") -> None:
    """Speed and memory of training steps, beside steps that hold all logits at once."""
    parser = command_parser(
        name,
        "Tokens per second and peak memory of a recipe's training step, beside the plain way to write it, which holds\n"
        "the target's law and the drafter's logits of every position at once. Both train the same drafter on the same\n"
        "features, in turn, each in a process of its own; that they agree on loss and gradient is checked first. The\n"
        "text is random tokens, and the loss forward KL: neither matters to the time.",
        f"{name} {RECIPE} --variant 'long: drafter.depths=7' --tokens 4096 --row-tokens 2048",
    )
    parser.add_argument("recipe", nargs="?", default=RECIPE, help="whose target and drafter (default: %(default)s)")
    parser.add_argument("--variant", action="append", metavar="'NAME: key.path=value ...'",
                        help="what is measured, several times if need be; 'base:' is the recipe as it is (default: 3 "
                        "and 7 depths at 8,192 and at 49,152 columns)")  # fmt: skip
    parser.add_argument("--tokens", type=int, default=2048, help="of a step (default: %(default)s)")
    parser.add_argument("--row-tokens", type=int, default=512, help="of each row (default: %(default)s)")
    parser.add_argument("--answer-share", type=float, default=1.0,
                        help="share of a row, at its end, that is trained on (default: %(default)s)")  # fmt: skip
    parser.add_argument("--steps", type=int, default=8, help="each way, after one to warm up (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of tokens and order (default: %(default)s)")
    parser.add_argument("--output", metavar="FILE.json", default=OUTPUT, help="the numbers (default: %(default)s)")
    options = parser.parse_args(arguments)
    _check(options)
    from spectrain.ablation import parse_variant
    from spectrain.config import load_recipe
    from spectrain.evaluation.training_speed import Job, measure, render

    jobs = []
    for variant in map(parse_variant, options.variant or VARIANTS):
        recipe = load_recipe(options.recipe, variant.overrides)
        if not recipe.drafter.trainable:
            raise SpectrainError(f"{options.recipe}: drafter {recipe.drafter.type} has nothing to train")
        jobs.append(Job(variant.name, recipe.target.name, recipe.target.dtype, recipe.drafter, options.tokens,
                        options.row_tokens, options.answer_share, options.seed))  # fmt: skip
    document = measure(jobs, options.steps)
    write_json(Path(options.output), document)
    print(f"{render(document)}\n\nmeasured: {options.output}")


def _check(options: argparse.Namespace) -> None:
    for flag, least in (("steps", 2), ("row_tokens", 16), ("tokens", options.row_tokens)):
        if getattr(options, flag) < least:
            found = getattr(options, flag)
            raise SpectrainError(f"--{flag.replace('_', '-')} {found}: expected a whole number of at least {least}")
    if options.tokens % options.row_tokens:
        raise SpectrainError(
            f"--tokens {options.tokens}: expected a multiple of --row-tokens, {options.row_tokens}: rows are whole"
        )
    if not 0.1 <= options.answer_share <= 1:
        raise SpectrainError(f"--answer-share {options.answer_share}: expected a number from 0.1 to 1")
