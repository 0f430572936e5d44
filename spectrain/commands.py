"""What the commands do once their options are parsed."""

from __future__ import annotations

import argparse
from pathlib import Path

from pydantic import ValidationError

from spectrain.bundle import resolve_bundle
from spectrain.data.conversations import load_conversations
from spectrain.drafters.ngram import NgramConfig
from spectrain.errors import SpectrainError
from spectrain.evaluation.acceptance import AcceptanceConfig
from spectrain.exact.sampler import Sampler
from spectrain.interop.gguf import convert_gguf as convert
from spectrain.interop.gguf import package_folder
from spectrain.manifest import read_manifest
from spectrain.pipeline import evaluate_bundle
from spectrain.target import load_target

FLAGS = {"samplers": "temperature"}  # settings whose flag has another name


def evaluate(options: argparse.Namespace) -> Path:
    """Measure a bundle on chat files; the path of acceptance.json."""
    temperatures = _numbers(options.temperature, "--temperature", float)
    try:
        config = AcceptanceConfig(
            k=tuple(int(k) for k in _numbers(options.k, "--k", int)),
            samplers=tuple(_sampler(t, options) for t in temperatures),
            conversations=options.conversations,
            max_new_tokens=options.max_new_tokens,
            seed=options.seed,
        )
    except ValidationError as error:
        first = error.errors()[0]
        flag = FLAGS.get(str(first["loc"][0]), str(first["loc"][0]).replace("_", "-"))
        message = first["msg"].removeprefix("Value error, ")
        raise SpectrainError(f"--{flag}: {message} (found {first['input']!r})") from error
    conversations = load_conversations(options.traffic)
    folder = resolve_bundle(options.bundle)
    recorded = read_manifest(folder).target
    name = options.target or recorded.name
    if not name:
        raise SpectrainError(f"{folder} does not say which target it belongs to; name it with --target")
    revision = recorded.revision if name == recorded.name else None
    target = load_target(name, revision=revision, dtype=options.dtype)
    traffic = ", ".join(Path(path).name for path in options.traffic)
    return evaluate_bundle(folder, target, conversations, config, Path(options.output), traffic=traffic,
                           baselines=(NgramConfig(),))  # fmt: skip


def _sampler(temperature: float, options: argparse.Namespace) -> Sampler:
    return Sampler(temperature, options.top_k, options.top_p) if temperature else Sampler()


def _numbers(text: str, flag: str, kind: type) -> list[float]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise SpectrainError(f"{flag} {text!r}: expected numbers with commas, for instance {flag} 1,3,5") from None


def convert_gguf(options: argparse.Namespace) -> None:
    """Convert once; a finished folder is left alone."""
    destination = Path(options.destination)
    if (destination / "config.json").is_file() and (destination / "model.safetensors").is_file():
        print(f"{destination} is there already")
        return
    source = Path(options.file) if options.file else package_folder(options.package)
    convert(source, destination)
    print(f"target: {destination}")
