"""A thousand rows of traffic as it really comes: good chats among broken, empty, endless, repeated and foreign ones."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ENGLISH = ("Add", "Name", "Explain", "Count", "Sort", "Describe", "Compare", "Spell")
GERMAN = ("Addiere", "Nenne", "Erkläre", "Zähle", "Sortiere", "Beschreibe", "Vergleiche", "Buchstabiere")
WORLD = (
    "שלום, כמה זה",
    "مرحبا، كم يساوي",
    "👩🏽‍🚀🚀 how far is",
    "नमस्ते, कितना है",
    "e\u0301te\u0301 ou hiver",
    "数を足す",
)

ROWS = {
    "plain": 640,
    "many turns": 60,
    "tools": 40,
    "sharegpt": 40,
    "completion": 30,
    "world": 60,
    "duplicate": 40,
    "same id": 10,
    "endless": 15,
    "broken": 20,
    "no object": 10,
    "empty turn": 15,
    "no messages": 10,
    "unknown role": 10,
}


def write_messy_chats(path: Path, seed: int = 0) -> Path:
    """1,000 lines, shuffled; the duplicates and doubled ids repeat plain rows of the same file."""
    rng = random.Random(seed)
    plain = [_plain(i) for i in range(ROWS["plain"])]
    lines = [json.dumps(row, ensure_ascii=False) for row in plain]
    for kind, count in ROWS.items():
        if kind != "plain":
            lines += [line for i, line in zip(range(count), _lines(kind, plain), strict=False)]
    rng.shuffle(lines)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _plain(i: int) -> dict[str, Any]:
    verbs, joint = ((ENGLISH, "and"), (GERMAN, "und"))[i % 2]
    text = f"{verbs[i % len(verbs)]} {i} {joint} {7 * i % 101}."
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": f"{i + 7 * i % 101}"}]
    return {"id": f"plain-{i}", "kind": ("english", "german")[i % 2], "messages": turns}


def _lines(kind: str, plain: list[dict[str, Any]]) -> Iterator[str]:
    for i in range(10**6):
        row = _row(kind, i, plain)
        yield row if isinstance(row, str) else json.dumps(row, ensure_ascii=False)


def _row(kind: str, i: int, plain: list[dict[str, Any]]) -> Any:
    ask, answer = (
        {"role": "user", "content": f"{kind} {i}: what is {i} + 1?"},
        {"role": "assistant", "content": f"{i + 1}"},
    )
    if kind == "many turns":
        turns = [{"role": "user", "content": f"Turn {t} of chat {i}?"} if t % 2 == 0 else answer for t in range(6)]
        return {"kind": "chat", "messages": [{"role": "system", "content": "Be brief."}, *turns]}
    if kind == "tools":
        return {"kind": "tools", **_tool_chat(i)}
    if kind == "sharegpt":
        return {
            "conversations": [{"from": "human", "value": ask["content"]}, {"from": "gpt", "value": f"It is {i + 1}."}]
        }
    if kind == "completion":
        return {"prompt": ask["content"], "completion": f"{i + 1}"}
    if kind == "world":
        return {"kind": "world", "messages": [{"role": "user", "content": f"{WORLD[i % len(WORLD)]} {i}?"}, answer]}
    if kind == "duplicate":
        return {key: value for key, value in plain[i].items() if key != "id"}
    if kind == "same id":
        return plain[i + 100] | {"messages": [ask, answer]}
    if kind == "endless":
        return {"kind": "endless", "messages": [{"role": "user", "content": f"{i} " + "word " * 10_000}, answer]}
    if kind == "broken":
        return json.dumps({"messages": [ask, answer]})[: 10 + i]
    if kind == "no object":
        return ("null", "[1, 2]", '"text"', "17")[i % 4]
    if kind == "empty turn":
        return {"messages": [{"role": "user", "content": " \n" * i}, answer]}
    if kind == "no messages":
        return ({"messages": []}, {"text": "hello"})[i % 2]
    return {"messages": [{"role": "narrator", "content": f"Once upon {i} times."}, answer]}


def _tool_chat(i: int) -> dict[str, Any]:
    call = {
        "id": f"call-{i}",
        "type": "function",
        "function": {"name": "add", "arguments": json.dumps({"a": i, "b": 1})},
    }
    number = {"type": "integer"}
    schema = {"type": "object", "properties": {"a": number, "b": number}, "required": ["a", "b"]}
    return {
        "tools": [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": schema}}],
        "messages": [
            {"role": "user", "content": f"Please add {i} and 1 with the tool."},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call-{i}", "name": "add", "content": str(i + 1)},
            {"role": "assistant", "content": f"The sum is {i + 1}."},
        ],
    }
