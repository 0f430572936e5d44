"""spectrain.json: what a bundle belongs to, and whether others could fetch that too."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from spectrain.errors import SpectrainError
from spectrain.files import json_digest
from spectrain.identity import TargetIdentity
from spectrain.weights import OWN_TARGET

if TYPE_CHECKING:
    from spectrain.target import Target

MANIFEST_FILE, REPORT_FILE = "spectrain.json", "acceptance.json"


@dataclass(frozen=True)
class Belonging:
    """The target that a bundle belongs to, its tokenizer, and the ids that end an answer beside the tokenizer's own."""

    target: TargetIdentity
    tokenizer: Any
    eos_ids: Sequence[int] = ()

    @classmethod
    def to(cls, target: Target) -> Belonging:
        return cls(target.identity(), target.tokenizer, target.eos_ids)


@dataclass(frozen=True)
class Trained:
    """What a training run knows of itself: the sampler of the answers it learnt from, its resolved recipe, and digests
    of its data by name. Nothing, of a drafter that was trained elsewhere."""

    sampler: Mapping[str, Any] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    data_digests: Mapping[str, str] = field(default_factory=dict)


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TargetRecord(_Record):
    """The target a drafter was trained for; the fields of TargetIdentity."""

    name: str | None
    revision: str | None
    architecture: str
    weights_digest: str
    config_digest: str

    @property
    def identity(self) -> TargetIdentity:
        return TargetIdentity(**self.model_dump())


class TokenizerRecord(_Record):
    """Digests of the tokenizer's identity; ``eos_ids`` are those given beside the tokenizer's own."""

    decode_digest: str
    traffic_digest: str
    components: dict[str, str]
    eos_ids: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _components_add_up(self) -> TokenizerRecord:
        if json_digest(self.components) != self.traffic_digest:
            raise ValueError("components do not add up to traffic_digest: the manifest was changed")
        return self


class ImportRecord(_Record):
    """Of a bundle that was made of a checkpoint from elsewhere: its layout, the SHA-256 of its weights as they came,
    and what could not be checked because it does not say."""

    layout: str
    weights: str
    not_checked: tuple[str, ...]


class Manifest(_Record):
    """spectrain.json. ``files`` maps every other file, save those of ADDED_LATER, to its SHA-256.

    A target that was trained with the drafter lies in the bundle, in ``OWN_TARGET``; ``target`` is then that one, and
    ``derived_from`` the one that training started from.
    """

    format_version: Literal[1] = 1
    spectrain_version: str
    checkpoint_format: str
    drafter: dict[str, Any]
    storage_dtype: str
    target: TargetRecord
    derived_from: TargetRecord | None = None
    tokenizer: TokenizerRecord
    taps: tuple[int, ...] | None
    tap_convention: str | None
    sampler: dict[str, Any]
    draft_vocabulary_digest: str | None
    recipe: dict[str, Any]
    data_digests: dict[str, str]
    versions: dict[str, str]
    files: dict[str, str]
    imported_from: ImportRecord | None = None

    @model_validator(mode="after")
    def _taps_have_a_convention(self) -> Manifest:
        if (self.taps is None) != (self.tap_convention is None):
            raise ValueError("taps and tap_convention belong together: one of them is missing")
        return self

    @model_validator(mode="after")
    def _sections_are_objects(self) -> Manifest:
        for section in ("target", "data", "training"):
            if not isinstance(self.recipe.get(section, {}), dict):
                raise ValueError(f"recipe.{section} is {self.recipe[section]!r}, expected an object")
        return self

    @model_validator(mode="after")
    def _own_target_has_an_origin(self) -> Manifest:
        if (self.derived_from is not None) != any(name.startswith(f"{OWN_TARGET}/") for name in self.files):
            raise ValueError(f"derived_from and the files of {OWN_TARGET}/ belong together: one of them is missing")
        return self


def read_manifest(folder: Path | str) -> Manifest:
    """Parse spectrain.json strictly; nothing else is read."""
    path = Path(folder) / MANIFEST_FILE
    try:
        return Manifest.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise _no_bundle(Path(folder)) from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the manifest"
        raise SpectrainError(f"{path}: {place}: {first['msg']} (found {first['input']!r:.200})") from error
    except ValueError as error:
        raise SpectrainError(f"{path} is not JSON: {error}") from error


def check_bundle(name: str) -> None:
    """SpectrainError where ``name`` is a folder, and no bundle."""
    folder = Path(name)
    if folder.is_dir() and not (folder / MANIFEST_FILE).is_file():
        raise _no_bundle(folder)


def report_file(bundle: Path, given: Path | None, instead: str = "") -> Path:
    """The report that was given, a file or its folder, or else the bundle's own; SpectrainError where there is none.

    ``instead`` says what may be given in its place.
    """
    path = given or bundle
    path = path / REPORT_FILE if path.is_dir() else path
    if not path.is_file():
        raise SpectrainError(
            f"{path} is not there, so nobody can tell whether {bundle} pays; {measure_again(bundle)}{instead}"
        )
    return path


def measure_again(bundle: Path) -> str:
    """How a bundle gets a report."""
    return (
        f"measure this one: spectrain evaluate {bundle} --traffic chats.jsonl --output DIR, and give "
        f"--report DIR/{REPORT_FILE}"
    )


def holds_bundle(folder: Path) -> str | None:
    """The bundle that a run's or a checkpoint's folder holds, for who named the folder; None where there is none."""
    inner = folder / "bundle"
    return f"did you mean {inner}" if (inner / MANIFEST_FILE).is_file() else None


def _no_bundle(folder: Path) -> SpectrainError:
    hint = holds_bundle(folder) or "spectrain import makes one of other checkpoints"
    return SpectrainError(f"{folder} is no bundle: it has no {MANIFEST_FILE}; {hint}")


def target_of(folder: Path | str, manifest: Manifest) -> str | None:
    """Where the bundle's target lies: in the bundle itself, or under the name that its manifest gives, if any.

    SpectrainError where files of one in the bundle are missing.
    """
    if manifest.derived_from is None:
        return manifest.target.name
    own = (name for name in sorted(manifest.files) if name.startswith(f"{OWN_TARGET}/"))
    missing = next((name for name in own if not (Path(folder) / name).is_file()), None)
    if missing is not None:
        raise SpectrainError(
            f"{folder} is incomplete: {missing}, a file of its own target, is missing; fetch or copy the bundle again"
        )
    return str(Path(folder) / OWN_TARGET)


def target_record(folder: Path | str, manifest: Manifest) -> TargetRecord:
    """The bundle's target under the name that loads it."""
    return manifest.target.model_copy(update={"name": target_of(folder, manifest)})


def template_kwargs(manifest: Manifest) -> dict[str, Any]:
    """The variables of the chat template that the drafter's training chats were rendered with."""
    return dict(manifest.recipe.get("data", {}).get("chat_template_kwargs", {}))


def chose_the_step(manifests: Iterable[Manifest], conversations: str) -> bool | None:
    """Whether the conversations with this digest are held-out ones by which a bundle's training chose its step or end.

    They are also recognised with other answers than those that training saw, where these were regenerated. None where
    nobody can tell: bundles of earlier versions do not say what they were before they were answered anew.
    """
    found = [_chose(manifest, conversations) for manifest in manifests]
    return True if True in found else None if None in found else False


def _chose(manifest: Manifest, conversations: str) -> bool | None:
    training, digests = manifest.recipe.get("training", {}), manifest.data_digests
    if training.get("select") != "best" and training.get("patience") is None:
        return False
    if conversations in (digests.get("heldout"), digests.get("heldout_asked")):
        return True
    unsaid = bool(manifest.recipe.get("regenerate")) and "heldout" in digests and "heldout_asked" not in digests
    return None if unsaid else False


def public_target(manifest: Manifest) -> TargetRecord:
    """The target that others fetch: the bundle's, or what the one in it was derived from."""
    return manifest.derived_from or manifest.target


def publishable(manifest: Manifest) -> str | None:
    """Why the bundle cannot be published, or None when it can."""
    public = public_target(manifest)
    name, revision = public.name, public.revision
    if not name or not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) or Path(name).exists():
        return f"its target is {name!r}, not a Hub id; give the id and revision that others can fetch"
    if not revision:
        return f"its target {name} has no revision; give the commit that the drafter was trained against"
    return None


def with_target(manifest: Manifest, name: str, revision: str) -> Manifest:
    """The manifest with another name and revision of the target that others fetch; its digests stay."""
    field = "target" if manifest.derived_from is None else "derived_from"
    record = getattr(manifest, field).model_copy(update={"name": name, "revision": revision})
    return manifest.model_copy(update={field: record})
