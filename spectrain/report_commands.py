"""Commands that read acceptance documents and need no model. Heavy imports wait until a command runs."""

from __future__ import annotations

from collections.abc import Sequence

from spectrain.cli_options import command_parser
from spectrain.errors import SpectrainError

DOCUMENT = ".json"


def report(arguments: Sequence[str], name: str = "spectrain report") -> None:
    """Rebuild the reports from acceptance.json."""
    text = (
        "Rebuild everything that is made from an acceptance.json: report.md, report.html, report.png, acceptance.csv\n"
        "and speculation_profile.json. Needs no model."
    )
    parser = command_parser(name, text, f"{name} runs/quickstart/acceptance.json --output runs/quickstart")
    parser.add_argument("document", help="an acceptance.json")
    parser.add_argument("--output", required=True, metavar="DIR", help="where the reports go")
    options = parser.parse_args(arguments)
    from spectrain.evaluation.report import render_report

    for path in render_report(options.document, options.output):
        print(path)


def are_documents(arguments: Sequence[str]) -> bool:
    """Whether ``compare`` was given documents, which need no traffic, and not bundles."""
    traffic = any(argument.split("=")[0] == "--traffic" for argument in arguments)
    return not traffic and any(argument.endswith(DOCUMENT) for argument in arguments)


def side_by_side(arguments: Sequence[str], name: str) -> None:
    """Set acceptance documents side by side."""
    parser = command_parser(
        name,
        "Set the reports of several acceptance.json side by side: speedup, tokens per round, acceptance, latency and\n"
        "verdict, as Markdown, a page and a table. Refused when they were not measured alike: other traffic, sampler,\n"
        "target, device, threads, dtype or token budget.",
        f"{name} runs/a/acceptance.json runs/b/acceptance.json --output runs/side_by_side",
    )
    parser.add_argument("documents", nargs="+", metavar="FILE.json", help="acceptance documents")
    parser.add_argument("--output", required=True, metavar="DIR", help="where the comparison goes")
    options = parser.parse_args(arguments)
    for document in options.documents:
        if not document.endswith(DOCUMENT):
            raise SpectrainError(
                f"{document} is no acceptance document ({DOCUMENT}); give documents alone, or bundles alone with "
                "--traffic"
            )
    from spectrain.evaluation.side_by_side import render_side_by_side

    for path in render_side_by_side(options.documents, options.output):
        print(path)
