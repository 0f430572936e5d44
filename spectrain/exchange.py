"""Bundles in the checkpoint layouts of others, and their checkpoints as bundles.

What comes in has no manifest: it is given one, with the target that is named for it, so that everything that takes a
bundle takes it too. What could not be checked is recorded there and told wherever the bundle is loaded.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedConfig

from spectrain.bundle import (
    ADDED_LATER,
    Belonging,
    check_pairing,
    check_place,
    read_bundle,
    save_bundle,
    unbound_drafter,
)
from spectrain.errors import SpectrainError
from spectrain.files import atomic_folder, file_digest
from spectrain.identity import compare, tokenizer_identity
from spectrain.interop import CONFIG_FILE, WEIGHTS_FILE, list_files, write_checkpoint
from spectrain.interop.layouts import (
    TargetParts,
    drafter_of,
    foreign_weights,
    layout_named,
    layouts_of,
    read_layout,
)
from spectrain.manifest import MANIFEST_FILE, ImportRecord, Manifest
from spectrain.reload import check_reload
from spectrain.target import Target

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_NOT_OF_A_CHECKPOINT = {CONFIG_FILE, WEIGHTS_FILE, MANIFEST_FILE, *ADDED_LATER}


def export_checkpoint(bundle: Path, name: str, folder: Path, target: Target, *, verify: bool = True) -> None:
    """Write a bundle's drafter at ``folder`` in the layout called ``name``, with its tokenizer; whole or not at all.

    Without the manifest: a folder that has one claims to be a bundle. A fresh process reads it back and has to draft
    the same, unless ``verify`` is false. Raises SpectrainError where the layout has no place for the drafter.
    """
    layout, contents = layout_named(name), read_bundle(bundle)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SpectrainError(f"{folder} exists and is not empty: choose another folder, or empty it")
    family = contents.manifest.drafter["type"]
    if contents.manifest.checkpoint_format != layout.FORMAT:
        fitting = ", ".join(other.NAME for other in layouts_of(contents.manifest.checkpoint_format))
        instead = f"it can be written as {fitting}" if fitting else "there is no format of others for it"
        raise SpectrainError(f"{name} holds {layout.ABOUT}, {bundle} a drafter of type {family!r}; {instead}")
    if contents.manifest.derived_from is not None:
        raise SpectrainError(
            f"{bundle} has a target of its own, trained with the drafter, which {name} has no place for: beside any "
            "other target its drafter is a worse one. Serve the bundle as it is"
        )
    identity = tokenizer_identity(target.tokenizer, contents.manifest.tokenizer.eos_ids)
    check_pairing(contents, identity, target.identity())
    parts = TargetParts.of(target)
    config, tensors = layout.from_native(contents.config, contents.tensors, parts)
    with atomic_folder(folder) as partial:
        write_checkpoint(partial, config, tensors, layout.WEIGHTS)
        for file in sorted(set(list_files(bundle)) - _NOT_OF_A_CHECKPOINT):
            if "/" not in file:  # folders hold what belongs to the bundle alone
                shutil.copyfile(bundle / file, partial / file)
        if verify:
            drafter = unbound_drafter(contents).to(target.device)
            drafter.bind(target)
            check_reload(partial, drafter, target, name=folder)


def import_checkpoint(
    checkpoint: Path,
    bundle: Path,
    target: Target,
    *,
    changes: Mapping[str, Any] | None = None,
    verify: bool = True,
) -> tuple[Manifest, tuple[str, ...]]:
    """Make a bundle of a checkpoint in any known layout; its manifest, and notes on how it was read.

    ``changes`` are keys of its config.json to read otherwise (None: left out), where it is silent or contradicts
    itself. Raises SpectrainError where a tensor or key is wrong, or the checkpoint's tokenizer is not the target's.
    """
    check_place(bundle)
    parts = TargetParts.of(target)
    layout, native = read_layout(checkpoint, parts, changes)
    drafter = drafter_of(layout, native, str(checkpoint)).to(target.device)
    drafter.bind(target)  # before anything is written: sizes that do not fit show here
    notes, not_checked = _check_tokenizer(checkpoint, target)
    weights = file_digest(foreign_weights(checkpoint))
    record = ImportRecord(layout=layout.NAME, weights=weights, not_checked=not_checked)
    with atomic_folder(bundle) as partial:
        manifest = save_bundle(
            partial,
            config=native.config,
            tensors=native.tensors,
            drafter=drafter.config.model_dump(mode="json"),
            belongs=Belonging.to(target),
            imported_from=record,
        )
        if verify:
            check_reload(partial, drafter, target, name=bundle)
    return manifest, (*native.notes, *notes, *not_checked, *_for_itself(checkpoint, target))


def _for_itself(checkpoint: Path, target: Target) -> Iterator[str]:
    """A note where the target itself was imported: a drafter as slow as what it drafts for."""
    weights, folder = foreign_weights(checkpoint), target.folder
    own = () if folder is None else folder.glob(f"*{weights.suffix}")
    if file_digest(weights) in map(file_digest, own):
        yield "its weights are the target's own: it drafts for itself, and a round costs more than it saves"


def _check_tokenizer(checkpoint: Path, target: Target) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Harmless differences between the checkpoint's tokenizer and the target's, and what could not be compared."""
    # Without the target's name, which may be a folder: the manifest is published.
    not_checked = ["it does not say which target it was trained for; this bundle's was given for it"]
    if not any((checkpoint / name).is_file() for name in _TOKENIZER_FILES):
        not_checked.append("it has no tokenizer files: of its vocabulary only the size was compared with the target's")
        return (), tuple(not_checked)
    try:
        # Its config.json may be of a kind that transformers does not know.
        theirs = AutoTokenizer.from_pretrained(
            checkpoint, trust_remote_code=False, local_files_only=True, config=PreTrainedConfig()
        )
    except Exception as error:  # each tokenizer library raises its own kinds
        raise SpectrainError(f"{checkpoint}: its tokenizer does not load: {error}") from error
    comparison = compare(tokenizer_identity(theirs), tokenizer_identity(target.tokenizer))
    if comparison.level == "different":
        raise SpectrainError(
            f"{checkpoint} does not fit {target.name} (checkpoint against target): {comparison.first_difference}"
        )
    return comparison.differences, tuple(not_checked)
