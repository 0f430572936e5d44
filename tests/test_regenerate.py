"""Answers by the target: ids as sampled, the same whatever the batch, and an interrupted run goes on."""

import json

import pytest

from spectrain.data.conversations import encode_all, load_conversations, parse_conversation, render_prompt
from spectrain.decoding import generate_plain
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler
from spectrain.regenerate import RegenerateConfig, regenerate
from spectrain.regenerate import local as module

CONFIG = RegenerateConfig(sampler=Sampler(1.0), max_new_tokens=10, batch_size=2, seed=3)
WEIGHTS = "w" * 64
TEXTS = ("hello", "Count to 12.", "What is this?", "hello hello hello", "1 2 3", "a")


def chats():
    """Prompts of one turn, and one with a history."""
    rows = [{"id": f"c{i}", "kind": "chat", "messages": [{"role": "user", "content": t}]} for i, t in enumerate(TEXTS)]
    turns = [("system", "Be brief."), ("user", "1 + 1?"), ("assistant", "2"), ("user", "2 + 2?"), ("assistant", "old")]
    rows[1] = {"id": "c1", "kind": "maths/sum", "template": "sum", "slots": {"a": 2}}
    rows[1]["messages"] = [{"role": role, "content": content} for role, content in turns]
    return [parse_conversation(row, f"row {i}") for i, row in enumerate(rows)]


@pytest.fixture
def answer(chat_target, tmp_path):
    def answer(config=CONFIG, name="train.jsonl", conversations=None, weights=WEIGHTS, target=chat_target):
        path = tmp_path / name
        return regenerate(target, weights, conversations or chats(), config, path, progress=False)

    return answer


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def answers(path):
    return {row["id"]: row["answer_ids"] for row in read(path)}


def refusal(call, *arguments, **keywords):
    with pytest.raises(SpectrainError) as error:
        call(*arguments, **keywords)
    return str(error.value)


def test_rows_come_in_the_order_of_the_prompts_with_their_labels(answer):
    path = answer()
    rows = read(path)
    assert [row["id"] for row in rows] == [f"c{i}" for i in range(len(TEXTS))]
    assert [row["kind"] for row in rows] == ["chat", "maths/sum", *["chat"] * 4]
    assert (rows[1]["template"], rows[1]["slots"]) == ("sum", {"a": 2})
    assert "template" not in rows[0]
    assert sorted(p.name for p in path.parent.iterdir()) == ["train.json", "train.jsonl"]


def test_the_history_stays_and_the_last_answer_is_the_targets(answer):
    row = read(answer())[1]
    contents = [message["content"] for message in row["messages"]]
    assert contents[:4] == ["Be brief.", "1 + 1?", "2", "2 + 2?"]
    assert row["messages"][-1]["role"] == "assistant"
    assert "old" not in contents


def test_ids_are_the_sampled_ones_and_are_trained_on_as_they_are(answer, chat_target):
    path, by_id = answer(), {chat.id: chat for chat in chats()}
    loaded = load_conversations(path)
    encoded, dropped = encode_all(loaded, chat_target.tokenizer)
    assert dropped.total == 0
    for row, read_back in zip(read(path), encoded, strict=True):
        assert row["prompt_ids"] == render_prompt(by_id[row["id"]].prompt, chat_target.tokenizer)
        assert read_back.ids == row["prompt_ids"] + row["answer_ids"]
        assert read_back.mask == [0] * len(row["prompt_ids"]) + [1] * len(row["answer_ids"])
    # Which matters: the text of most of these answers is that of other ids.
    texts = [chat_target.tokenizer(row["messages"][-1]["content"]).input_ids for row in read(path)]
    assert any(ids != row["answer_ids"] for ids, row in zip(texts, read(path), strict=True))


def test_greedy_answers_are_those_of_plain_decoding_and_end_with_the_first_eos(answer, chat_target):
    """Case C17 for rewritten traffic."""
    rows = read(answer(RegenerateConfig(max_new_tokens=10, batch_size=3)))
    for row in rows:
        plain = generate_plain(chat_target, row["prompt_ids"], sampler=Sampler(), max_new_tokens=10)
        assert (row["answer_ids"], row["finished"]) == (plain.tokens, plain.finished)
        assert sum(token in chat_target.eos_ids for token in row["answer_ids"]) == (row["finished"] == "eos")
    assert {row["finished"] for row in rows} == {"eos", "budget"}


def test_a_conversation_has_its_own_stream_whatever_the_batch_and_the_order(answer):
    whole = answers(answer())
    alone = answers(answer(CONFIG.model_copy(update={"batch_size": 1}), "one.jsonl"))
    together = answers(answer(CONFIG.model_copy(update={"batch_size": 99}), "all.jsonl"))
    backwards = answers(answer(name="back.jsonl", conversations=chats()[::-1]))
    fewer = answers(answer(name="few.jsonl", conversations=chats()[2:4]))
    assert whole == alone == together == backwards
    assert fewer == {name: whole[name] for name in ("c2", "c3")}
    other = answers(answer(CONFIG.model_copy(update={"seed": 4}), "seed.jsonl"))
    assert other != whole


def test_same_prompt_twice_gets_two_answers(answer):
    rows = [{"id": name, "prompt": "hello"} for name in ("a", "b")]
    found = answers(answer(conversations=[parse_conversation(row, "row") for row in rows]))
    assert found["a"] != found["b"]


class Interrupting:
    """``generate_batch`` that fails in the given call, and counts the prompts it answered."""

    def __init__(self, monkeypatch, failing=0):
        self.real, self.calls, self.prompts, self.failing = module.generate_batch, 0, 0, failing
        monkeypatch.setattr(module, "generate_batch", self)

    def __call__(self, target, drafter, prompts, **keywords):
        self.calls += 1
        if self.calls == self.failing:
            raise KeyboardInterrupt
        self.prompts += len(prompts)
        return self.real(target, drafter, prompts, **keywords)


@pytest.mark.parametrize("torn", [b"", b'{"id": "c', '{"id": "c5", "messages": "é'.encode()[:-1]])
def test_an_interrupted_run_goes_on_and_answers_nothing_twice(answer, monkeypatch, tmp_path, torn):
    whole = answer(name="whole.jsonl").read_bytes()
    broken = Interrupting(monkeypatch, failing=2)
    with pytest.raises(KeyboardInterrupt):
        answer()
    assert not (tmp_path / "train.jsonl").exists()
    assert broken.prompts == 2
    with (tmp_path / "train.jsonl.partial").open("ab") as file:
        file.write(torn)
    monkeypatch.setattr(module, "generate_batch", broken.real)
    rest = Interrupting(monkeypatch)
    path = answer(CONFIG.model_copy(update={"batch_size": 3}))  # another batch size may go on
    assert path.read_bytes() == whole
    assert rest.prompts == len(TEXTS) - 2
    assert sorted(p.name for p in tmp_path.glob("train*")) == ["train.json", "train.jsonl"]


def test_answers_with_unusual_line_ends_survive_an_interruption(answer, monkeypatch, chat_target):
    monkeypatch.setattr(chat_target.tokenizer, "decode", lambda ids, **_: "one\u2028two\x85three")
    with monkeypatch.context() as context:
        Interrupting(context, failing=2)
        with pytest.raises(KeyboardInterrupt):
            answer()
    path = answer()
    assert len(load_conversations(path)) == len(TEXTS)
    assert read(path)[0]["messages"][-1]["content"] == "one\u2028two\x85three"


def test_a_finished_file_is_not_touched(answer, monkeypatch):
    path = answer()
    before = (path.read_bytes(), path.stat().st_mtime_ns)
    calls = Interrupting(monkeypatch)
    assert answer(CONFIG.model_copy(update={"batch_size": 5})) == path
    assert calls.calls == 0
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


@pytest.mark.parametrize("state", ["finished", "partial"])
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"config": CONFIG.model_copy(update={"sampler": Sampler(0.5)})},
            " regenerate.sampler.temperature: 1.0 against 0.5",
        ),
        ({"config": CONFIG.model_copy(update={"max_new_tokens": 9})}, "regenerate.max_new_tokens: 10 against 9"),
        ({"config": CONFIG.model_copy(update={"seed": 1})}, "regenerate.seed: 3 against 1"),
        ({"conversations": chats()[:-1]}, "the chats (data.train, "),
        ({"weights": "x" * 64}, "the target's weights (target.name, "),
    ],
    ids=["sampler", "length", "seed", "prompts", "model"],
)
def test_answers_made_otherwise_are_refused_by_what_differs(answer, monkeypatch, tmp_path, state, changes, named):
    if state == "partial":
        with monkeypatch.context() as context:
            Interrupting(context, failing=2)
            with pytest.raises(KeyboardInterrupt):
                answer()
    else:
        answer()
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    message = refusal(answer, **changes)
    assert named in message
    assert "train.jsonl" in message
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_another_template_or_eos_is_refused(answer, chat_target, monkeypatch):
    answer()
    with monkeypatch.context() as context:
        context.setattr(chat_target.tokenizer, "chat_template", chat_target.tokenizer.chat_template + " ")
        assert "as the target's chat template renders them" in refusal(answer)
    monkeypatch.setattr(chat_target.model.generation_config, "eos_token_id", 5)
    assert "the ids that end an answer" in refusal(answer)


def test_a_prompt_without_room_is_named_before_anything_is_written(answer, tmp_path):
    row = {"id": "long", "prompt": "x" * 250}
    message = refusal(answer, conversations=[*chats(), parse_conversation(row, "row")])
    assert "conversation 'long'" in message
    assert "context of 256" in message
    assert "regenerate.max_new_tokens" in message
    assert list(tmp_path.iterdir()) == []


def test_a_record_that_is_missing_is_refused(answer, tmp_path):
    answer()
    (tmp_path / "train.json").unlink()
    assert "train.json" in refusal(answer)
