"""Training that starts from the weights of a bundle: whether it is one to start from, and the start itself."""

from __future__ import annotations

from pathlib import Path

from spectrain.bundle import BundleContents, read_bundle, resolve_bundle, unbound_drafter
from spectrain.drafters import TrainableDrafter
from spectrain.drafters.base import check_type
from spectrain.errors import SpectrainError
from spectrain.identity import compare, compare_targets, tokenizer_identity
from spectrain.manifest import read_manifest, target_of
from spectrain.target import Target


def find_start(bundle: str, revision: str | None, family: str, target: Target) -> Path:
    """The folder of a bundle (folder or Hub id) that a drafter of type ``family`` for ``target`` may start from.

    SpectrainError, without a drafter at hand, where it is none, is damaged, holds another type of drafter, or its ids
    mean other tokens. Sizes show in ``warm_start``.
    """
    try:
        folder = resolve_bundle(bundle, revision)
        check_type(str(read_manifest(folder).drafter.get("type")), family)
        _check_ids(read_bundle(folder), target)
    except SpectrainError as error:
        raise SpectrainError(f"warm_start.bundle {bundle}: {error}") from error
    return folder


def warm_start(drafter: TrainableDrafter, folder: Path, target: Target, *, remap: bool = False) -> tuple[str, ...]:
    """Give ``drafter`` the weights of the bundle in ``folder``; harmless differences as notes.

    The bundle's own target may be another one, as long as its ids mean the same: SpectrainError where they do not, or
    where the drafters are not of one family and size.
    """
    key = f"warm_start.bundle {folder}"
    try:
        contents = read_bundle(folder)
        notes = [*contents.notes, *_check_ids(contents, target)]
        models = compare_targets(contents.manifest.target.identity, target.identity())
        if models.level == "different":
            own, origin = target_of(folder, contents.manifest), contents.manifest.derived_from
            own = f"{own} (derived from {origin.name})" if origin is not None else own
            notes.append(f"it was trained for another target, {own}: {models.first_difference}")
        notes += drafter.warm_start(unbound_drafter(contents), target, remap=remap)
    except SpectrainError as error:
        raise SpectrainError(f"{key}: {error}") from error
    return tuple(f"{key}: {note}" for note in notes)


def _check_ids(contents: BundleContents, target: Target) -> tuple[str, ...]:
    """SpectrainError where the ids of a bundle mean other tokens than the target's; harmless differences."""
    tokens = compare(contents.identity, tokenizer_identity(target.tokenizer, contents.manifest.tokenizer.eos_ids))
    if tokens.level == "different":
        raise SpectrainError(
            f"its ids mean other tokens than this target's (bundle against target): {tokens.first_difference}"
        )
    return tokens.differences
