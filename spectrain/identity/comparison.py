"""Two identities side by side: what differs, whether it does harm, and where it begins."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tokenizers import Tokenizer

from spectrain.identity.tokenizer import DECODE_COMPONENTS, PROBES, TRAFFIC_COMPONENTS, TokenizerIdentity

Level = Literal["identical", "compatible", "different"]

_CUTTING = {"added_tokens", "model", "normalizer", "pre_tokenizer"}  # what decides where text is cut

# What a component only shows, and the ones that cause it: where one of those differs, it is the one to name.
_EFFECTS = {
    "texts": {"vocabulary", "decoder", "decodings"},
    "frame": {"vocabulary", "post_processor"},
    "encodings": {"vocabulary", *_CUTTING},
    "added_encodings": {"vocabulary", *_CUTTING, "encodings"},
    "round_trips": {*DECODE_COMPONENTS, *_CUTTING, "encodings"},
}


@dataclass(frozen=True)
class Comparison:
    """What differs, each as "what: a against b", the harmless with the reason why they are."""

    harmful: tuple[str, ...] = ()
    harmless: tuple[str, ...] = ()

    @property
    def level(self) -> Level:
        if self.harmful:
            return "different"
        return "compatible" if self.harmless else "identical"

    @property
    def differences(self) -> tuple[str, ...]:
        return self.harmful + self.harmless

    @property
    def first_difference(self) -> str | None:
        return next(iter(self.differences), None)


def compare(a: TokenizerIdentity, b: TokenizerIdentity, *, traffic: bool = False) -> Comparison:
    """Compare tokenizers: identical, compatible (ids mean the same, text may become others) or different.

    ``traffic``: text has to become the same ids, too; only the padding's id may be another one.
    """
    differing = {name for name in a.components if a.components[name] != b.components[name]}
    differing -= {name for name, causes in _EFFECTS.items() if causes & differing}
    said = {name: f"{name}: {_explain(name, a, b)}" for name in differing}
    demanded = [*DECODE_COMPONENTS, "round_trips", *(TRAFFIC_COMPONENTS if traffic else ())]
    harmful = [name for name in demanded if name in differing and name != "padding_id"]
    return Comparison(
        tuple(said[name] for name in harmful),
        tuple(
            f"{said[name]} (harmless{'' if traffic else ' in decoding'}: {reason})"
            for name, reason in TRAFFIC_COMPONENTS.items()
            if name in differing and name not in harmful
        ),
    )


def _explain(name: str, a: TokenizerIdentity, b: TokenizerIdentity) -> str:
    left, right = a.components[name], b.components[name]
    if name == "vocabulary":
        return _explain_vocabulary(left, right)
    if name in {"decodings", "texts"}:
        run = next(run for run in {**left, **right} if left.get(run) != right.get(run))
        return f"ids {run} decode to {left.get(run)!r} against {right.get(run)!r}"
    if name == "encodings":
        return _explain_probe(a, b)
    if name == "added_encodings":
        return f"text of the added tokens {_parted(_words(a, left), _words(b, right))}"
    return first_difference(left, right) + _explain_effect(name, a, b)


def _explain_effect(name: str, a: TokenizerIdentity, b: TokenizerIdentity) -> str:
    """What a component that cuts text does to the probes: to their ids, or else to what it makes of them."""
    if name not in _CUTTING:
        return ""
    if (
        a.components["vocabulary"] == b.components["vocabulary"]
        and a.components["encodings"] != b.components["encodings"]
    ):
        return f"; {_explain_probe(a, b)}"
    if name not in {"normalizer", "pre_tokenizer"}:
        return ""
    pieces = [_pieces(side.components, name) for side in (a, b)]
    text = next((text for text, left, right in zip(PROBES, *pieces, strict=True) if left != right), None)
    if text is None:
        return "; no probe shows it"
    left, right = (side[PROBES.index(text)] for side in pieces)
    return f"; probe {text!r} {_parted(left, right)}, which become the same tokens"


def _pieces(components: Mapping[str, Any], name: str) -> list[list[str]]:
    """What the stage ``name`` alone makes of every probe: pieces, or characters."""
    empty = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
    stages = Tokenizer.from_str(json.dumps({**empty, name: components[name]}))
    if name == "normalizer":
        return [list(stages.normalizer.normalize_str(text) if stages.normalizer else text) for text in PROBES]
    cut = stages.pre_tokenizer
    return [[piece for piece, _ in cut.pre_tokenize_str(text)] if cut else [text] for text in PROBES]


def _explain_vocabulary(left: Mapping[str, int], right: Mapping[str, int]) -> str:
    differing = [token for token in {**left, **right} if left.get(token) != right.get(token)]
    token = min(differing, key=lambda token: left.get(token, right.get(token, 0)))
    ids = (str(side.get(token, "absent")) for side in (left, right))
    return f"token {token!r}: id {' against '.join(ids)}"


def _explain_probe(a: TokenizerIdentity, b: TokenizerIdentity) -> str:
    left, right = a.components["encodings"], b.components["encodings"]
    text = next(text for text in {**left, **right} if left.get(text) != right.get(text))
    return f"probe {text!r} {_parted(_words(a, left.get(text)), _words(b, right.get(text)))}"


def _words(side: TokenizerIdentity, ids: Sequence[int] | None) -> list[str]:
    return [side.tokens[index] for index in ids or ()]


def _parted(left: Sequence[str], right: Sequence[str]) -> str:
    start = common_prefix(left, right)
    shown = " against ".join(str(side[start : start + 6]) for side in (left, right))
    return f"splits differently from token {start} on: {shown}"


def first_difference(left: Any, right: Any, path: str = "", names: Mapping[str, str] | None = None) -> str:
    """Name the first place where two JSON values part, as "path: a against b" with long values cut.

    ``names``: what people call a path, or what it begins with.
    """
    if isinstance(left, dict) and isinstance(right, dict) and left.get("type") == right.get("type"):
        key = next(key for key in {**left, **right} if left.get(key, ...) != right.get(key, ...))
        return first_difference(left.get(key), right.get(key), f"{path}.{key}".lstrip("."), names)
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        index = next(i for i, (x, y) in enumerate(zip(left, right, strict=True)) if x != y)
        return first_difference(left[index], right[index], f"{path}[{index}]", names)
    if isinstance(left, (str, list)) and isinstance(right, (str, list)):
        start = max(0, common_prefix(left, right) - 10)
        path, left, right = f"{path}[{start}:]" if start else path, left[start:], right[start:]
    shown = " against ".join(textwrap.shorten(repr(value), 100) for value in (left, right))
    return f"{_named(path, names or {})}: {shown}" if path else shown


def _named(path: str, names: Mapping[str, str]) -> str:
    """A path with its longest beginning that has a name called by it."""
    ends = [i for i in range(len(path), 0, -1) if i == len(path) or path[i] in ".["]
    end = next((end for end in ends if path[:end] in names), 0)
    return names[path[:end]] + path[end:] if end else path


def common_prefix(left: Sequence[Any], right: Sequence[Any]) -> int:
    """How many items two sequences begin with that are the same."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(left), len(right)))
