"""A tokenizer's chat template as a function to ids, and where in them an answer begins and ends.

*Render boundaries*: an answer spans from the end of ``render(history + generation prompt)`` to the
end-of-turn token of ``render(history + answer)``. No generation tags are needed; a template without such
boundaries is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from inspect import signature
from typing import Any

from transformers import PreTrainedTokenizerBase

from spectrain.data.dropped import RowError
from spectrain.data.messages import REASONING, arguments_as_text
from spectrain.errors import SpectrainError
from spectrain.identity import common_prefix

Turn = Mapping[str, Any]  # {"role": ..., "content": ..., ...}
Tools = Sequence[Mapping[str, Any]]
# What a template's own settings cannot be called.
RESERVED = frozenset(signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {"messages"}

_SETTINGS = "spectrain_template_settings"
_OPENING = re.compile(r"\s*<(\w+)>\s*")  # a generation prompt may open a reasoning trace
_PROBE_CALL = {"x": "v"}


def set_template_kwargs(tokenizer: Any, settings: Mapping[str, Any]) -> None:
    """Render every chat of this tokenizer with these variables, such as ``enable_thinking``.

    They go with the tokenizer, so that training, regeneration and evaluation cannot part over them.
    """
    setattr(tokenizer, _SETTINGS, dict(settings))


class ChatTemplate:
    """A tokenizer's chat template as a function from messages to ids, with the place where an answer ends."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.settings: dict[str, Any] = getattr(tokenizer, _SETTINGS, {})
        self.name = f"the chat template of {getattr(tokenizer, 'name_or_path', '') or type(tokenizer).__name__}"
        if not getattr(tokenizer, "chat_template", None):
            raise SpectrainError(
                f"{self.name} is missing; set tokenizer.chat_template (chat_template.jinja beside it) "
                "to the template that the model was trained and is served with"
            )

    def render(self, messages: Sequence[Turn], generation_prompt: bool, tools: Tools | None = None) -> list[int]:
        """Ids of ``messages``; no special tokens beyond the template's own. A RowError where the template fails."""
        ids = self._apply([self._as_read(turn) for turn in messages], generation_prompt, tools, tokenize=True)
        bos = self.tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            raise SpectrainError(f"{self.name} begins with two BOS tokens (id {bos}); remove one from the template")
        return list(ids)

    def _text(self, messages: Sequence[Turn], generation_prompt: bool, tools: Tools | None) -> str:
        return str(self._apply([self._as_read(turn) for turn in messages], generation_prompt, tools, tokenize=False))

    def _apply(self, turns: Sequence[Turn], generation_prompt: bool, tools: Tools | None, *, tokenize: bool) -> Any:
        try:
            # return_dict: transformers 5 would give a BatchEncoding otherwise.
            return self.tokenizer.apply_chat_template(
                list(turns),
                tools=list(tools) if tools else None,
                tokenize=tokenize,
                add_generation_prompt=generation_prompt,
                return_dict=False,
                **self.settings,
            )
        except Exception as error:  # templates raise whatever jinja or raise_exception() gives
            roles = ", ".join(turn["role"] for turn in turns)
            raise RowError("template_fails", f"{self.name} fails on a conversation of {roles}: {error}") from error

    def _as_read(self, turn: Turn) -> Turn:
        """The turn with a reasoning trace under the name that the template reads, and arguments as it takes them."""
        turn = dict(turn)
        if "reasoning_content" in turn:
            turn[self._reasoning_key] = turn.pop("reasoning_content")
        if "tool_calls" in turn and self._arguments_as_text:
            turn["tool_calls"] = [arguments_as_text(call) for call in turn["tool_calls"]]
        return turn

    @cached_property
    def _reasoning_key(self) -> str:
        source = str(self.tokenizer.chat_template)
        return next((key for key in REASONING if re.search(rf"\b{key}\b", source)), REASONING[0])

    @cached_property
    def _arguments_as_text(self) -> bool:
        """Whether arguments have to be JSON text: the template fails on objects, or shows them as Python would."""
        call = {"id": "abcdefghi", "type": "function", "function": {"name": "probe", "arguments": _PROBE_CALL}}
        asked = {"role": "user", "content": "a"}
        shown = []
        for one in (call, arguments_as_text(call)):
            try:
                turns: list[Turn] = [asked, {"role": "assistant", "content": "", "tool_calls": [one]}]
                shown.append(str(self._apply(turns, False, None, tokenize=False)))
            except RowError:
                shown.append("")
        objects, text = shown
        return bool(text) and (not objects or str(_PROBE_CALL) in objects)

    @cached_property
    def ending(self) -> list[int]:
        """What follows an answer's content, from the end-of-turn token on: ``[<|im_end|>, newline]``."""
        asked = {"role": "user", "content": "a"}
        answers = ({"role": "assistant", "content": content} for content in ("0", "1"))
        try:
            one, other = (self.render([asked, answer], generation_prompt=False) for answer in answers)
        except RowError as error:  # it fails on the simplest chat: no row will do
            raise SpectrainError(str(error)) from error
        after = one[len(one) - common_prefix(one[::-1], other[::-1]) :]
        special = {*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder}
        start = next((i for i, token in enumerate(after) if token in special), None)
        if start is None or one == other:
            raise SpectrainError(
                f"{self.name} puts no special token after an answer, so its end cannot be found; use a "
                "template that closes the assistant's turn with one, such as <|im_end|> or the EOS token"
            )
        return after[start:]

    def span(self, history: Sequence[Turn], answer: Turn, tools: Tools | None = None) -> tuple[list[int], int]:
        """(ids up to the end-of-turn token, where the answer begins) for one answer after its history.

        The ids begin with those of the prompt as a server renders it, and go on. A RowError where there is no such
        boundary, or where tool calls would be lost.
        """
        prompt = self.render(history, True, tools)
        full = self.render([*history, answer], False, tools)
        same = common_prefix(prompt, full)
        if same < len(prompt):
            rest = self._continuation(history, answer, tools, prompt)
            if rest is None:
                raise self._no_boundary(prompt, full, same)
            full = prompt + rest
        end = self._end(full, len(prompt), calls=bool(answer.get("tool_calls")))
        if end is None or end <= len(prompt):
            raise self._no_boundary(prompt, full, same)
        self._check_calls(full[len(prompt) : end], answer)
        return full[:end], len(prompt)

    def _continuation(self, history: Sequence[Turn], answer: Turn, tools: Tools | None,
                      prompt: list[int]) -> list[int] | None:  # fmt: skip
        """Ids of what follows the prompt, where the whole text cuts into other tokens at the boundary, or where the
        generation prompt opens a trace that the template leaves out of a finished turn; None where nothing follows."""
        opened, closed = self._text(history, True, tools), self._text([*history, answer], False, tools)
        same = common_prefix(opened, closed)
        rest = closed[same:] if same == len(opened) else _with_trace(opened[same:], answer, closed[same:])
        if rest is None:
            return None
        ids = [self.tokenizer.encode(text, add_special_tokens=False) for text in (rest, opened + rest)]
        # Some tokenizers put a space before every text that they encode.
        as_text = [self.tokenizer.decode(found, skip_special_tokens=False) for found in (prompt + ids[0], ids[1])]
        return list(ids[0]) if as_text[0] == as_text[1] else None

    def _end(self, full: Sequence[int], start: int, calls: bool) -> int | None:
        """Where the turn that begins at ``start`` ends, its end-of-turn token included."""
        plain = len(full) - len(self.ending)
        if list(full[plain:]) == self.ending:
            return plain + 1
        if not calls:
            return None
        # A turn of tool calls may close with a token of its own, such as <|eom_id|>.
        added = self.tokenizer.added_tokens_decoder.items()
        special = {*self.tokenizer.all_special_ids, *(i for i, token in added if token.special)}
        return next((i + 1 for i in range(len(full) - 1, start - 1, -1) if full[i] in special), None)

    def _check_calls(self, ids: Sequence[int], answer: Turn) -> None:
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        names = [call["function"]["name"] for call in answer.get("tool_calls", ())]
        lost = next((name for name in names if name not in text), None)
        if lost is not None:
            raise RowError(
                "template_fails",
                f"{self.name} leaves the call of tool {lost!r} out of the turn; use the template that the model calls "
                "tools with, or write the calls as text",
            )

    def _no_boundary(self, prompt: Sequence[int], full: Sequence[int], same: int) -> RowError:
        found = self.tokenizer.convert_ids_to_tokens(list(full[same : same + 3]))
        wanted = self.tokenizer.convert_ids_to_tokens(list(prompt[same : same + 3]))
        return RowError(
            "no_boundary",
            f"{self.name} has no boundary between prompt and answer: at token {same} the prompt has "
            f"{wanted}, the finished turn {found}; expected prompt, answer, end of turn (the generation "
            "prompt must open the turn as the finished turn does)",
        )


def _with_trace(opening: str, answer: Turn, visible: str) -> str | None:
    """The turn after a generation prompt that ends in ``opening``, with the trace that the answer has; ``visible`` is
    what the template shows of it. None where no trace is opened, or the answer has none."""
    tag = _OPENING.fullmatch(opening)
    if tag is None:
        return None
    closing, content = f"</{tag[1]}>", str(answer["content"])
    if "reasoning_content" in answer:
        trace, shown = f"{answer['reasoning_content'].strip()}\n", f"\n\n{content}"
    elif closing in content:
        trace, _, shown = content.rpartition(closing)
        trace = trace.lstrip()
        for head in (opening.lstrip(), f"<{tag[1]}>"):
            trace = trace.removeprefix(head)
    else:
        return None
    text = shown.strip()
    after = visible.lstrip()
    if not after.startswith(text):
        return None
    gap = shown[: len(shown) - len(shown.lstrip())]
    return trace + closing + gap + after
