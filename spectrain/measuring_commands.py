"""The commands that decode with a target and tell what they found. Heavy imports wait until one runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spectrain.cli_options import (
    OWN,
    RECIPE,
    bundle,
    command_parser,
    greedy_check,
    measurement,
    option,
    recipe_command,
    variants,
)
from spectrain.output import telling
from spectrain.report_commands import are_documents, finish, side_by_side


def evaluate(arguments: Sequence[str], name: str = "spectrain evaluate") -> None:
    """Measure a bundle on held-out chats."""
    parser = command_parser(
        name,
        "Measure what a bundle buys on held-out chats, against plain decoding and prompt lookup on the same prompts:\n"
        "acceptance, tokens per round, device time, speedup with intervals, and a verdict: on with which k, or off.\n"
        "Interrupted, the same command goes on with the next chat; started by accelerate launch, processes share them.",
        f"{name} runs/quickstart/bundle --traffic chats.jsonl --k 1,3,5 --temperature 0,1 --output runs/report\n"
        f"  {name} runs/quickstart/bundle --traffic chats.jsonl --tree dynamic:5,4,16 --tree '0;1;0,0' \\\n"
        "      --verification token,block --output runs/trees",
    )
    option(parser, "bundle")
    measurement(parser)
    options = parser.parse_args(arguments)
    from spectrain.commands import evaluate as command

    with telling(options.json) as tell:
        finish(command(options), tell)


def compare(arguments: Sequence[str], name: str = "spectrain compare") -> None:
    """Rank several bundles on held-out chats, or set reports side by side."""
    if are_documents(arguments):
        return side_by_side(arguments, name)
    parser = command_parser(
        name,
        "Measure several bundles of one target, and drafters that need no training, on the same held-out chats in one\n"
        "run, and rank them by tokens per device-second; those that the clock cannot tell apart share a rank.\n"
        "Interrupted, the same command goes on with the next chat.\n"
        "Given acceptance.json files instead of bundles, and no traffic, it sets their reports side by side.",
        f"{name} runs/eagle3/bundle runs/medusa/bundle --traffic chats.jsonl --k 3,5 --output runs/leaderboard\n"
        f"  {name} runs/a/acceptance.json runs/b/acceptance.json --output runs/side_by_side",
    )
    parser.add_argument("bundles", nargs="+", metavar="BUNDLE", type=bundle,
                        help="bundles of one target: folders or Hub ids")  # fmt: skip
    parser.add_argument("--baselines", default="ngram,lookahead", metavar="NAMES",
                        help="drafters without training, with commas, or none (default: %(default)s)")  # fmt: skip
    measurement(parser)
    options = parser.parse_args(arguments)
    from spectrain.commands import compare as command

    with telling(options.json) as tell:
        finish(command(options), tell)


def ablation(arguments: Sequence[str], name: str = "spectrain ablation") -> None:
    """Compare variants of a recipe over several seeds."""
    parser = recipe_command(
        name,
        "Train one recipe in several variants, each with several seeds, and say which accepts more. All runs train on\n"
        "the recipe's own answers and features, with as many steps. Each bundle is measured on the held-out rows,\n"
        "teacher-forced; differences come with a 95% interval over conversations and seeds.\n"
        "Interrupted, the same command goes on; finished runs are kept.",
        f"{name} {RECIPE} --output runs/losses training.epochs=1 \\\n"
        "      --variant base: --variant \"lk: 'loss.terms={lk_hybrid: 1}'\"",
    )
    variants(parser)
    options = parser.parse_intermixed_args(arguments)
    from spectrain.ablation import ablate

    ablate(options)


def exactness(arguments: Sequence[str], name: str = "spectrain exactness") -> int:
    """Compare greedy output with plain decoding, token by token."""
    parser = command_parser(
        name,
        "Decode prompts greedily under every scheme (chains, static and dynamic trees, token and block verification)\n"
        "at every batch size, and compare each output with plain decoding, token by token. A difference between two\n"
        "tokens whose logits all but tie is one of floating point; any other is a fault. Drafters: prompt lookup; one\n"
        "that knows the answers, so that rounds of every length and every branch of a tree come up; and the bundle's,\n"
        "with --bundle.",
        f"{name} --bundle runs/quickstart/bundle --traffic chats.jsonl --batch 1,5 --json > exactness.json",
        "0 done and equal, ties apart; 1 faults found (or disk, permissions)",
    )
    greedy_check(parser)
    options = parser.parse_args(arguments)
    from spectrain.commands import exactness as command

    with telling(options.json) as tell:
        return 1 if command(options, tell) else 0


def tree(arguments: Sequence[str], name: str = "spectrain tree") -> None:
    """Find a bundle's best static tree on given answers."""
    parser = command_parser(
        name,
        "Measure how often each of a drafter's likeliest tokens is the target's, on chats with the target's answers,\n"
        "and find the best static tree. What was measured goes into the bundle, as ranks.json, where it is a folder:\n"
        "evaluate and compare make the trees of --tree measured:NODES from it. Use training chats, not held-out ones.",
        f"{name} runs/quickstart/bundle --traffic runs/quickstart/data/train.jsonl --nodes 16",
    )
    option(parser, "bundle")
    option(parser, "--traffic", "with answers by the target", required=True)
    option(parser, "--bad-rows")
    parser.add_argument(
        "--nodes", type=int, default=16, metavar="N", help="of the tree, at most (default: %(default)s)"
    )
    option(parser, "--temperature")
    option(parser, "--target", otherwise=OWN)
    option(parser, "--conversations", otherwise="all")
    option(parser, "--dtype")
    options = parser.parse_args(arguments)
    from spectrain.commands import tree as command

    command(options)


MEASURING_COMMANDS: dict[str, Callable[..., int | None]] = {
    "evaluate": evaluate,
    "compare": compare,
    "ablation": ablation,
    "exactness": exactness,
    "tree": tree,
}
