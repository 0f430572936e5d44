"""The check of two tokenizers as a command. Heavy imports wait until it runs, so that ``--help`` is instant."""

from __future__ import annotations

from collections.abc import Sequence

from spectrain.cli_options import command_parser, option
from spectrain.output import telling


def check(arguments: Sequence[str], name: str = "spectrain check") -> int:
    """Say whether two tokenizers are the same, and where they part."""
    parser = command_parser(
        name,
        "Compare the tokenizers of two models, bundles or tokenizers: ids, decoding, special ids, and all that turns\n"
        "text into ids. Verdicts: identical; compatible, where the ids mean the same and what differs is harmless to\n"
        "a drafter and its target, which exchange ids; different, harmful differences first. A bundle is also held\n"
        "against the target that it belongs to. Of Hub ids no weights are fetched.",
        f"{name} runs/quickstart/bundle org/model --text",
        "0 done: identical or compatible; 1 different (or disk, permissions)",
    )
    parser.add_argument("a", help="a folder (model, tokenizer or bundle), a Hub id or a .gguf file")
    parser.add_argument("b", help="what it is compared with: likewise")
    parser.add_argument("--text", action="store_true",
                        help="text must become the same ids, too: templates, normalizers, pre-tokenizers and merges "
                        "that differ make it different")  # fmt: skip
    option(parser, "--json", "level, harmful and harmless differences")
    options = parser.parse_args(arguments)
    from spectrain.pairing import compare_sides, read_side

    with telling(options.json) as tell:
        found = compare_sides(read_side(options.a), read_side(options.b), traffic=options.text)
        document = {"a": options.a, "b": options.b, "text": options.text, "level": found.level}
        tell({**document, "harmful": found.harmful, "harmless": found.harmless},
             "\n  ".join([f"{found.level}: {options.a} against {options.b}", *found.differences]))  # fmt: skip
    return int(found.level == "different")
