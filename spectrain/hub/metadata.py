"""The card's metadata: what the Hub reads of a bundle, checked here, before anything is sent."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from spectrain.errors import SpectrainError
from spectrain.manifest import Manifest, public_target

# The table of hub-docs, docs/hub/repositories-licenses.md, from which the Hub takes its own, as of 2026-07.
LICENSES = frozenset(Path(__file__).with_name("licenses.txt").read_text(encoding="utf-8").split())
_OURS = ("base_model", "base_model_relation", "library_name", "model-index", "model_name", "pipeline_tag")
_FRONT_MATTER = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
_TASK = "text-generation"


def read_notes(path: Path) -> tuple[dict[str, Any], str]:
    """A Markdown file of the owner's: metadata between ``---`` lines at its head, if any, and its text."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpectrainError(f"{path} cannot be read as text: {error}; give a Markdown file in UTF-8") from error
    head = _FRONT_MATTER.match(text)
    if head is None:
        return {}, text.strip()
    try:
        found = yaml.safe_load(head[1]) or {}
    except yaml.YAMLError as error:
        raise SpectrainError(f"{path}: its metadata is not YAML: {error}") from error
    if not isinstance(found, dict):
        raise SpectrainError(f"{path}: its metadata is {type(found).__name__}, expected key: value lines")
    taken = next((key for key in _OURS if key in found), None)
    if taken is not None:
        raise SpectrainError(f"{path}: {taken} follows from the bundle and its report; take it out of the metadata")
    return found, text[head.end() :].strip()


def card_data(
    repo: str, manifest: Manifest, results: Sequence[EvalResult], given: Mapping[str, Any], method: str | None
) -> ModelCardData:
    """Everything the Hub is told; ``given`` is the owner's (license, datasets, tags, ...), ``method`` vLLM's, if it has
    one.

    Raises SpectrainError naming the first key that the Hub would refuse or not understand.
    """
    check_given(given)
    family = str(manifest.drafter["type"])
    rest = {key: value for key, value in given.items() if key not in ("license", "tags")}
    tags = ["speculative-decoding", "spectrain", family.replace("_", "-")]
    tags += ["vllm", method.replace("_", "-")] if method else []
    data = ModelCardData(
        license=given["license"],
        base_model=public_target(manifest).name,
        # What adds to a model that stays as it is, is an adapter to the Hub; a target that moved is a finetune.
        base_model_relation="adapter" if manifest.derived_from is None else "finetune",
        library_name="spectrain",
        pipeline_tag=_TASK,
        tags=list(dict.fromkeys([*tags, *given.get("tags", [])])),
        model_name=repo.rsplit("/", 1)[-1],
        eval_results=list(results) or None,
        **rest,
    )
    return data


def check_given(given: Mapping[str, Any]) -> None:
    """Raise on the first key of the owner's metadata that the Hub would refuse."""
    license_ = given.get("license")
    if license_ is None:
        raise SpectrainError("the card has no license; give one with --license, for instance the target's own")
    if license_ not in LICENSES:
        raise SpectrainError(
            f"license {license_!r} is none that the Hub knows; give an identifier such as apache-2.0, or other with "
            "--license-name and --license-link"
        )
    if license_ == "other" and not (given.get("license_name") and given.get("license_link")):
        raise SpectrainError("license other needs a name and a link: give --license-name and --license-link")
    for key, value in given.items():
        if value is None or (isinstance(value, list) and any(item in (None, "") for item in value)):
            raise SpectrainError(f"{key} of the card is {value!r}: give values that are there, or leave {key} out")
    for key in ("datasets", "tags"):
        value = given.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise SpectrainError(f"{key} of the card is {value!r}; expected a list of names")
    for name in given.get("datasets", []):
        check_id(name, "dataset")


def check_id(name: str, what: str) -> None:
    """Raise unless ``name`` is one that a repository of the Hub can have."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise SpectrainError(f"{what} {name!r} is no Hub id: expected ORG/NAME ({error})") from error


def eval_results(document: Mapping[str, Any], drafter: str) -> list[EvalResult]:
    """The drafter's lossless contenders over everything, each number with its interval."""
    traffic, confidence = document["context"]["traffic"], document["statistics"]["confidence"]
    results = []
    for block in document["samplers"]:
        for contender in block["contenders"]:
            if contender["drafter"] != drafter or contender["lossy"]:
                continue
            pooled = contender["pooled"]
            numbers = {"tokens_per_round": pooled["tokens_per_round"]}
            if pooled["speedup"] is not None:
                numbers["decode_speedup"] = pooled["speedup"]["decode"]
            for kind, number in numbers.items():
                results.append(
                    EvalResult(
                        task_type=_TASK,
                        dataset_type=traffic["digest"],
                        dataset_name=f"{traffic['name']}, {block['name']}",
                        dataset_args={"conversations": block["conversations"]},
                        metric_type=kind,
                        metric_name=f"{kind.replace('_', ' ')}, {contender['contender']}",
                        metric_value=round(number["value"], 4),
                        metric_args=_interval(number, confidence),
                    )
                )
    return results


def _interval(number: Mapping[str, Any], confidence: float) -> dict[str, Any]:
    bounds = {side: None if number[side] is None else round(number[side], 4) for side in ("low", "high")}
    return {"confidence": confidence, **bounds}
