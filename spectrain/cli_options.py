"""Options that several commands share. Nothing heavy is imported: ``--help`` is instant."""

from __future__ import annotations

import argparse

RECIPE = "recipes/smollm2-135m-instruct/eagle3.yaml"
OVERRIDES = "any key of the recipe as key.path=value, for instance optim.lr=2e-4 training.epochs=2"

TREE = (
    "a tree for every drafter that fills trees, may be given several times: dynamic:DEPTH,TOP_K,NODES grows by "
    "confidence, for instance dynamic:5,4,16; or its nodes as paths of ranks, for instance '0;1;0,0': the two most "
    "likely tokens, and the most likely one after the first. 'chosen:0;1;0,0' takes the most likely tokens at T>0 too, "
    "'independent:' draws children with replacement, 'distinct:' (what a bare path means) without. measured:NODES is "
    "the best static tree of so many nodes for each bundle, by its measured ranks (see spectrain tree)"
)
RULES = (
    "how chains are judged, several with commas: token (one by one), block (as a whole: the same law, as many tokens "
    "accepted or more), typical_lossy (LOSSY: changes the output's law; shown, never recommended); default: %(default)s"
)


DONE = "0 done; 1 disk or permissions"


def recipe_command(name: str, text: str, example: str, done: str = DONE) -> argparse.ArgumentParser:
    parser = command_parser(name, text, example, done)
    parser.add_argument("recipe", help="a YAML recipe; the ones that ship lie in recipes/")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help=OVERRIDES)
    return parser


def command_parser(name: str, text: str, example: str, done: str = DONE) -> argparse.ArgumentParser:
    codes = f"exit codes: {done}; 2 bad input; 130 interrupted"
    return argparse.ArgumentParser(
        prog=name, description=text, epilog=f"example:\n  {example}\n\n{codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip


def planning(parser: argparse.ArgumentParser) -> None:
    """Whether to train or only to say what that would be, and what that is to assume."""
    parser.add_argument("--dry-run", action="store_true", help="say rows, steps, memory and time, and start nothing")
    rates = (("--tflops", "of one device"), ("--bandwidth", "of its memory, GB/s"))
    for flag, what in rates:
        parser.add_argument(flag, type=float, metavar="FLOAT", help=f"of --dry-run: {what} (default: measured here)")


def measurement(parser: argparse.ArgumentParser) -> None:
    """What is measured, on what."""
    formats = "held-out chats: .jsonl, .json, .parquet"
    parser.add_argument("--traffic", required=True, nargs="+", metavar="FILE", help=formats)
    parser.add_argument("--output", required=True, metavar="DIR", help="where acceptance.json and the reports go")
    parser.add_argument("--target", metavar="NAME", help="folder or Hub id of the target (default: the bundle's own)")
    parser.add_argument("--k", default="3,5", help="draft tokens a round, several with commas (default: %(default)s)")
    parser.add_argument("--tree", action="append", metavar="TREE", help=TREE)
    parser.add_argument("--verification", default="token", metavar="RULES", help=RULES)
    parser.add_argument("--temperature", default="0", help="several with commas; 0 is greedy (default: %(default)s)")
    parser.add_argument("--top-k", type=int, help="top-k of every temperature above 0")
    parser.add_argument("--top-p", type=float, help="top-p of every temperature above 0")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="of one answer, at most (default: %(default)s)")
    parser.add_argument("--conversations", type=int, help="measure this many, spread over the kinds (default: all)")
    parser.add_argument("--stop-at", type=float, metavar="WIDTH", help="end early, once tokens per round of every "
                        "contender is known to ± this (95%%); chats are then taken in a random order")  # fmt: skip
    parser.add_argument("--dtype", default="float32", help="dtype of the target (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of sampling and of the order (default: %(default)s)")
    under_load(parser)


def under_load(parser: argparse.ArgumentParser) -> None:
    """Batches of requests, which are measured only where they are asked for."""
    parser.add_argument("--batch", metavar="SIZES",
                        help="measure batches of requests too, sizes with commas, for instance 1,2,4,8,16: what a "
                        "verification costs there, and up to which it pays (with the first temperature)")  # fmt: skip
    parser.add_argument("--context", metavar="TOKENS",
                        help="cached tokens behind a verification, several with commas (default: what the "
                        "measured requests have in the middle of their answers)")  # fmt: skip
    parser.add_argument("--batch-groups", type=int, metavar="N", help="batches of each size (default: 8)")
    parser.add_argument("--request-rate", metavar="RATES",
                        help="requests a second, several with commas: running batch, latency and the best draft length "
                        "there, from the batches of --batch")  # fmt: skip


def greedy_check(parser: argparse.ArgumentParser) -> None:
    """What is compared with plain decoding, on what."""
    parser.add_argument("--traffic", required=True, nargs="+", metavar="FILE", help="chats whose last turn is answered")
    parser.add_argument("--target", metavar="NAME", help="folder or Hub id of the target (default: the bundle's own)")
    parser.add_argument("--bundle", metavar="DIR", help="a bundle of this target, folder or Hub id")
    parser.add_argument(
        "--prompts", type=int, default=64, help="how many, spread over the kinds (default: %(default)s)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, help="of one answer, at most (default: %(default)s)")
    parser.add_argument("--batch", default="1,5", help="batch sizes, several with commas (default: %(default)s)")
    parser.add_argument("--k", default="5", help="draft tokens a round, several with commas (default: %(default)s)")
    parser.add_argument("--tree", action="append", metavar="TREE", help=f"{TREE} (default: one of each)")
    parser.add_argument("--verification", default="token,block", metavar="RULES",
                        help="how chains are judged: token, block (default: %(default)s)")  # fmt: skip
    parser.add_argument("--tolerance", type=float, metavar="GAP",
                        help="gap of logits up to which a difference is a tie (default: what rounding explains, 1e-3 "
                        "in float32 and 0.5 in bfloat16)")  # fmt: skip
    parser.add_argument("--dtype", default="float32", help="dtype of the target (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of prompts (default: %(default)s)")
    parser.add_argument("--output", metavar="FILE.json", help="where the numbers go, besides the table")


def variants(parser: argparse.ArgumentParser) -> None:
    """What is tried against each other."""
    parser.add_argument("--variant", action="append", required=True, metavar="'NAME: key.path=value ...'",
                        help="what a variant overrides; give one or more. 'base:' is the recipe as it is; each is "
                        "told against those before it")  # fmt: skip
    parser.add_argument("--seeds", default="0,1,2", help="training seeds, with commas (default: %(default)s)")
    parser.add_argument("--output", required=True, metavar="DIR", help="for NAME-SEED/, a run each, and ablation.json")
