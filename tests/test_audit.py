"""The audit of a recipe: numbers in files, text on the terminal only, no weights, and what would stop prepare."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tiny import CHATML

from spectrain import audit as auditing
from spectrain import cli
from spectrain.audit import audit_recipe
from spectrain.config import load_recipe
from spectrain.data.audit_table import table
from spectrain.data.conversations import Conversation, EncodedRow
from spectrain.data.messages import Message
from spectrain.data.preview import GREEN, RESET, chosen, render_row
from spectrain.errors import SpectrainError

OWN = ("regenerate=null",)


@pytest.fixture
def recipe(make_recipe, tmp_path, chat_folder) -> Path:
    """A recipe over chats with answers; of its target there are no weights."""
    path = make_recipe(tmp_path)
    bare = tmp_path / "bare"
    shutil.copytree(chat_folder, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    path.write_text(path.read_text().replace(str(chat_folder), str(bare)), encoding="utf-8")
    for name in ("train", "heldout"):
        file = tmp_path / f"{name}.jsonl"
        rows = [json.loads(line) | {"completion": f"hello {name}"} for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def add(folder: Path, *rows: object, name: str = "train") -> None:
    with (folder / f"{name}.jsonl").open("a", encoding="utf-8") as file:
        file.writelines((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def test_the_numbers_of_a_clean_recipe(recipe, tmp_path):
    found = audit_recipe(load_recipe(recipe, OWN))
    document = json.loads((tmp_path / "run" / "data" / "audit.json").read_text())
    assert document == found.document
    assert found.stops == []
    train, heldout = document["sides"]["train"], document["sides"]["heldout"]
    rows = found.sides["train"].rows
    assert (train["conversations"], train["rows"], heldout["rows"]) == (8, 8, 4)
    assert train["tokens"] == sum(len(row.ids) for row in rows)
    assert train["supervised_share"] == sum(sum(row.mask) for row in rows) / train["tokens"]
    lengths = sorted(len(row.ids) for row in rows)
    assert train["lengths"] == {"p50": lengths[4], "p95": lengths[-1], "max": lengths[-1]}
    assert train["answers"] == {"by_target": False, "given": 8, "sampled_ids": 0, "retokenized": 0, "none": 0,
                                "truncated": 0}  # fmt: skip
    assert train["dropped"] == {"too_long": 0, "nothing_supervised": 0}
    assert list(train["kinds"]) == ["sum/even", "sum/odd"]
    assert document["near_duplicates"]["count"] == 0
    assert document["template"]["kwargs"] == {}


def test_coverage_is_the_share_of_answer_tokens_that_the_drafter_can_name(recipe):
    """hello is one token of two words' answers; the vocabulary of one holds what is most frequent."""
    found = audit_recipe(load_recipe(recipe, [*OWN, "drafter.draft_vocab_size=3"]))
    counts: dict[int, int] = {}
    for row in found.sides["train"].rows:
        for token, asked in zip(row.ids, row.mask, strict=True):
            counts[token] = counts.get(token, 0) + asked
    best = sorted(counts, key=lambda token: (-counts[token], token))[:3]
    train = found.document["sides"]["train"]
    assert train["coverage"] == sum(counts[token] for token in best) / train["answer_tokens"]
    assert 0 < train["coverage"] < 1
    held = [t for r in found.sides["heldout"].rows for t, asked in zip(r.ids, r.mask, strict=True) if asked]
    assert found.document["sides"]["heldout"]["coverage"] == sum(t in best for t in held) / len(held)
    assert "| sum/even |" in (found.folder / "audit.md").read_text()
    medusa = ("drafter={type: medusa}", "evaluation.k=[2]", "training.validation_depths=1")
    assert audit_recipe(load_recipe(recipe, [*OWN, *medusa])).document["draft_vocabulary"] is None


def test_every_bad_row_is_told_with_its_place_and_prepare_would_stop(recipe, tmp_path, capsys):
    add(tmp_path, "{", {"prompt": " "}, {"prompt": "x " * 200, "completion": "y"}, {"prompt": "no answer"})
    add(tmp_path, {"prompt": "new", "completion": "same"}, {"prompt": "new", "completion": "same"})
    add(tmp_path, {"prompt": "5 + 5?", "completion": "leaked"}, name="heldout")
    assert cli.guarded(cli.prepare, [str(recipe), "--audit", *OWN], "spectrain prepare") == 1
    out = capsys.readouterr().out
    document = json.loads((tmp_path / "run" / "data" / "audit.json").read_text())
    train = document["sides"]["train"]
    assert train["dropped"] == {"too_long": 1, "nothing_supervised": 1, "broken_json": 1, "empty_turn": 1}
    assert train["dropped_at"]["broken_json"] == [f"{tmp_path / 'train.jsonl'}:9"]
    assert train["duplicates"] == 1
    assert len(document["leaks"]) == 1
    assert "train.jsonl:6" in document["leaks"][0]
    assert "heldout.jsonl:5" in document["leaks"][0]
    assert "prepare stops: 2 rows cannot be used" in out
    assert "prepare stops: 1 held-out conversations are also in training" in out
    document = audit_recipe(load_recipe(recipe, [*OWN, "data.bad_rows=drop", "data.duplicates=drop"])).document
    assert [why for why in document["stops"] if "rows" in why] == []
    assert document["sides"]["train"]["dropped"]["duplicate"] == 1


def test_text_of_the_traffic_is_shown_and_never_written(recipe, tmp_path, capsys):
    add(tmp_path, {"prompt": "the secret word", "completion": "is \x1b[31mxyzzy"})
    assert cli.guarded(cli.prepare, [str(recipe), "--audit", *OWN], "spectrain prepare") == 0
    out = capsys.readouterr().out
    assert "[[hello train<|im_end|>]]" in out  # not a terminal: marks instead of colours
    assert "\x1b" not in out
    files = list((tmp_path / "run").rglob("*"))
    written = "".join(path.read_text() for path in files if path.is_file())
    assert {path.name for path in files} == {"data", "audit.json", "audit.md"}
    for word in ("hello train", "secret", "xyzzy"):
        assert word not in written


def test_answers_of_the_target_count_once_they_are_there(recipe, tmp_path):
    before = audit_recipe(load_recipe(recipe))
    assert "The target has not answered yet" in (before.folder / "audit.md").read_text()
    for side, count in (("train", 3), ("heldout", 1)):
        row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
        row |= {"prompt_ids": [1, 2], "answer_ids": [3], "retokenized": side == "heldout", "finished": "budget"}
        lines = [json.dumps(row | {"id": str(i)}) for i in range(count)]
        (before.folder / f"{side}.jsonl").write_text("\n".join(lines) + "\n")
    after = audit_recipe(load_recipe(recipe)).document["sides"]
    assert (after["train"]["answers"]["sampled_ids"], after["train"]["answers"]["truncated"]) == (3, 3)
    assert after["heldout"]["answers"]["retokenized"] == 1
    assert after["train"]["answers"]["by_target"] is True
    assert after["train"]["tokens"] == 9


def test_a_target_without_a_tokenizer_is_named(recipe, tmp_path):
    (tmp_path / "bare" / "config.json").unlink()
    with pytest.raises(SpectrainError, match=r"bare'?: its tokenizer and config\.json do not load"):
        audit_recipe(load_recipe(recipe))


def test_rows_are_shown_in_colour_by_kind_and_from_their_end(chat_target):
    ids = chat_target.tokenizer.encode("hello hello hello")
    row = EncodedRow("c", "k", ids, [0] * (len(ids) - 1) + [1])
    shown = render_row(row, chat_target.tokenizer, True, "with tools")
    assert shown.startswith(f"--- c (k), {len(ids)} tokens, with tools\n")
    assert shown.endswith(f" {GREEN}hello{RESET}")
    long = EncodedRow("c", "k", ids * 200, [0] * (200 * len(ids)))
    assert "tokens before\n" in render_row(long, chat_target.tokenizer, False, "")


def test_rows_are_chosen_by_their_shape():
    def chat(name: str, turns: int = 1, tools: bool = False) -> Conversation:
        schema = ({"type": "function", "function": {"name": "f"}},) if tools else None
        return Conversation(name, (Message("user", "a"),) * turns, tools=schema)

    def shown(rows: list[EncodedRow], *chats: Conversation, count: int = 4) -> list[tuple[str, str]]:
        return [(row.conversation, why) for row, why in chosen(rows, chats, count)]

    rows = [EncodedRow(str(i), kind, [1] * (9 if i == 5 else 1), [1]) for i, kind in enumerate("aaabaaa")]
    plain = [("5", "the longest"), ("3", "the first of its kind"), ("0", "from the front"), ("1", "from the front")]
    assert shown(rows) == plain
    found = shown(rows, chat("0"), chat("4", turns=2), chat("6", tools=True), count=5)
    assert found == [("6", "with tools"), ("4", "several turns"), *plain[:3]]
    assert shown(rows[:1], chat("0", turns=2, tools=True)) == [("0", "with tools")]
    assert shown([]) == []


def test_conversations_that_the_template_makes_split_are_told(recipe, tmp_path):
    """Answers before the last one are shown in another way than when they were the last."""
    old = "m['role'] == 'assistant' and not loop.last"
    rewriting = CHATML.replace("m['content']", f"(m['content'] | upper if {old} else m['content'])")
    assert rewriting != CHATML
    (tmp_path / "bare" / "chat_template.jinja").write_text(rewriting, encoding="utf-8")
    says = [{"role": role, "content": text} for role, text in
            (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))]  # fmt: skip
    assert "conversations are split" not in table(audit_recipe(load_recipe(recipe, OWN)).document)
    add(tmp_path, {"messages": says})
    found = audit_recipe(load_recipe(recipe, OWN))
    assert found.document["sides"]["train"]["with"]["split"] == 1
    assert found.document["sides"]["train"]["rows"] == 8 + 2
    assert "1 conversations are split into a row for each answer" in table(found.document)
    asked = audit_recipe(load_recipe(recipe))  # the target answers the end alone
    assert "conversations are split" not in table(asked.document)
    assert "that answer alone is trained on" in table(asked.document)


def test_what_is_shown_is_called_what_it_is(recipe, capsys):
    cli.prepare([str(recipe), "--audit"])
    assert "The chats of the files, their own answers in [[ ]]: the last makes way" in (said := capsys.readouterr().out)
    assert "What is trained on" not in said
    cli.prepare([str(recipe), "--audit", *OWN])
    assert "What is trained on, supervised tokens in [[ ]]:" in capsys.readouterr().out


def test_colours_need_a_terminal_that_wants_them(monkeypatch):
    class Terminal:
        def __init__(self, real: bool) -> None:
            self.isatty = lambda: real

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert auditing.colours(Terminal(True))
    assert not auditing.colours(Terminal(False))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not auditing.colours(Terminal(True))


def test_answers_that_the_target_will_replace_stop_nothing(recipe, tmp_path):
    """Prepare takes these chats up to their last answer, whatever that is."""
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    lost = {"role": "assistant", "content": None, "tool_calls": [call]}  # which the template leaves out
    add(tmp_path, {"messages": [{"role": "user", "content": "call it"}, lost]}, {"prompt": "no answer"})
    found = audit_recipe(load_recipe(recipe))
    assert found.stops == []
    assert found.document["sides"]["train"]["dropped"] == {"too_long": 0, "nothing_supervised": 0}
    assert audit_recipe(load_recipe(recipe, OWN)).stops != []


def test_a_context_without_room_is_told_with_what_was_asked_for(recipe):
    stops = audit_recipe(load_recipe(recipe, ["regenerate.max_new_tokens=256"])).stops
    assert any("every conversation is left out" in stop for stop in stops)
    assert any("no room in the target's context" in stop and "max_new_tokens 256" in stop for stop in stops)
    stops = audit_recipe(load_recipe(recipe, ["regenerate.max_new_tokens=256", "data.bad_rows=drop"])).stops
    assert [stop.split(":")[0] for stop in stops] == ["train", "heldout"]


def test_answers_made_for_another_recipe_are_not_this_ones(recipe, tmp_path):
    answers = tmp_path / "run" / "data" / "train.jsonl"
    answers.parent.mkdir(parents=True)
    answers.write_text(json.dumps({"prompt": "old", "completion": "answer"}) + "\n", encoding="utf-8")
    train = audit_recipe(load_recipe(recipe, OWN)).document["sides"]["train"]
    assert (train["conversations"], train["answers"]["by_target"]) == (8, False)
