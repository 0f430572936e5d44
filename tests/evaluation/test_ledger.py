"""Samples of several processes in one folder: whole conversations, one order, nothing held in memory."""

import json
import tracemalloc

import pytest

from spectrain.errors import SpectrainError
from spectrain.evaluation.ledger import Ledger

ORDER = ["a", "b", "c", "d"]


def lines(conversation, size=2, text=""):
    return [{"conversation": conversation, "number": i, "text": text} for i in range(size)]


def ledger(folder, rank=0, order=ORDER, size=2, observe=lambda samples: None):
    found = Ledger(folder, order, size, rank=rank, observe=observe)
    found.open()
    return found


def test_what_processes_write_comes_back_in_one_order(tmp_path):
    first, second = ledger(tmp_path), ledger(tmp_path, rank=1)
    second.append(lines("d"))
    second.append(lines("b"))
    first.append(lines("a"))
    first.append(lines("c"))
    assert list(first.lines()) == [line for name in ORDER for line in lines(name)]
    assert list(first.lines(2)) == [*lines("a"), *lines("b")]
    first.merge(write=True)
    second.merge(write=False)
    assert [path.name for path in tmp_path.iterdir()] == ["samples.jsonl"]
    assert list(second.lines()) == list(first.lines()) == [line for name in ORDER for line in lines(name)]
    written = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert written == list(first.lines())


@pytest.mark.parametrize("line", ['{"conversation": ', '{"number": 1}', "[]"])
def test_a_line_that_is_no_sample_is_named(tmp_path, line):
    (tmp_path / "samples.jsonl").write_text(line + "\n")
    with pytest.raises(SpectrainError, match=r"samples\.jsonl: .* is no raw sample"):
        ledger(tmp_path)


def test_a_conversation_that_is_there_twice_is_an_error_and_is_not_dropped(tmp_path):
    first = ledger(tmp_path)
    first.append(lines("a"))
    before = first.whole.read_text()
    for again in (lines("a"), [*lines("b"), *lines("a", text="other")]):
        with pytest.raises(SpectrainError, match=r"conversation 'a' is there twice, in .*samples\.jsonl, with 2 lines"):
            first.append(again)
        with pytest.raises(SpectrainError, match="conversation 'a' is there twice"):
            ledger(tmp_path)
        first.whole.write_text(before)
        first = ledger(tmp_path)
    other = tmp_path / "samples.1.jsonl"
    other.write_text("".join(json.dumps(line) + "\n" for line in lines("a", text="other")))
    with pytest.raises(SpectrainError, match=r"'a' is there twice, in .*samples\.jsonl and .*samples\.1\.jsonl"):
        ledger(tmp_path)
    other.write_text(before)  # what a merge leaves that was interrupted
    assert list(ledger(tmp_path).lines()) == lines("a")


def test_conversations_are_observed_in_their_order_whoever_is_first(tmp_path):
    seen = []
    first = ledger(tmp_path, observe=lambda samples: seen.append(samples[0]["conversation"]))
    second = ledger(tmp_path, rank=1)
    second.append(lines("b"))
    second.append(lines("d"))
    first.refresh()
    assert seen == []
    first.append(lines("a"))
    assert seen == ["a", "b"]
    first.append(lines("c"))
    assert seen == ORDER


@pytest.mark.parametrize("kept", [1, 20, 60, -1], ids=["torn", "torn more", "a line of two", "no line end"])
def test_what_an_interruption_cut_off_is_written_again(tmp_path, kept):
    ledger(tmp_path).append(lines("a"))
    text = "".join(json.dumps(line) + "\n" for line in lines("b"))
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write(text[:kept])
    again = ledger(tmp_path)
    assert "a" in again
    assert "b" not in again
    again.append(lines("b"))
    assert list(ledger(tmp_path).lines()) == [*lines("a"), *lines("b")]
    assert (tmp_path / "samples.jsonl").read_text().count("\n") == 4


def test_what_another_process_is_still_writing_is_waited_for(tmp_path):
    first, text = ledger(tmp_path), "".join(json.dumps(line) + "\n" for line in lines("b"))
    other = tmp_path / "samples.1.jsonl"
    for end in (5, 50, len(text) - 1):
        other.write_text(text[:end])
        first.refresh()
        assert "b" not in first
    other.write_text(text)
    first.refresh()
    assert "b" in first


def test_a_run_of_fewer_processes_goes_on_with_what_more_have_left(tmp_path):
    ledger(tmp_path, rank=3).append(lines("d"))
    with (tmp_path / "samples.3.jsonl").open("a") as file:
        file.write('{"conversation": "c", "nu')
    alone = ledger(tmp_path)
    assert [name in alone for name in ORDER] == [False, False, False, True]
    for name in "abc":
        alone.append(lines(name))
    alone.merge(write=True)
    assert list(alone.lines()) == [line for name in ORDER for line in lines(name)]


def test_other_line_ends_inside_a_text_are_no_line_ends(tmp_path):
    text = "one\u2028two\x85three\x0b"
    with (tmp_path / "samples.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines("a", text=text))
    assert [line["text"] for line in ledger(tmp_path).lines()] == [text, text]


def test_memory_does_not_grow_with_what_was_written(tmp_path):
    """Each conversation's lines are a hundred times what is remembered of them."""
    names = [str(i) for i in range(400)]
    found = ledger(tmp_path, order=names)
    tracemalloc.start()
    for name in names:
        found.append(lines(name, text="x" * 20_000))
    kept, _ = tracemalloc.get_traced_memory()
    most = 0
    for _ in found.lines():
        most = max(most, tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert (tmp_path / "samples.jsonl").stat().st_size > 400 * 40_000
    assert kept < 400 * 400
    assert most - kept < 400_000
