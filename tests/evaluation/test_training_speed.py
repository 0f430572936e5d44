"""The training benchmark: both ways compute the same, for every family, and its figures are what was measured."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from families import TRAINABLE

from spectrain import cli
from spectrain.benchmarks import training
from spectrain.config import load_recipe
from spectrain.drafters.objective import DrafterLoss, LossConfig
from spectrain.errors import SpectrainError
from spectrain.evaluation import training_speed
from spectrain.evaluation.training_speed import ALL_LOGITS, CHUNKED, WAYS, AllLogits, Job, Step, render


def job(chat_folder, kind, **fields):
    small = {"depths": 2, "draft_vocab_size": 16, "tap_layers": (0, 1, 2), "noise": 0.0} | fields
    config = kind(**{name: value for name, value in small.items() if name in kind.model_fields})
    return Job("small", str(chat_folder), "float32", config, 96, 32, 0.5, 0)


@pytest.mark.parametrize("kind", TRAINABLE, ids=lambda kind: get_args(kind.model_fields["type"].annotation)[0])
def test_both_ways_have_one_loss_and_one_gradient(chat_folder, kind):
    step = Step(CHUNKED, job(chat_folder, kind))
    weights = [1.0 / (1 + depth) for depth in range(len(step.drafter.shifts()))]
    found = {}
    for way, module in {CHUNKED: DrafterLoss(step.drafter, step.head, LossConfig(regression=0.0), chunk=7),
                        ALL_LOGITS: AllLogits(step.drafter, step.head)}.items():  # fmt: skip
        step.drafter.zero_grad()
        loss = module(step.batch, weights)
        loss.backward()
        found[way] = loss.item(), {n: p.grad.clone() for n, p in step.drafter.named_parameters() if p.grad is not None}
    (loss, gradients), (plain_loss, plain_gradients) = (found[way] for way in WAYS)
    assert loss == pytest.approx(plain_loss, rel=1e-5)
    assert gradients.keys() == plain_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, plain_gradients[name], rtol=1e-4, atol=1e-5, msg=name)


def test_a_step_trains(chat_folder):
    step = Step(ALL_LOGITS, job(chat_folder, TRAINABLE[0]))
    losses = [step.take()["loss"] for _ in range(8)]
    assert losses[-1] < losses[0]


def test_different_computations_are_not_compared():
    one, other = {"loss": 1.0, "gradient_norm": 2.0}, {"loss": 1.0, "gradient_norm": 2.1}
    training_speed._check_same({CHUNKED: one, ALL_LOGITS: dict(one)}, "same")
    with pytest.raises(SpectrainError, match=r"broken: gradient_norm is 2\.0"):
        training_speed._check_same({CHUNKED: one, ALL_LOGITS: other}, "broken")


@pytest.mark.slow
def test_the_command_measures_in_two_processes(make_recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = make_recipe(tmp_path)
    arguments = [str(recipe), "--step-tokens", "64", "--row-tokens", "32", "--steps", "2", "--variant", "base:"]
    assert cli.guarded(training, arguments, "training") == 0
    assert "times as fast" in capsys.readouterr().out
    text = (tmp_path / "runs/benchmarks/training.json").read_text(encoding="utf-8")
    assert load_recipe(recipe).target.name not in text


def test_ratios_are_those_of_the_measured_seconds():
    ways = {way: {"seconds": seconds, "peak_bytes": peak, "loaded_bytes": 1, "first": {}}
            for way, seconds, peak in ((CHUNKED, [1.0, 1.0], 30), (ALL_LOGITS, [2.0, 4.0], 60))}  # fmt: skip
    found = training_speed._ratios(ways, 120, 0)
    assert found["speed_ratio"] == {"value": 3.0, "low": 2.0, "high": 4.0}
    assert found["peak_ratio"] == 0.5
    assert found["tokens_per_second"] == {CHUNKED: 120.0, ALL_LOGITS: 40.0}
    row = {"settings": {"name": "case"}, "ways": ways, **found}
    assert "3.00 (2.00–4.00)" in render({"rows": [row]})


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--step-tokens", "100", "--row-tokens", "64"], "--step-tokens 100: expected a multiple of --row-tokens, 64"),
        (["--steps", "1"], "--steps 1"),
        (["--answer-share", "nan"], "--answer-share nan"),
        (["--variant", "nothing"], "--variant 'nothing'"),
    ],
)
def test_bad_options_are_named(make_recipe, tmp_path, capsys, flags, said):
    assert cli.guarded(training, [str(make_recipe(tmp_path)), *flags], "training") == 2
    assert said in capsys.readouterr().err
