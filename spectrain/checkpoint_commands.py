"""The commands around other people's checkpoints and servers. Heavy imports wait until one runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from spectrain.cli_options import command_parser
from spectrain.errors import SpectrainError


def export_bundle(arguments: Sequence[str], name: str = "spectrain export") -> None:
    """Write a bundle as a checkpoint of another format."""
    parser = command_parser(
        name,
        "Write a bundle's drafter in the checkpoint format that another server or trainer reads. vLLM needs none of\n"
        "this: bundles are what it loads. A fresh process reads the checkpoint back and has to draft the same.",
        f"{name} runs/quickstart/bundle sglang-eagle3 exported\n  {name} --list",
    )
    parser.add_argument("bundle", nargs="?", help="a bundle folder or a Hub id")
    parser.add_argument("format", nargs="?", help="one of --list")
    parser.add_argument(
        "folder", nargs="?", metavar="DIR", help="where the checkpoint goes; must not exist, or be empty"
    )
    parser.add_argument("--list", action="store_true", help="print the formats and what reads them")
    parser.add_argument("--target", metavar="NAME", help="folder or Hub id of the target (default: the bundle's own)")
    parser.add_argument("--dtype", default="float32", help="dtype of the target (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.list:
        from spectrain.interop.layouts import LAYOUTS

        width = max(len(layout.NAME) for layout in LAYOUTS)
        print("\n".join(f"{layout.NAME:<{width}}  {layout.ABOUT}" for layout in LAYOUTS))
        return
    if options.folder is None:
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
    export_checkpoint(bundle, options.format, Path(options.folder),
                      load_target(target, revision=revision, dtype=options.dtype))  # fmt: skip
    print(f"{options.format}: {options.folder}")


def import_checkpoint(arguments: Sequence[str], name: str = "spectrain import") -> None:
    """Make a bundle of a checkpoint from elsewhere."""
    parser = command_parser(
        name,
        "Make a bundle of a drafter trained elsewhere, to evaluate it, compare it, or go on training from it.\n"
        "The format is found by config.json and the names of the tensors: see spectrain export --list. Pickles are\n"
        "read for their tensors alone. What could not be checked is printed, and recorded in the bundle.",
        f"{name} downloads/EAGLE3-LLaMA3.1-Instruct-8B runs/imported --target meta-llama/Llama-3.1-8B-Instruct",
    )
    parser.add_argument("checkpoint", help="a folder with config.json and weights, or a Hub id of one in safetensors")
    parser.add_argument("bundle", metavar="BUNDLE", help="the folder to write")
    parser.add_argument("--target", required=True, metavar="NAME", help="folder or Hub id of the target it is for")
    parser.add_argument("--revision", help="of the checkpoint on the Hub")
    parser.add_argument("--target-revision", metavar="REVISION", help="of the target on the Hub")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help="a key of config.json to read as this JSON value; null leaves it out. For "
                        "what it does not say, or says twice")  # fmt: skip
    parser.add_argument("--dtype", default="float32", help="dtype of the target (default: %(default)s)")
    options = parser.parse_args(arguments)
    changes = dict(map(_change, options.set))
    from spectrain import exchange
    from spectrain.bundle import resolve_bundle
    from spectrain.target import load_target

    checkpoint = resolve_bundle(options.checkpoint, options.revision)
    target = load_target(options.target, revision=options.target_revision, dtype=options.dtype)
    manifest, notes = exchange.import_checkpoint(checkpoint, Path(options.bundle), target, changes=changes)
    for note in notes:
        print(f"note: {note}")
    print(f"bundle: {options.bundle} ({manifest.drafter['type']})")


def serve_command(arguments: Sequence[str], name: str = "spectrain serve-command") -> None:
    """Print how vLLM, SGLang and transformers serve a bundle."""
    parser = command_parser(
        name,
        "Print the commands that serve a bundle with vLLM, SGLang and transformers, with as many draft tokens a round\n"
        "as its acceptance.json recommends. Nothing is started, and no model is read.",
        f"{name} runs/quickstart/bundle",
    )
    parser.add_argument("bundle", help="a bundle folder or a Hub id")
    parser.add_argument("--k", type=int, help="draft tokens a round (default: what the bundle's report recommends)")
    options = parser.parse_args(arguments)
    from spectrain.bundle import resolve_bundle
    from spectrain.serving import serve_commands

    print(serve_commands(resolve_bundle(options.bundle), options.k))


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
