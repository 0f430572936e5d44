"""What must not leave: folders of a run, paths and addresses of this machine, the words of the traffic."""

from __future__ import annotations

import html
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import safe_open

from spectrain.data.conversations import load_conversations
from spectrain.errors import SpectrainError

# Of a run's folder, of trackers and of tools: no part of a bundle, even where a manifest should list them.
_NEVER = {"data", "features", "training", "evaluation", "checkpoints", "wandb", "logs", "traffic"}
_NEVER_SUFFIXES = {".jsonl", ".parquet", ".pt", ".env"}
_BINARY = {".png", ".model"}
_WEIGHTS = ".safetensors"
# Chinese and Japanese are written without spaces: a character of theirs counts as half a word.
_UNSPACED = "\u3005\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")
_WINDOW = 6  # words in a row that are taken for the traffic's own
_LEAST = (3, 16)  # shorter messages, in words and characters, say nothing of where they come from
_VERBATIM = {"chat_template_kwargs"}  # the template is rendered with exactly these


def check_names(names: Iterable[str]) -> None:
    """Raise on the first file that belongs to a run or a tool, not to a bundle."""
    for name in names:
        path = PurePosixPath(name.casefold())
        if _NEVER & set(path.parts[:-1]) or path.suffix in _NEVER_SUFFIXES or any(p[0] == "." for p in path.parts):
            raise SpectrainError(
                f"{name} is never published: it belongs to a run, not to a bundle; take it out of the folder and out "
                "of files in spectrain.json"
            )


def without_places(value: Any, renamed: Mapping[str, str]) -> Any:
    """``value`` (of JSON) with paths cut to their last part and addresses to their scheme; ``renamed`` comes first."""
    if isinstance(value, Mapping):
        return {k: v if k in _VERBATIM else without_places(v, renamed) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [without_places(item, renamed) for item in value]
    if not isinstance(value, str):
        return value
    return renamed[value] if value in renamed else _placeless(value)


def _placeless(text: str) -> str:
    if re.match(r"https?://", text):
        return f"{text.partition('://')[0]}://…"
    absolute = re.match(r"[/~\\]|\.{1,2}[/\\]|[A-Za-z]:[/\\]", text)
    if absolute or ("/" in text and (text.count("/") > 1 or Path(text).exists())):
        return re.split(r"[/\\]", text.rstrip("/\\"))[-1] or "…"
    return text


def check_places(files: Mapping[str, bytes | Path], places: Iterable[Path]) -> None:
    """Raise on the first file whose text still names one of this machine's folders."""
    shown = sorted({str(place) for place in places if len(place.parts) > 2}, key=len, reverse=True)
    for name, text in _texts(files):
        found = next((place for place in shown if place in text), None)
        if found is not None:
            raise SpectrainError(f"{name} names {found}, a folder of this machine; take it out before publishing")


def check_traffic(files: Mapping[str, bytes | Path], traffic: Sequence[str], known: Iterable[str]) -> None:
    """Raise on a file with words of the chats in the files ``traffic``.

    Six words in a row of a message, or a shorter message as a whole, count, however they are marked up; what stands in
    one of the texts ``known``, such as the target's chat template and its tokens, is not the traffic's. The message of
    the error does not repeat them.
    """
    if not traffic:
        return
    said = {window: name for name, text in _texts(files) for window in _windows(text, _LEAST[0])}
    for text in known:
        for window in _windows(text, _LEAST[0]):
            said.pop(window, None)
    for file in traffic:  # one by one: files of one run, before and after it, share their ids
        for saying in _sayings(file):
            if saying in said:
                raise SpectrainError(
                    f"{said[saying]} holds words of a chat in {Path(file).name}; nothing was sent. Take them out (of "
                    "--notes, of names and settings) and publish again"
                )


def _sayings(file: str) -> Iterator[str]:
    for conversation in load_conversations(file):
        for message in conversation.messages:
            for text in (message.content, *_leaves(message.extra)):
                windows = list(_windows(text, _WINDOW))
                yield from windows or ([" ".join(_words(text))] if len(text) >= _LEAST[1] else [])


def _windows(text: str, least: int) -> Iterator[str]:
    """From each word of a text on: every run of words from ``least`` in size to the first that is long enough."""
    words = _words(text)
    sizes = [0.5 if re.match(f"[{_UNSPACED}]", word) else 1 for word in words]
    for start in range(len(words)):
        size = 0.0
        for end in range(start, len(words)):
            size += sizes[end]
            if size >= least:
                yield " ".join(words[start : end + 1])
            if size >= _WINDOW:
                break


def _words(text: str) -> list[str]:
    """Without marks of Markdown, entities of HTML, and the ways to write one character."""
    return _WORD.findall(unicodedata.normalize("NFKC", html.unescape(text)).casefold())


def _texts(files: Mapping[str, bytes | Path]) -> Iterator[tuple[str, str]]:
    """Each file's texts: as a whole; of JSON every string by itself, as it reads without escapes; of weights what they
    say beside their numbers."""
    for name, content in files.items():
        suffix = PurePosixPath(name).suffix
        if suffix in _BINARY:
            continue
        if suffix == _WEIGHTS and isinstance(content, Path):
            with safe_open(content, "pt") as file:
                yield from ((name, text) for text in _leaves([file.metadata(), list(file.keys())]))
            continue
        raw = content.read_bytes() if isinstance(content, Path) else content
        try:
            text = raw.decode("utf-8")
            # As pairs: of a key that is given twice, a dictionary keeps only the last.
            found = _leaves(json.loads(text, object_pairs_hook=list)) if suffix == ".json" else [text]
        except ValueError as error:
            raise SpectrainError(f"{name} cannot be searched for what must not leave: {error}") from error
        yield from ((name, part) for part in found)


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from _leaves(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)
