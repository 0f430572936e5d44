"""The check of a machine as a command. Heavy imports wait until it runs, so that ``--help`` is instant."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spectrain.cli_options import OVERRIDES, RECIPE, command_parser, option
from spectrain.errors import SpectrainError
from spectrain.output import telling

if TYPE_CHECKING:
    from spectrain.config import Recipe
    from spectrain.doctor import Subject


def doctor(arguments: Sequence[str], name: str = "spectrain doctor") -> int:
    """Check versions, devices, threads, memory, disks and launcher."""
    parser = command_parser(
        name,
        "Check what spectrain runs on: versions, devices and their driver, threads, memory, disks, Accelerate's\n"
        "launcher and the Hub; with a recipe or a bundle also whether its target can be had, and whether there is\n"
        "room for what spectrain estimate says. A change would make it better, a fault has to be mended; each says\n"
        "how. Nothing is written or started, and nothing is fetched without --online.",
        f"{name}\n  {name} {RECIPE} --json",
        "0 usable; 1 faults found (or disk, permissions)",
    )
    parser.add_argument(
        "subject", metavar="RECIPE|BUNDLE", nargs="?", help="what is to run here (default: nothing yet)"
    )
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help=OVERRIDES)
    parser.add_argument("--online", action="store_true", help="ask the Hub whether it answers and has the target")
    option(parser, "--json", "every finding, and whether it is usable")
    options = parser.parse_intermixed_args(arguments)
    from spectrain.doctor import examine, render, usable
    from spectrain.machine import disks, observe

    with telling(options.json) as tell:
        machine, subject = observe({"this folder": Path.cwd()}, online=options.online), None
        broken = [package.name for package in machine.packages if package.found is None]
        broken += ["torch"] if machine.torch_fault else []
        if options.subject and broken:
            print(f"{options.subject} is not looked at before {', '.join(broken)} can be loaded")
        elif options.subject:
            subject = _subject(options)
            machine = replace(machine, disks=disks({"output": subject.output or Path.cwd()}))
        findings = examine(machine, subject)
        tell({"usable": usable(findings), "findings": [asdict(finding) for finding in findings]}, render(findings))
    return 0 if usable(findings) else 1


def _subject(options: argparse.Namespace) -> Subject:
    from spectrain.config import load_recipe

    path = Path(options.subject)
    if not path.is_dir():
        return _of_recipe(path, load_recipe(path, options.overrides), options.online)
    if options.overrides:
        raise SpectrainError(f"{path} is a bundle, and {options.overrides[0]} an override of a recipe; leave it out")
    return _of_bundle(path, options.online)


def _of_bundle(folder: Path, online: bool) -> Subject:
    from spectrain.doctor import Subject
    from spectrain.manifest import read_manifest, target_record

    manifest = read_manifest(folder)
    record = target_record(folder, manifest)
    missing = next((name for name in manifest.files if not (folder / name).is_file()), None)
    if record.name is None:
        return Subject(str(folder), "its target", "folder", f"{folder} does not say which it is; name it with --target")
    place, trouble = _place(record.name, record.revision, online)
    trouble = f"{folder} is incomplete: {missing} is missing" if missing else trouble
    return Subject(str(folder), record.name, place, trouble)


def _of_recipe(path: Path, recipe: Recipe, online: bool) -> Subject:
    from spectrain import estimate as counting
    from spectrain.data.dropped import BadRowsError
    from spectrain.doctor import Subject
    from spectrain.preflight import file_faults
    from spectrain.rates import rates
    from spectrain.workload import bad_rows, workload

    place, trouble = _place(recipe.target.name, recipe.target.revision, online, recipe.data.chat_template_kwargs)
    folders = {Path(recipe.output), Path(recipe.prepared or recipe.output)}
    written = (file for folder in folders for file in folder.rglob("*") if file.is_file())
    subject = Subject(str(path), recipe.target.name, place, trouble, recipe.target.dtype, recipe.training.precision,
                      Path(recipe.output), held=sum(file.stat().st_size for file in written))  # fmt: skip
    absent = "; ".join(file_faults(recipe.data))
    if absent:
        return replace(subject, chats=(absent, "data.train=[FILE] data.heldout=[FILE]"))
    if trouble or not recipe.drafter.trainable:
        return subject
    if place == "Hub" and not online and not (path.parent / "config.json").is_file():
        return replace(subject, unknown="the target's config.json is not here, and is fetched only with --online")
    try:
        target = counting.blueprint(recipe, counting.load_config(recipe, path))
        anything = rates(target.dtype, tflops=1.0, bandwidth=1.0, utilisation=1.0)  # times are not asked for
        found = counting.estimate(recipe, target, workload(recipe), anything)
    except BadRowsError as error:
        return replace(subject, chats=(bad_rows(recipe) or error.row, f"{error.how}, or mend these rows"))
    except SpectrainError as error:
        return replace(subject, unknown=str(error))
    return replace(subject, memory=max(parts["peak"] for parts in found["memory"].values()),
                   disk=found["disk"]["total"], target_bytes=found["disk"]["target"])  # fmt: skip


def _place(name: str, revision: str | None, online: bool, template: Mapping[str, Any] | None = None) -> tuple[Any, str]:
    """Where a target's files are, and what of them cannot be used; ``template``: a recipe's settings of its chats'."""
    from huggingface_hub import snapshot_download

    if Path(name).is_dir():
        return "folder", _unusable(Path(name), template)
    if Path(name).is_file():
        return "folder", "it is a file, not a folder with a model"
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        return "folder", "there is no such folder"
    try:
        folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
    except Exception:  # not in the cache, or no id at all, which the Hub says when it is asked
        return "Hub", _refused(name, revision) if online else ""
    if not list(folder.glob("*.safetensors")):  # a config alone, as spectrain estimate fetches it
        return "Hub", _refused(name, revision) if online else ""
    return "Hub cache", _unusable(folder, template)


def _unusable(folder: Path, template: Mapping[str, Any] | None) -> str:
    from spectrain.config import TargetConfig
    from spectrain.data.template_variables import choose_template_kwargs
    from spectrain.preflight import load_tokenizer

    if not list(folder.glob("*.safetensors")):
        return "it has no weights (*.safetensors)"
    try:
        tokenizer, _ = load_tokenizer(TargetConfig(name=str(folder)))
        if template is not None:
            choose_template_kwargs(tokenizer, template)
    except SpectrainError as error:
        return str(error)
    return ""


def _refused(name: str, revision: str | None) -> str:
    from huggingface_hub import model_info

    from spectrain.fetching import refused

    try:
        model_info(name, revision=revision)
    except Exception as error:  # gated, not there, or no answer
        return refused(error, name, revision)
    return ""
