"""Speculation by batch size: what is timed, what is counted, and when it is said to pay."""

from __future__ import annotations

import io
import random

import pytest

from spectrain.drafters.ngram import NgramConfig, NgramDrafter
from spectrain.evaluation import load
from spectrain.evaluation.contenders import contenders
from spectrain.evaluation.load import crossover, measure, render, summarise, verification_costs
from spectrain.evaluation.load_picture import draw_load
from spectrain.evaluation.workbench import Prompt

PROMPTS = [Prompt(f"p{i}", "all", [3, 4, 5, 3, 4, 5][: 3 + i % 3]) for i in range(4)]


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target("llama", eos=7)


@pytest.fixture(scope="module")
def entries():
    return contenders({"ngram": NgramDrafter(NgramConfig())}, (1, 3))


@pytest.fixture(scope="module")
def samples(target, entries):
    return measure(target, entries, PROMPTS, (2, 1, 2), 3, 12, 0, progress=False)


# --- what a verification costs ------------------------------------------------------------------------------------


def test_verification_is_timed_for_every_batch_and_length(target, monkeypatch):
    seen = []
    forward = target.forward

    def spy(ids, *, cache=None, layout=None):
        seen.append((*ids.shape, tuple(cache.lengths)))
        return forward(ids, cache=cache, layout=layout)

    monkeypatch.setattr(target, "forward", spy)
    costs = verification_costs(target, (1, 3), (1, 3, 3), 10, 2, 0, progress=False)
    assert [(cost["batch"], cost["k"], cost["rows"]) for cost in costs] == [
        (batch, k, k + 1) for batch in (1, 3) for k in (0, 1, 3)
    ]
    assert all(cost["v"] == 1.0 for cost in costs if cost["k"] == 0)
    assert all(cost["seconds"] > 0 and cost["v"] > 0 for cost in costs)
    forwards = [call for call in seen if call[1] != 10]
    # A warm-up and two repeats of three forwards for each batch, all behind the same ten tokens.
    assert len(forwards) == 2 * 3 * 3
    assert all(lengths == (10,) * batch for batch, _, lengths in forwards)


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


def test_requests_that_end_leave_the_batch(target, entries):
    class Run:
        def __init__(self, tokens, rounds):
            self.tokens, self.rounds = tokens, [type("R", (), {"committed": 1})] * rounds

    found = load._sample(entries[0], 2, 0, PROMPTS[:2], [Run([1] * 4, 3), Run([1] * 8, 7)], 2.0)
    assert found["running"] == (4 + 8) / 8  # two for four rounds, prefill counted, then one
    assert (found["tokens"], found["rounds"], found["committed"]) == (12, 10, 10)


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
                    "committed": 9 * batch, "running": batch, "identical": batch}  # fmt: skip
            found.append({**base, "contender": "plain", "drafter": "plain", "k": 0, "seconds": 1.0 + group})
            seconds = (1.0 + group) / speedup
            found.append({**base, "contender": "x k=3", "drafter": "x", "k": 3, "seconds": seconds})
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
    costs = [{"batch": b, "k": k, "rows": k + 1, "seconds": 0.01 * b, "v": 1 + k / 10} for b in (1, 4) for k in (0, 3)]
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
