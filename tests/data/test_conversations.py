"""Formats in, errors by file and line, and masks that come from the template's render boundaries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spectrain.data.conversations import (
    Conversation,
    Message,
    encode,
    encode_all,
    from_sampled,
    load_conversations,
    render_prompt,
)
from spectrain.data.dropped import PLACES, Dropped
from spectrain.errors import SpectrainError

CHATML = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
# As reasoning models do: only the newest answer keeps its thoughts.
FORGETFUL = (
    "{% for m in messages %}<s>{{ m['role'] }}\n"
    "{{ m['content'].split('/think ')[-1] if m['role'] == 'assistant' and not loop.last else m['content'] }}"
    "</s>\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
WORDS = [
    *"abcdefgh01",
    "\n",
    "system",
    "user",
    "assistant",
    "think",
    "/think",
    "User:",
    "Bot:",
    "[I]",
    "[/I]",
]


def word_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """One token a word, a newline or a special: ``<s>`` opens and ``</s>`` closes a turn."""
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<end>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    newline = pre_tokenizers.Split("\n", behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([newline, pre_tokenizers.Split(" ", behavior="removed")])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<end>"],
        chat_template=template,
    )


def chat(*contents: str, name: str = "c") -> Conversation:
    roles = ("user", "assistant")
    return Conversation(name, tuple(Message(roles[i % 2], text) for i, text in enumerate(contents)))


def write(folder: Path, *rows: object, name: str = "chats.jsonl") -> Path:
    path = folder / name
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def tokens(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return " ".join(tokenizer.convert_ids_to_tokens(ids))


ASKED_ANSWERED = (Message("user", "hello"), Message("assistant", "hi"))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]},
            ASKED_ANSWERED,
        ),
        (
            {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]},
            ASKED_ANSWERED,
        ),
        ({"prompt": "hello", "completion": "hi"}, ASKED_ANSWERED),
        (
            {
                "prompt": [{"role": "user", "content": "hello"}],
                "completion": [{"role": "assistant", "content": "hi"}],
            },
            ASKED_ANSWERED,
        ),
        ({"prompt": "hello"}, ASKED_ANSWERED[:1]),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]},
            ASKED_ANSWERED[:1],
        ),
        # Rows that hold both are common (the prompt repeats the first turn): the messages count.
        ({"prompt": "x", "messages": [{"role": "user", "content": "hello"}]}, ASKED_ANSWERED[:1]),
    ],
)
def test_formats(tmp_path: Path, row: dict, expected: tuple[Message, ...]) -> None:
    (conversation,) = load_conversations(write(tmp_path, row))
    assert conversation.messages == expected
    assert conversation.kind == "unlabelled"
    assert conversation.prompt == ASKED_ANSWERED[:1]


def test_labels_ids_and_order(tmp_path: Path) -> None:
    first = write(
        tmp_path,
        {"id": 7, "category": "maths", "prompt": "a"},
        "",
        {"id": "x", "kind": "sql", "template": "t", "slots": {"n": 1}, "prompt": "b"},
    )
    second = write(tmp_path, {"prompt": "a"}, {"prompt": "a"}, {"prompt": "b"}, name="more.jsonl")
    seven, x, copy, again, other = load_conversations([first, second])
    assert (seven.id, seven.kind, seven.template) == ("7", "maths", None)
    assert (x.id, x.kind, x.template, x.slots) == ("x", "sql", "t", {"n": 1})
    assert again.id == f"{copy.id}-2" != other.id  # ids made from the content; copies keep apart
    assert load_conversations(second)[0].id == copy.id


def test_json_array_and_parquet(tmp_path: Path) -> None:
    from datasets import Dataset

    rows = [
        {"id": "a", "messages": [{"role": "user", "content": "é\n"}], "kind": "chat"},
        {"id": "b", "messages": [{"role": "user", "content": "b"}], "kind": None},
    ]
    array = tmp_path / "chats.json"
    array.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    Dataset.from_list(rows).to_parquet(tmp_path / "chats.parquet")
    lines = write(tmp_path, *rows)
    assert load_conversations(array) == load_conversations(lines) == load_conversations(tmp_path / "chats.parquet")
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"not a table")
    with pytest.raises(SpectrainError, match=r"broken\.parquet: not a readable Parquet file"):
        load_conversations(broken)


GOOD = {"id": "good", "prompt": "a"}
USER = {"role": "user", "content": "a"}
BOT = {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"prompt": "a"', "not valid JSON"),
        ("[1]", "found a JSON list, expected an object"),
        ('{"prompt": NaN}', "NaN is not JSON"),
        ({"text": "a"}, "found text; expected messages, conversations, or prompt"),
        ({"messages": []}, "messages is .*, expected a list of at least one message"),
        ({"messages": ["a"]}, "message 1: found str, expected an object"),
        (
            {"messages": [{"role": "owner", "content": "a"}]},
            "message 1: unknown role 'owner'; expected one of system",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": " \n"}]},
            r"message 2 \(assistant\): empty content",
        ),
        (
            {"messages": [{"role": "user", "content": None}]},
            r"message 1 \(user\): content is None, expected text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "content is .*image.*, expected text",
        ),
        ({"messages": [USER, {**BOT, "tool_calls": [{}]}]}, r"message 2 \(assistant\): tool call 1 has no name"),
        ({"messages": [USER, {**BOT, "tool_calls": 3}]}, "tool_calls is 3, expected a list of calls"),
        (
            {"messages": [USER, {**BOT, "tool_calls": [{"name": "f", "arguments": "{x"}]}]},
            "arguments of tool call 1: not valid JSON",
        ),
        ({"messages": [USER, {**BOT, "tool_calls": [{"name": "f", "arguments": "[1]"}]}]}, "are no JSON object"),
        (
            {"messages": [USER, {**BOT, "tool_calls": [{"name": "f", "arguments": '{"x": NaN}'}]}]},
            "plain JSON in UTF-8",
        ),
        (
            {"messages": [USER, {**BOT, "tool_calls": [{"name": "f", "arguments": {"x": "\ud800"}}]}]},
            "plain JSON in UTF",
        ),
        ({"messages": [USER, {"role": "function_call", "content": "f(x)"}]}, "not valid JSON"),
        ({"messages": [USER, BOT], "tools": [1]}, r"tools is \[1\], expected a list of JSON schemas"),
        ({"messages": [USER, BOT], "tools": "[{]"}, "tools: not valid JSON"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "content is None, expected text"),
        ({"messages": [{"role": "system", "content": "a"}]}, "no user turn"),
        ({"messages": [BOT, USER]}, "message 1 is of the assistant, but no user turn comes before it"),
        ({"messages": [{"role": "tool", "content": "a"}, BOT]}, "no user turn"),
        ({"prompt": "a \ud800"}, "half a surrogate pair"),
        (GOOD, r"id 'good' was already used at .*chats\.jsonl:1"),
        ({"id": "\ud800", "prompt": "a"}, "labels: UnicodeEncodeError, expected plain JSON"),
        ({"slots": {"a": "\ud800"}, "prompt": "a"}, "labels: UnicodeEncodeError"),
        ({"id": "", "prompt": "a"}, "id is '', expected text or an integer"),
        ({"kind": 3, "prompt": "a"}, "kind is 3, expected str"),
        ({"slots": [1], "prompt": "a"}, r"slots is \[1\], expected dict"),
        ({"messages": [USER, BOT], "answer_ids": [1]}, "answer_ids without prompt_ids"),
        (
            {"messages": [USER, BOT], "prompt_ids": [1], "answer_ids": [1, True]},
            "answer_ids: expected a list of token",
        ),
        ({"messages": [USER], "prompt_ids": [1], "answer_ids": [2]}, "the last message is the user's"),
    ],
)
def test_a_broken_line_names_file_and_line(tmp_path: Path, row: object, message: str) -> None:
    path = write(tmp_path, GOOD, "", row)
    with pytest.raises(SpectrainError, match=rf"chats\.jsonl:3: .*{message}"):
        load_conversations(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SpectrainError, match=r"none\.jsonl: no such file"):
        load_conversations(tmp_path / "none.jsonl")
    with pytest.raises(SpectrainError, match=r"unknown file type '\.csv'"):
        load_conversations(write(tmp_path, GOOD, name="chats.csv"))
    with pytest.raises(SpectrainError, match="no conversations in"):
        load_conversations(write(tmp_path, ""))
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b'{"prompt": "a"}\n{"prompt": "caf\xe9"}\n')
    with pytest.raises(SpectrainError, match=r"latin\.jsonl:2: not UTF-8 at byte 15"):
        load_conversations(latin)


def test_one_row_masks_every_answer_with_its_end_of_turn() -> None:
    tokenizer = word_tokenizer(CHATML)
    (row,) = encode(chat("a b", "c d", "e", "f"), tokenizer)
    assert tokens(tokenizer, row.ids) == (
        "<s> user \n a b </s> \n <s> assistant \n c d </s> \n <s> user \n e </s> \n <s> assistant \n f </s>"
    )
    answered = tokens(tokenizer, [i for i, m in zip(row.ids, row.mask, strict=True) if m])
    assert answered == "c d </s> f </s>"  # the newline after </s> is the template's, not an answer's
    assert (row.conversation, row.kind, row.turn) == ("c", "unlabelled", None)


def test_the_prompt_is_the_rows_unmasked_head() -> None:
    tokenizer = word_tokenizer(CHATML)
    (row,) = encode(chat("a b", "c d"), tokenizer)
    prompt = render_prompt(chat("a b", "c d").prompt, tokenizer)
    assert row.ids[: len(prompt)] == prompt
    assert row.mask == [0] * len(prompt) + [1, 1, 1]
    assert prompt.count(tokenizer.bos_token_id) == 2  # one a turn here: it opens turns, and none is added in front


def test_c01_positions_that_predict_an_answer_token() -> None:
    template = "{% for m in messages %} {{ m['content'] }}{{ '</s>\\n' if m['role'] == 'assistant' }}{% endfor %}"
    (row,) = encode(chat("a b c d", "e f"), word_tokenizer(template))
    mask = [*row.mask, 0, 0]  # a packed row goes on with something that is no answer
    assert "".join(map(str, mask[:8])) == "00001110"
    # The last token of the prompt predicts an answer token; the end of turn predicts none.
    assert "".join(str(mask[t + 1]) for t in range(8)) == "00011100"


def test_a_template_that_rewrites_history_gives_a_row_an_answer() -> None:
    tokenizer = word_tokenizer(FORGETFUL)
    rows = encode(chat("a", "think b /think c", "d", "think e /think f"), tokenizer)
    assert [row.turn for row in rows] == [0, 1]
    answers = [[i for i, m in zip(row.ids, row.mask, strict=True) if m] for row in rows]
    assert [tokens(tokenizer, ids) for ids in answers] == ["think b /think c </s>", "think e /think f </s>"]
    assert tokens(tokenizer, rows[1].ids).startswith("<s> user \n a </s> \n <s> assistant \n c </s> \n")
    for row, turns in zip(rows, (1, 3), strict=True):
        history = chat("a", "think b /think c", "d").messages[:turns]
        assert row.ids[: row.mask.index(1)] == render_prompt(history, tokenizer)


def test_a_trailing_question_is_left_out() -> None:
    tokenizer = word_tokenizer(CHATML)
    assert encode(chat("a", "b", "c"), tokenizer) == encode(chat("a", "b"), tokenizer)
    assert encode(chat("a"), tokenizer) == []


def test_the_first_special_token_after_the_answer_ends_it() -> None:
    """Some templates add an end of text when no generation prompt follows; no answer contains it."""
    template = CHATML.replace("{% endif %}", "{% else %}<end>{% endif %}")
    tokenizer = word_tokenizer(template)
    (row,) = encode(chat("a", "b"), tokenizer)
    assert tokens(tokenizer, row.ids).endswith("assistant \n b </s>")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "is missing; set tokenizer.chat_template"),
        (
            "{% for m in messages %}User: {{ m['content'] }}\n{% endfor %}",
            "puts no special token after an answer",
        ),
        ("{{ messages[0]['content'] }}</s>", "puts no special token after an answer"),
        (
            CHATML.replace("<s>assistant\n{%", "Bot: {%"),
            "has no boundary between prompt and answer: at token 6",
        ),
        (CHATML.replace("{% for", "<s><s>{% for", 1), "begins with two BOS tokens"),
        ("{{ raise_exception('only one turn') }}", "fails on a conversation of user: only one turn"),
    ],
)
def test_c02_a_template_without_boundaries_is_named(template: str | None, message: str) -> None:
    tokenizer = word_tokenizer(template)
    tokenizer.name_or_path = "some/model"
    with pytest.raises(SpectrainError, match=f"the chat template of some/model {message}"):
        encode(chat("a", "b"), tokenizer)


def test_c03_long_rows_are_dropped_and_counted_never_cut() -> None:
    tokenizer = word_tokenizer(CHATML)
    long = [chat(" ".join("a" * 200), "b", name=f"long{i}") for i in range(8)]
    with pytest.raises(SpectrainError, match=r"nothing to train on: of 8 .* 8 longer than max_length.*64"):
        encode_all(long, tokenizer, max_length=64)
    rows, dropped = encode_all([*long, chat("a", "b"), chat("a")], tokenizer, max_length=64)
    assert [row.conversation for row in rows] == ["c"]
    assert dropped.counts == {"too_long": 8, "nothing_supervised": 1}
    assert dropped.total == 9
    whole, none = encode_all(long, tokenizer)
    assert min(len(row.ids) for row in whole) > 200
    assert none.total == 0
    with pytest.raises(SpectrainError, match=r"nothing to train on.* 0 longer than max_length, 2 without an answer"):
        encode_all([chat("a"), chat("b")], tokenizer)


def test_max_length_is_inclusive() -> None:
    tokenizer = word_tokenizer(CHATML)
    (row,) = encode(chat("a", "b"), tokenizer)
    assert encode_all([chat("a", "b")], tokenizer, len(row.ids))[0] == [row]
    with pytest.raises(SpectrainError, match="nothing to train on"):
        encode_all([chat("a", "b")], tokenizer, len(row.ids) - 1)


def test_sampled_ids_are_taken_as_they_are(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(CHATML)
    row = {"id": "r", "messages": [USER, BOT], "prompt_ids": [5, 6, 7], "answer_ids": [9, 9, 2]}
    (conversation,) = load_conversations(write(tmp_path, row))
    (encoded,) = encode(conversation, tokenizer)
    assert (encoded.ids, encoded.mask, encoded.turn) == ([5, 6, 7, 9, 9, 2], [0, 0, 0, 1, 1, 1], 0)
    assert encoded == from_sampled(conversation)
    with pytest.raises(SpectrainError, match="'c' has no sampled ids"):
        from_sampled(chat("a", "b"))


def test_a_sampled_answer_may_be_empty_and_ids_must_exist(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(CHATML)
    silent = {"messages": [USER, {"role": "assistant", "content": ""}], "prompt_ids": [1], "answer_ids": [2]}
    (conversation,) = load_conversations(write(tmp_path, silent))
    assert encode(conversation, tokenizer)[0].mask == [0, 1]
    foreign = {**silent, "id": "far", "answer_ids": [999]}
    (conversation,) = load_conversations(write(tmp_path, foreign))
    with pytest.raises(SpectrainError, match=rf"'far': sampled id 999, but .* has {len(tokenizer)} ids"):
        encode(conversation, tokenizer)


@pytest.mark.parametrize("line", ['{"messages": [{"role": ["user"], "content": "x"}]}', "[" * 100_000])
def test_odd_json_is_refused_where_it_stands(tmp_path, line):
    path = tmp_path / "odd.jsonl"
    path.write_text(line + "\n", encoding="utf-8")
    with pytest.raises(SpectrainError, match=r"odd\.jsonl:1"):
        load_conversations(path)


CALLS = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        (
            {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [{"id": "i", **CALLS[0]}]}]},
            [USER, {"role": "assistant", "content": "", "tool_calls": [{"id": "i", **CALLS[0]}]}],
        ),
        (
            {
                "messages": [
                    USER,
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}]},
                ]
            },
            [USER, {"role": "assistant", "content": "", "tool_calls": CALLS}],
        ),
        (
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": "b", "function_call": {"name": "f", "arguments": "{}"}},
                ]
            },
            [USER, {**BOT, "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}],
        ),
        (
            {
                "system": "s",
                "conversations": [
                    {"from": "human", "value": "a"},
                    {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
                    {"from": "observation", "value": ""},
                    {"from": "bot", "value": "b"},
                ],
            },
            [
                {"role": "system", "content": "s"},
                USER,
                {"role": "assistant", "content": "", "tool_calls": CALLS},
                {"role": "tool", "content": ""},
                BOT,
            ],
        ),
        (
            {
                "messages": [
                    {"role": "developer", "content": "s"},
                    USER,
                    {"role": "user", "content": [{"type": "input_text", "text": "c"}, {"type": "text", "text": "d"}]},
                    {"role": "tool", "content": {"x": "é"}, "tool_call_id": "i", "name": "f", "weight": 1},
                ]
            },
            [
                {"role": "system", "content": "s"},
                USER,
                {"role": "user", "content": "cd"},
                {"role": "tool", "content": '{"x": "é"}', "tool_call_id": "i", "name": "f"},
            ],
        ),
        ({"messages": [USER, {**BOT, "thinking": "hm"}]}, [USER, {**BOT, "reasoning_content": "hm"}]),
        ({"messages": [USER, {**BOT, "reasoning": " "}]}, [USER, BOT]),
        (
            {"messages": [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"}]},
            [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"}],
        ),
    ],
)
def test_tools_traces_and_roles(tmp_path: Path, row: dict, turns: list[dict]) -> None:
    (conversation,) = load_conversations(write(tmp_path, row))
    assert [message.turn for message in conversation.messages] == turns
    again = {**conversation.labels, "messages": [message.turn for message in conversation.messages]}
    (reread,) = load_conversations(write(tmp_path, again, name="again.jsonl"))
    assert reread == conversation  # what regeneration writes reads back as it was


@pytest.mark.parametrize(
    ("tools", "read"),
    [([TOOL], (TOOL,)), (json.dumps([TOOL]), (TOOL,)), ([{"name": "f", "parameters": {}}], (TOOL,)), ([], None)],
)
def test_tools_of_a_row(tmp_path: Path, tools: object, read: object) -> None:
    (conversation,) = load_conversations(write(tmp_path, {"prompt": "a", "tools": tools}))
    assert conversation.tools == read


def test_an_id_made_from_the_content_sees_tools_and_calls_and_stays_as_it_was(tmp_path: Path) -> None:
    called = {"messages": [USER, {**BOT, "tool_calls": CALLS}]}
    path = write(tmp_path, {"messages": [USER, BOT]}, {"messages": [USER, BOT], "tools": [TOOL]}, called)
    plain, *others = load_conversations(path)
    assert plain.id == "e9090a957d1421f5"
    assert len({plain.id, *(other.id for other in others)}) == 3


def test_bad_rows_are_left_out_and_counted_by_reason(tmp_path: Path) -> None:
    bad = ["{", {"messages": [{"role": "owner", "content": "a"}]}, {"prompt": " "}, {**GOOD, "prompt": "b"}, "[1]"]
    path = write(tmp_path, GOOD, *bad, *[{"prompt": ""}] * PLACES, {"id": "last", "prompt": "z"})
    dropped = Dropped()
    assert [chat.id for chat in load_conversations(path, dropped)] == ["good", "last"]
    assert dropped.counts == {
        "too_long": 0,
        "nothing_supervised": 0,
        "broken_json": 1,
        "unknown_role": 1,
        "empty_turn": 1 + PLACES,
        "duplicate_id": 1,
        "bad_row": 1,
    }
    assert dropped.places["empty_turn"] == [f"{path}:{line}" for line in (4, 7, 8, 9, 10)]
    assert f"with an empty turn: {path}:4, " in dropped.listing()
    assert ", 1 more" in dropped.listing()
    with pytest.raises(SpectrainError, match=r"no conversations in .*rows dropped: .*1 not valid JSON"):
        load_conversations(write(tmp_path, "{", name="broken.jsonl"), Dropped())


def test_rows_of_an_array_are_left_out_one_by_one_and_a_broken_file_is_not(tmp_path: Path) -> None:
    path, dropped = tmp_path / "chats.json", Dropped()
    path.write_text(json.dumps([1, GOOD]), encoding="utf-8")
    assert len(load_conversations(path, dropped)) == dropped["bad_row"] == 1
    path.write_text(json.dumps([GOOD])[:-1], encoding="utf-8")
    with pytest.raises(SpectrainError, match="not valid JSON"):
        load_conversations(path, dropped)


def test_answers_of_a_server_are_told_apart(tmp_path: Path) -> None:
    row = {"messages": [USER, BOT], "prompt_ids": [1], "answer_ids": [2]}
    finishes = ("eos", "stop", "budget", "length", False, True)
    path = write(tmp_path, row, {**row, "retokenized": True}, *({**row, "finished": how} for how in finishes))
    sampled, made, *others = load_conversations(path)
    assert (sampled.retokenized, sampled.finished, made.retokenized) == (False, None, True)
    assert [other.finished for other in others] == [True, True, False, False, False, True]
