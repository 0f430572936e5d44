"""Two models, tokenizers or bundles side by side: do the ids of one mean the same to the other?"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from spectrain.bundle import check_tokenizer, load_tokenizer
from spectrain.errors import SpectrainError
from spectrain.identity import (
    Comparison,
    TargetIdentity,
    TokenizerIdentity,
    check_rows,
    compare,
    compare_targets,
    target_identity,
    tokenizer_identity,
)
from spectrain.interop.gguf import gguf_tokenizer
from spectrain.manifest import MANIFEST_FILE, Manifest, holds_bundle, read_manifest
from spectrain.weights import MODEL_FILES, resolve_model

_FILES = [pattern for pattern in MODEL_FILES if "safetensors" not in pattern]  # weights are not fetched


@dataclass(frozen=True)
class Side:
    """What there is of one side; None where the folder does not say.

    ``rows`` of the embedding, ``eos_ids`` that end an answer, ``target``: the one that a bundle belongs to, or the
    model itself. ``manifest`` of a bundle.
    """

    name: str
    tokenizer: TokenizerIdentity
    rows: int | None
    eos_ids: tuple[int, ...] | None
    folder: Path | None = None
    manifest: Manifest | None = None
    notes: tuple[str, ...] = ()

    def target(self) -> TargetIdentity | None:
        """The target that a bundle belongs to, or the model itself where its weights are here."""
        if self.manifest is not None:
            return self.manifest.target.identity
        stored = self.folder is not None and any(self.folder.glob("*.safetensors"))
        return target_identity(self.folder, self.name) if stored and self.folder is not None else None


def read_side(name: str) -> Side:
    """Read a folder, a Hub id or a .gguf file, as a bundle where it is one. No weights are read or fetched.

    SpectrainError where there is no tokenizer, where a bundle's ids are not the ones of its manifest, and where a
    token has no row in the model.
    """
    if name.endswith(".gguf"):
        return _read_gguf(Path(name))
    folder, _ = resolve_model(name, files=_FILES, what="model")
    within = holds_bundle(folder)
    if within is not None:
        raise SpectrainError(f"{folder} is a run's folder, and no model, tokenizer or bundle; {within}")
    tokenizer = _loaded(name, lambda: load_tokenizer(folder))
    if (folder / MANIFEST_FILE).is_file():
        manifest = read_manifest(folder)
        notes = check_tokenizer(folder, manifest, tokenizer_identity(tokenizer, manifest.tokenizer.eos_ids))
        eos_ids = _ids(manifest.tokenizer.eos_ids, tokenizer)
        return Side(name, tokenizer_identity(tokenizer), None, eos_ids, folder, manifest, notes)
    config, generation = (_settings(folder / file) for file in ("config.json", "generation_config.json"))
    return _side(name, tokenizer, config, generation or config, folder)


def compare_sides(a: Side, b: Side, *, traffic: bool = False) -> Comparison:
    """Compare tokenizers, embedding rows and ends of answers; targets, where one side is a bundle."""
    found = [compare(a.tokenizer, b.tokenizer, traffic=traffic)]
    if None not in (a.eos_ids, b.eos_ids) and a.eos_ids != b.eos_ids:
        said = f"ends of an answer: ids {a.eos_ids} against {b.eos_ids}"
        why = " (harmless in decoding: the target's end the answers)"
        found.append(Comparison((said,)) if traffic else Comparison((), (said + why,)))
    same_tokens = a.tokenizer.components["vocabulary"] == b.tokenizer.components["vocabulary"]
    if None not in (a.rows, b.rows) and a.rows != b.rows and same_tokens:  # else the rows are those of other tokens
        why = "(harmless: rows beyond the tokens are padding, and masked)"
        found.append(Comparison((), (f"embedding rows: {a.rows} against {b.rows} {why}",)))
    if a.manifest is not None or b.manifest is not None:
        targets = a.target(), b.target()
        if targets[0] is not None and targets[1] is not None:
            found.append(compare_targets(targets[0], targets[1]))
    noted = (f"{side.name}: {note}" for side in (a, b) for note in side.notes)
    return Comparison(_joined(c.harmful for c in found), (*_joined(c.harmless for c in found), *noted))


def _joined(parts: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(text for part in parts for text in part)


def _side(name: str, tokenizer: Any, config: dict[str, Any], generation: dict[str, Any], folder: Path | None) -> Side:
    rows = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    if rows is not None:
        check_rows(tokenizer, rows)
    eos_ids = _ids(generation["eos_token_id"], tokenizer) if "eos_token_id" in generation else None
    return Side(name, tokenizer_identity(tokenizer), rows, eos_ids, folder)


def _ids(declared: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends an answer: the declared one or ones, and the tokenizer's."""
    listed = declared if isinstance(declared, (list, tuple)) else [declared]
    return tuple(sorted({int(index) for index in (*listed, tokenizer.eos_token_id) if index is not None}))


def _read_gguf(path: Path) -> Side:
    if not path.is_file():
        raise SpectrainError(f"{path} does not exist: give a model folder, a Hub id or a .gguf file")
    options: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    tokenizer = _loaded(str(path), lambda: gguf_tokenizer(path))
    config = _loaded(str(path), lambda: AutoConfig.from_pretrained(path.parent, **options)).to_dict()
    return _side(str(path), tokenizer, config, config, None)


def _loaded(name: str, load: Any) -> Any:
    try:
        found = load()
    except SpectrainError:
        raise
    except Exception as error:  # each library that reads a part of it raises its own kinds
        reason = next(iter(str(error).strip().splitlines()), "").rstrip(": ")
        raise SpectrainError(
            f"the tokenizer of {name} does not load ({type(error).__name__}: {reason}); expected tokenizer.json, or "
            "files that the installed libraries can convert to one"
        ) from error
    if hasattr(found, "get_vocab") and not found.get_vocab():
        raise SpectrainError(f"{name} has no tokenizer files; expected tokenizer.json and tokenizer_config.json")
    return found


def _settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SpectrainError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise SpectrainError(f"{path} holds a {type(found).__name__}, not an object")
    return found
