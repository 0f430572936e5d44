"""The acceptance document of one bundle: there, measured on this very bundle, honest about its rules."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from spectrain.bundle import REPORT_FILE
from spectrain.decoding.verification import Verification, is_lossy
from spectrain.errors import SpectrainError
from spectrain.evaluation.document import read_document
from spectrain.evaluation.leaves import LOSSY
from spectrain.interop import WEIGHTS_FILE
from spectrain.manifest import Manifest


def report_path(bundle: Path, given: Path | None) -> Path:
    """The file of the report that was given, by itself or by its folder, or of the bundle's own."""
    path = given or bundle
    return path / REPORT_FILE if path.is_dir() else path


def own_report(bundle: Path, manifest: Manifest, given: Path | None, instead: str = "") -> dict[str, Any]:
    """The document at ``report_path``. SpectrainError where it is another bundle's, or does not say whose; ``instead``
    is what one may do without a report."""
    path = report_path(bundle, given)
    again = f"measure this one: spectrain evaluate {bundle} --traffic chats.jsonl --output DIR, and give "
    again += f"--report DIR/{REPORT_FILE}{instead}"
    if not path.is_file():
        raise SpectrainError(f"{path} is not there, so nobody can tell whether {bundle} pays; {again}")
    document = read_document(path)
    context = document["context"]
    for what, found, ours in (
        ("drafter", context["drafter"].get("weights"), manifest.files[WEIGHTS_FILE]),
        ("target", context["target"].get("weights"), manifest.target.weights_digest),
    ):
        if found is None:
            raise SpectrainError(f"{path} does not say which {what} was measured; {again}")
        if found != ours:
            raise SpectrainError(
                f"{path} was measured on another {what}: its weights have the digest {found}, the bundle's {ours}; "
                f"{again}"
            )
    for block in document["samplers"]:
        for contender in block["contenders"]:
            _check_label(path, contender)
    return document


def _check_label(path: Path, contender: Mapping[str, Any]) -> None:
    rule = contender["verification"]
    if rule not in (None, *get_args(Verification)):
        raise SpectrainError(f"{path}: verification {rule!r} is unknown; measure again with this version")
    lossy = rule is not None and is_lossy(rule)
    if not lossy == contender["lossy"] == (LOSSY in contender["contender"]):
        raise SpectrainError(
            f"{path}: {contender['contender']} was verified with {rule}, lossy is {contender['lossy']}: a rule that "
            f"changes the law of the output must be called {LOSSY}, and no other may be; measure again"
        )
