"""Options that several commands share: one name, one type and one meaning each. Nothing heavy is imported: ``--help``
is instant."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from spectrain.errors import SpectrainError
from spectrain.places import check_writable
from spectrain.settings import LONGEST

RECIPE = "my.yaml"
DONE = "0 done; 1 disk or permissions"

OVERRIDES = "any key of the recipe as key.path=value, for instance optim.lr=2e-4 training.epochs=2"
TREE = (
    "a tree for every drafter that fills trees, may be given several times: dynamic:DEPTH,TOP_K,NODES grows by "
    "confidence, for instance dynamic:5,4,16; or its nodes as paths of ranks, for instance '0;1;0,0': the two most "
    "likely tokens, and the most likely one after the first. 'chosen:0;1;0,0' takes the most likely tokens at T>0 too, "
    "'independent:' draws children with replacement, 'distinct:' (what a bare path means) without. measured:NODES is "
    "the best static tree of so many nodes for each bundle, by its measured ranks (see spectrain tree)"
)
RULES = (
    "how chains are judged, with commas: token (one by one), block (as a whole: the same law, as many tokens accepted "
    "or more), typical_lossy (LOSSY: changes the output's law; shown, never recommended)"
)

BAD_ROWS = "what happens to rows that cannot be read, rendered or answered; drop leaves them out, counted by reason"
VARIANT = "what a variant overrides; may be given several times. 'base:' is the recipe as it is"


class Parser(argparse.ArgumentParser):
    """Its errors are those of every other mistake: one message, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise SpectrainError(f"{message.removeprefix('argument ')}; {self.prog} --help tells more")


def command_parser(name: str, text: str, example: str, done: str = DONE) -> Parser:
    codes = f"exit codes: {done}; 2 bad input; 130 interrupted"
    return Parser(
        prog=name, description=text, epilog=f"example:\n  {example}\n\n{codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip


def recipe_command(name: str, text: str, example: str, done: str = DONE) -> Parser:
    parser = command_parser(name, text, example, done)
    option(parser, "recipe")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help=OVERRIDES)
    return parser


# --- values -------------------------------------------------------------------------------------------------------


def numbers(text: str) -> tuple[float, ...]:
    """Numbers with commas."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers with commas, for instance 0,0.7 (found {text!r})") from None


def sizes(text: str) -> tuple[int, ...]:
    """Whole numbers of at least 1 with commas."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = (0,)
    if min(found) < 1:
        raise argparse.ArgumentTypeError(
            f"expected whole numbers of at least 1 with commas, for instance 1,2,4 (found {text!r})"
        )
    return found


def lengths(text: str) -> tuple[int, ...]:
    """Draft lengths: one, several with commas, or from one to another."""
    first, dots, last = text.partition("..")
    try:
        ends = tuple(int(part) for part in ((first, last) if dots else text.split(",")))
    except ValueError:
        ends = (0,)
    if min(ends) < 1 or max(ends) > LONGEST or (dots and ends[0] > ends[1]):
        raise argparse.ArgumentTypeError(
            f"expected draft lengths from 1 to {LONGEST}, for instance 5, 1,3,5 or 1..8 (found {text!r})"
        )
    return tuple(range(ends[0], ends[1] + 1)) if dots else ends


def one(values: tuple[int, ...] | None, flag: str) -> int | None:
    """The only value of an option that elsewhere takes several."""
    if values is not None and len(values) > 1:
        raise SpectrainError(f"{flag}: expected one number (found {','.join(map(str, values))})")
    return values[0] if values else None


def output(text: str, *, as_a_whole: bool = False) -> str:
    """A folder that files are written into."""
    try:
        check_writable("folder", text, as_a_whole=as_a_whole)
    except SpectrainError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def destination(text: str) -> str:
    """A folder that is put in place as a whole."""
    return output(text, as_a_whole=True)


def bundle(text: str) -> str:
    """What may be a bundle: a folder that is none is told before the libraries are loaded that read one."""
    from spectrain.manifest import check_bundle  # with the libraries that check a manifest, which --help does without

    try:
        check_bundle(text)
    except SpectrainError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


# --- options ------------------------------------------------------------------------------------------------------

# What a flag is called and means wherever it stands. A command adds what it does with it, and its default.
FLAGS: dict[str, dict[str, Any]] = {
    "bundle": {"metavar": "BUNDLE", "type": bundle, "help": "a bundle: a folder or a Hub id"},
    "destination": {"metavar": "DIR", "type": destination, "help": "the folder to write"},
    "recipe": {"help": "a YAML recipe; spectrain recipe writes one to start from"},
    "--answer-share": {"metavar": "SHARE", "type": float, "help": "share of the tokens that are answers"},
    "--bad-rows": {"choices": ("error", "drop"), "default": "error", "metavar": "error|drop", "help": BAD_ROWS},
    "--bandwidth": {"metavar": "GB/S", "type": float, "help": "of one device's memory"},
    "--batch": {"metavar": "SIZES", "type": sizes, "help": "requests that share a step, with commas"},
    "--batch-groups": {"metavar": "N", "type": int, "help": "batches of each size"},
    "--bundle": {"metavar": "BUNDLE", "type": bundle, "help": "a bundle of this target: a folder or a Hub id"},
    "--context": {"metavar": "SIZES", "type": sizes, "help": "cached tokens behind a verification, with commas"},
    "--conversations": {"metavar": "N", "type": int, "help": "take this many chats, spread over the kinds"},
    "--dry-run": {"action": "store_true", "help": "say what would be done, and do nothing"},
    "--dtype": {"metavar": "DTYPE", "default": "float32", "help": "of the target"},
    "--json": {"action": "store_true", "help": "print one JSON object on stdout, and all else on stderr"},
    "--k": {"metavar": "LENGTHS", "type": lengths, "help": "draft tokens a round: 5, or 1,3,5, or 1..8"},
    "--max-new-tokens": {"metavar": "N", "type": int, "default": 128, "help": "of one answer, at most"},
    "--output": {"metavar": "DIR", "required": True, "type": output, "help": "the folder to write into"},
    "--report": {"metavar": "FILE", "help": "an acceptance.json"},
    "--revision": {"metavar": "REVISION", "help": "of a Hub id: branch, tag or commit"},
    "--row-tokens": {"metavar": "N", "type": int, "help": "tokens of a row"},
    "--seed": {"metavar": "N", "type": int, "default": 0, "help": "seed of all that is random"},
    "--target": {"metavar": "NAME", "help": "the target: a folder or a Hub id"},
    "--target-revision": {"metavar": "REVISION", "help": "of the target's Hub id: branch, tag or commit"},
    "--temperature": {"metavar": "NUMBERS", "type": numbers, "default": "0", "help": "with commas; 0 is greedy"},
    "--tflops": {"metavar": "TFLOP/S", "type": float, "help": "of one device, in the target's dtype"},
    "--traffic": {"metavar": "FILE", "nargs": "+", "help": "chats: .jsonl, .json, .parquet"},
    "--tree": {"metavar": "TREE", "action": "append", "help": TREE},
    "--variant": {"metavar": "'NAME: key.path=value ...'", "action": "append", "help": VARIANT},
    "--verification": {"metavar": "RULES", "help": RULES},
}
OWN = "the bundle's own"


def option(parser: argparse.ArgumentParser, flag: str, tells: str = "", *, otherwise: str = "", **changes: Any) -> None:
    """A shared option, with what this command does with it; ``otherwise`` is a default in words."""
    settings = {**FLAGS[flag], **changes}
    default = "%(default)s" if settings.get("default") not in (None, []) else otherwise
    text = "; ".join(filter(None, [settings.pop("help"), tells]))
    parser.add_argument(flag, help=f"{text} (default: {default})" if default else text, **settings)


def planning(parser: argparse.ArgumentParser) -> None:
    """Whether to train or only to say what that would be, and what that is to assume."""
    option(parser, "--dry-run", "rows, steps, memory and time")
    for flag in ("--tflops", "--bandwidth"):
        option(parser, flag, "with --dry-run", otherwise="measured here")


def counting(parser: argparse.ArgumentParser) -> None:
    """What a recipe is held against, and what is assumed."""
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="of training (default: %(default)s)")
    parser.add_argument("--device-memory", type=float, metavar="GIB", help="of one device, to be fitted into")
    parser.add_argument("--tokens", type=int, metavar="N",
                        help="to train on (default: counted in a prepared run, or in the recipe's files)")  # fmt: skip
    option(parser, "--answer-share", "of --tokens")
    option(parser, "--row-tokens", "of --tokens, the mean", otherwise="1024, at most data.max_length")
    for flag in ("--tflops", "--bandwidth"):
        option(parser, flag, otherwise="measured here")
    parser.add_argument("--utilisation", type=float, default=0.4, metavar="SHARE",
                        help="share of --tflops that a step reaches; assumed (default: %(default)s)")  # fmt: skip
    parser.add_argument("--config", metavar="FILE", help="the target's config.json (default: in its folder, beside "
                        "the recipe, or on the Hub)")  # fmt: skip
    option(parser, "--json", "all that the table shows, in bytes and seconds")


def measurement(parser: argparse.ArgumentParser) -> None:
    """What is measured, on what."""
    option(parser, "--traffic", "held out from training", required=True)
    option(parser, "--bad-rows", "also in the report")
    option(parser, "--output", "acceptance.json and the reports")
    option(parser, "--target", otherwise=OWN)
    option(parser, "--k", default="3,5")
    option(parser, "--tree")
    option(parser, "--verification", default="token")
    option(parser, "--temperature")
    parser.add_argument("--top-k", type=int, metavar="N", help="top-k of every temperature above 0")
    parser.add_argument("--top-p", type=float, metavar="P", help="top-p of every temperature above 0")
    option(parser, "--max-new-tokens")
    option(parser, "--conversations", otherwise="all")
    parser.add_argument("--stop-at", type=float, metavar="WIDTH", help="end early, once tokens per round of every "
                        "contender is known to ± this (95%%); chats are then taken in a random order")  # fmt: skip
    option(parser, "--dtype")
    option(parser, "--seed", "sampling and the order of the chats")
    under_load(parser)
    option(parser, "--json", "the verdicts, and where the numbers are")


def under_load(parser: argparse.ArgumentParser) -> None:
    """Batches of requests, which are measured only where they are asked for."""
    option(parser, "--batch", "measures these too, for instance 1,2,4,8,16: what a verification costs there, and up "
           "to which it pays (with the first temperature)")  # fmt: skip
    option(parser, "--context", otherwise="what the measured requests have in the middle of their answers")
    option(parser, "--batch-groups", otherwise="8")
    parser.add_argument("--request-rate", type=numbers, metavar="NUMBERS",
                        help="requests a second, with commas: running batch, latency and the best draft length there, "
                        "from the batches of --batch")  # fmt: skip


def greedy_check(parser: argparse.ArgumentParser) -> None:
    """What is compared with plain decoding, on what."""
    option(parser, "--traffic", "the last turn of each is answered", required=True)
    option(parser, "--bad-rows")
    option(parser, "--target", otherwise=OWN)
    option(parser, "--bundle")
    option(parser, "--conversations", default=64)
    option(parser, "--max-new-tokens")
    option(parser, "--batch", default="1,5")
    option(parser, "--k", default="5")
    option(parser, "--tree", otherwise="one of each")
    option(parser, "--verification", "lossy ones have nothing to be equal to", default="token,block")
    parser.add_argument("--tolerance", type=float, metavar="GAP",
                        help="gap of logits up to which a difference is a tie (default: what rounding explains, 1e-3 "
                        "in float32 and 0.5 in bfloat16)")  # fmt: skip
    option(parser, "--dtype")
    option(parser, "--seed", "the choice of chats")
    option(parser, "--json", "every scheme by batch, each difference and the number of faults")


def variants(parser: argparse.ArgumentParser) -> None:
    """What is tried against each other."""
    option(parser, "--variant", "each is told against those before it", required=True)
    parser.add_argument("--seeds", default="0,1,2", metavar="NUMBERS",
                        help="training seeds, with commas (default: %(default)s)")  # fmt: skip
    option(parser, "--output", "NAME-SEED/, a run each, and ablation.json")
