"""A bundle: the checkpoint folder that a server loads as it is, plus spectrain.json: what it belongs to.

Saving is atomic, loading is strict, and neither touches a pickle, remote code or a path outside the folder.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedConfig

from spectrain import interop
from spectrain.drafters.base import TrainableDrafter
from spectrain.drafters.ranks import RANKS_FILE
from spectrain.errors import SpectrainError
from spectrain.fetching import refused
from spectrain.files import atomic_folder, file_digest, json_digest, write_json
from spectrain.identity import (
    DECODE_COMPONENTS,
    TargetIdentity,
    TokenizerIdentity,
    compare,
    compare_targets,
    target_identity,
    tokenizer_identity,
)
from spectrain.manifest import (
    MANIFEST_FILE,
    REPORT_FILE,
    Belonging,
    ImportRecord,
    Manifest,
    TargetRecord,
    TokenizerRecord,
    Trained,
    read_manifest,
    target_of,
)
from spectrain.target import Target
from spectrain.weights import OWN_TARGET

__all__ = [
    "ADDED_LATER",
    "REPORT_FILE",
    "Belonging",
    "BundleContents",
    "Trained",
    "check_pairing",
    "load_drafter",
    "read_bundle",
    "resolve_bundle",
    "save_bundle",
    "save_drafter",
    "target_of",
    "unbound_drafter",
]
ADDED_LATER = {"README.md", REPORT_FILE, RANKS_FILE, "report.png"}
_LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub")


@dataclass(frozen=True)
class BundleContents:
    """A checked bundle. ``settings`` are the checkpoint format's own; ``notes`` tell harmless differences."""

    folder: Path
    manifest: Manifest
    config: dict[str, Any]
    settings: Any
    tensors: dict[str, Tensor]
    tokenizer: Any
    identity: TokenizerIdentity
    notes: tuple[str, ...] = ()


def save_bundle(
    folder: Path | str,
    *,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    drafter: Mapping[str, Any],
    belongs: Belonging,
    trained: Trained | None = None,
    write_more: Callable[[Path], None] = lambda folder: None,
    imported_from: ImportRecord | None = None,
) -> Manifest:
    """Write a bundle at ``folder``, whole or not at all; an earlier bundle there is replaced.

    ``config`` and ``tensors`` are a checkpoint as its interop format writes it, and are checked first;
    ``drafter`` is the drafter's own configuration. The tokenizer is read back before the bundle appears, so
    one that changes when saved is refused. ``write_more`` adds files; where they are a model in ``OWN_TARGET``, that is
    the bundle's target from then on, derived from the one that it ``belongs`` to.
    """
    folder, trained = Path(folder), trained or Trained()
    target, tokenizer, eos_ids = belongs.target, belongs.tokenizer, tuple(belongs.eos_ids)
    check_place(folder)
    format_ = interop.format_of_config(config, str(folder))
    settings, tensors = format_.from_checkpoint(config, tensors, str(folder))
    identity = tokenizer_identity(tokenizer, eos_ids)
    with atomic_folder(folder) as partial:
        interop.write_checkpoint(partial, config, tensors)
        tokenizer.save_pretrained(partial)
        comparison = compare(identity, tokenizer_identity(load_tokenizer(partial), eos_ids))
        if comparison.level != "identical":
            raise SpectrainError(f"the tokenizer changes when saved: {comparison.first_difference}")
        write_more(partial)
        moved = target_identity(partial / OWN_TARGET, OWN_TARGET) if (partial / OWN_TARGET).is_dir() else None
        manifest = Manifest(
            spectrain_version=importlib.metadata.version("spectrain"),
            checkpoint_format=format_.NAME,
            drafter=dict(drafter),
            storage_dtype=_storage_dtype(tensors),
            target=TargetRecord(**asdict(moved or target)),
            derived_from=TargetRecord(**asdict(target)) if moved else None,
            tokenizer=TokenizerRecord(
                decode_digest=identity.decode_digest,
                traffic_digest=identity.traffic_digest,
                components=identity.digests,
                eos_ids=eos_ids,
            ),
            taps=settings.taps,
            tap_convention=None if settings.taps is None else format_.TAP_CONVENTION,
            sampler=dict(trained.sampler),
            draft_vocabulary_digest=_vocabulary_digest(format_, tensors),
            recipe=dict(trained.recipe),
            data_digests=dict(trained.data_digests),
            versions={name: importlib.metadata.version(name) for name in _LIBRARIES},
            files={name: file_digest(partial / name) for name in sorted(interop.list_files(partial))},
            imported_from=imported_from,
        )
        write_json(partial / MANIFEST_FILE, manifest.model_dump(mode="json"))
    return manifest


def check_place(folder: Path) -> None:
    """SpectrainError where a bundle at ``folder`` would replace what is none."""
    ours = not folder.exists() or (folder / MANIFEST_FILE).is_file()
    if not ours and (not folder.is_dir() or any(folder.iterdir())):
        raise SpectrainError(f"{folder} exists and is no bundle: choose another folder, or empty it")


def save_drafter(
    folder: Path | str, drafter: TrainableDrafter, belongs: Belonging, trained: Trained | None = None
) -> Manifest:
    """``save_bundle`` of a drafter in the format its servers read."""
    target = belongs.target
    config, tensors = interop.format_for(drafter).from_drafter(drafter, target.name or "", [target.architecture])
    return save_bundle(
        folder,
        config=config,
        tensors={name: tensor.detach().cpu() for name, tensor in tensors.items()},
        drafter=drafter.config.model_dump(mode="json"),
        belongs=belongs,
        trained=trained,
        write_more=drafter.write_more,
    )


def load_drafter(
    name: str | Path, target: Target, *, revision: str | None = None
) -> tuple[TrainableDrafter, BundleContents, tuple[str, ...]]:
    """The drafter of a bundle (folder or Hub id), checked against ``target`` and bound to it; harmless notes last."""
    contents = read_bundle(resolve_bundle(name, revision))
    identity = tokenizer_identity(target.tokenizer, contents.manifest.tokenizer.eos_ids)
    notes = check_pairing(contents, identity, target.identity())
    drafter = unbound_drafter(contents).to(device=target.device).eval()
    drafter.bind(target)
    return drafter, contents, (*contents.notes, *notes)


def unbound_drafter(contents: BundleContents) -> TrainableDrafter:
    """The drafter of a bundle that was read, without any target."""
    format_ = interop.format_of_config(contents.config, str(contents.folder))
    return format_.to_drafter(contents.settings, contents.tensors, contents.manifest.drafter)


def read_bundle(folder: Path | str) -> BundleContents:
    """Read and check a whole bundle; SpectrainError names the first file, key or tensor that is wrong."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    interop.check_listing(folder, manifest.files, MANIFEST_FILE, ADDED_LATER)
    config, tensors = interop.read_config(folder), interop.read_tensors(folder)
    format_ = interop.format_of_config(config, str(folder))
    settings, tensors = format_.from_checkpoint(config, tensors, str(folder))
    for field, found in {
        "checkpoint_format": format_.NAME,
        "taps": settings.taps,
        "tap_convention": None if settings.taps is None else format_.TAP_CONVENTION,
        "storage_dtype": _storage_dtype(tensors),
        "draft_vocabulary_digest": _vocabulary_digest(format_, tensors),
    }.items():
        if getattr(manifest, field) != found:
            raise SpectrainError(
                f"{folder}: {field} is {found!r} in the checkpoint, {getattr(manifest, field)!r} in {MANIFEST_FILE}"
            )
    tokenizer = load_tokenizer(folder)
    identity = tokenizer_identity(tokenizer, manifest.tokenizer.eos_ids)
    notes = check_tokenizer(folder, manifest, identity) + unchecked(manifest)
    return BundleContents(folder, manifest, config, settings, tensors, tokenizer, identity, notes)


def check_pairing(
    bundle: BundleContents, tokenizer: TokenizerIdentity, target: TargetIdentity | None = None
) -> tuple[str, ...]:
    """Raise with the first difference when a bundle does not fit a target; return harmless ones as notes.

    ``tokenizer`` and ``target`` are the target's identities, the former taken with the bundle's ``eos_ids``.
    """
    comparisons = [compare(bundle.identity, tokenizer)]
    if target is not None:
        comparisons.append(compare_targets(bundle.manifest.target.identity, target))
    for comparison in comparisons:
        if comparison.level == "different":
            raise SpectrainError(
                f"{bundle.folder} does not fit this target ({target_of(bundle.folder, bundle.manifest)} was its own; "
                f"bundle against target): {comparison.first_difference}"
            )
    return tuple(note for comparison in comparisons for note in comparison.differences)


def resolve_bundle(name_or_path: str | Path, revision: str | None = None) -> Path:
    """The folder of a bundle: a local one as it is, or a Hub id fetched at ``revision`` into the cache."""
    path, name = Path(name_or_path), str(name_or_path)
    if path.is_dir():
        if revision is not None:
            raise SpectrainError(f"{path} is a local folder: it has no revision {revision!r}")
        return path
    patterns = sorted(f"*{suffix}" for suffix in interop.SUFFIXES)
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except HFValidationError:
        raise SpectrainError(f"{name} is neither a folder nor a Hub id") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        at = f" at revision {revision}" if revision else ""
        why = refused(error, name, revision)
        raise SpectrainError(f"no folder {name}, and the Hub did not give it{at}: {why}") from error


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder whose config.json, if any, may be of a kind that only servers know."""
    known = (folder / "config.json").is_file() and interop.read_config(folder).get("model_type") in CONFIG_MAPPING
    config = {} if known else {"config": PreTrainedConfig()}  # else it would be read, with a warning
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True, **config)


def _storage_dtype(tensors: Mapping[str, Tensor]) -> str:
    kinds = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values() if tensor.is_floating_point()}
    return "+".join(sorted(kinds))


def _vocabulary_digest(format_: interop.Format, tensors: Mapping[str, Tensor]) -> str | None:
    ids_D = format_.draft_vocabulary(tensors)
    return None if ids_D is None else json_digest(ids_D.tolist())


def unchecked(manifest: Manifest) -> tuple[str, ...]:
    """What nobody could check when a checkpoint from elsewhere became a bundle."""
    origin = manifest.imported_from
    return () if origin is None else tuple(f"imported from {origin.layout}: {what}" for what in origin.not_checked)


def check_tokenizer(folder: Path, manifest: Manifest, identity: TokenizerIdentity) -> tuple[str, ...]:
    """SpectrainError where the ids of a bundle's tokenizer mean something else than its manifest says; notes for the
    rest. Of what older versions did not record, nothing is said."""
    recorded, found = manifest.tokenizer.components, identity.digests
    differing = [name for name in recorded if recorded[name] != found.get(name)]
    for name in DECODE_COMPONENTS:
        if name in differing:
            raise SpectrainError(
                f"{folder}: the tokenizer's {name} is not the one the drafter was trained with: "
                f"digest {found[name]}, {MANIFEST_FILE} says {recorded[name]}"
            )
    versions = f"written with tokenizers {manifest.versions.get('tokenizers')}"
    return tuple(f"the tokenizer's {name} reads differently here ({versions})" for name in differing)
