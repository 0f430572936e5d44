"""Answers found in every style of template: the prompt as served comes first, and only the answer is supervised."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from templates import CALLING, CHATML, OPENED, STYLES, THINKING, Style, byte_tokenizer

from spectrain.data.conversations import Conversation, EncodedRow, encode, encode_all, parse_conversation, render_prompt
from spectrain.data.template import ChatTemplate, set_template_kwargs
from spectrain.errors import SpectrainError

SEARCH = {"type": "function", "function": {"name": "search", "description": "d", "parameters": {"type": "object"}}}
STOPS = {"<|im_end|>", "<eos>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>"}
WORDS = st.text("ab é", min_size=1, max_size=6).filter(lambda text: text.strip() == text)
TEXTS = st.text("ab é\n", min_size=1, max_size=8).filter(lambda text: text.strip())


def call(**arguments: Any) -> dict[str, Any]:
    return {"id": "call12345", "type": "function", "function": {"name": "search", "arguments": arguments}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def bot(text: str | None, **extra: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **extra}


def chat(*turns: dict[str, Any], **row: Any) -> Conversation:
    return parse_conversation({"id": "c", "messages": list(turns), **row}, "chats.jsonl:7")


def decode(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False))


def runs(row: EncodedRow) -> list[tuple[int, int]]:
    """Where the supervised stretches begin and end."""
    found, at = [], 0
    for asked, group in groupby(row.mask):
        length = len(list(group))
        found += [(at, at + length)] if asked else []
        at += length
    return found


def answers(conversation: Conversation, tokenizer: Any) -> list[str]:
    return [
        decode(tokenizer, row.ids[start:end]) for row in encode(conversation, tokenizer) for start, end in runs(row)
    ]


@st.composite
def conversations(draw: st.DrawFn, style: Style) -> Conversation:
    turns: list[dict[str, Any]] = []
    if style.system and draw(st.booleans()):
        turns.append({"role": "system", "content": draw(TEXTS)})
    calls = style.tools and draw(st.booleans())
    for _ in range(draw(st.integers(1, 3))):
        turns.append(user(draw(TEXTS)))
        if calls and draw(st.booleans()):
            turns.append(bot(None, tool_calls=[call(q=draw(WORDS), n=draw(st.integers(0, 9)))]))
            turns.append({"role": "tool", "content": draw(TEXTS), "tool_call_id": "call12345", "name": "search"})
        text, trace = draw(TEXTS), draw(WORDS)
        kind = draw(st.sampled_from(["key", "tags"] if style.needs_trace else ["none", "key", "tags"]))
        if not style.traces or kind == "none":
            turns.append(bot(text))
        elif kind == "key":
            turns.append(bot(text, reasoning_content=trace))
        else:
            turns.append(bot(f"<think>\n{trace}\n</think>\n\n{text.lstrip()}"))
    return chat(*turns, **({"tools": [SEARCH]} if calls else {}))


@pytest.mark.parametrize("name", STYLES)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_every_answer_follows_the_prompt_as_it_is_served(name: str, data: st.DataObject) -> None:
    style = STYLES[name]
    tokenizer = style.tokenizer()
    set_template_kwargs(tokenizer, style.kwargs)
    template, conversation = ChatTemplate(tokenizer), data.draw(conversations(style))
    turns = [message.turn for message in conversation.messages]
    places = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
    rows = encode(conversation, tokenizer)
    found = [(row, start, end) for row in rows for start, end in runs(row)]
    assert len(found) == len(places)  # one stretch an answer, and no other is supervised
    assert len(rows) in (1, len(places))
    for (row, start, end), place in zip(found, places, strict=True):
        assert row.ids[:start] == template.render(turns[:place], True, conversation.tools)
        text = decode(tokenizer, row.ids[start:end])
        stop = next(stop for stop in STOPS if text.endswith(stop))
        assert not any(stop in text[: -len(stop)] for stop in STOPS)
        said = turns[place]["content"].split("</think>")[-1]
        assert said.strip() in text
        for shown in turns[place].get("tool_calls", ()):
            assert f'"{shown["function"]["name"]}"' in text
            assert f'"q": "{shown["function"]["arguments"]["q"]}"' in text
        if "reasoning_content" in turns[place]:
            assert turns[place]["reasoning_content"] in text
        if style.bos:
            assert row.ids.count(tokenizer.bos_token_id) == 1
        plain = text.removesuffix(stop).removeprefix("<think>\n\n</think>\n\n")
        if not style.traces and "tool_calls" not in turns[place]:
            assert plain.strip() == said.strip()


def test_a_turn_of_tool_calls_may_end_with_a_token_of_its_own() -> None:
    tokenizer = byte_tokenizer(CALLING, "<bos>")
    turns = [user("q"), bot(None, tool_calls=[call(q="x")]), {"role": "tool", "content": "r"}, bot("done")]
    assert answers(chat(*turns, tools=[SEARCH]), tokenizer) == [
        '{"name": "search", "parameters": {"q": "x"}}<|eom_id|>',
        "done<|eot_id|>",
    ]


def test_tools_are_shown_and_calls_are_supervised_as_they_were_made() -> None:
    tokenizer = byte_tokenizer(CHATML)
    asked = chat(user("q"), bot("let me see", tool_calls=[call(q="é"), call(n=1)]), tools=[SEARCH])
    (row,) = encode(asked, tokenizer)
    assert '"description": "d"' in decode(tokenizer, row.ids[: row.mask.index(1)])
    (text,) = answers(asked, tokenizer)
    opening, closing = '<tool_call>\n{"name": "search", "arguments": ', "}\n</tool_call>"
    first, second = (opening + arguments + closing for arguments in ('{"q": "é"}', '{"n": 1}'))
    assert text == f"let me see{first}{second}<|im_end|>"
    assert render_prompt(asked, tokenizer) == row.ids[: row.mask.index(1)]
    assert render_prompt(asked.prompt, tokenizer) != render_prompt(asked, tokenizer)  # without tools another prompt


def test_a_template_that_leaves_tool_calls_out_is_refused() -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    template += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    with pytest.raises(SpectrainError, match=r"chats\.jsonl:7: .* leaves the call of tool 'search' out of the turn"):
        encode(chat(user("q"), bot(None, tool_calls=[call(q="x")])), byte_tokenizer(template))


@pytest.mark.parametrize("shown", ["' ' + call.function.arguments", "' ' ~ call.function.arguments"])
def test_arguments_are_json_text_where_the_template_needs_it(shown: str) -> None:
    """One fails on objects, the other shows them in Python's notation."""
    template = CHATML.replace("{{ call.function.arguments | tojson }}", f"{{{{ {shown} }}}}")
    assert template != CHATML
    (text,) = answers(chat(user("q"), bot(None, tool_calls=[call(q="é")])), byte_tokenizer(template))
    assert '"arguments":  {"q": "é"}' in text


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("read", ["reasoning_content", "thinking"])
def test_a_trace_reaches_the_template_under_the_name_it_reads(key: str, read: str) -> None:
    tokenizer = byte_tokenizer(THINKING.replace("m.reasoning_content", f"m.{read}"))
    assert answers(chat(user("q"), bot("a", **{key: "hm"})), tokenizer) == ["<think>\nhm\n</think>\n\na<|im_end|>"]


def test_a_trace_that_the_generation_prompt_opens_is_trained_from_there() -> None:
    tokenizer = byte_tokenizer(OPENED, "<bos>")
    for turn in (bot("<think>\nhm\n</think>\n\na"), bot("hm\n</think>\n\na"), bot("a", reasoning="hm")):
        (row,) = encode(chat(user("q"), turn), tokenizer)
        assert decode(tokenizer, row.ids) == "<bos>[INST]q[/INST]<|im_start|><think>\nhm\n</think>\n\na<eos>"
        assert decode(tokenizer, row.ids[row.mask.index(1) :]) == "hm\n</think>\n\na<eos>"
    with pytest.raises(SpectrainError, match="has no boundary between prompt and answer"):
        encode(chat(user("q"), bot("a")), tokenizer)  # the model would not answer like this


def test_thinking_turned_off_is_part_of_every_prompt() -> None:
    tokenizer = byte_tokenizer(THINKING)
    conversation = chat(user("q"), bot("a"))
    assert answers(conversation, tokenizer) == ["<think>\n\n</think>\n\na<|im_end|>"]
    (default,) = encode(conversation, tokenizer)
    set_template_kwargs(tokenizer, {"enable_thinking": False})
    assert answers(conversation, tokenizer) == ["a<|im_end|>"]
    (off,) = encode(conversation, tokenizer)
    assert off.ids == default.ids
    assert off.mask != default.mask
    assert decode(tokenizer, render_prompt(conversation, tokenizer)).endswith("<think>\n\n</think>\n\n")
    with pytest.raises(SpectrainError, match="has no boundary"):  # an answer that thinks all the same
        encode(chat(user("q"), bot("a", reasoning="hm")), tokenizer)


def test_text_that_would_merge_with_the_prompts_end_is_cut_there() -> None:
    """A server feeds the prompt's ids; the answer's own line end must not change them."""
    tokenizer = byte_tokenizer(CHATML)
    (row,) = encode(chat(user("q"), bot("\na")), tokenizer)
    assert row.ids[: row.mask.index(1)] == render_prompt([*chat(user("q")).messages], tokenizer)
    assert answers(chat(user("q"), bot("\na")), tokenizer) == ["\na<|im_end|>"]


def test_the_template_judges_the_order_of_turns() -> None:
    tokenizer = STYLES["inst"].tokenizer()
    twice = chat(user("q"), bot("a"), bot("b"))
    with pytest.raises(SpectrainError, match="roles must take turns"):
        encode(twice, tokenizer)
    rows, dropped = encode_all([chat(user("q"), bot("a")), twice], tokenizer, drop_bad=True)
    assert (len(rows), dropped["template_fails"], dropped.places) == (1, 1, {"template_fails": ["chats.jsonl:7"]})
    assert answers(twice, byte_tokenizer(CHATML)) == ["a<|im_end|>", "b<|im_end|>"]
    with pytest.raises(SpectrainError, match="System role not supported"):
        encode(chat({"role": "developer", "content": "s"}, user("q"), bot("a")), STYLES["gemma"].tokenizer())
