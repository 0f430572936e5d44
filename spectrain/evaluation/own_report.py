"""The acceptance document of one bundle: there, measured on this very bundle, honest about its rules."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from spectrain.decoding.verification import Verification, is_lossy
from spectrain.errors import SpectrainError
from spectrain.evaluation.document import read_document
from spectrain.evaluation.leaves import LOSSY
from spectrain.interop import WEIGHTS_FILE
from spectrain.manifest import Manifest, measure_again, report_file


def own_report(bundle: Path, manifest: Manifest, given: Path | None, instead: str = "") -> dict[str, Any]:
    """The document of ``report_file``; SpectrainError also where it is another bundle's, or does not say whose."""
    path, again = report_file(bundle, given, instead), measure_again(bundle) + instead
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
