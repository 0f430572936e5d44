"""Batches as part of an evaluation: measured once, kept, asked for later, and told in the document."""

import shutil

import pytest

from spectrain import cli
from spectrain.data.conversations import load_conversations
from spectrain.drafters.ngram import NgramConfig
from spectrain.evaluation import acceptance, load
from spectrain.evaluation.bundles import Asked, evaluate_bundle
from spectrain.evaluation.contenders import AcceptanceConfig
from spectrain.evaluation.document import read_document
from spectrain.evaluation.load_config import LoadConfig
from spectrain.exact.sampler import Sampler

CONFIG = AcceptanceConfig(k=(1, 2), verification=("token", "typical_lossy"), samplers=(Sampler(1.0), Sampler()),
                          max_new_tokens=5)  # fmt: skip
LOAD = LoadConfig(batch=(1, 3), context=(4,), groups=2, repeats=1)


@pytest.fixture(scope="module")
def evaluate(finished_run, chat_target, tmp_path_factory):
    bundle = shutil.copytree(finished_run / "run" / "bundle", tmp_path_factory.mktemp("bundle") / "bundle")
    chats = load_conversations([str(finished_run / "heldout.jsonl")])

    def evaluate(output, **settings):
        config = CONFIG.model_copy(update={"load": LOAD.model_copy(update=settings)})
        path = evaluate_bundle(
            bundle,
            chat_target,
            Asked(chats, config, output, traffic="heldout.jsonl", baselines=(NgramConfig(),), progress=False),
        )
        return read_document(path)

    return evaluate


@pytest.fixture(scope="module")
def evaluated(evaluate, tmp_path_factory):
    output = tmp_path_factory.mktemp("evaluated")
    return evaluate(output), output


def test_batches_stand_in_the_document(evaluated):
    document, output = evaluated
    found = document["load"]
    assert (found["batches"], found["context_tokens"], found["groups"]) == ([1, 3], [4], 2)
    assert found["sampler"] == document["samplers"][0]["name"]  # the first that is measured
    names = {row["contender"] for row in found["rows"]}
    lawful = {c["contender"] for c in document["samplers"][0]["contenders"] if not c["lossy"]}
    assert names == lawful
    assert all(row["identical"] is None for row in found["rows"])  # sampled: nothing to be equal to
    assert [row["decision"] for row in found["by_batch"]] == ["off", "off"]  # two batches of a size decide nothing
    assert "too few batches: 2" in found["by_batch"][0]["reason"]
    chains = document["cost_model"]["chains"]
    assert [row["batch"] for row in chains[0]["by_batch"]] == [1, 3]
    assert all(chain["by_batch"] == [] for chain in chains if chain["sampler"] != found["sampler"])
    assert len((output / "evaluation" / "load.jsonl").read_text().splitlines()) == 2


def test_sizes_and_rates_may_be_asked_for_later(evaluate, evaluated, monkeypatch):
    first, output = evaluated
    measured = []
    keep = load.measure_batch
    monkeypatch.setattr(load, "measure_batch", lambda *a, **k: measured.append(a[2]) or keep(*a, **k))
    monkeypatch.setattr(acceptance, "generate", None)  # single requests are not measured again
    more = evaluate(output, batch=(1, 2, 3), request_rates=(0.5,))
    assert measured == [2]
    assert more["load"]["batches"] == [1, 2, 3]
    kept = [row for row in more["load"]["rows"] if row["batch"] != 2]
    assert kept == first["load"]["rows"]
    assert first["cost_model"]["goodput"] is None
    assert [row["request_rate"] for row in more["cost_model"]["goodput"]] == [0.5]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--context", "64"], "--context is about batches of requests; give their sizes with --batch, too"),
        (["--request-rate", "2"], "--request-rate is about batches of requests"),
        (["--batch-groups", "4"], "--batch-groups is about batches of requests"),
        (["--batch", "1,x"], "--batch: expected whole numbers of at least 1 with commas"),
        (["--batch", "0"], "--batch: expected whole numbers of at least 1"),
        (["--batch", "1", "--batch-groups", "1"], "--batch-groups: Input should be greater than or equal to 2"),
        (["--batch", "1", "--request-rate", "0"], "--request-rate: Input should be greater than 0"),
    ],
)
def test_mistakes_are_named_by_their_flag(finished_run, tmp_path, capsys, more, message):
    arguments = ["bundle", "--traffic", str(finished_run / "heldout.jsonl"), "--output", str(tmp_path / "out"), *more]
    assert cli.guarded(cli.evaluate, arguments, "spectrain evaluate") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_verifications_are_timed_behind_as_much_as_the_requests_have(evaluate, tmp_path):
    """Unless told otherwise: costs behind other contexts would predict other rounds."""
    found = evaluate(tmp_path, context=(), batch=(1,))["load"]
    assert found["context_tokens"] == [round(found["prompt_tokens"] + found["max_new_tokens"] / 2)]
