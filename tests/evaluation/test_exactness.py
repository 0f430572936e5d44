"""The comparison with plain decoding: finds nothing where there is nothing, and every fault that is put in."""

import copy
import json

import pytest
import torch

from spectrain.data.conversations import parse_conversation
from spectrain.decoding import generate_plain
from spectrain.drafters.ngram import NgramConfig, NgramDrafter
from spectrain.errors import SpectrainError
from spectrain.evaluation import exactness
from spectrain.evaluation.exactness import ExactnessConfig, compare, render
from spectrain.evaluation.workbench import Prompt
from spectrain.exact.sampler import Sampler
from spectrain.shapes import DynamicTree, StaticTree

IDS = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8], [0, 0, 0], [23, 22, 21]]
PROMPTS = [Prompt(f"p{i}", "all", ids) for i, ids in enumerate(IDS)]
TREE, DYNAMIC = StaticTree(((0,), (1,), (0, 0), (1, 0), (0, 0, 0))), DynamicTree(3, 3, 8)
CONFIG = ExactnessConfig(max_new_tokens=12, batch=(1, 3), k=(3,), trees=(TREE, DYNAMIC))
CHAINS = CONFIG.model_copy(update={"trees": ()})
DRAFTS = ["k=3", "k=3 block", "tree of 5", "dynamic tree of 8"]
SCHEMES = ["plain", *(f"{drafter} {draft}" for drafter in ("ngram", "rehearsed") for draft in DRAFTS)]


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target(layers=2)


@pytest.fixture
def run(target):
    def run(config=CONFIG, prompts=PROMPTS, on=target):
        return compare(on, {"ngram": NgramDrafter(NgramConfig())}, prompts, config, progress=False)

    return run


@pytest.fixture
def altered(monkeypatch):
    """Batched answers of one size pass through a function first: ``altered(size, change)``."""

    def altered(size, change):
        real = exactness.generate_batch

        def generate_batch(target, drafter, prompts, **settings):
            results = real(target, drafter, prompts, **settings)
            if len(prompts) == size and drafter is not None:
                for result in results:
                    result.tokens = change(list(result.tokens))
            return results

        monkeypatch.setattr(exactness, "generate_batch", generate_batch)

    return altered


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_every_scheme_equals_plain_decoding_at_every_batch_size(run, tiny_target, architecture):
    document = run(on=tiny_target(architecture, layers=2))
    assert [(c["scheme"], c["batch"]) for c in document["cells"]] == [(s, b) for s in SCHEMES for b in (1, 3)]
    assert all((c["compared"], c["equal"], c["ties"], c["faults"]) == (5, 5, 0, 0) for c in document["cells"])
    assert (document["faults"], document["ties"], document["tokens"]) == (0, 0, 60)
    assert document == json.loads(json.dumps(document, allow_nan=False))
    by_scheme = {c["scheme"]: c for c in document["cells"]}
    assert by_scheme["plain"]["tokens_per_round"] == 1
    # The drafter that knows the answers makes sure that something was accepted.
    assert all(by_scheme[f"rehearsed {draft}"]["tokens_per_round"] > 1.5 for draft in DRAFTS)
    text = render(document)
    assert "exact: all outputs are plain decoding's, token by token; 5 prompts, 60 tokens" in text
    assert text.count("5/5") == 2 * len(SCHEMES)


def test_answers_that_end_early_are_compared_too(run, tiny_target, target):
    eos = generate_plain(target, IDS[0], sampler=Sampler(), max_new_tokens=12).tokens[4]
    document = run(CHAINS, on=tiny_target(layers=2, eos=eos))
    assert document["tokens"] < 60
    assert document["faults"] == document["ties"] == 0


def test_a_wrong_token_is_a_fault_with_its_place_and_gap(run, altered, target):
    altered(3, lambda tokens: [*tokens[:6], (tokens[6] + 1) % 24, *tokens[7:]])
    document = run()
    assert document["faults"] == (len(SCHEMES) - 1) * 3  # the batch of three; two prompts are left for a smaller one
    for cell in document["cells"]:
        faults = 0 if cell["batch"] == 1 or cell["scheme"] == "plain" else 3
        assert (cell["equal"], cell["ties"], cell["faults"]) == (5 - faults, 0, faults)
    found = next(c for c in document["cells"] if c["faults"])["differences"][0]
    plain = generate_plain(target, IDS[0], sampler=Sampler(), max_new_tokens=12).tokens
    with torch.inference_mode():
        logits_V = target.model(torch.tensor([[*IDS[0], *plain[:6]]])).logits[0, -1]
    wrong = (plain[6] + 1) % 24
    assert (found["prompt"], found["position"], found["expected"], found["found"]) == ("p0", 6, plain[6], wrong)
    assert found["logit_gap"] == pytest.approx(float(logits_V[plain[6]] - logits_V[wrong]))
    assert found["tie"] is False
    text = render(document)
    assert f"FAULT: ngram k=3, batch 3, prompt 'p0', token 6: id {wrong} instead of {plain[6]}, logits" in text
    assert "NOT EXACT: 24 differences beyond a tie (within 1e-08 logits)" in text
    assert "2/5 (3 FAULTs)" in text


@pytest.mark.parametrize(("change", "position"), [(lambda t: t[:7], 7), (lambda t: [*t, 1], 12)])
def test_an_answer_that_ends_elsewhere_is_a_fault_and_never_a_tie(run, altered, change, position):
    altered(3, change)
    document = run(CHAINS.model_copy(update={"tolerance": 1e9}))
    found = [d for cell in document["cells"] for d in cell["differences"]]
    assert document["faults"] == len(found) == 4 * 3
    assert {(d["position"], d["logit_gap"], d["tie"]) for d in found} == {(position, None, False)}
    assert "one of them has ended" in render(document)


def test_a_difference_within_the_tolerance_is_a_tie(run, altered):
    altered(1, lambda tokens: [*tokens[:6], (tokens[6] + 1) % 24, *tokens[7:]])
    config = CHAINS.model_copy(
        update={"batch": (1, 2), "max_new_tokens": 8}
    )  # the fifth prompt is alone in a batch of two as well
    strict = run(config)
    gaps = [d["logit_gap"] for c in strict["cells"] for d in c["differences"]]
    assert strict["faults"] == len(gaps) == 4 * 6
    loose = run(config.model_copy(update={"tolerance": max(gaps)}))
    assert (loose["faults"], loose["ties"], loose["tolerance"]) == (0, strict["faults"], max(gaps))
    text = render(loose)
    assert f"exact, up to {loose['ties']} ties of floating point" in text
    assert "(5 ties)" in text
    assert text.count("\ntie: ") == 20
    assert f"and {loose['ties'] - 20} ties more" in text
    middle = run(config.model_copy(update={"tolerance": sorted(gaps)[len(gaps) // 2]}))
    assert 0 < middle["faults"] < strict["faults"]
    assert middle["faults"] + middle["ties"] == strict["faults"]


def test_a_decoder_that_keeps_a_rejected_token_is_found(run, monkeypatch):
    """A fault of the kind that this is for: the verdict of a tree off by one node."""
    from spectrain.decoding import outcome

    real = outcome.verify

    def off_by_one(rule, shape, *arguments):
        path_BN, accepted_B, token_B = real(rule, shape, *arguments)
        if isinstance(shape, StaticTree):
            accepted_B = accepted_B.clamp(max=1)  # deeper nodes are dropped, the token after them is not
        return path_BN, accepted_B, token_B

    monkeypatch.setattr(outcome, "verify", off_by_one)
    faults = {c["scheme"]: c["faults"] for c in run(CONFIG.model_copy(update={"batch": (3,)}))["cells"]}
    assert faults["rehearsed tree of 5"] > 0
    assert not any(count for scheme, count in faults.items() if "tree of 5" not in scheme)


def test_drafts_that_cannot_be_made_are_refused_before_anything_is_decoded(target, monkeypatch):
    limited = NgramDrafter(NgramConfig())
    limited.deepest = 2
    monkeypatch.setattr(exactness, "generate_plain", None)
    with pytest.raises(SpectrainError, match="k=3 has depth 3, ngram drafts at most 2"):
        compare(target, {"ngram": limited}, PROMPTS, CONFIG, progress=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"verification": ("typical_lossy",)}, "'token' or 'block'"),
        ({"batch": (0,)}, "greater than or equal to 1"),
        ({"tolerance": -1}, "greater than or equal to 0"),
        ({"tolerance": float("nan")}, "finite"),
        ({"trees": (DYNAMIC, DYNAMIC)}, "the same tree twice"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        ExactnessConfig(**settings)


def test_every_batch_size_counts_once():
    assert ExactnessConfig(batch=(5, 1, 5)).batch == (1, 5)


def test_the_table_comes_from_the_document_alone(run):
    document = run(CHAINS, PROMPTS[:2])
    assert render(json.loads(json.dumps(document))) == render(copy.deepcopy(document))


def test_no_text_of_a_chat_is_printed(altered, chat_target):
    chat = parse_conversation({"id": "c", "prompt": "hello"}, "row")
    prompts = exactness_prompts(chat_target, chat)
    altered(1, lambda tokens: [(tokens[0] + 1) % 250, *tokens[1:]])
    document = compare(chat_target, {}, prompts, CHAINS.model_copy(update={"batch": (1,)}), progress=False)
    assert document["faults"] > 0
    assert "hello" not in render(document)
    assert "hello" not in json.dumps(document)


def exactness_prompts(target, *chats):
    from spectrain.evaluation.workbench import prompts_of

    return prompts_of(target, list(chats), None, 20, 0)
