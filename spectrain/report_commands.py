"""Commands that read acceptance documents and need no model. Heavy imports wait until a command runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from spectrain.cli_options import command_parser, option
from spectrain.errors import SpectrainError
from spectrain.output import telling

DOCUMENT = ".json"


def report(arguments: Sequence[str], name: str = "spectrain report") -> None:
    """Rebuild the reports from acceptance.json."""
    text = (
        "Rebuild everything that is made from an acceptance.json: report.md, report.html, report.png, acceptance.csv\n"
        "and speculation_profile.json, beside it where no other folder is named. Needs no model."
    )
    parser = command_parser(name, text, f"{name} runs/quickstart/acceptance.json")
    parser.add_argument("document", metavar="FILE.json", help="an acceptance.json")
    option(parser, "--output", "the reports", required=False, otherwise="the folder of FILE.json")
    option(parser, "--json", "the verdicts, and where the reports are")
    options = parser.parse_args(arguments)
    from spectrain.evaluation.report import render_report

    with telling(options.json) as tell:
        folder = Path(options.document).parent if options.output is None else options.output
        paths = list(map(str, render_report(options.document, folder)))
        tell({**findings(options.document), "reports": paths}, "\n".join(paths))


def findings(document: Path | str) -> dict[str, Any]:
    """What a script would ask an acceptance.json: the verdict under each sampler, in all and by drafter."""
    from spectrain.evaluation.document import read_document

    blocks = read_document(document)["samplers"]
    return {"document": str(document), "verdicts": {block["name"]: block["verdict"] for block in blocks}}


def finish(document: Path, tell: Callable[[Mapping[str, Any], str], None]) -> None:
    """Say what was found and where the numbers are, once however many processes measured them, and let these go."""
    from spectrain.distributed import processes

    if processes().is_main_process:
        from spectrain.evaluation.document import read_document
        from spectrain.evaluation.told import told

        beside = "reports beside it: report.html, report.md, report.png, acceptance.csv"
        tell(findings(document), f"{told(read_document(document))}\n\nmeasured: {document}; {beside}")
    processes().destroy_process_group()


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
    option(parser, "--output", "the comparison")
    option(parser, "--json", "where the comparison is")
    options = parser.parse_args(arguments)
    for document in options.documents:
        if not document.endswith(DOCUMENT):
            raise SpectrainError(
                f"{document} is no acceptance document ({DOCUMENT}); give documents alone, or bundles alone with "
                "--traffic"
            )
    from spectrain.evaluation.side_by_side import render_side_by_side

    with telling(options.json) as tell:
        paths = list(map(str, render_side_by_side(options.documents, options.output)))
        tell({"documents": options.documents, "reports": paths}, "\n".join(paths))
