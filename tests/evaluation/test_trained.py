"""What a reader who trained a drafter is told where another contender is the fastest."""

from __future__ import annotations

import json

import pytest

from spectrain import cli
from spectrain.evaluation.report import render_markdown
from spectrain.evaluation.summary import summarise
from spectrain.evaluation.told import told
from spectrain.evaluation.trained import fastest_trained, trained_drafters
from spectrain.files import write_json


@pytest.fixture(scope="module")
def make(simulator):
    """A document of two drafters with these acceptances: EAGLE-3 was trained, prompt lookup was not."""

    def make(eagle3, ngram, **context):
        samples = simulator.samples({"desk": {"eagle3": eagle3, "ngram": ngram}}, conversations=12)
        return summarise(samples, context=simulator.context | {"drafter": {"name": "eagle3"}} | context)

    return make


@pytest.fixture(scope="module")
def beaten(make):
    """Neither pays, and prompt lookup is the least bad."""
    return make(0.1, 0.3)


def test_trained_drafters_are_those_with_weights(make, beaten):
    (block,) = beaten["samplers"]
    assert trained_drafters(beaten, block) == ["eagle3"]
    facts = {"eagle3": {"bytes": 9, "training": None}, "ngram": {"bytes": 0, "training": None}}
    compared = make(0.1, 0.3, drafter={"name": "eagle3, other"}, drafters=facts)
    assert trained_drafters(compared, compared["samplers"][0]) == ["eagle3"]
    without = make(0.1, 0.3, drafter={"name": "none"})
    assert fastest_trained(without, without["samplers"][0]) is None


def test_what_would_change_it_is_told_for_the_trained_drafter(make, beaten):
    verdict = beaten["samplers"][0]["verdict"]
    own, overall = verdict["by_drafter"]["eagle3"]["overall"], verdict["overall"]
    assert (overall["decision"], overall["best"]["drafter"]) == ("off", "ngram")
    text = render_markdown(beaten)
    name = own["best"]["contender"]
    expected = f"for the trained {name}: {own['would_change']}. And for ngram k=5: {overall['would_change']}."
    assert f"What would change it {expected}" in text
    alone = make(0.3, 0.01)
    assert alone["samplers"][0]["verdict"]["overall"]["best"]["drafter"] == "eagle3"
    assert f"What would change it: {alone['samplers'][0]['verdict']['overall']['would_change']}." in render_markdown(
        alone
    )


def test_a_plan_is_made_for_the_trained_drafter(beaten, tmp_path, capsys):
    write_json(tmp_path / "a.json", beaten)

    def plan(*more):
        assert cli.guarded(cli.COMMANDS["plan"], ["--report", str(tmp_path / "a.json"), "--json", *more], "plan") == 0
        return json.loads(capsys.readouterr().out)

    name = beaten["samplers"][0]["verdict"]["by_drafter"]["eagle3"]["overall"]["best"]["contender"]
    found = plan()
    assert found["contender"] == name
    (note,) = found["notes"]
    assert note.startswith(f"{name} is taken, the trained drafter's best; the report's best is ngram k=5")
    assert (plan("--contender", "ngram k=5")["contender"], plan("--contender", name)["notes"]) == ("ngram k=5", [])


def test_a_measurement_is_told_in_a_few_lines(beaten, make):
    text = told(beaten)
    assert text.startswith("greedy (T=0): Leave it off. At best, ngram k=5 decodes ")
    assert "The trained drafter eagle3 by itself: off (" in text
    lines = text.splitlines()
    assert lines[1].split() == ["contender", "tokens", "per", "round", "τ", "decode", "speedup"]
    assert [line.split("  ")[0] for line in lines[2:]] == ["plain", "ngram k=5", "eagle3 k=3", "eagle3 k=5"]
    assert len({len(line) for line in lines[1:]}) == 1
    assert told(make(0.9, 0.1)).startswith("greedy (T=0): Turn it on: eagle3 k=5. eagle3 k=5 decodes ")
