"""Numbers by turn, prompt length and place in the answer; sample-size advice; what must add up."""

import copy
import json

import pytest

from spectrain.errors import SpectrainError
from spectrain.evaluation.blocks import advice
from spectrain.evaluation.summary import summarise
from spectrain.evaluation.sums import check_parts

ALPHAS = {"desk/a": {"eagle3": 0.8}, "desk/b": {"eagle3": 0.6}, "chat": {"eagle3": 0.3}}


@pytest.fixture(scope="module")
def document(simulator):
    samples = simulator.samples(ALPHAS, conversations=8)
    for number, found in enumerate(sorted({s["conversation"] for s in samples})):
        for sample in samples:
            if sample["conversation"] == found:
                sample |= {"turn": 1 + number % 6, "prompt_tokens": 40 * (1 + number)}
    return summarise(samples, context=simulator.context)


@pytest.fixture
def contender(document):
    found = next(c for c in document["samplers"][0]["contenders"] if c["contender"] == "eagle3 k=5")
    return copy.deepcopy(found)


def test_every_family_of_bands_adds_up(contender):
    assert [band["label"] for band in contender["by_band"]["turn"]] == ["1", "2", "3", "4 and later"]
    labels = [band["label"] for band in contender["by_band"]["prompt tokens"]]
    assert labels == ["1 to 64", "65 to 256", "257 to 1,024"]
    assert [band["label"] for band in contender["by_band"]["answer position"]] == ["2 to 32", "33 to 128"]
    for bands in contender["by_band"].values():
        assert sum(band["rounds"] for band in bands) == contender["pooled"]["rounds"]
    for family in ("turn", "prompt tokens"):
        assert sum(band["conversations"] for band in contender["by_band"][family]) == 24
        assert all(band["decode_speedup"]["low"] is not None for band in contender["by_band"][family][1:])
    # prompts of 40 tokens more each: one conversation has at most 64, which has no interval
    assert contender["by_band"]["prompt tokens"][0]["tokens_per_round"]["low"] is None
    assert all(band["decode_speedup"] is None for band in contender["by_band"]["answer position"])


def test_plain_decoding_has_bands_without_a_speedup(document):
    plain = document["samplers"][0]["contenders"][0]
    for bands in plain["by_band"].values():
        assert [(band["tokens_per_round"]["value"], band["decode_speedup"]) for band in bands] == [(1, None)] * len(
            bands
        )


def test_samples_without_a_turn_have_no_such_band(simulator):
    samples = simulator.samples({"desk": {"eagle3": 0.8}}, conversations=3)
    for sample in samples:
        del sample["turn"]
    bands = summarise(samples, context=simulator.context)["samplers"][0]["contenders"][1]["by_band"]
    assert bands["turn"] == []
    assert bands["prompt tokens"]


def test_a_round_belongs_to_the_band_in_which_it_starts(simulator):
    """The first token comes from prefill: rounds of 4 tokens start at 2, 6, …, 30, 34."""
    samples = simulator.samples({"desk": {"eagle3": 1.0}}, conversations=2)
    samples = [s for s in samples if s["contender"] in ("plain", "eagle3 k=3")]
    for sample in samples:
        rounds = [[0, 0, 1, None, 0]] * 36 if sample["k"] == 0 else [[3, 3, 4, None, 3]] * 9
        sample |= {"rounds": rounds, "new_tokens": 37}
    plain, own = summarise(samples, context=simulator.context)["samplers"][0]["contenders"]
    assert [band["rounds"] for band in own["by_band"]["answer position"]] == [2 * 8, 2 * 1]
    assert [band["rounds"] for band in plain["by_band"]["answer position"]] == [2 * 31, 2 * 5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["by_kind"]["chat"].update(tokens=c["by_kind"]["chat"]["tokens"] + 1), "pooled.tokens is"),
        (lambda c: c["by_kind"]["desk"].update(conversations=1), "pooled.conversations is"),
        (lambda c: c["by_kind"]["chat"]["seconds"].update(draft=0.0), "pooled.seconds.draft is"),
        (lambda c: c["by_band"]["turn"].pop(), "pooled.rounds is .* those of eagle3 k=5.by_band.turn come to"),
        (
            lambda c: c["by_band"]["answer position"][0]["tokens_per_round"].update(value=1.0),
            "pooled.tokens is .* those of eagle3 k=5.by_band.answer position come to",
        ),
    ],
)
def test_parts_that_do_not_add_up_fail_loudly(contender, change, message):
    check_parts(contender, "eagle3 k=5", kinds_of_one=True)
    change(contender)
    with pytest.raises(SpectrainError, match=f"eagle3 k=5.{message}"):
        check_parts(contender, "eagle3 k=5", kinds_of_one=True)


def test_plain_decoding_commits_a_token_a_step(document):
    plain = copy.deepcopy(document["samplers"][0]["contenders"][0])
    check_parts(plain, "plain")
    for numbers in (plain["pooled"], *(n for kind, n in plain["by_kind"].items() if "/" not in kind)):
        numbers["tokens"] *= 2
    plain["by_band"] = {}
    with pytest.raises(SpectrainError, match=r"plain\.pooled\.tokens is .* steps of plain decoding are"):
        check_parts(plain, "plain")


def test_advice_is_how_many_conversations_would_narrow_the_interval():
    found = advice({"value": 2.5, "low": 2.4, "high": 2.6}, 48)
    assert found["half_width"] == pytest.approx(0.1)
    assert found["conversations_for"] == {"0.1": 48, "0.05": 192, "0.02": 1200}
    assert set(advice({"value": 2.5, "low": None, "high": None}, 1)["conversations_for"].values()) == {None}


def test_statistics_name_the_method_and_how_many_were_tried(document):
    found = document["statistics"]
    assert found["comparisons"] == 2  # eagle3 at two lengths
    assert found["adjusted_confidence"] == pytest.approx(1 - 0.05 / 2)
    assert "BCa bootstrap of whole conversations" in found["method"]
    assert (found["confidence"], found["resamples"], found["seed"]) == (0.95, 2000, 0)


def test_seeds_of_a_conversation_stay_together(simulator):
    """Answers to the same chats twice over are no more conversations, and their interval is no narrower."""
    samples = simulator.samples({"desk": {"eagle3": 0.7}}, conversations=10, spread=0.1, temperature=1.0)
    again = [s | {"seed": 1, "seed_index": 1} for s in copy.deepcopy(samples)]
    once, twice = (summarise(s, context=simulator.context)["samplers"][0] for s in (samples, samples + again))
    assert once["conversations"] == twice["conversations"] == 10
    for one, two in zip(once["contenders"], twice["contenders"], strict=True):
        assert two["pooled"]["rounds"] == 2 * one["pooled"]["rounds"]
        assert two["pooled"]["tokens_per_round"] == pytest.approx(one["pooled"]["tokens_per_round"])
        assert two["pooled"]["advice"]["tokens_per_round"] == one["pooled"]["advice"]["tokens_per_round"]


def test_clips_are_told_apart_by_reason(document):
    for contender in document["samplers"][0]["contenders"][1:]:
        pooled = contender["pooled"]
        assert set(pooled["clipped"]) == {"eos", "budget", "stop"}
        assert sum(pooled["clipped"].values()) == pooled["clipped_rounds"]
        assert pooled["clipped"]["eos"] > 0 < pooled["clipped"]["budget"]


def test_samples_are_read_once_and_the_lines_may_come_from_anywhere(simulator):
    samples = simulator.samples({"desk": {"eagle3": 0.7}}, conversations=6)
    lines = (json.loads(line) for line in [json.dumps(sample) for sample in samples])
    assert summarise(lines, context=simulator.context) == summarise(samples, context=simulator.context)


def test_what_decoding_recorded_is_summed_by_conversation(simulator):
    samples = simulator.samples({"desk": {"eagle3": 0.7}}, conversations=6, temperature=1.0)
    for number, sample in enumerate(samples):
        sample |= {"energy_j": 2.0 * sample["new_tokens"], "cache_bytes": number, "state_bytes": None}
        if sample["shape"]:
            sample["visited_alpha"] = [[3.0, 4]] * sample["shape"]["depth"]
    context = simulator.context | {"memory": {"target": 1000, "drafters": {"eagle3": 10}}}
    contenders = summarise(samples, context=context)["samplers"][0]["contenders"]
    pooled = contenders[-1]["pooled"]
    assert pooled["energy_j_per_token"] == {key: pytest.approx(2.0) for key in ("value", "low", "high")}
    assert [row["position"] for row in pooled["visited_alpha"]] == [1, 2, 3, 4, 5]
    assert pooled["visited_alpha"][0] == {"position": 1, "value": 0.75, "low": 0.75, "high": 0.75, "positions": 24}
    assert pooled["memory"] == {
        "target_bytes": 1000, "drafter_bytes": 10, "cache_bytes": len(samples) - 1, "state_bytes": None
    }  # fmt: skip
    assert contenders[0]["pooled"]["visited_alpha"] is None
    assert contenders[0]["pooled"]["memory"]["drafter_bytes"] == 0
    samples[-1]["energy_j"] = None
    assert summarise(samples, context=context)["samplers"][0]["contenders"][-1]["pooled"]["energy_j_per_token"] is None
