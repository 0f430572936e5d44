"""Publishing as a command. Heavy imports wait until it runs, so that ``--help`` is instant."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from spectrain.cli_options import OWN, command_parser, option
from spectrain.errors import SpectrainError
from spectrain.output import telling


def publish(arguments: Sequence[str], name: str = "spectrain publish") -> None:
    """Put a measured bundle on the Hub, with its card."""
    parser = command_parser(
        name,
        "Publish a bundle with its acceptance report, its picture and a model card made from them, in one commit that\n"
        "is read back. Only the bundle's own files leave, without paths of this machine; a bundle that was not\n"
        "measured, or whose target others cannot fetch, is refused. The token comes from HF_TOKEN or hf auth login.",
        f"{name} runs/quickstart/bundle ORG/NAME --license apache-2.0 --target ORG/MODEL --target-revision COMMIT \\\n"
        "      --traffic runs/quickstart/data/train.jsonl --dry-run",
        "0 published, or all of it was there; 1 disk or permissions",
    )
    option(parser, "bundle", "to publish it has to be a folder")
    parser.add_argument("repo", metavar="ORG/NAME", help="a repository on the Hub; one that is not there is made")
    parser.add_argument("--license", metavar="ID", help="as the Hub names it, such as apache-2.0, llama3.1 or other")
    parser.add_argument("--license-name", metavar="NAME", help="of a license other")
    parser.add_argument("--license-link", metavar="URL", help="of a license other")
    parser.add_argument("--dataset", action="append", metavar="ID", help="a public data set it was trained on; several")
    parser.add_argument("--notes", metavar="FILE.md", help="text for the card's end, with metadata of its own if any")
    option(parser, "--report", "of this bundle", otherwise="the one in it")
    option(parser, "--target", "the id that others fetch, of one that was a folder here", otherwise=OWN)
    option(parser, "--target-revision", "the whole commit, 40 hexadecimal digits")
    option(parser, "--traffic", "no word of them may leave", default=[], otherwise="none")
    parser.add_argument("--branch", metavar="NAME", help="a branch that is there (default: main)")
    parser.add_argument("--private", action="store_true", help="for you and your organisation alone")
    option(parser, "--dry-run", "the files and the card; nothing is sent")
    option(parser, "--json", "the files, the card and where they are")
    options = parser.parse_args(arguments)
    request = _request(options)
    from spectrain.hub.contents import gather  # seconds, as what sends
    from spectrain.hub.remote import send

    with telling(options.json) as tell:
        publication = gather(request)
        document = {"repo": options.repo, "files": publication.sizes, "notes": list(publication.notes)}
        for note in publication.notes:
            print(f"note: {note}")
        if options.dry_run:
            sizes = [f"{size:>14,} bytes  {path}" for path, size in publication.sizes.items()]
            nothing = f"dry run: {len(publication.files)} files for {options.repo}; nothing was sent, and the Hub was "
            nothing += "not asked whether it has the target"
            tell({**document, "card": publication.card, "sent": None},
                 "\n".join([*sizes, "", publication.card, nothing]))  # fmt: skip
            return
        sent = send(publication, private=options.private, branch=options.branch)
        lines = [*(f"removed: {path}" for path in sent.removed),
                 f"{'published' if sent.new else 'all of it was there already'}: {sent.url}",
                 "every file was read back by its digest"]  # fmt: skip
        tell({**document, "card": publication.card, "sent": {**asdict(sent), "removed": list(sent.removed)}},
             "\n".join(lines))  # fmt: skip


def _request(options: argparse.Namespace) -> Any:
    from spectrain.hub.request import Request, check_request

    bundle = Path(options.bundle)
    if not bundle.is_dir():
        raise SpectrainError(f"{bundle} is no folder; publish a bundle that lies here")
    given = {
        "license": options.license,
        "license_name": options.license_name,
        "license_link": options.license_link,
        "datasets": options.dataset,
    }
    request = Request(
        bundle=bundle,
        repo=options.repo,
        metadata={key: value for key, value in given.items() if value is not None},
        target=options.target,
        revision=options.target_revision,
        report=Path(options.report) if options.report else None,
        notes=Path(options.notes) if options.notes else None,
        traffic=tuple(options.traffic),
    )
    check_request(request)  # before libraries are loaded
    return request
