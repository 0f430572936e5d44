"""Speculation by batch size: what is timed, what is counted, and when it is said to pay."""

from __future__ import annotations

import io
import json
import random
import shutil
from dataclasses import replace

import known_server
import pytest
from jsonschema import Draft202012Validator

from spectrain.drafters.ngram import NgramConfig, NgramDrafter
from spectrain.errors import SpectrainError
from spectrain.evaluation import forwards, load
from spectrain.evaluation.contenders import contenders
from spectrain.evaluation.forwards import verification_seconds
from spectrain.evaluation.load import Load, measure_batch, measure_load
from spectrain.evaluation.load_config import LoadConfig
from spectrain.evaluation.load_picture import draw_load
from spectrain.evaluation.load_summary import crossover, render, summarise, summarise_load
from spectrain.evaluation.schema import SCHEMA_FILE
from spectrain.evaluation.workbench import Prompt

PROMPTS = [Prompt(f"p{i}", "all", [3, 4, 5, 3, 4, 5][: 3 + i % 3]) for i in range(4)]
CONFIG = LoadConfig(batch=(2, 1, 2), context=(4, 8), groups=3, repeats=2)


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target("llama", eos=7)


@pytest.fixture(scope="module")
def entries():
    return contenders({"ngram": NgramDrafter(NgramConfig())}, (1, 3))


@pytest.fixture(scope="module")
def settings(entries):
    return Load(entries, PROMPTS, CONFIG, 12, 0)


@pytest.fixture(scope="module")
def measured(target, settings, tmp_path_factory):
    folder = tmp_path_factory.mktemp("load")
    return measure_load(target, settings, folder, {"weights": "w"}, progress=False), folder


@pytest.fixture(scope="module")
def samples(measured):
    return [sample for line in measured[0] for sample in line["samples"]]


# --- what a verification costs ------------------------------------------------------------------------------------


def test_verification_is_timed_for_every_length_in_turn(target, monkeypatch):
    seen = []
    forward = target.forward

    def spy(ids, *, cache=None, layout=None):
        seen.append((*ids.shape, tuple(cache.lengths)))
        return forward(ids, cache=cache, layout=layout)

    monkeypatch.setattr(target, "forward", spy)
    costs = verification_seconds(target, [10, 7, 9], [1, 2, 4], 2, 0)
    assert {rows: len(seconds) for rows, seconds in costs.items()} == {1: 2, 2: 2, 4: 2}
    forwards = [call for call in seen if call[1] != 10]
    # A warm-up and two repeats of three forwards, all behind the same tokens.
    assert len(forwards) == 3 * 3
    assert all(lengths == (10, 7, 9) and batch == 3 for batch, _, lengths in forwards)


def test_cached_tokens_are_spread_as_the_prompts_are(settings):
    """A batch is as wide as its longest request: an average of all would be too cheap."""
    prompts = [replace(PROMPTS[0], ids=[1] * length) for length in (10, 10, 10, 10, 10, 10, 10, 90)]
    load = replace(settings, prompts=prompts, max_new_tokens=8, config=LoadConfig(batch=(1,)))
    assert load.cached(1) == {24: [14]}
    assert load.cached(2) == {24: [14, 14]}
    assert load.cached(8) == {24: [14] * 7 + [94]}
    assert load.cached(16) == {24: [14] * 14 + [94] * 2}
    asked = replace(load, config=LoadConfig(batch=(1,), context=(50, 20)))
    assert asked.cached(3) == {20: [20] * 3, 50: [50] * 3}


def test_costs_are_told_by_batch_context_and_length(measured):
    found = summarise_load(measured[0])
    assert (found["batches"], found["context_tokens"]) == ([1, 2], [4, 8])
    assert [(row["batch"], row["context"], row["k"]) for row in found["verification"]] == [
        (batch, context, k) for batch in (1, 2) for context in (4, 8) for k in (0, 1, 3)
    ]
    assert all(row["v"] == 1.0 for row in found["verification"] if row["k"] == 0)
    assert all(row["seconds"] > 0 for row in found["verification"])


def test_the_line_nearest_to_the_forwards_is_found():
    def line(seconds):
        costs = [{"context": 9, "rows": rows, "seconds": [taken]} for rows, taken in seconds]
        return {"batch": 2, "verification": costs, "parts": [], "samples": made({2: 1.5})}

    (straight,) = summarise_load([line([(1, 0.012), (3, 0.016), (6, 0.022)])])["lines"]
    assert straight["floor_s"] == pytest.approx(0.010)
    assert straight["seconds_per_row"] == pytest.approx(0.002)
    assert straight["largest_residual"] == pytest.approx(0, abs=1e-12)
    (bent,) = summarise_load([line([(1, 0.012), (3, 0.020), (6, 0.022)])])["lines"]
    assert bent["largest_residual"] > 0.05


def test_rounds_consist_of_drafting_verification_and_the_rest(measured):
    rows = summarise_load(measured[0])["drafting"]
    # Rounds of two requests, and those of the one that is left when the other has ended.
    found = {(row["batch"], row["running"], row["contender"]) for row in rows}
    names = ("plain", "ngram k=1", "ngram k=3")
    assert {(batch, batch, name) for batch in (1, 2) for name in names} <= found
    assert found <= {(batch, running, name) for batch in (1, 2) for running in (1, 2) for name in names}
    for row in rows:
        assert row["rounds"] > 0
        assert row["verify_s"] > 0
        assert 1 <= row["rows"] <= 4
    assert all(row["rows"] == 1 and row["proposed_per_round"] == 0 for row in rows if row["contender"] == "plain")


def test_a_document_holds_a_drafter_that_proposes_in_some_rounds_only(simulator):
    seldom = known_server.line(2)
    for part in seldom["parts"]:
        part["proposed"] //= 7
    found = known_server.document(simulator.samples({"desk": {"eagle3": 0.7}}, conversations=12), simulator, [seldom])
    proposed = [row["proposed_per_round"] for row in found["load"]["drafting"]]
    assert sorted(proposed) == pytest.approx([0, 8 / 20, 14 / 20])
    assert Draft202012Validator(json.loads(SCHEMA_FILE.read_text())).is_valid(found)


# --- going on -----------------------------------------------------------------------------------------------------


def test_an_interrupted_measurement_goes_on_with_the_next_size(target, settings, measured, monkeypatch, tmp_path):
    lines, folder = measured
    shutil.copytree(folder, tmp_path / "again")
    file = tmp_path / "again" / "load.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[:-40])  # the second size was cut off while it was written
    sizes = []
    monkeypatch.setattr(load, "measure_batch", lambda *a, **k: sizes.append(a[2]) or measure_batch(*a, **k))
    again = measure_load(target, settings, tmp_path / "again", {"weights": "w"}, progress=False)
    assert sizes == [2]
    assert again[0] == lines[0]
    tokens = [[(s["contender"], s["prompts"], s["tokens"]) for s in line["samples"]] for line in (again[1], lines[1])]
    assert tokens[0] == tokens[1]
    assert len(file.read_text().splitlines()) == 2
    assert measure_load(target, settings, tmp_path / "again", {"weights": "w"}, progress=False) == again
    assert sizes == [2]


def test_forwards_take_turns_with_decoding(target, settings, monkeypatch):
    """A machine that is slower for a while is so for both."""
    order = []
    decode, time = load._decode, forwards.verification_seconds
    monkeypatch.setattr(load, "_decode", lambda *a, **k: order.append("decode") or decode(*a, **k))
    monkeypatch.setattr(forwards, "verification_seconds", lambda *a, **k: order.append(len(a[1])) or time(*a, **k))
    line = measure_batch(target, settings, 3, progress=False)
    # Two repeats of each among seven groups of three contenders, four of them timed by parts; three warm up.
    assert order.count("decode") == (load.TIMED_GROUPS + 3 + 1) * 3
    first = order.index(3)
    assert order[first : first + 3] == [3, 3, "decode"]  # two contexts
    assert order[-2:] == [3, 3]
    assert all(len(cost["seconds"]) == 2 for cost in line["verification"])
    assert {part["running"] for part in line["parts"]} <= {1, 2, 3}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text + text.splitlines()[0] + "\n", r"load\.jsonl:3: 1 is there twice"),
        (lambda text: text + "{}\n", r"load\.jsonl:3: '\{\}' is no raw line"),
        (lambda text: "[]\n" + text, r"load\.jsonl:1: '\[\]' is no raw line"),
    ],
)
def test_a_line_that_is_there_twice_or_is_none_is_named(target, settings, measured, tmp_path, change, message):
    shutil.copytree(measured[1], tmp_path / "again")
    file = tmp_path / "again" / "load.jsonl"
    file.write_text(change(file.read_text()))
    with pytest.raises(SpectrainError, match=message):
        measure_load(target, settings, tmp_path / "again", {"weights": "w"}, progress=False)


def test_a_folder_of_another_target_is_refused(target, settings, measured):
    with pytest.raises(SpectrainError, match=r"load\.jsonl was measured with other settings.*weights"):
        measure_load(target, settings, measured[1], {"weights": "x"}, progress=False)


def test_a_context_that_leaves_no_room_is_refused_before_anything_is_written(target, entries, tmp_path):
    config = LoadConfig(batch=(1,), context=(100_000,))
    with pytest.raises(SpectrainError, match="--context 100000: with 4 tokens to verify"):
        measure_load(target, Load(entries, PROMPTS, config, 4, 0), tmp_path / "x", {}, progress=False)
    assert not (tmp_path / "x").exists()


def test_raw_numbers_are_kept(measured):
    lines, folder = measured
    assert [json.loads(line) for line in (folder / "load.jsonl").read_text().splitlines()] == lines
    assert all(len(cost["seconds"]) == 2 for line in lines for cost in line["verification"])


# --- what it yields -----------------------------------------------------------------------------------------------


def test_every_contender_answers_the_same_batches(samples):
    assert len(samples) == 2 * 3 * 3
    for batch in (1, 2):
        for group in range(3):
            own = [s for s in samples if (s["batch"], s["group"]) == (batch, group)]
            assert {s["contender"] for s in own} == {"plain", "ngram k=1", "ngram k=3"}
            assert len({tuple(s["prompts"]) for s in own}) == 1
            assert len(own[0]["prompts"]) == batch
            assert len({s["tokens"] for s in own}) == 1
            assert all(s["identical"] == batch and 0 < s["running"] <= batch for s in own)
            assert all(s["seconds"] == s["prefill_s"] + s["decode_s"] for s in own)


def test_rounds_are_counted_by_the_requests_that_share_them(samples):
    for sample in samples:
        found = sample["rounds_by_running"]
        assert sum(rounds for _, rounds in found) == sample["steps"]
        assert sum(running * rounds for running, rounds in found) == sample["rounds"]
        assert all(1 <= running <= sample["batch"] for running, _ in found)
    assert any(len(sample["rounds_by_running"]) > 1 for sample in samples)  # answers of unequal length
    for row in summarise(samples)["rows"]:
        own = [s for s in samples if (s["contender"], s["batch"]) == (row["contender"], row["batch"])]
        assert sum(row["rounds_by_running"].values()) == sum(s["steps"] for s in own)


def test_batches_of_an_earlier_version_are_measured_again(measured):
    lines = json.loads(json.dumps(measured[0]))
    del lines[0]["samples"][0]["rounds_by_running"]
    with pytest.raises(SpectrainError, match=r"delete load\.jsonl"):
        summarise_load(lines)


def test_requests_that_end_leave_the_batch(settings, entries):
    class Run:
        def __init__(self, tokens, rounds):
            self.tokens, self.rounds = tokens, [type("R", (), {"committed": 1})] * rounds

    runs = load._Decoded([Run([1] * 4, 3), Run([1] * 8, 7)], 0.5, 1.5)
    found = load._sample(settings, entries[0], 2, 0, PROMPTS[:2], {"plain": runs})
    assert found["running"] == (4 + 8) / 8  # two for four rounds, prefill counted, then one
    assert found["rounds_by_running"] == [[1, 4], [2, 3]]
    assert (found["tokens"], found["rounds"], found["steps"], found["committed"]) == (12, 10, 7, 10)
    assert (found["seconds"], found["decode_s"]) == (2.0, 1.5)


def test_batches_are_drawn_without_repetition_while_prompts_last():
    rng = random.Random(0)
    assert len({prompt.id for prompt in load._draw(rng, PROMPTS, 4)}) == 4
    more = [prompt.id for prompt in load._draw(rng, PROMPTS, 6)]
    assert len(more) == 6
    assert set(more) == {prompt.id for prompt in PROMPTS}


def test_rows_hold_rates_of_sums(samples):
    rows = summarise(samples)["rows"]
    assert [(row["contender"], row["batch"]) for row in rows] == [
        (name, batch) for name in ("plain", "ngram k=1", "ngram k=3") for batch in (1, 2)
    ]
    for row in rows:
        own = [s for s in samples if (s["contender"], s["batch"]) == (row["contender"], row["batch"])]
        assert row["tokens_per_second"] == pytest.approx(sum(s["tokens"] for s in own) / sum(s["seconds"] for s in own))
        assert row["identical"] == row["answers"] == 3 * row["batch"]
        assert (row["speedup"] is None) == (row["contender"] == "plain")
        assert not row["pays"]  # three batches of a size are too few to say so


# --- where it pays ------------------------------------------------------------------------------------------------


def made(speedups, *, groups=6):
    """Samples of plain decoding and of a drafter that is so many times as fast, by batch size, on every batch."""
    found = []
    for batch, speedup in speedups.items():
        for group in range(groups):
            base = {"batch": batch, "group": group, "prompts": ["p"] * batch, "tokens": 10 * batch, "rounds": 5 * batch,
                    "steps": 5, "committed": 9 * batch, "running": batch, "identical": batch,
                    "rounds_by_running": [[batch, 5]], "prefill_s": 0.0}  # fmt: skip
            found.append({**base, "contender": "plain", "drafter": "plain", "k": 0, "seconds": 1.0 + group,
                          "decode_s": 1.0 + group})  # fmt: skip
            seconds = (1.0 + group) / speedup
            found.append({**base, "contender": "x k=3", "drafter": "x", "k": 3, "seconds": seconds,
                          "decode_s": seconds})  # fmt: skip
    return found


@pytest.mark.parametrize(
    ("speedups", "largest", "words"),
    [
        ({1: 2.0, 2: 1.5, 4: 0.8}, 2, "x k=3 pays up to batch 2 (1.50 (1.50–1.50) times as fast); at batch 4 it no"),
        ({1: 2.0, 2: 1.5}, 2, "x k=3 pays at every batch measured, up to batch 2 (1.50"),
        (
            {1: 0.9, 2: 0.7},
            None,
            "x k=3 pays at no batch measured; at best 0.90 (0.90–0.90) times as fast, at batch 1.",
        ),
        ({1: 0.9, 2: 1.2, 4: 0.7}, 2, "(0.70 (0.70–0.70)); unclear at batch 1."),
    ],
)
def test_the_crossover_is_the_largest_batch_that_pays(speedups, largest, words):
    (found,) = summarise(made(speedups))["crossovers"]
    assert found["largest_paying_batch"] == largest
    assert words in found["sentence"]


def test_too_few_batches_decide_nothing():
    (found,) = summarise(made({1: 2.0}, groups=5))["crossovers"]
    assert found["largest_paying_batch"] is None
    assert found["sentence"] == "x k=3: 5 batches of each size are too few to tell, at least 6 are needed."


def test_an_interval_that_includes_1_does_not_pay():
    samples = made({1: 1.05})
    for sample in samples:
        if sample["k"] and sample["group"] % 2:
            sample["seconds"] *= 1.3
    rows = [row for row in summarise(samples)["rows"] if row["k"]]
    assert rows[0]["speedup"]["low"] < 1 < rows[0]["speedup"]["high"]
    assert crossover(rows)["largest_paying_batch"] is None


# --- how it looks -------------------------------------------------------------------------------------------------


@pytest.fixture
def document():
    costs = [{"batch": b, "k": k, "rows": k + 1, "seconds": 0.01 * b, "v": 1 + k / 10}
             for b in (1, 4) for k in (0, 3)]  # fmt: skip
    return {"title": "toy", "verification": costs, **summarise(made({1: 2.0, 4: 0.5}))}


def test_the_tables_have_a_column_for_every_batch(document):
    verification, speeds, sentence = render(document).split("\n\n")
    assert [cell.strip() for cell in verification.splitlines()[2].strip("|").split("|")] == [
        "plain step, ms", "10.0", "40.0",
    ]  # fmt: skip
    assert "v at k=3" in verification
    assert speeds.splitlines()[3].split("|")[2:4] == [" 5.7 2.00× ", " 5.7 0.50× "]
    assert sentence.startswith("x k=3 pays up to batch 1")


def test_the_picture_is_a_png(document):
    file = io.BytesIO()
    draw_load(document, file)
    assert file.getvalue().startswith(b"\x89PNG")
    assert len(file.getvalue()) > 5_000
