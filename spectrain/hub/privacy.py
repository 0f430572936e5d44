"""What must not leave: folders of a run, paths and addresses of this machine, the words of the traffic."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from spectrain.data.conversations import load_conversations
from spectrain.errors import SpectrainError

# Of a run's folder, of trackers and of tools: no part of a bundle, even where a manifest should list them.
_NEVER = {"data", "features", "training", "evaluation", "checkpoints", "wandb", "logs", "traffic"}
_NEVER_SUFFIXES = {".jsonl", ".parquet", ".pt", ".env"}
_BINARY = {".safetensors", ".png", ".model"}
_WINDOW = 6  # words in a row that are taken for the traffic's own
_LEAST = (3, 16)  # shorter messages, in words and characters, say nothing of where they come from
_VERBATIM = {"chat_template_kwargs"}  # the template is rendered with exactly these


def check_names(names: Iterable[str]) -> None:
    """Raise on the first file that belongs to a run or a tool, not to a bundle."""
    for name in names:
        path = PurePosixPath(name)
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
    """Raise on the first text file that still names one of this machine's folders."""
    shown = sorted({str(place) for place in places if len(place.parts) > 2}, key=len, reverse=True)
    for name, content in _texts(files):
        for text in _strings(name, content):
            found = next((place for place in shown if place in text), None)
            if found is not None:
                raise SpectrainError(f"{name} names {found}, a folder of this machine; take it out before publishing")


def check_traffic(files: Mapping[str, bytes | Path], traffic: Sequence[str], template: str) -> None:
    """Raise on the first file with words of the chats in the files ``traffic``.

    Six words in a row of a message, or a shorter message as a whole, count; what the target's chat ``template`` says
    in every prompt is not the traffic's. The message of the error does not repeat them.
    """
    if not traffic:
        return
    known, common = _sayings(traffic), {" ".join(words) for words in _windows(template)}
    for name, content in _texts(files):
        for text in _strings(name, content):
            if any(saying in known and saying not in common for saying in map(" ".join, _windows(text))):
                raise SpectrainError(
                    f"{name} holds words of a chat in {', '.join(Path(p).name for p in traffic)}; nothing was sent. "
                    "Take them out (of --notes, of names and settings) and publish again"
                )


def _sayings(traffic: Sequence[str]) -> set[str]:
    found = set()
    # One by one: files of one run, before and after it, share their ids.
    for conversation in itertools.chain.from_iterable(load_conversations(file) for file in traffic):
        for message in conversation.messages:
            for text in (message.content, *_leaves(message.extra)):
                words = _words(text)
                if len(words) >= _WINDOW:
                    found |= {" ".join(words[i : i + _WINDOW]) for i in range(len(words) - _WINDOW + 1)}
                elif len(words) >= _LEAST[0] and len(text) >= _LEAST[1]:
                    found.add(" ".join(words))
    return found


def _windows(text: str) -> Iterator[list[str]]:
    words = _words(text)
    for size in range(_LEAST[0], _WINDOW + 1):
        yield from (words[i : i + size] for i in range(len(words) - size + 1))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def _texts(files: Mapping[str, bytes | Path]) -> Iterator[tuple[str, str]]:
    for name, content in files.items():
        if PurePosixPath(name).suffix not in _BINARY:
            raw = content.read_bytes() if isinstance(content, Path) else content
            yield name, raw.decode("utf-8", errors="replace")


def _strings(name: str, content: str) -> Iterable[str]:
    """A text as a whole; of JSON every string by itself, as it reads without escapes."""
    return _leaves(json.loads(content)) if name.endswith(".json") else [content]


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
