"""What a server with OpenAI's endpoints is asked, and what its answer says.

Token ids go in and out where the server knows them, as vLLM does: a prompt of ids at /completions, and
``return_token_ids`` for the sampled ones. Else text: at /completions, or at /chat/completions, where the server renders
the chat itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from spectrain.data.messages import arguments_as_text
from spectrain.regenerate.client import UnreadableError
from spectrain.regenerate.config import RegenerateConfig

ENDED = {"stop": "eos", "tool_calls": "eos", "function_call": "eos", "length": "budget"}


class Dialect(BaseModel):
    """How this server is spoken to: found once, and part of what the answers depend on.

    ``extended``: it takes the fields of vLLM that OpenAI does not have. ``token_ids``: it gives the sampled ids.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    endpoint: Literal["completions", "chat/completions"]
    extended: bool
    token_ids: bool = False


# In order of what they leave to chance: with ids nothing is rendered or tokenized twice.
DIALECTS = tuple(Dialect(endpoint=endpoint, extended=extended)
                 for endpoint in ("completions", "chat/completions") for extended in (True, False))  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """``message`` as chats have it; sampled ``ids``, the prompt's ids and their number where the server gives them."""

    message: dict[str, Any]
    finished: str
    ids: list[int] | None
    prompt_ids: list[int] | None
    prompt_tokens: int | None


@dataclass(frozen=True)
class Chat:
    """A prompt as a server renders it itself: turns, the tools they may call, and the template's own settings."""

    turns: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    settings: Mapping[str, Any] | None = None

    def fields(self) -> dict[str, Any]:
        """Of a request's body; what there is none of is not sent, for not every server knows it."""
        named = {"tools": self.tools, "chat_template_kwargs": self.settings}
        turns = [_over_the_wire(turn) for turn in self.turns]
        return {"messages": turns, **{name: value for name, value in named.items() if value}}


def request(dialect: Dialect, config: RegenerateConfig, model: str, prompt_ids: Sequence[int], chat: Chat,
            seed: int) -> dict[str, Any]:  # fmt: skip
    """The body of a request. Every field that shapes the law is named: a server's own defaults (those of the model's
    generation_config.json, in vLLM) would else be part of it."""
    sampler = config.sampler
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": config.max_new_tokens,
        "temperature": sampler.temperature,
        "top_p": 1.0 if sampler.greedy else sampler.top_p or 1.0,
        "seed": seed % 2**31,  # some servers hold it in 32 bits
    }
    body |= {"prompt": list(prompt_ids)} if dialect.endpoint == "completions" else chat.fields()
    if dialect.extended:
        top_k = -1 if sampler.greedy else sampler.top_k or -1
        body |= {"top_k": top_k, "min_p": 0.0, "repetition_penalty": 1.0, "return_token_ids": True}
    return body


def read_answer(found: Any) -> Answer:
    """The first choice of either endpoint's answer. UnreadableError where it is not whole."""
    choices = found.get("choices") if isinstance(found, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        raise UnreadableError("no choices")
    reason = choice.get("finish_reason")
    if reason not in ENDED:
        raise UnreadableError(f"finish_reason {reason!r}, which is no end of an answer")
    prompt_ids = found.get("prompt_token_ids") or choice.get("prompt_token_ids")  # of a chat, of a completion
    usage = found.get("usage")
    counted = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    message, ids = _message(choice), _ids(choice.get("token_ids"))
    if not ids and ENDED[reason] == "budget" and not (message["content"] or message.get("reasoning_content")):
        raise UnreadableError("an empty answer that is said to be too long")
    return Answer(message, ENDED[reason], ids, _ids(prompt_ids), counted if type(counted) is int else None)


def _message(choice: Mapping[str, Any]) -> dict[str, Any]:
    if "message" not in choice:
        return {"role": "assistant", "content": _text("" if choice.get("text", 0) is None else choice.get("text"))}
    said = choice["message"]
    if not isinstance(said, dict):
        raise UnreadableError("a message that is no object")
    message: dict[str, Any] = {"role": "assistant", "content": _text(said.get("content") or "")}
    thought = said.get("reasoning_content") or said.get("reasoning")
    if thought:
        message["reasoning_content"] = _text(thought)
    if said.get("tool_calls"):
        message["tool_calls"] = said["tool_calls"]
    return message


def _over_the_wire(turn: Mapping[str, Any]) -> dict[str, Any]:
    """A turn with the arguments of its tool calls as JSON text, as OpenAI has them."""
    if "tool_calls" not in turn:
        return dict(turn)
    return {**turn, "tool_calls": [arguments_as_text(call) for call in turn["tool_calls"]]}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise UnreadableError("no text")
    return value


def _ids(value: Any) -> list[int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or any(type(i) is not int or i < 0 for i in value):
        raise UnreadableError("token ids that are no whole numbers")
    return value
