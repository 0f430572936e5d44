"""What of a bundle goes to the Hub: a fixed list of files, none with a word or a path that is its owner's own."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from spectrain.bundle import BundleContents, read_bundle, unchecked
from spectrain.drafters.ranks import RANKS_FILE, read_ranks
from spectrain.errors import SpectrainError
from spectrain.evaluation.own_report import own_report
from spectrain.evaluation.report import PICTURE, render_picture
from spectrain.files import file_digest
from spectrain.hub.card import write_card
from spectrain.hub.metadata import read_notes
from spectrain.hub.privacy import check_names, check_places, check_traffic, without_places
from spectrain.hub.request import Request, check_request
from spectrain.interop import format_of_config
from spectrain.manifest import MANIFEST_FILE, REPORT_FILE, Manifest, public_target

CARD_FILE = "README.md"
Content = bytes | Path


@dataclass(frozen=True)
class Publication:
    """Every file by its path in the repository, the card among them, and what the owner should know."""

    repo: str
    files: Mapping[str, Content]
    target: tuple[str, str]
    """What others have to fetch for it: id and commit."""
    notes: tuple[str, ...] = ()

    @property
    def card(self) -> str:
        card = self.files[CARD_FILE]
        assert isinstance(card, bytes)
        return card.decode()

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of every file."""
        return {n: c.stat().st_size if isinstance(c, Path) else len(c) for n, c in self.files.items()}


def gather(request: Request) -> Publication:
    """Read and check a bundle and everything that goes with it. Nothing is written or sent.

    Raises SpectrainError with what stands in the way: see README, "Publishing".
    """
    manifest = check_request(request)
    contents = read_bundle(request.bundle)
    doubts = [note for note in contents.notes if note not in unchecked(contents.manifest)]
    if doubts:
        raise SpectrainError(
            f"{request.bundle}: {doubts[0]}; publish with the libraries that wrote the bundle, or export it "
            "again with its target's tokenizer"
        )
    check_names(manifest.files)
    document = own_report(request.bundle, manifest, request.report)
    metadata, text = read_notes(request.notes) if request.notes else ({}, "")
    files, manifest = _bundle_files(contents, manifest)
    files[MANIFEST_FILE] = _json(manifest.model_dump(mode="json"))
    document = _document(document, contents.manifest, manifest)
    files[REPORT_FILE] = _json(document)
    files[PICTURE] = _picture(document)
    if (request.bundle / RANKS_FILE).is_file():
        files[RANKS_FILE] = _json(read_ranks(request.bundle))
    given = {**metadata, **request.metadata}
    method = format_of_config(contents.config, str(request.bundle)).SERVED.vllm
    files[CARD_FILE] = write_card(request.repo, contents.folder, manifest, document, given, method, text).encode()
    check_places(files, _places(request, contents.manifest))
    check_traffic(files, request.traffic, _of_the_target(contents))
    replaced = (request.bundle / CARD_FILE).is_file() and not request.notes
    note = f"{CARD_FILE} of the bundle gives way to the card; --notes FILE puts a text of yours into it"
    target = public_target(manifest)
    fetched = str(target.name), str(target.revision)
    return Publication(request.repo, dict(sorted(files.items())), fetched, (note,) if replaced else ())


def _bundle_files(contents: BundleContents, manifest: Manifest) -> tuple[dict[str, Content], Manifest]:
    """The files that the manifest lists and the manifest, both without paths of this machine.

    A changed file keeps its meaning: only names of places differ, and the manifest has its new digest.
    """
    renamed = _renamed(contents.manifest, manifest)
    files: dict[str, Content] = {}
    for name in manifest.files:
        path = contents.folder / name
        files[name] = path
        if PurePosixPath(name).name in ("config.json", "adapter_config.json"):
            before = json.loads(path.read_text(encoding="utf-8"))
            after = without_places(before, renamed)
            files[name] = path if after == before else _json(after)
    digests = {name: content_digest(content) for name, content in files.items()}
    changes = {field: without_places(getattr(manifest, field), renamed) for field in ("recipe", "drafter")}
    return files, manifest.model_copy(update={"files": digests, **changes})


def _renamed(before: Manifest, after: Manifest) -> dict[str, str]:
    """What the target was called here → what others call it."""
    public = str(public_target(after).name)
    names = (public_target(before).name, before.recipe.get("target", {}).get("name"))
    return {name: public for name in names if name}


def _document(document: Mapping[str, Any], before: Manifest, after: Manifest) -> dict[str, Any]:
    """The report, with the target by the name that others know, where it is not the bundle's own."""
    context = dict(document["context"])
    context["drafter"] = without_places(context["drafter"], _renamed(before, after))
    if after.derived_from is None:
        context["target"] = {**context["target"], "name": after.target.name}
    elif context["target"].get("derived_from"):
        origin = {**context["target"]["derived_from"], "name": after.derived_from.name}
        context["target"] = {**context["target"], "name": f"{after.derived_from.name}, changed", "derived_from": origin}
    return {**document, "context": context}


def _picture(document: Mapping[str, Any]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return render_picture(document, Path(folder) / PICTURE).read_bytes()


def _of_the_target(contents: BundleContents) -> list[str]:
    """What the target itself says: its template, and its tokens, of which some are whole phrases."""
    template = contents.tokenizer.chat_template
    return [template if isinstance(template, str) else json.dumps(template or ""), *contents.tokenizer.get_vocab()]


def _places(request: Request, manifest: Manifest) -> set[Path]:
    """Folders of this machine that were at hand when the bundle was made, measured and published."""
    ours = [request.bundle.resolve(), *([request.report.resolve()] if request.report else [])]
    named = [Path(name) for name in _renamed(manifest, manifest) if Path(name).is_absolute()]
    return {*ours, *(path.parent for path in ours), *named, Path.cwd(), Path.home()}


def content_digest(content: Content) -> str:
    """SHA-256 in hex."""
    return file_digest(content) if isinstance(content, Path) else hashlib.sha256(content).hexdigest()


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
