"""Messages: what chat files call their roles, texts, tools and tool calls, in the one form that templates take."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spectrain.data.dropped import RowError
from spectrain.data.rows import Row

ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "bot", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "function_response"), "tool"),
}
CALL_ROLE = "function_call"  # ShareGPT: an assistant's turn that is a tool call, written as JSON
REASONING = ("reasoning_content", "reasoning", "thinking")  # what a trace beside the answer is called
TEXT_PARTS = ("text", "input_text", "output_text")


@dataclass(frozen=True)
class Message:
    """One turn. ``extra`` holds what else templates read: of an assistant ``tool_calls`` (OpenAI's form, arguments as
    objects) and ``reasoning_content``, of a tool ``name`` and ``tool_call_id``."""

    role: str  # "system", "user", "assistant" or "tool"
    content: str
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def turn(self) -> dict[str, Any]:
        """The message as chat templates take it."""
        return {"role": self.role, "content": self.content, **self.extra}


def read_messages(row: Row, place: str, allow_empty_answer: bool) -> tuple[Message, ...]:
    """The messages of a row; a RowError names ``place`` and the message."""
    messages = tuple(
        _message(entry, f"{place}: message {number}", allow_empty_answer)
        for number, entry in enumerate(_entries(row, place), start=1)
    )
    _check_turns(messages, place)
    return messages


def read_tools(value: Any, place: str) -> tuple[Mapping[str, Any], ...]:
    """JSON schemas of a row's tools, a list or its JSON text; a bare function gets OpenAI's wrapping."""
    tools = _json(value, f"{place}: tools") if isinstance(value, str) else value
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError("bad_tools", f"{place}: tools is {value!r:.60}, expected a list of JSON schemas")
    return tuple(_tool(tool) for tool in plain_json(tools, "bad_tools", f"{place}: tools"))


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    bare = "name" in tool and "function" not in tool and tool.get("type") in (None, "function")
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} if bare else tool


def _entries(row: Row, place: str) -> list[Any]:
    for key in ("messages", "conversations"):
        if key in row:
            if not isinstance(row[key], list) or not row[key]:
                raise RowError(
                    "bad_row", f"{place}: {key} is {row[key]!r:.60}, expected a list of at least one message"
                )
            return _with_system(row, row[key]) if key == "conversations" else row[key]
    if "prompt" not in row:
        keys = ", ".join(row) or "no keys"
        raise RowError(
            "bad_row", f"{place}: found {keys}; expected messages, conversations, or prompt (and completion)"
        )
    parts = [("user", row["prompt"])] + ([("assistant", row["completion"])] if "completion" in row else [])
    return [
        entry
        for role, part in parts
        for entry in (part if isinstance(part, list) else [{"role": role, "content": part}])
    ]


def _with_system(row: Row, entries: list[Any]) -> list[Any]:
    """ShareGPT files may keep the system prompt in a key of its own."""
    first = entries[0]
    has_own = isinstance(first, dict) and first.get("role", first.get("from")) in ("system", "developer")
    text = row.get("system")
    return entries if has_own or not isinstance(text, str) or not text.strip() else [
        {"from": "system", "value": text}, *entries
    ]  # fmt: skip


def _message(entry: Any, where: str, allow_empty_answer: bool) -> Message:
    if not isinstance(entry, dict):
        raise RowError("bad_row", f"{where}: found {type(entry).__name__}, expected an object with role and content")
    entry = {key: value for key, value in entry.items() if value is not None}  # Parquet fills gaps with null
    name = entry.get("role", entry.get("from"))
    if name == CALL_ROLE:
        return Message("assistant", "", {"tool_calls": _written_calls(entry, where)})
    if not isinstance(name, str) or name not in ROLES:
        expected = ", ".join([*ROLES, CALL_ROLE])
        raise RowError("unknown_role", f"{where}: unknown role {name!r}; expected one of {expected}")
    role, where = ROLES[name], f"{where} ({name})"
    extra = _extra(role, entry, where)
    content = _text(entry.get("content", entry.get("value")), where, role, optional="tool_calls" in extra)
    may_be_empty = role == "tool" or "tool_calls" in extra or (allow_empty_answer and role == "assistant")
    if not content.strip() and not may_be_empty:
        raise RowError("empty_turn", f"{where}: empty content; fill it or remove the message")
    return Message(role, content, extra)


def _extra(role: str, entry: Row, where: str) -> dict[str, Any]:
    if role == "tool":
        return {
            key: _encodable(entry[key], where) for key in ("tool_call_id", "name") if isinstance(entry.get(key), str)
        }
    found: dict[str, Any] = {}
    if role != "assistant":
        return found
    traces = [entry[key] for key in REASONING if isinstance(entry.get(key), str) and entry[key].strip()]
    if traces:
        found["reasoning_content"] = _encodable(traces[0], where)
    calls = entry.get("tool_calls") or ([entry["function_call"]] if entry.get("function_call") else [])
    if calls:
        found["tool_calls"] = _calls(calls, where)
    return found


def _written_calls(entry: Row, where: str) -> list[dict[str, Any]]:
    value = entry.get("value", entry.get("content"))
    calls = _json(value, f"{where} ({CALL_ROLE})") if isinstance(value, str) else value
    return _calls(calls if isinstance(calls, list) else [calls], f"{where} ({CALL_ROLE})")


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls in OpenAI's form. Arguments become objects: most templates write them as JSON themselves."""
    if not isinstance(calls, list) or not calls:
        raise RowError("bad_tools", f"{where}: tool_calls is {calls!r:.60}, expected a list of calls")
    found = []
    for number, call in enumerate(calls, start=1):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise RowError("bad_tools", f"{where}: tool call {number} has no name; expected name and arguments")
        arguments = function.get("arguments", function.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = _json(arguments or "{}", f"{where}: arguments of tool call {number}")
        if not isinstance(arguments, dict):
            raise RowError("bad_tools", f"{where}: arguments of tool call {number} are no JSON object")
        name = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        found.append({**name, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return list(plain_json(found, "bad_tools", f"{where}: tool_calls"))


def arguments_as_text(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call with its arguments as JSON text, as OpenAI has them and as some templates take them."""
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError("bad_tools", f"{where}: not valid JSON ({type(error).__name__}); mend it") from error


def plain_json(value: Any, reason: str, where: str) -> Any:
    """``value``, if it can be written down again: no NaN, no half characters."""
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, TypeError) as error:
        raise RowError(reason, f"{where}: {type(error).__name__}, expected plain JSON in UTF-8") from error
    return value


def _text(content: Any, where: str, role: str, optional: bool) -> str:
    if content is None and optional:
        return ""
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") in TEXT_PARTS for p in content):
        content = "".join(str(part.get("text", "")) for part in content)
    elif role == "tool" and isinstance(content, (dict, list)):
        content = json.dumps(content, ensure_ascii=False)  # a result that was not written as text yet
    if not isinstance(content, str):
        raise RowError("bad_content", f"{where}: content is {content!r:.60}, expected text")
    return _encodable(content, where)


def _encodable(text: str, where: str) -> str:
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        raise RowError(
            "bad_content",
            f"{where}: content holds half a surrogate pair, which no tokenizer can encode; fix the text",
        )
    return text


def _check_turns(messages: Sequence[Message], place: str) -> None:
    """Every answer needs a question before it. Which other orders make sense is the template's to judge."""
    roles = [message.role for message in messages]
    if "user" not in roles:
        raise RowError("no_user_turn", f"{place}: no user turn (found {', '.join(roles)}); a conversation needs one")
    early = next(_answers(roles[: roles.index("user")]), None)
    if early is not None:
        raise RowError(
            "no_user_turn",
            f"{place}: message {early + 1} is of the assistant, but no user turn comes before it; remove it or add one",
        )


def _answers(roles: Sequence[str]) -> Iterator[int]:
    return (i for i, role in enumerate(roles) if role == "assistant")
