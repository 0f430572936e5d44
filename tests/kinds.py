"""Small tokenizers of every kind of model that the library has, as the JSON they are stored in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

Form = dict[str, Any]  # {"tokenizer": tokenizer.json, "config": arguments of the tokenizer's class}

SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "<extra>"]
MARKS = [AddedToken("<think>", normalized=False), AddedToken("<tool_call>", lstrip=True, normalized=False)]
TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
CORPUS = [
    "hello world, hello there: the then them they other mother",
    "def f(x):\n    return x**2  # 100%\n\n\tpass",
    "0 12 345 6789 1234567890 3.14 100 200 300 123 123",
    "<think>\nlet me think\n</think>\n\nyes, the answer is 12",
    "שלום עולם مرحبا 日本語 한국어 é ß e\u0301 🙂",
    "to be or not to be, that is the question; whether it is nobler in the mind to suffer",
]
TIKTOKEN = (  # as in cl100k_base
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def _trained(tokenizer: Tokenizer, trainer: Any) -> Tokenizer:
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet)
    return _trained(tokenizer, trainer)


def tiktoken_like() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(Regex(TIKTOKEN), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=SPECIAL, initial_alphabet=alphabet)
    return _trained(tokenizer, trainer)


def byte_fallback() -> Tokenizer:
    """As sentencepiece's BPE becomes when it is converted (Llama 2, Gemma)."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    _trained(tokenizer, trainers.BpeTrainer(vocab_size=400, special_tokens=names, limit_alphabet=60))
    settings = json.loads(tokenizer.to_str())
    settings["added_tokens"] = settings["added_tokens"][: len(SPECIAL)]  # bytes are tokens like others
    return Tokenizer.from_str(json.dumps(settings))


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _trained(tokenizer, trainers.UnigramTrainer(vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>"))


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer = _trained(tokenizer, trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return tokenizer


def word_level() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return _trained(tokenizer, trainers.WordLevelTrainer(special_tokens=SPECIAL))


BUILT = {f.__name__: f for f in (byte_level, tiktoken_like, byte_fallback, unigram, word_piece, word_level)}


def form(kind: str) -> Form:
    """One of ``BUILT`` with two added tokens and a template."""
    tokenizer = BUILT[kind]()
    tokenizer.add_tokens(MARKS)
    config = dict(zip(("unk_token", "bos_token", "eos_token", "pad_token"), SPECIAL, strict=False))
    return {"tokenizer": json.loads(tokenizer.to_str()), "config": {**config, "chat_template": TEMPLATE}}


def stored(folder: Path, size: int | None = None) -> Form:
    """A real byte-level tokenizer as it lies in a folder, cut down to its first ``size`` ids."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    model, settings = tokenizer["model"], json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    if size is not None:
        model["vocab"] = {token: index for token, index in model["vocab"].items() if index < size}
        model["merges"] = [pair for pair in model["merges"] if {*pair, "".join(pair)} <= model["vocab"].keys()]
    config = {name: token for name, token in settings.items() if name.endswith("_token")}
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return {"tokenizer": tokenizer, "config": {**config, "chat_template": template}}


def build(form: Form) -> PreTrainedTokenizerFast:
    """The tokenizer of a form."""
    backend = Tokenizer.from_str(json.dumps(form["tokenizer"]))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **form["config"])
