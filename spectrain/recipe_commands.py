"""Recipes to start from. Nothing heavy is imported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from spectrain.cli_options import command_parser, option
from spectrain.errors import SpectrainError
from spectrain.files import atomic_file
from spectrain.output import telling

STARTERS = Path(__file__).parent / "starters"
PLACE = "# The drafter stands here.\n"


def recipe(arguments: Sequence[str], name: str = "spectrain recipe") -> None:
    """Write a recipe to start from."""
    parser = command_parser(
        name,
        "Write a recipe for a model and traffic of yours, with a comment for each line that has to be SET. Without a\n"
        "drafter it lists them; without a file it prints the recipe.",
        f"{name}\n  {name} eagle3 my.yaml",
    )
    parser.add_argument("drafter", metavar="DRAFTER", nargs="?", help="which to train")
    parser.add_argument("file", metavar="FILE.yaml", nargs="?", help="the file to write; it must not be there yet")
    option(parser, "--json", "what there is, or the recipe's text")
    options = parser.parse_args(arguments)
    with telling(options.json) as tell:
        about = {drafter: _about(drafter) for drafter in starters()}
        if options.drafter is None:
            width = max(map(len, about))
            tell({"drafters": about}, "\n".join(f"{drafter:<{width}}  {text}" for drafter, text in about.items()))
            return
        text = starter(options.drafter)
        if options.file is None:
            tell({"drafter": options.drafter, "text": text}, text.rstrip("\n"))
            return
        path = Path(options.file)
        if path.exists():
            raise SpectrainError(f"{path} is there already; name another file, or remove it")
        with atomic_file(path) as partial:
            partial.write_text(text, encoding="utf-8")
        tell({"drafter": options.drafter, "text": text, "file": str(path)},
             f"recipe: {path}; set the lines marked SET, then: spectrain run {path}")  # fmt: skip


def starters() -> list[str]:
    """Drafters there is a recipe for."""
    return sorted(path.stem for path in (STARTERS / "drafters").glob("*.yaml"))


def starter(drafter: str) -> str:
    """A whole recipe: what all have, with a drafter of its own in its place."""
    if drafter not in starters():
        raise SpectrainError(f"{drafter!r}: there is no such recipe; expected one of {', '.join(starters())}")
    about, _, block = (STARTERS / "drafters" / f"{drafter}.yaml").read_text(encoding="utf-8").partition("\n")
    how = "# Set the lines marked SET, and start with: spectrain run FILE (prepare, train, evaluate, report).\n"
    body = (STARTERS / "body.yaml").read_text(encoding="utf-8")
    return f"{about}\n{how}{body.replace(PLACE, block)}"


def _about(drafter: str) -> str:
    return (STARTERS / "drafters" / f"{drafter}.yaml").read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
