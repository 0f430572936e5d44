"""Turning on: the fastest of several is held to more than one alone, and what would change a verdict is told."""

import random

import pytest

from spectrain.evaluation.decisions import Rival, adjusted_confidence, decide, fewest, resamples_at
from spectrain.evaluation.summary import summarise


def rival(name, value, half, *, wider=1.5):
    """A speedup whose interval at an adjusted confidence is so many times as wide."""

    def interval(width):
        return {"value": value, "low": value - width, "high": value + width}

    return Rival(name, interval(half), lambda confidence: interval(half * wider))


def test_one_contender_needs_nothing_more():
    decided = decide([rival("a", 1.2, 0.19)], 48)
    assert (decided.decision, decided.reason) == ("on", "the interval lies above 1")
    assert decided.adjusted == decided.rival.speedup


def test_the_fastest_of_several_needs_a_wider_interval_above_1():
    near = [rival("a", 1.2, 0.19), rival("b", 0.9, 0.05), rival("c", 0.8, 0.05)]
    decided = decide(near, 48)
    assert decided.decision == "off"
    assert decided.reason.startswith("the interval lies above 1, but not at 98.3%, which choosing among 3 asks for")
    assert decided.needed > 48
    clear = decide([rival("a", 1.4, 0.19), *near[1:]], 48)
    assert clear.reason == "the interval lies above 1, also at 98.3%, for it was chosen among 3"
    assert (clear.on, clear.rival.name, clear.adjusted["low"]) == (True, "a", pytest.approx(1.4 - 0.285))


def test_a_faster_one_that_is_uncertain_does_not_hide_one_that_is_certain():
    decided = decide([rival("wild", 1.6, 0.9), rival("calm", 1.5, 0.1)], 48)
    assert (decided.on, decided.rival.name) == (True, "calm")
    assert decided.reason.endswith("wild was faster here, but not for certain")


def test_a_drafter_by_itself_is_given_the_same_length_as_among_all():
    """Held to less, a faster length that is uncertain among all would be certain among its drafter's own."""

    def at(value, half):
        return Rival(f"{value}", {"value": value, "low": value - half, "high": value + half},
                     lambda c: {"value": value, "low": value - half * z[c], "high": value + half * z[c]})  # fmt: skip

    z = {adjusted_confidence(2): 1.2, adjusted_confidence(4): 1.3}
    own, others = [at(1.5, 0.4), at(1.4, 0.1)], [at(0.9, 0.1), at(0.8, 0.1)]
    among_all = decide([*own, *others], 48)
    assert (among_all.on, among_all.rival.name) == (True, "1.4")
    assert decide(own, 48, comparisons=4) == among_all
    assert decide(own, 48).rival.name == "1.5"
    assert decide(own, 7, comparisons=4).reason == "too few conversations: 7, at least 8 are needed to choose among 4"


@pytest.mark.parametrize(("comparisons", "least"), [(1, 6), (2, 7), (4, 8), (16, 10)])
def test_more_comparisons_need_more_conversations(comparisons, least):
    """n that are all faster happen by chance with 2^-n: no more than the tail of the adjusted interval."""
    tail = (1 - adjusted_confidence(comparisons)) / 2
    assert fewest(comparisons) == least
    assert 2.0**-least <= tail < 2.0 ** (1 - least)
    rivals = [rival(str(i), 2 - i / 100, 0.1) for i in range(comparisons)]
    assert decide(rivals, least).on
    assert decide(rivals, least - 1).reason.startswith(f"too few conversations: {least - 1}, at least {least}")


def test_intervals_far_out_have_resamples_beyond_them():
    assert resamples_at(0.95) == 2000
    assert resamples_at(adjusted_confidence(10)) == 8000


def test_chance_alone_turns_nothing_on_more_often_with_more_contenders():
    """With many that cost as much as they yield, the fastest is on by itself more often than it is among the others."""
    rng, alone, among = random.Random(0), 0, 0
    for _ in range(400):
        rivals = []
        for name in "abcdefgh":
            value = rng.gauss(1, 0.05)  # no gain at all; intervals as a normal law has them
            at = {0.95: 1.960, adjusted_confidence(8): 2.734}

            def interval(z, value=value):
                return {"value": value, "low": value - 0.05 * z, "high": value + 0.05 * z}

            rivals.append(Rival(name, interval(1.96), lambda c, at=at, interval=interval: interval(at[c])))
        alone += max(r.speedup["low"] for r in rivals) > 1
        among += decide(rivals, 48).on
    assert alone / 400 > 0.12
    assert among / 400 < 0.05


# --- verdicts of known costs --------------------------------------------------------------------------------------


def verdict(samples, context, kind=None):
    found = summarise(samples, context=context)["samplers"][0]["verdict"]
    return found["overall"] if kind is None else found["by_kind"][kind]


def slowed(samples, part, factor):
    """The same with a part of every drafting sample so many times as slow."""
    found = []
    for sample in samples:
        extra = sample[part] * (factor - 1) if sample["k"] else 0.0
        found.append({**sample, part: sample[part] + extra, "total_s": sample["total_s"] + extra})
    return found


def test_a_slow_drafter_is_off_and_says_what_it_would_take(simulator):
    samples = slowed(simulator.samples({"desk": {"eagle3": 0.6}}, conversations=12), "draft_s", 10)
    found = verdict(samples, simulator.context)
    assert (found["decision"], found["k"], found["reason"]) == ("off", 0, "slower than plain decoding")
    # k=3: 3 · 1.0 + 1.45 + 0.05 = 4.5 (of steps that take 1.02) for at most 4 tokens: no α is enough.
    assert "α" not in found["would_change"]
    assert found["would_change"].startswith("a draft cost below 0.2")
    assert "(now 0.9" in found["would_change"]
    assert found["up_to_batch"] is None


def test_a_drafter_of_another_domain_is_off_there_alone(simulator):
    alphas = {"desk": {"eagle3": 0.9}, "poems": {"eagle3": 0.05}}
    samples = simulator.samples(alphas, conversations=12)
    assert verdict(samples, simulator.context, "desk")["decision"] == "on"
    off = verdict(samples, simulator.context, "poems")
    assert off["decision"] == "off"
    # 3 · 0.1 + 1.45 + 0.05 steps a round: 0.8 tokens more than one, which an α of about 0.49 accepts.
    assert off["would_change"].startswith("α above 0.4")
    assert "at k=3 (now as if 0.0" in off["would_change"]


def test_a_perfect_drafter_is_on_with_the_longest_draft(simulator):
    samples = simulator.samples({"desk": {"eagle3": 0.98}}, conversations=12)
    found = verdict(samples, simulator.context)
    assert (found["decision"], found["contender"], found["k"]) == ("on", "eagle3 k=5", 5)
    assert found["adjusted"]["low"] < found["best"]["decode_speedup"]["value"] < found["adjusted"]["high"]
    assert found["comparisons"] == 2
    assert found["would_change"].startswith("α below 0.")
    assert found["would_change"].endswith("larger batches, which were not measured")


def test_a_perfect_drafter_that_costs_more_the_longer_is_on_with_the_k_that_pays(simulator):
    """Verification of five tokens at three times the price: the shorter draft wins."""
    samples = simulator.samples({"desk": {"eagle3": 0.98}}, conversations=12)
    dear = [slowed([s], "verify_s", 3)[0] if s["k"] == 5 else s for s in samples]
    assert verdict(dear, simulator.context)["k"] == 3


def test_more_conversations_may_be_all_that_is_missing(simulator):
    samples = simulator.samples({"desk": {"eagle3": 0.9}}, conversations=3)
    found = verdict(samples, simulator.context)
    assert found["conversations_needed"] == 7
    assert found["would_change"] == "about 4 more conversations"


def test_a_tree_breaks_even_by_tokens_per_round(simulator):
    samples = simulator.samples({"desk": {"eagle3": 0.9}}, conversations=12, more=(simulator.tree,))
    chains_gone = [s for s in samples if s["contender"] in ("plain", simulator.tree)]
    text = verdict(chains_gone, simulator.context)["would_change"]
    assert text.startswith("tokens per round below 2.")
    assert "steps a round (now 0." in text
