"""Reliability curves and coverage from raw lines, by hand."""

import random

import pytest

from spectrain.evaluation.calibration import Calibration, reliability

GREEDY, WARM = ({"temperature": t, "top_k": None, "top_p": None} for t in (0.0, 1.0))
EMPTY = [0.0, 0, 0]


def bins(**filled):
    """``b3=(1.4, 4, 1)``: bin 3."""
    return [list(filled.get(f"b{i}", EMPTY)) for i in range(10)]


def test_ece_by_hand():
    """Bin 3: 4 of mean confidence 0.35, a quarter right; bin 9: 6 of mean 0.95, all right."""
    found = reliability(bins(b3=(1.4, 4, 1), b9=(5.7, 6, 6)))
    assert found["ece"] == pytest.approx(0.4 * 0.10 + 0.6 * 0.05)
    assert (found["positions"], found["mean_confidence"], found["hit_rate"]) == (10, pytest.approx(0.71), 0.7)
    assert found["bins"][3] == {"low": 0.3, "high": 0.4, "count": 4, "confidence": 0.35, "accepted": 0.25}
    assert found["bins"][0] == {"low": 0.0, "high": 0.1, "count": 0, "confidence": None, "accepted": None}
    assert len(found["bins"]) == 10


def test_rows_pool_conversations_and_keep_sources_apart():
    forced = {"confidence": [bins(b9=(2.8, 3, 3)), bins(b5=(0.5, 1, 0)), bins()], "in_draft_vocabulary": [3, 3]}
    sample = {"drafter": "eagle3", "contender": "eagle3 k=2", "sampler": WARM, "kind": "a", "conversation": "c"}
    changes = [
        {"confidence": bins(b3=(1.4, 4, 1))},
        {"confidence": bins(b3=(0.6, 2, 2), b9=(0.9, 1, 1))},
        {"contender": "eagle3 k=2 block", "confidence": bins(b0=(0.05, 1, 0))},
        {"contender": "ngram k=2", "confidence": None},
        *[{"sampler": GREEDY, "confidence": None, "teacher_forced": forced}] * 2,
        {"sampler": GREEDY, "confidence": None, "teacher_forced": None},
    ]
    calibration = Calibration.of({**sample, **change} for change in changes)
    found = {(row["source"], row["sampler"], row["depth"]): row for row in calibration.rows()}
    assert set(found) == {
        ("eagle3 k=2", "T=1", None),
        ("eagle3 k=2 block", "T=1", None),
        ("teacher-forced", "greedy (T=0)", 0),
        ("teacher-forced", "greedy (T=0)", 1),
    }
    pooled = found["eagle3 k=2", "T=1", None]
    assert (pooled["positions"], pooled["hit_rate"]) == (7, 4 / 7)
    assert pooled["bins"][3]["confidence"] == pytest.approx(2.0 / 6)
    assert found["teacher-forced", "greedy (T=0)", 0]["positions"] == 6
    assert all(row["drafter"] == "eagle3" for row in found.values())


def test_a_calibrated_drafter_has_next_to_no_error_and_a_boastful_one_has():
    rng, calibrated, boastful = random.Random(0), bins(), bins()
    for _ in range(20_000):
        confidence = rng.random()
        right = rng.random() < confidence
        for table, said in ((calibrated, confidence), (boastful, confidence**0.5)):
            row = table[int(said * 10)]
            row[:] = [row[0] + said, row[1] + 1, row[2] + right]
    assert reliability(calibrated)["ece"] < 0.02
    assert reliability(boastful)["ece"] == pytest.approx(1 / 6, abs=0.02)  # the integral of √x - x


def record(conversation, kind, covered, of, drafter="eagle3", sampler=GREEDY):
    forced = {"confidence": [], "in_draft_vocabulary": [covered, of]}
    return {"conversation": conversation, "kind": kind, "drafter": drafter, "sampler": sampler, "confidence": None,
            "teacher_forced": forced}  # fmt: skip


def test_coverage_by_kind_over_conversations():
    rows = Calibration.of(
        [
            record("a", "narrow/sql", 9, 10),
            record("a", "narrow/sql", 8, 10, sampler=WARM),
            record("b", "narrow/json", 3, 20),
            record("c", "open", 5, 5),
            record("c", "open", 0, 5, drafter="medusa"),
            record("d", "open", 0, 0, drafter="none"),
        ]
    ).vocabulary_rows()
    found = {(row["drafter"], row["kind"]): row for row in rows}
    assert {kind for drafter, kind in found if drafter == "eagle3"} == {
        "everything", "narrow", "narrow/sql", "narrow/json", "open",
    }  # fmt: skip
    assert found["eagle3", "everything"]["coverage"]["value"] == pytest.approx(25 / 45)
    assert found["eagle3", "everything"]["tokens"] == 45
    assert found["eagle3", "narrow/sql"]["coverage"] == {"value": 0.85, "low": None, "high": None}  # one conversation
    narrow = found["eagle3", "narrow"]["coverage"]
    assert narrow["low"] == pytest.approx(3 / 20)
    assert narrow["high"] == pytest.approx(0.85)
    assert found["medusa", "everything"]["coverage"]["value"] == 0
    assert not any(drafter == "none" for drafter, _ in found)
