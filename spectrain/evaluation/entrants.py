"""Who is measured: bundles of one target, found, loaded for it, and named so that they can be told apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spectrain.bundle import BundleContents, load_drafter, resolve_bundle
from spectrain.drafters import Drafter
from spectrain.errors import SpectrainError
from spectrain.evaluation.leaves import LOSSY
from spectrain.identity import compare_targets
from spectrain.manifest import Manifest, TargetRecord, read_manifest, target_of, target_record
from spectrain.target import Target, load_target


@dataclass(frozen=True)
class Entrant:
    """A bundle's drafter, ready to be measured under its name.

    ``target`` is the one it goes with, and ``original`` the one that this was derived from, where it was and that is at
    hand.
    """

    drafter: Drafter
    contents: BundleContents
    target: Target
    original: Target | None = None

    @property
    def manifest(self) -> Manifest:
        return self.contents.manifest

    def described(self) -> dict[str, Any]:
        """Its own configuration and taps: what the bundle has, and what was asked for where that is something else."""
        taken, rest = self.drafter.came_to(), {k: v for k, v in self.manifest.drafter.items() if k != "type"}
        rest |= {**taken, **{f"{k}_asked_for": rest[k] for k, v in taken.items() if rest.get(k, v) != v}}
        origin = self.manifest.imported_from
        rest |= {} if origin is None else {"imported_from": origin.layout, "not_checked": list(origin.not_checked)}
        return rest | ({"tap_layers": list(self.manifest.taps)} if self.manifest.taps else {})


def load_entrant(bundle: Path, target: Target, original: Target | None = None) -> Entrant:
    """A bundle for its own target, or for the one that this was derived from."""
    manifest, own = read_manifest(bundle), target
    if _same(manifest.derived_from, target):
        name = str(target_of(bundle, manifest))
        own = load_target(name, dtype=str(target.dtype), device=str(target.device),
                          attention=target.model.config._attn_implementation)  # fmt: skip
        original = target
    drafter, contents, notes = load_drafter(bundle, own)
    if original is not None and not _same(manifest.derived_from, original):
        raise SpectrainError(f"{bundle} was not derived from {original.name}; give the target that it was derived from")
    for note in notes:
        print(f"note: {note}", flush=True)
    return Entrant(drafter, contents, own, original)


def resolve_bundles(bundles: Sequence[str]) -> dict[str, Path]:
    """Folders or Hub ids → the folder of each.

    Raises SpectrainError for one that is no bundle, is given twice, or does not belong to the first one's target: see
    ``shared_target``.
    """
    folders: dict[str, Path] = {}
    for bundle in bundles:
        folder = resolve_bundle(bundle)
        before = next((name for name, other in folders.items() if other.resolve() == folder.resolve()), None)
        if before is not None:
            raise SpectrainError(f"bundle {bundle} is given twice (before as {before}); give every bundle once")
        folders[bundle] = folder
    shared_target(folders)
    return folders


def shared_target(folders: Mapping[str, Path]) -> TargetRecord:
    """The target that all bundles go with, or that their own targets were derived from.

    Raises SpectrainError where there is none, naming a bundle that does not belong to the target of the first.
    """
    records = {bundle: _targets(folder) for bundle, folder in folders.items()}
    (first, candidates), *others = records.items()
    strangers: list[tuple[str, str | None]] = []
    for candidate in candidates:
        stranger = next(((name, found) for name, found in others if not any(_same(r, candidate) for r in found)), None)
        if stranger is None:
            return candidate
        name, found = stranger
        strangers.append((name, compare_targets(candidate.identity, found[0].identity).first_difference))
    name, difference = strangers[0]
    raise SpectrainError(
        f"{name} does not belong to the target of {first} ({difference}); compare bundles of one target"
    )


def _targets(folder: Path) -> list[TargetRecord]:
    """What a bundle's target was derived from, if it was, and the target itself, by the name that loads it."""
    manifest = read_manifest(folder)
    own = target_record(folder, manifest)
    return [own] if manifest.derived_from is None else [manifest.derived_from, own]


def _same(record: TargetRecord | None, other: TargetRecord | Target) -> bool:
    identity = other.identity() if isinstance(other, Target) else other.identity
    return record is not None and compare_targets(record.identity, identity).level != "different"


def names_of(bundles: Sequence[str], families: Sequence[str]) -> list[str]:
    """A name for each bundle: its family, and where others share it as much of its folder as tells them apart.

    "runs/a/bundle" and "runs/b/bundle" are "eagle3 (runs/a)" and "eagle3 (runs/b)".
    """
    parts = [Path(bundle).parts for bundle in bundles]
    names = list(families)
    for family, count in Counter(families).items():
        members = [i for i, found in enumerate(families) if found == family]
        if count > 1:
            for i, label in zip(members, _labels([parts[i] for i in members]), strict=True):
                names[i] = f"{family} ({label})"
    for name in names:
        if LOSSY in name:
            raise SpectrainError(f"bundle {name}: {LOSSY} marks rules that change the output; rename the folder")
    return names


def _labels(paths: Sequence[tuple[str, ...]]) -> list[str]:
    """The ends of paths, without what all end in: of two parts, or of as many as make them differ."""
    ending = 0
    while all(len(path) > ending + 1 and path[-1 - ending] == paths[0][-1 - ending] for path in paths):
        ending += 1
    heads = [path[: len(path) - ending] for path in paths]
    for size in range(2, max(map(len, heads)) + 1):
        labels = [str(Path(*head[-size:])) for head in heads]
        if len(set(labels)) == len(labels):
            return labels
    return [str(Path(*head)) for head in heads]
