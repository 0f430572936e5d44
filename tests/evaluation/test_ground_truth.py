"""Every figure of the report beside its true value, thousands of times: intervals hold it as often as they say.

``markov`` knows the truth by dynamic programming and decodes with the real verification kernel; the sums of each
conversation go through the code that makes the report's intervals.
"""

import markov
import numpy as np
import pytest

from spectrain.evaluation.answers import gather
from spectrain.evaluation.blocks import number_block
from spectrain.evaluation.figures import FEWEST_EVENTS, STATISTICS, Figure, measured
from spectrain.intervals import ratio_intervals

REPETITIONS, CONVERSATIONS, SEEDS = 2000, 48, 2
ENOUGH_EVENTS = 12  # expected rounds on the rarer side of a share; with fewer, intervals are rather too wide
AT_ONCE = 100  # repetitions
SHARES = ("share", "survival", "conditional")


@pytest.fixture(scope="module")
def world():
    return markov.build(seed=0)


@pytest.fixture(scope="module")
def decoded(world):
    return markov.converse(world, REPETITIONS, CONVERSATIONS, SEEDS, seed=1, kept=CONVERSATIONS * SEEDS)


def bounds(world, sums):
    """Intervals of every figure, by name: low, value and high [repetitions], NaN where the report gives none."""
    found = {}
    for size in (2, 4):
        names = {name: ratio for name, ratio in markov.figures(world.k).items() if len(ratio) == size}
        tables = [np.stack([sums[ratio[part]] for ratio in names.values()], 1) for part in range(size)]
        parts = [
            ratio_intervals(*(table[start : start + AT_ONCE] for table in tables), **STATISTICS)
            for start in range(0, len(tables[0]), AT_ONCE)
        ]
        for i, name in enumerate(names):
            found[name] = [np.concatenate([getattr(p, side)[:, i] for p in parts]) for side in ("low", "value", "high")]
    return found


def events(sums, name, k):
    """Rounds on the rarer side of a share, by repetition."""
    top, bottom = (sums[part].sum(-1) for part in markov.figures(k)[name])
    return np.minimum(top, bottom - top)


def coverage(world, sums, only=""):
    """Name → how often its interval holds the truth, among the repetitions where the report gives one."""
    truths, found = markov.truths(world), {}
    for name, (low, value, high) in bounds(world, sums).items():
        if not name.startswith(only):
            continue
        share = name.startswith(SHARES)
        given = events(sums, name, world.k) >= FEWEST_EVENTS if share else np.ones(len(low), dtype=bool)
        held = (low <= truths[name]) & (truths[name] <= high)
        found[name] = float(held[given].mean()), float(given.mean())
        print(f"{name:28} truth {truths[name]:.4f}  mean {np.nanmean(value):.4f}  covered {100 * found[name][0]:5.1f} %"
              + (f"  ({events(sums, name, world.k).mean():.0f} events)" if share else ""))  # fmt: skip
    return found


@pytest.mark.slow
def test_intervals_hold_the_truth_as_often_as_they_say(world, decoded):
    found = coverage(world, decoded.by_conversation(SEEDS, CONVERSATIONS))
    assert len(found) == 20
    wrong = {name: held for name, (held, given) in found.items() if not 0.93 <= held <= 0.97 or given < 1}
    assert not wrong


@pytest.mark.slow
def test_of_rare_rounds_there_is_an_interval_from_a_few_on():
    """Drafters that are seldom right, short answers, one seed: the deep positions have a handful of rounds."""
    world = markov.build(seed=3, mix=(0.5, 0.8, 0.95), budget=8)
    sums = markov.converse(world, REPETITIONS, CONVERSATIONS, 1, seed=2).by_conversation(1, CONVERSATIONS)
    found = {name: held for name, held in coverage(world, sums).items() if name.startswith(SHARES)}
    expected = {name: events(sums, name, world.k).mean() for name in found}
    assert min(expected.values()) < 20
    most = {name: 0.97 if expected[name] >= ENOUGH_EVENTS else 0.99 for name in found}
    wrong = {name: held for name, (held, _) in found.items() if not 0.93 <= held <= most[name]}
    assert not wrong


def test_simulation_and_dynamic_programming_agree(world, decoded):
    """Two ways to the same numbers, so that a mistake in one is not taken for the truth."""
    totals = {name: sums.sum() for name, sums in decoded.sums_B.items()}
    truths = markov.truths(world)
    for name, names in markov.figures(world.k).items():
        value = totals[names[0]] / totals[names[1]]
        value = value if len(names) == 2 else value / (totals[names[2]] / totals[names[3]])
        assert value == pytest.approx(truths[name], rel=0.005), name


def samples(decoded):
    """The first repetition as raw samples."""
    found = []
    for i, rounds in enumerate(decoded.rounds):
        sums = {name: float(values[i]) for name, values in decoded.sums_B.items()}
        about = {
            "conversation": f"{i // SEEDS:03d}", "kind": "any", "sampler": {"temperature": 1.0}, "seed": i,
            "seed_index": i % SEEDS, "turn": 1, "prompt_tokens": 9, "equal_to_plain": None, "first_difference": None,
            "lossy": False, "prefill_s": markov.PREFILL, "overhead_s": 0.0,
        }  # fmt: skip
        steps = int(sums["plain rounds"])
        found.append(about | {
            "contender": "plain", "drafter": "plain", "k": 0, "shape": None, "verification": None, "draft_s": 0.0,
            "rounds": [[0, 0, 1, None, 0]] * steps, "new_tokens": 1 + steps, "verify_s": sums["plain seconds"],
            "total_s": sums["plain total"],
        })  # fmt: skip
        found.append(about | {
            "contender": "chain k=3", "drafter": "chain", "k": 3, "verification": "token",
            "shape": {"type": "chain", "depth": 3, "nodes": 3}, "rounds": rounds,
            "new_tokens": int(sums["tokens"]), "draft_s": markov.DRAFT * sums["proposed"],
            "verify_s": markov.VERIFY * sums["rounds"], "total_s": sums["total"],
            "visited_alpha": [[sums[f"alpha {p}"], sums[f"visited {p}"]] for p in (1, 2, 3)],
        })  # fmt: skip
    return found


def test_the_report_gives_these_very_intervals(world, decoded):
    sums = {name: table[:1] for name, table in decoded.by_conversation(SEEDS, CONVERSATIONS).items()}
    expected = {name: [float(side[0]) for side in found] for name, found in bounds(world, sums).items()}
    (_, (plain, chain)), = gather(samples(decoded))  # fmt: skip
    block = number_block("chain", None, chain.clusters(), plain.clusters(), {})
    assert block["conversations"] == CONVERSATIONS
    figures = {
        "tokens per round": block["tokens_per_round"],
        "tokens per full round": block["tokens_per_full_round"],
        "accepted prefix": block["accepted_prefix"]["interval"],
        "decode speedup": block["speedup"]["decode"],
        "total speedup": block["speedup"]["total"],
    }
    for i, row in enumerate(block["accepted_prefix"]["shares"]):
        figures[f"share of prefixes of {i}"] = row
    for row in block["marginal_survival"]:
        figures[f"survival {row['position']}"] = row
    for row in block["conditional_acceptance"]:
        figures[f"conditional {row['position']}"] = row
    for row in block["visited_alpha"]:
        figures[f"alpha visited {row['position']}"] = row
    apart = {"alpha, target-sampled", "coverage"}  # of teacher-forced rows, which have the same interval code
    assert set(figures) == set(expected) - apart
    for name, row in figures.items():
        value = next(row[key] for key in ("value", "rate", "share") if key in row)
        assert [row["low"], value, row["high"]] == pytest.approx(expected[name], rel=1e-9), name


def test_too_few_rounds_on_a_side_have_no_interval():
    counts = np.full(12, 4.0)
    few, enough = (np.array([1.0] * number + [0.0] * (12 - number)) for number in (FEWEST_EVENTS - 1, FEWEST_EVENTS))
    found = measured({
        "few": Figure(few, counts, share=True), "rest": Figure(counts - few, counts, share=True),
        "enough": Figure(enough, counts, share=True), "never": Figure(counts, 0 * counts, share=True),
        "rate": Figure(few, counts),
    })  # fmt: skip
    assert found["few"] == {"value": 4 / 48, "low": None, "high": None}
    assert found["rest"] == {"value": 44 / 48, "low": None, "high": None}
    assert found["enough"]["low"] < 5 / 48 < found["enough"]["high"]
    assert found["rate"]["low"] < 4 / 48 < found["rate"]["high"]
    assert found["never"] is None
