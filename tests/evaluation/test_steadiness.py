"""Numbers that no steady clock gives, and passes that disagree, are said before any number that rests on them."""

import copy

import pytest
from complete import complete

import spectrain.evaluation.report as report
from spectrain.evaluation.cautions import cautions
from spectrain.evaluation.steadiness import batches_of_one, unsteady
from spectrain.evaluation.summary import summarise
from spectrain.evaluation.told import told

ALPHAS = {"desk": {"eagle3": 0.8, "ngram": 0.5}}


@pytest.fixture(scope="module")
def steady(simulator):
    return complete(summarise(simulator.samples(ALPHAS, conversations=12), context=simulator.context))


@pytest.fixture
def document(steady):
    return copy.deepcopy(steady)


def drafting(document):
    return next(c for c in document["samplers"][0]["contenders"] if c["shape"] is not None)


def speed(document, factor):
    """The first drafter's speedup is so many times its tokens per round."""
    found = drafting(document)
    found["pooled"]["speedup"]["decode"]["value"] = factor * found["pooled"]["tokens_per_round"]["value"]
    return found["contender"]


def test_a_steady_clock_is_not_doubted(document):
    assert unsteady(document) == []


def test_a_gain_above_the_tokens_of_a_round_is_hard_to_believe(document):
    name = speed(document, 1.27)
    (found,) = unsteady(document)
    assert found.startswith(f"Hard to believe: {name} decodes ")
    assert found.endswith("disturbed the clock: measure again with nothing else running.")
    assert found in cautions(document)
    assert found in told(document)


def test_a_drafter_that_never_drafts_may_be_a_little_faster_than_plain(document):
    speed(document, 1.01)
    assert unsteady(document) == []


def test_a_forward_pass_quicker_than_plains_is_hard_to_believe(document):
    plain, found = document["samplers"][0]["contenders"][0]["pooled"], drafting(document)["pooled"]
    a_round = plain["seconds"]["verify"] / plain["rounds"]
    found["seconds"]["verify"] = 0.61 * a_round * found["rounds"]
    (told_,) = unsteady(document)
    assert "verifies a round in 0.61 of the time that plain decoding's forward pass takes" in told_
    found["seconds"]["verify"] = 0.85 * a_round * found["rounds"]
    assert unsteady(document) == []


def other(verdict):
    """The opposite, about the same contender."""
    on = verdict["decision"] == "on"
    return {"decision": "off", "contender": None, "k": 0} if on else {"decision": "on", "contender": "eagle3 k=3"}


def test_batches_of_one_that_are_judged_otherwise_are_a_caution_beside_both(document):
    first = document["load"]["by_batch"][0]
    first |= other(first)
    sentence = batches_of_one(document)
    assert "nothing is on" in sentence
    assert "disagree, so the clock was not steady" in sentence
    assert unsteady(document) == [sentence]
    for shown in (report.render_markdown(document), report.render_page(document)):
        assert shown.count(sentence) == 2
        head, load = shown.split("Under load", 1)
        assert sentence in head
        assert sentence in load


def test_batches_of_one_that_turn_on_another_drafter_disagree_and_another_length_does_not(document):
    overall, first = document["samplers"][0]["verdict"]["overall"], document["load"]["by_batch"][0]
    overall |= {"decision": "on", "contender": "eagle3 k=3", "reason": "the interval lies above 1"}
    for name, said in (("eagle3 k=5", False), ("ngram k=5", True)):
        document["samplers"][0]["contenders"][-1] |= {"contender": name, "drafter": name.split()[0]}
        first |= {"decision": "on", "contender": name, "reason": "the interval lies above 1"}
        assert bool(batches_of_one(document)) is said


@pytest.mark.parametrize(
    "change",
    [
        lambda load: load["by_batch"][0].update(reason="too few batches: 2, at least 6 are needed"),
        lambda load: load["by_batch"].pop(0),
        lambda load: load.update(sampler="T=1"),
    ],
    ids=["too few to tell", "no batches of 1", "another sampler"],
)
def test_what_cannot_be_compared_does_not_disagree(document, change):
    first = document["load"]["by_batch"][0]
    first |= other(first)
    change(document["load"])
    assert batches_of_one(document) == ""


def test_what_was_not_measured_in_batches_does_not_disagree(document):
    document["load"] = None
    assert unsteady(document) == []
