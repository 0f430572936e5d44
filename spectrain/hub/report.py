"""The acceptance document that goes with a bundle: there, measured on this very bundle, honest about its rules."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from spectrain.decoding.verification import Verification, is_lossy
from spectrain.errors import SpectrainError
from spectrain.evaluation.document import read_document
from spectrain.evaluation.leaves import LOSSY
from spectrain.hub.request import measure_again, report_file
from spectrain.interop import WEIGHTS_FILE
from spectrain.manifest import Manifest


def read_report(bundle: Path, manifest: Manifest, given: Path | None) -> dict[str, Any]:
    """The document at ``given``, a file or its folder, or the bundle's own; SpectrainError where it is another's."""
    path, again = report_file(bundle, given), measure_again(bundle)
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


def own_contenders(block: Mapping[str, Any], drafter: str) -> list[Mapping[str, Any]]:
    return [contender for contender in block["contenders"] if contender["drafter"] == drafter]


def served_k(document: Mapping[str, Any], drafter: str) -> int:
    """How many tokens to draft a round: of the exact chains measured the fastest; without chains, a tree's depth."""
    own = [c for block in document["samplers"] for c in own_contenders(block, drafter) if not c["lossy"]]
    if not own:
        raise SpectrainError(f"the report has no exact measurement of {drafter}; measure it: spectrain evaluate")
    chains = [c for c in own if c["shape"]["type"] == "chain"] or own
    return int(max(chains, key=lambda c: c["pooled"]["speedup"]["decode"]["value"])["depth"])
