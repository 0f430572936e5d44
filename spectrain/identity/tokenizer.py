"""A tokenizer's identity: the contents of its components, and what it does to text and ids."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from spectrain.errors import SpectrainError
from spectrain.files import json_digest

DECODE_COMPONENTS = ("vocabulary", "decoder", "decodings", "texts", "special_ids")

# What differs only on the way from text to ids, and why a drafter can live with it.
TRAFFIC_COMPONENTS = {
    "added_tokens": "the flags decide where text is cut around a token, not which id it has",
    "model": "merges and scores decide how text is cut, not which id a token has",
    "normalizer": "it changes text before it becomes ids; drafter and target exchange ids",
    "pre_tokenizer": "it decides how text is cut; drafter and target exchange ids",
    "post_processor": "it adds ids around a prompt, which both sides then see",
    "frame": "ids around a prompt are seen by both sides",
    "chat_template": "the prompt is rendered once, by the target's tokenizer",
    "encodings": "text is cut once, by the target's tokenizer",
    "added_encodings": "text is cut once, by the target's tokenizer",
    "padding_id": "padding is masked and never emitted",
}

_TOKEN_FLAGS = ("content", "special", "lstrip", "rstrip", "normalized", "single_word")

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
    encodings = {text: _encode(tokenizer, text) for text in PROBES}
    return TokenizerIdentity(
        {
            "vocabulary": vocabulary,
            "decoder": _canonical_decoder(stages.get("decoder")),
            "decodings": _decodings(tokenizer, vocabulary),
            "texts": _texts(tokenizer, sorted(set(vocabulary.values()))),
            "special_ids": {"bos": tokenizer.bos_token_id, "eos": sorted(eos), "unk": tokenizer.unk_token_id},
            "added_tokens": added,
            "model": stages["model"],
            "normalizer": stages.get("normalizer"),
            "pre_tokenizer": stages.get("pre_tokenizer"),
            "post_processor": stages.get("post_processor"),
            "frame": _frame(tokenizer),
            "padding_id": tokenizer.pad_token_id,
            "chat_template": _line_ends(tokenizer.chat_template),
            "encodings": encodings,
            "added_encodings": _encode(tokenizer, " x ".join(token["content"] for token in added.values())),
            "round_trips": {text: ids and _decode(tokenizer, ids) for text, ids in encodings.items()},
        }
    )


def _encode(tokenizer: Any, text: str, whole: bool = False) -> list[int] | None:
    """Ids of a text, None where the tokenizer has none for it; ``whole`` with the ids that it adds around a prompt."""
    try:
        return list(tokenizer.encode(text, add_special_tokens=whole))
    except Exception as error:  # models without an unknown token say it in an exception of no kind
        if type(error) is not Exception:
            raise
        return None


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _frame(tokenizer: Any) -> dict[str, list[int]] | None:
    """The ids that the tokenizer adds before and after a prompt on its own."""
    bare, whole = _encode(tokenizer, "0"), _encode(tokenizer, "0", whole=True)
    if bare is None or whole is None:
        return None
    start = next(i for i in range(len(whole) + 1) if whole[i : i + len(bare)] == bare or i == len(whole))
    return {"before": whole[:start], "after": whole[start + len(bare) :]}


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
    return {" ".join(map(str, run)): _decode(tokenizer, run) for run in runs if run}


def _texts(tokenizer: Any, ids: Sequence[int]) -> dict[str, str]:
    """Text of every id on its own; bytes that are no character are told apart by the vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    single = [[index] for index in ids]
    texts: Iterable[str]
    if backend is not None:  # at once: there may be 250,000
        texts = backend.decode_batch(single, skip_special_tokens=False)
    else:
        texts = (_decode(tokenizer, run) for run in single)
    return dict(zip(map(str, ids), texts, strict=True))


def tokenizer_size(tokenizer: Any) -> int:
    """One more than the largest id of a tokenizer: ids from there on do not exist, whatever rows a model has."""
    return int(max(tokenizer.get_vocab().values())) + 1


def check_rows(tokenizer: Any, rows: int) -> None:
    """Raise when an id of the tokenizer has no embedding row; more rows than ids (padding) are fine."""
    token, index = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if index >= rows:
        raise SpectrainError(
            f"token {token!r} has id {index}, but the model has {rows} embedding rows (ids 0 to {rows - 1}). "
            "Resize the model's embeddings, or use the tokenizer the model was saved with."
        )
