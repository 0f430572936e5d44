"""Identity: what makes a tokenizer or a target the same one, and what the first difference is.

*Decode identity* (which id is which token, what bytes it stands for, which ids are special) is what pairing
a drafter with a target needs: the two only exchange ids. *Traffic identity* adds everything that turns text
into ids (template, normalizer, pre-tokenizer, merges, flags), which training and reports need.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from spectrain.errors import SpectrainError
from spectrain.files import json_digest
from spectrain.weights import weights_digest

DECODE_COMPONENTS = ("vocabulary", "decoder", "decodings", "special_ids")

# What differs only on the way from text to ids, and why a drafter can live with it.
TRAFFIC_COMPONENTS = {
    "added_tokens": "the flags decide where text is cut around a token, not which id it has",
    "model": "merges and scores decide how text is cut, not which id a token has",
    "normalizer": "it changes text before it becomes ids; drafter and target exchange ids",
    "pre_tokenizer": "it decides how text is cut; drafter and target exchange ids",
    "post_processor": "it adds ids around a prompt, which both sides then see",
    "padding_id": "padding is masked and never emitted",
    "chat_template": "the prompt is rendered once, by the target's tokenizer",
    "encodings": "text is cut once, by the target's tokenizer",
}

_TOKEN_FLAGS = ("content", "special", "lstrip", "rstrip", "normalized", "single_word")

_CUTTING = {"added_tokens", "model", "normalizer", "pre_tokenizer"}  # what decides where text is cut

# Text on which tokenizers with equal vocabularies have been seen to part.
PROBES = (
    "Hello world, it's a test. Don't I'LL we’ve",
    "0 12 345 6789 1234567890 3.14 1,000,000",
    "  two  spaces   three\t\ttabs \u00a0 nbsp \none\n\ntwo\n\n\n  three\r\nfour\n",
    "<think>\nhm\n</think>\n\nyes",
    '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
    "<|im_start|>user\nhi<|im_end|>\n<s>[INST] hi [/INST]</s><|endoftext|><pad><unk>",
    "def f(x):\n    return x**2  # 100%\n\n\tpass",
    "🙂 👍🏽 👩‍👩‍👧 🇨🇭 日本語のテキスト 한국어 中文",
    "e\u0301 é a\u030a Å \u0915\u094d\u0937\u093f ﬁ ² ½ Ⅳ 𝔘𝔫𝔦 ß ǅ",
    "שלום עולם مرحبا بالعالم",
    "\u0001\u007f\u200b\ufeff\ufffd\U0010fffd",
)

# Keys of config.json that say where a model came from or how it is run, not which function it is.
_INFORMATIONAL = {"transformers_version", "dtype", "torch_dtype", "use_cache", "return_dict"}


@dataclass(frozen=True)
class Comparison:
    """Two identities side by side. Harmful ``differences`` come first; each reads "what: a against b"."""

    level: Literal["identical", "compatible", "different"]
    differences: tuple[str, ...] = ()

    @property
    def first_difference(self) -> str | None:
        return self.differences[0] if self.differences else None


@dataclass(frozen=True)
class TokenizerIdentity:
    """The contents of every component (JSON values, for explaining) and their SHA-256 digests."""

    components: Mapping[str, Any]

    @cached_property
    def digests(self) -> dict[str, str]:
        return {name: json_digest(value) for name, value in self.components.items()}

    @cached_property
    def decode_digest(self) -> str:
        return json_digest({name: self.digests[name] for name in DECODE_COMPONENTS})

    @cached_property
    def traffic_digest(self) -> str:
        return json_digest(self.digests)

    @cached_property
    def tokens(self) -> dict[int, str]:
        """The token of each id."""
        return {index: token for token, index in self.components["vocabulary"].items()}


def tokenizer_identity(tokenizer: Any, eos_ids: Sequence[int] = ()) -> TokenizerIdentity:
    """Take the identity of a transformers tokenizer, fast or slow; padding state does not matter.

    ``eos_ids``: ids that end an answer beside the tokenizer's own (the list of a generation config).
    """
    vocabulary = dict(tokenizer.get_vocab())
    added = {
        str(index): {flag: getattr(token, flag) for flag in _TOKEN_FLAGS}
        for index, token in tokenizer.added_tokens_decoder.items()
    }
    backend = getattr(tokenizer, "backend_tokenizer", None)
    stages = json.loads(backend.to_str()) if backend is not None else {"model": {}}
    if stages["model"].get("type") != "Unigram":  # whose vocabulary also carries the scores
        stages["model"].pop("vocab", None)
    eos = {tokenizer.eos_token_id, *eos_ids} - {None}
    return TokenizerIdentity(
        {
            "vocabulary": vocabulary,
            "decoder": _canonical_decoder(stages.get("decoder")),
            "decodings": _decodings(tokenizer, vocabulary),
            "special_ids": {"bos": tokenizer.bos_token_id, "eos": sorted(eos), "unk": tokenizer.unk_token_id},
            "added_tokens": added,
            "model": stages["model"],
            "normalizer": stages.get("normalizer"),
            "pre_tokenizer": stages.get("pre_tokenizer"),
            "post_processor": stages.get("post_processor"),
            "padding_id": tokenizer.pad_token_id,
            "chat_template": _line_ends(tokenizer.chat_template),
            "encodings": {text: list(tokenizer.encode(text, add_special_tokens=False)) for text in PROBES},
        }
    )


def _canonical_decoder(decoder: Any) -> Any:
    """Drop the settings a ByteLevel decoder stores but never reads; converters write them differently."""
    if decoder is None or decoder["type"] == "ByteLevel":
        return decoder and {"type": "ByteLevel"}
    return {**decoder, "decoders": [_canonical_decoder(part) for part in decoder.get("decoders", ())]}


def _line_ends(template: Any) -> Any:
    if isinstance(template, dict):
        return {name: _line_ends(text) for name, text in template.items()}
    return "\n".join(template.replace("\r\n", "\n").split("\r")) if template else template


def _decodings(tokenizer: Any, vocabulary: Mapping[str, int]) -> dict[str, str]:
    """Text of runs of ids spread over the vocabulary, chosen by id so that encoding plays no part in it."""
    ids = sorted(set(vocabulary.values()))
    runs = [ids[start : start + 8] for start in range(0, len(ids), max(8, len(ids) // 256))]
    runs += [[vocabulary[byte] for byte in ("<0xE2>", "<0x82>", "<0xAC>") if byte in vocabulary]]  # €
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    return {" ".join(map(str, run)): tokenizer.decode(run, **options) for run in runs if run}


def check_rows(tokenizer: Any, rows: int) -> None:
    """Raise when an id of the tokenizer has no embedding row; more rows than ids (padding) are fine."""
    token, index = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if index >= rows:
        raise SpectrainError(
            f"token {token!r} has id {index}, but the model has {rows} embedding rows (ids 0 to {rows - 1}). "
            "Resize the model's embeddings, or use the tokenizer the model was saved with."
        )


def compare(a: TokenizerIdentity, b: TokenizerIdentity) -> Comparison:
    """Compare tokenizers: identical, compatible (ids mean the same, text may become others) or different."""
    differing = [name for name in a.components if a.components[name] != b.components[name]]
    if _CUTTING & set(differing) and "encodings" in differing:
        differing.remove("encodings")  # the component that causes it shows the probe
    harmful = [f"{name}: {_explain(name, a, b)}" for name in DECODE_COMPONENTS if name in differing]
    mild = [
        f"{name}: {_explain(name, a, b)} (harmless in decoding: {reason})"
        for name, reason in TRAFFIC_COMPONENTS.items()
        if name in differing
    ]
    if harmful:
        return Comparison("different", (*harmful, *mild))
    return Comparison("compatible" if mild else "identical", tuple(mild))


def _explain(name: str, a: TokenizerIdentity, b: TokenizerIdentity) -> str:
    left, right = a.components[name], b.components[name]
    if name == "vocabulary":
        return _explain_vocabulary(left, right)
    if name == "decodings":
        run = next(run for run in {**left, **right} if left.get(run) != right.get(run))
        return f"ids {run} decode to {left.get(run)!r} against {right.get(run)!r}"
    if name == "encodings":
        return _explain_probe(a, b)
    shows_probe = name in _CUTTING and a.components["encodings"] != b.components["encodings"]
    return first_difference(left, right) + (f"; {_explain_probe(a, b)}" if shows_probe else "")


def _explain_vocabulary(left: Mapping[str, int], right: Mapping[str, int]) -> str:
    differing = [token for token in {**left, **right} if left.get(token) != right.get(token)]
    token = min(differing, key=lambda token: left.get(token, right.get(token, 0)))
    ids = (str(side.get(token, "absent")) for side in (left, right))
    return f"token {token!r}: id {' against '.join(ids)}"


def _explain_probe(a: TokenizerIdentity, b: TokenizerIdentity) -> str:
    left, right = a.components["encodings"], b.components["encodings"]
    text = next(text for text in {**left, **right} if left.get(text) != right.get(text))
    words = [[side.tokens[index] for index in side.components["encodings"].get(text, ())] for side in (a, b)]
    start = _common(*words)
    shown = " against ".join(str(side[start : start + 6]) for side in words)
    return f"probe {text!r} splits differently from token {start} on: {shown}"


def first_difference(left: Any, right: Any, path: str = "") -> str:
    """Name the first place where two JSON values part, as "path: a against b" with long values cut."""
    if isinstance(left, dict) and isinstance(right, dict) and left.get("type") == right.get("type"):
        key = next(key for key in {**left, **right} if left.get(key, ...) != right.get(key, ...))
        return first_difference(left.get(key), right.get(key), f"{path}.{key}".lstrip("."))
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        index = next(i for i, (x, y) in enumerate(zip(left, right, strict=True)) if x != y)
        return first_difference(left[index], right[index], f"{path}[{index}]")
    if isinstance(left, (str, list)) and isinstance(right, (str, list)):
        start = max(0, _common(left, right) - 10)
        path, left, right = f"{path}[{start}:]" if start else path, left[start:], right[start:]
    shown = " against ".join(textwrap.shorten(repr(value), 100) for value in (left, right))
    return f"{path}: {shown}" if path else shown


def _common(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Length of the common prefix."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(left), len(right)))


@dataclass(frozen=True)
class TargetIdentity:
    """Architecture, configuration and weights; name and revision only say where they were found."""

    architecture: str
    config_digest: str
    weights_digest: str
    name: str | None = None
    revision: str | None = None

    @property
    def digest(self) -> str:
        """One digest of what the model computes: architecture, configuration, weights."""
        return json_digest([self.architecture, self.config_digest, self.weights_digest])


def target_identity(folder: Path, name: str | None = None, revision: str | None = None) -> TargetIdentity:
    """Take the identity of a plain transformers folder (a Hub snapshot or a local one)."""
    path = folder / "config.json"
    if not path.is_file():
        raise SpectrainError(f"{path} is missing: a target is a folder with config.json and safetensors")
    config = json.loads(path.read_text(encoding="utf-8"))
    function = {key: value for key, value in config.items() if key not in _INFORMATIONAL and key[0] != "_"}
    architecture = (config.get("architectures") or [config.get("model_type", "unknown")])[0]
    return TargetIdentity(architecture, json_digest(function), weights_digest(folder), name, revision)


def compare_targets(a: TargetIdentity, b: TargetIdentity) -> Comparison:
    """Different when architecture, weights or configuration differ; another revision is only noted."""
    shown = {
        field: f"target {field}: {getattr(a, field)} against {getattr(b, field)}"
        for field in ("architecture", "weights_digest", "config_digest", "revision")
        if getattr(a, field) != getattr(b, field)
    }
    revision = shown.pop("revision", "")
    if shown:
        return Comparison("different", tuple(shown.values()))
    if a.revision and b.revision and revision:
        return Comparison("compatible", (f"{revision} (harmless: same weights and configuration)",))
    return Comparison("identical")
