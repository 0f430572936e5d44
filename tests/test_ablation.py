"""Variants of a recipe: all trained alike, compared in pairs."""

from __future__ import annotations

import json

import numpy as np
import pytest

from spectrain.ablation import _interval, _rate, _resampled, ablation, in_words, markdown, parse_variant
from spectrain.errors import SpectrainError
from spectrain.training import Trainer


@pytest.fixture
def recipe(make_recipe, tmp_path):
    (tmp_path / "recipe").mkdir()
    return make_recipe(tmp_path / "recipe")


def run(recipe, output, *variants, seeds="0,1", overrides=()):
    asked = [part for variant in variants for part in ("--variant", variant)]
    ablation([str(recipe), *overrides, *asked, "--seeds", seeds, "--output", str(output)])
    return json.loads((output / "ablation.json").read_text())


def test_a_difference_that_is_there_is_found_and_finished_runs_are_not_repeated(recipe, tmp_path, monkeypatch, capsys):
    asked = ("slow: optim.lr=1e-9", "fast: optim.lr=3e-3", "again: optim.lr=3e-3")
    document = run(recipe, tmp_path / "out", *asked, overrides=["training.epochs=12"])
    assert document["variants"]["fast"] == ["optim.lr=3e-3"]
    assert document["conversations"] == 4
    found = {(d["variant"], d["against"], d["kind"], d["measure"]): d for d in document["differences"]}
    better = found["fast", "slow", "everything", "alpha_first"]
    assert better["value"] > 0.02
    assert in_words(better) == "better"
    same = found["again", "fast", "everything", "alpha_all_depths"]
    assert (same["value"], same["low"], same["high"]) == (0, 0, 0)
    assert in_words(same) == "no difference found"
    assert "| fast |" in capsys.readouterr().out
    monkeypatch.setattr(Trainer, "_step", None)
    assert run(recipe, tmp_path / "out", *asked, overrides=["training.epochs=12"]) == document
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir()) == sorted(
        ["prepared", *(f"{name}-{seed}" for name in ("again", "fast", "slow") for seed in (0, 1))]
    )


def test_the_interval_covers_seeds_and_conversations():
    """Two seeds that disagree make it wide, although every conversation says the same of each."""
    counts = np.ones((2, 50))
    agreeing, torn = np.full((2, 50), 0.5), np.repeat([[0.3], [0.7]], 50, axis=1)
    spans = []
    for sums in (agreeing, torn):
        assert _rate(sums, counts) == pytest.approx(0.5)
        found = _interval(_rate(sums, counts), _resampled(sums, counts))
        spans.append(found["high"] - found["low"])
    assert spans[0] == pytest.approx(0, abs=1e-12)
    assert spans[1] == pytest.approx(0.4)
    by_chat = np.tile(np.repeat([0.0, 1.0], 25), (2, 1))
    found = _interval(0.5, _resampled(by_chat, counts))
    assert found["high"] - found["low"] == pytest.approx(2 * 1.96 * 0.5 / 50**0.5, rel=0.15)


def test_words_and_tables():
    assert in_words({"low": -0.2, "high": -0.1}) == "worse"
    row = {"kind": "open", "measure": "alpha_first", "variant": "a", "value": 0.5, "low": 0.4, "high": 0.6}
    other = {**row, "variant": "b"}
    difference = {**other, "against": "a", "value": 0.01, "low": 0.002, "high": 0.02}
    text = markdown({"conversations": 3, "seeds": [0], "rows": [row, other], "differences": [difference]})
    assert "| open | first depth | a | 0.5000 (0.4000 to 0.6000) |  |  |" in text
    assert "+0.0100 (+0.0020 to +0.0200) to a | better |" in text


def test_variants_of_unlike_length_are_refused(recipe, tmp_path):
    with pytest.raises(SpectrainError, match=r"variants differ in optimizer steps, \{'a': \d+, 'b': \d+\}"):
        run(recipe, tmp_path / "out", "a: training.epochs=1", "b: training.epochs=2", seeds="0")


@pytest.mark.parametrize(
    ("variants", "seeds", "named"),
    [
        (("no colon",), "0", r"--variant 'no colon': expected NAME: key\.path=value"),
        (("a/b: optim.lr=1",), "0", "--variant 'a/b"),
        (("a:", "a: optim.lr=1"), "0", "--variant: found a, a, expected each once"),
        (("a:",), "0,0", "--seeds: found 0, 0, expected each once"),
        (("a:",), "x", "--seeds 'x': expected whole numbers"),
        (("a:", "b: optim.rl=1"), "0", r"unknown key 'optim\.rl'"),
    ],
)
def test_bad_input_is_named_before_anything_runs(recipe, tmp_path, variants, seeds, named):
    with pytest.raises(SpectrainError, match=named):
        run(recipe, tmp_path / "out", *variants, seeds=seeds)
    assert not (tmp_path / "out").exists()


def test_a_variant_without_overrides_is_the_recipe():
    assert parse_variant("base:").overrides == ()
    assert parse_variant(" lk : loss.terms={lk_hybrid:1} a.b=c").overrides == ("loss.terms={lk_hybrid:1}", "a.b=c")
