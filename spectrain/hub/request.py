"""What is asked to be published, and all that can be seen to be wrong with it before the bundle's weights are read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spectrain.errors import SpectrainError, told
from spectrain.hub.metadata import check_given, check_id, read_notes
from spectrain.manifest import Manifest, public_target, publishable, read_manifest, report_file, with_target


@dataclass(frozen=True)
class Request:
    """A bundle, the repository it goes to, and what only its owner knows.

    ``target`` and ``revision`` name a target that was a folder in training; ``metadata`` and ``notes`` (a Markdown file
    with metadata of its own) go into the card, the former first; ``traffic`` are chat files whose words must not leave.
    """

    bundle: Path
    repo: str
    metadata: Mapping[str, Any]
    target: str | None = None
    revision: str | None = None
    report: Path | None = None
    notes: Path | None = None
    traffic: tuple[str, ...] = ()


def check_request(request: Request) -> Manifest:
    """The bundle's manifest, with the target by the name that others fetch it by.

    SpectrainError with everything that is missing or wrong, a line each.
    """
    recorded = read_manifest(request.bundle)
    found = [
        *told(lambda: _check_repo(request.repo)),
        *told(lambda: _check_metadata(request)),
        *told(lambda: _named(recorded, request)),
        *told(lambda: report_file(request.bundle, request.report)),
        *_missing(request.traffic),
    ]
    if found:
        raise SpectrainError("\n".join(found))
    return _named(recorded, request)


def _check_repo(repo: str) -> None:
    check_id(repo, "repository")
    if "/" not in repo:
        raise SpectrainError(f"repository {repo!r} has no owner: expected ORG/NAME")


def _check_metadata(request: Request) -> None:
    noted = read_notes(request.notes)[0] if request.notes else {}
    check_given({**noted, **request.metadata})


def _missing(traffic: tuple[str, ...]) -> Iterator[str]:
    for name in traffic:
        if not Path(name).is_file():
            yield f"--traffic: {name}: no such file; give the chats that the drafter was trained and measured on"


def _named(manifest: Manifest, request: Request) -> Manifest:
    """The manifest with a target that others can fetch."""
    hint = "; publish with --target ORG/NAME --target-revision COMMIT"
    recorded = public_target(manifest)
    if request.target or request.revision:
        name, revision = request.target or recorded.name, request.revision or recorded.revision
        manifest = with_target(manifest, str(name or ""), str(revision or ""))
    reason = publishable(manifest)
    if reason is not None:
        raise SpectrainError(f"{request.bundle} cannot be published: {reason}{hint}")
    revision = str(public_target(manifest).revision)
    if not re.fullmatch(r"[0-9a-f]{40}", revision):
        raise SpectrainError(
            f"{request.bundle} cannot be published: its target's revision {revision!r} can move; name the commit, 40 "
            f"hexadecimal digits{hint}"
        )
    return manifest
