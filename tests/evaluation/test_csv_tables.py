"""The table and the acceptance vectors: the document's own numbers, each with what it is over."""

import csv
import io
import json

import pytest
from complete import complete

from spectrain.evaluation.csv_tables import COLUMNS, acceptance_csv
from spectrain.evaluation.profile import PROFILE_SCHEMA, speculation_profile
from spectrain.evaluation.summary import summarise

KINDS = {"desk, and more": {"eagle3": 0.8, "ngram": 0.5}, "chat": {"eagle3": 0.3, "ngram": 0.2}}


@pytest.fixture(scope="module")
def document(simulator):
    samples = simulator.samples(KINDS, conversations=6, more=(simulator.tree,))
    samples += simulator.samples(KINDS, conversations=6, temperature=1.0)
    forced = [simulator.forced_row(drafter="eagle3", prefixes="T=1", depth=depth, alpha=0.6) for depth in (0, 1)]
    return complete(summarise(samples, context=simulator.context | {"teacher_forced": forced}))


@pytest.fixture(scope="module")
def rows(document):
    return list(csv.DictReader(io.StringIO(acceptance_csv(document))))


def one(rows, **wanted):
    (row,) = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    return row


def test_a_line_has_a_number_its_interval_and_what_it_is_over(document, rows):
    assert tuple(rows[0]) == COLUMNS
    contender = next(c for c in document["samplers"][0]["contenders"] if c["contender"] == "eagle3 k=3")
    where = {"sampler": "greedy (T=0)", "contender": "eagle3 k=3", "band": ""}
    for kind, numbers in (("everything", contender["pooled"]), *contender["by_kind"].items()):
        for key in ("marginal_survival", "conditional_acceptance"):
            expected = numbers[key][1]
            row = one(rows, **where, kind=kind, measure=key, position="2")
            assert [float(row[name]) for name in ("value", "low", "high")] == [
                expected[n] for n in ("rate", "low", "high")
            ]
            assert int(row["n"]) == expected.get("rounds", expected.get("proposed"))
        row = one(rows, **where, kind=kind, measure="decode_speedup")
        assert float(row["high"]) == numbers["speedup"]["decode"]["high"]
        assert int(row["n"]) == numbers["conversations"]


def test_bands_and_given_answers_are_lines_too(document, rows):
    contender = document["samplers"][1]["contenders"][1]
    band = contender["by_band"]["answer position"][0]
    label = f"answer position: {band['label']}"
    row = one(rows, sampler="T=1", contender=contender["contender"], band=label, measure="tokens_per_round")
    assert float(row["value"]) == band["tokens_per_round"]["value"]
    row = one(rows, measure="teacher_forced_alpha", position="2")
    assert (row["contender"], row["band"], row["value"], row["n"]) == ("eagle3", "answers by T=1", "0.6", "900")


def test_what_has_no_value_or_interval_is_an_empty_cell(rows):
    row = one(rows, sampler="T=1", contender="plain", kind="chat", measure="latency_ms_token_p50")
    assert (row["low"], row["high"], row["position"]) == ("", "", "")
    assert "None" not in {value for row in rows for value in row.values()}


def test_a_vector_holds_what_a_simulator_needs(document):
    profile = json.loads(json.dumps(speculation_profile(document), allow_nan=False))
    assert profile["schema"] == PROFILE_SCHEMA == "spectrain.speculation_profile/1"
    assert profile["traffic"]["digest"] == "sha256:5e1f"
    names = {(p["sampler"], p["contender"], p["kind"]) for p in profile["profiles"]}
    assert len(names) == len(profile["profiles"]) == 3 * 4 + 3 * 3  # with the tree at T=0, without plain decoding
    found = next(p for p in profile["profiles"] if p["contender"] == "eagle3 k=5")
    numbers = next(c for c in document["samplers"][0]["contenders"] if c["contender"] == "eagle3 k=5")["pooled"]
    assert (found["kind"], found["temperature"], found["k"], len(found["acceptance"])) == ("everything", 0.0, 5, 5)
    survival = 1.0
    for conditional, marginal in zip(found["acceptance"], found["survival"], strict=True):
        survival *= conditional
        assert marginal == pytest.approx(survival)  # this drafter proposes k tokens in every round
    assert 1 + sum(found["survival"]) == pytest.approx(numbers["tokens_per_full_round"]["value"])
    assert found["verify_cost"] == numbers["cost"]["verify_cost_per_round"]
    assert set(profile["meaning"]) <= set(found)


def test_a_tree_has_vectors_by_depth_and_no_cost_a_token(document, simulator):
    profile = speculation_profile(document)
    tree = next(p for p in profile["profiles"] if p["contender"] == simulator.tree)
    assert (tree["k"], tree["depth"], tree["draft_cost"], len(tree["survival"])) == (None, 5, None, 5)
    assert tree["draft_cost_per_round"] > 0
