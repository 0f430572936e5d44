"""The commands around other people's checkpoints and servers. Heavy imports wait until one runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from spectrain.cli_options import OWN, command_parser, one, option
from spectrain.errors import SpectrainError
from spectrain.output import telling


def export_bundle(arguments: Sequence[str], name: str = "spectrain export") -> None:
    """Write a bundle as a checkpoint of another format."""
    parser = command_parser(
        name,
        "Write a bundle's drafter in the checkpoint format that another server or trainer reads. A bundle is what\n"
        "vLLM loads as it is: vLLM's formats in --list, and that of transformers, leave out what spectrain adds,\n"
        "and vllm-eagle3 stores the embedding that the speculators library asks for. A fresh process reads the\n"
        "checkpoint back and has to draft the same.",
        f"{name} runs/quickstart/bundle sglang-eagle3 exported\n  {name} --list",
    )
    option(parser, "bundle", nargs="?")
    parser.add_argument("format", metavar="FORMAT", nargs="?", help="one of --list")
    option(parser, "destination", "one that is there has to be empty", nargs="?")
    parser.add_argument("--list", action="store_true", help="print the formats and what reads them")
    option(parser, "--target", otherwise=OWN)
    option(parser, "--dtype")
    option(parser, "--json", "with --list its formats, else what was written")
    options = parser.parse_args(arguments)
    with telling(options.json) as tell:
        if options.list:
            from spectrain.interop.layouts import LAYOUTS

            width = max(len(layout.NAME) for layout in LAYOUTS)
            tell({"formats": {layout.NAME: layout.ABOUT for layout in LAYOUTS}},
                 "\n".join(f"{layout.NAME:<{width}}  {layout.ABOUT}" for layout in LAYOUTS))  # fmt: skip
            return
        _export(options, name)
        tell({"format": options.format, "folder": options.destination}, f"{options.format}: {options.destination}")


def _export(options: argparse.Namespace, name: str) -> None:
    if options.destination is None:
        raise SpectrainError(f"expected a bundle, a format and a folder; for instance {name} BUNDLE sglang-eagle3 DIR")
    from spectrain.bundle import resolve_bundle
    from spectrain.exchange import export_checkpoint
    from spectrain.interop.layouts import layout_named
    from spectrain.manifest import read_manifest, target_record
    from spectrain.target import load_target

    layout_named(options.format)  # before a target is loaded
    bundle = resolve_bundle(options.bundle)
    recorded = target_record(bundle, read_manifest(bundle))
    target = options.target or recorded.name
    if not target:
        raise SpectrainError(f"{bundle} does not say which target it belongs to; name it with --target")
    revision = recorded.revision if target == recorded.name else None
    export_checkpoint(bundle, options.format, Path(options.destination),
                      load_target(target, revision=revision, dtype=options.dtype))  # fmt: skip


def import_checkpoint(arguments: Sequence[str], name: str = "spectrain import") -> None:
    """Make a bundle of a checkpoint from elsewhere."""
    parser = command_parser(
        name,
        "Make a bundle of a drafter trained elsewhere, to evaluate it, compare it, or go on training from it.\n"
        "The format is found by config.json and the names of the tensors: see spectrain export --list. Pickles are\n"
        "read for their tensors alone. What could not be checked is printed, and recorded in the bundle.",
        f"{name} downloads/EAGLE3-LLaMA3.1-Instruct-8B runs/imported --target meta-llama/Llama-3.1-8B-Instruct",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT",
                        help="a folder with config.json and weights, or a Hub id of one in safetensors")  # fmt: skip
    option(parser, "destination", "the bundle")
    option(parser, "--target", "what the checkpoint is for", required=True)
    option(parser, "--revision", "the checkpoint's")
    option(parser, "--target-revision")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help="a key of config.json to read as this JSON value; null leaves it out. For "
                        "what it does not say, or says twice")  # fmt: skip
    option(parser, "--dtype")
    options = parser.parse_args(arguments)
    changes = dict(map(_change, options.set))
    from spectrain import exchange
    from spectrain.bundle import resolve_bundle
    from spectrain.target import load_target

    checkpoint = resolve_bundle(options.checkpoint, options.revision)
    target = load_target(options.target, revision=options.target_revision, dtype=options.dtype)
    manifest, notes = exchange.import_checkpoint(checkpoint, Path(options.destination), target, changes=changes)
    for note in notes:
        print(f"note: {note}")
    print(f"bundle: {options.destination} ({manifest.drafter['type']})")


def serve_command(arguments: Sequence[str], name: str = "spectrain serve-command") -> int:
    """Print how vLLM, SGLang and transformers serve a bundle."""
    parser = command_parser(
        name,
        "Print the commands that serve a bundle with vLLM, SGLang and transformers, with as many draft tokens a round\n"
        "as its acceptance.json recommends. Nothing is started, and no model is read.",
        f"{name} runs/quickstart/bundle\n  {name} runs/my/bundle --report runs/report/acceptance.json",
        "0 done; 1 the report says to leave it off (or disk, permissions)",
    )
    option(parser, "bundle")
    option(parser, "--k", "one", otherwise="what the report recommends")
    option(parser, "--report", "of this bundle", otherwise="the one in it")
    option(parser, "--json", "the lines for each server")
    options = parser.parse_args(arguments)
    k, bundle, report = one(options.k, "--k"), Path(options.bundle), options.report and Path(options.report)
    if k is None and bundle.is_dir():  # before what takes seconds to load
        from spectrain.evaluation.document import read_document
        from spectrain.manifest import report_file

        read_document(report_file(bundle, report, ", or --k"))
    from spectrain.bundle import resolve_bundle
    from spectrain.serving import LeaveOffError, invocations, shell

    with telling(options.json) as tell:
        try:
            found = invocations(resolve_bundle(options.bundle), k, report)
        except LeaveOffError as off:
            # A comment, for whoever runs what this prints.
            tell({"k": 0, "reason": str(off), "notes": [], "servers": {}}, f"# {off}")
            return 1
        tell(found, shell(found))
    return 0


CHECKPOINT_COMMANDS: dict[str, Callable[..., int | None]] = {
    "export": export_bundle,
    "import": import_checkpoint,
    "serve-command": serve_command,
}


def _change(text: str) -> tuple[str, Any]:
    key, given, value = text.partition("=")
    try:
        if not given or not key:
            raise ValueError("there is no KEY=")
        return key, json.loads(value)
    except ValueError as error:
        raise SpectrainError(
            f"--set {text!r}: {error}; expected KEY=VALUE with a JSON value, for instance --set bias=false"
        ) from None
