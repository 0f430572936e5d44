"""The leaderboard: order, ties and what has no rank, on samples whose truth is known."""

import copy
import random
import re

import pytest

import spectrain.evaluation.acceptance_plots as acceptance_plots
import spectrain.evaluation.report as report
from spectrain.errors import SpectrainError
from spectrain.evaluation.document import check_document
from spectrain.evaluation.summary import summarise

STEP_S = 0.01
TRAINED = {"bytes": 3 << 20, "training": {"seconds": 1234.4, "answer_tokens": 56789}}
FACTS = {"a": TRAINED, "b": {"bytes": 0, "training": None}, "c": {"bytes": None, "training": None}}


def sample(contender, conversation, seconds, **changes):
    """Ten rounds of two tokens, or plain decoding of as many, in ``seconds`` besides the prefill."""
    drafter, *draft = contender.split()
    k = 2 if draft else 0
    return {
        "conversation": conversation, "kind": "desk", "contender": contender, "drafter": drafter, "k": k,
        "shape": {"type": "chain", "depth": k, "nodes": k} if k else None,
        "verification": ("typical_lossy" if "LOSSY" in contender else "token") if k else None,
        "lossy": "LOSSY" in contender, "temperature": 0.0,
        "sampler": {"temperature": 0.0, "top_k": None, "top_p": None}, "seed": 0, "prompt_tokens": 3, "new_tokens": 21,
        "finished": "budget", "rounds": [[2, 1, 2, None, 2]] * 10 if k else [[0, 0, 1, None, 0]] * 20,
        "prefill_s": STEP_S, "draft_s": 0.1 * seconds if k else 0.0, "verify_s": 0.8 * seconds, "overhead_s": 0.0,
        "total_s": seconds + STEP_S, "state_bytes": 100 if k else 0, "equal_to_plain": True, "first_difference": None,
        **changes,
    }  # fmt: skip


def run(speeds, *, conversations=12, noise=0.02, changes=None):
    """Samples of contenders that take plain decoding's seconds ÷ their speed, up to noise of their own; how long a
    conversation takes differs widely, for all alike."""
    rng = random.Random(0)
    samples = []
    for number in range(conversations):
        length = rng.uniform(0.5, 2)
        for name, speed in {"plain": 1.0, **speeds}.items():
            seconds = 20 * STEP_S * length / speed * rng.uniform(1 - noise, 1 + noise)
            samples.append(sample(name, f"c{number}", seconds, **(changes or {}).get(name, {})))
    return samples


@pytest.fixture
def board(simulator):
    def board(speeds, context=None, **options):
        context = simulator.context | {"drafters": FACTS} | (context or {})
        (block,) = summarise(run(speeds, **options), context=context)["samplers"]
        return block["leaderboard"]

    return board


def ranks(found):
    return [(row["contender"], report_rank(row)) for row in found["ranked"]]


def report_rank(row):
    return report.FILTERS["rank"](row)


def test_the_fastest_is_first_and_ties_share_a_rank(board):
    found = board({"a k=2": 1.3, "b k=2": 1.6, "c k=2": 1.6 * 1.001, "d k=2": 0.7})
    assert {name for name, rank in ranks(found)[:2]} == {"b k=2", "c k=2"}
    assert [rank for _, rank in ranks(found)] == ["1=", "1=", "3", "4", "5"]
    assert [name for name, _ in ranks(found)[2:]] == ["a k=2", "plain", "d k=2"]
    speeds = [row["tokens_per_second"]["value"] for row in found["ranked"]]
    assert speeds == sorted(speeds, reverse=True)
    assert found["apart"] == []


def test_each_is_set_against_the_one_above_on_the_same_conversations(board):
    """Conversations differ fourfold in time, so intervals of the rates overlap where that of their ratio is narrow."""
    first, second, third = board({"a k=2": 1.3, "b k=2": 1.2})["ranked"]
    assert first["above"] is None
    assert second["above"]["contender"] == "a k=2"
    ratio = second["above"]["ratio"]
    assert ratio["value"] == pytest.approx(second["tokens_per_second"]["value"] / first["tokens_per_second"]["value"])
    assert ratio["low"] < ratio["value"] < ratio["high"] < 1
    assert second["tokens_per_second"]["high"] > first["tokens_per_second"]["low"]
    assert [row["rank"] for row in (first, second, third)] == [1, 2, 3]
    assert not any(row["tied"] for row in (first, second, third))


def test_neighbours_are_tied_one_by_one(board):
    """A long tie shares one rank, and what follows counts everyone before it."""
    found = board({"a k=2": 1.5, "b k=2": 1.5, "c k=2": 1.5, "d k=2": 1.2, "e k=2": 1.2}, noise=0.1)
    assert [rank for _, rank in ranks(found)] == ["1=", "1=", "1=", "4=", "4=", "6"]


@pytest.mark.parametrize(("conversations", "expected"), [(1, ["1="] * 3), (5, ["1="] * 3), (6, ["1", "2", "3"])])
def test_a_handful_of_conversations_decides_nothing(board, conversations, expected):
    found = board({"a k=2": 2.0, "b k=2": 1.5}, conversations=conversations)
    assert [rank for _, rank in ranks(found)] == expected


def test_what_changes_the_output_stands_apart_without_a_rank(board):
    wrong = {"equal_to_plain": False, "first_difference": {"position": 2, "logit_gap": 3.0}}
    speeds = {"a k=2": 1.2, "a k=2 LOSSY typical": 1.9, "b k=2": 1.8}
    found = board(speeds, changes={"b k=2": wrong, "a k=2 LOSSY typical": wrong})
    assert ranks(found) == [("a k=2", "1"), ("plain", "2")]
    assert [(row["contender"], row["why"]) for row in found["apart"]] == [
        ("a k=2 LOSSY typical", "another law than the target's"),
        ("b k=2", "changes the greedy output"),
    ]
    assert all((row["rank"], row["tied"], row["above"]) == (None, False, None) for row in found["apart"])


def test_a_row_holds_what_was_measured_and_what_is_known(board, simulator):
    rows = [
        simulator.forced_row(drafter="a", prefixes=prefixes, kind=kind, depth=depth, alpha=alpha)
        for prefixes, kind, depth, alpha in (
            ("greedy (T=0)", "everything", 0, 0.625), ("greedy (T=0)", "everything", 1, 0.1),
            ("greedy (T=0)", "desk", 0, 0.2), ("T=1", "everything", 0, 0.3),
        )
    ]  # fmt: skip
    speeds = {"a k=2": 2.0, "b k=2": 1.5, "c k=2": 1.1}
    changes = {"a k=2": {"state_bytes": 2 << 20}, "c k=2": {"state_bytes": None}}
    found = board(speeds, {"teacher_forced": rows}, noise=0.0, changes=changes)
    a, b, c, plain = found["ranked"]
    seconds = sum(s["total_s"] for s in run(speeds, noise=0.0) if s["contender"] == "a k=2")
    assert a["tokens_per_second"]["value"] == pytest.approx(12 * 21 / seconds)
    assert a["accepted_draft_tokens_per_second"]["value"] == pytest.approx(12 * 10 / seconds)
    assert a["speedup"]["decode"]["value"] == pytest.approx(2)
    assert (a["tokens_per_round"]["value"], a["alpha"]) == (2, 0.625)
    assert a["draft_cost_per_round"] == pytest.approx(0.1)  # a tenth of the 20 / 2 steps, over ten rounds
    assert a["verify_cost_per_round"] == pytest.approx(0.8)
    assert (a["drafter_bytes"], a["state_bytes"]) == (3 << 20, 2 << 20)
    assert (a["training_seconds"], a["training_answer_tokens"]) == (1234.4, 56789)
    assert (b["alpha"], b["drafter_bytes"], b["training_seconds"]) == (None, 0, None)
    assert (c["drafter_bytes"], c["state_bytes"]) == (None, None)
    assert (plain["speedup"], plain["draft_cost_per_round"], plain["drafter_bytes"]) == (None, None, None)


def test_there_is_none_unless_drafters_are_compared(board):
    assert board({"a k=2": 2.0}, {"drafters": {}}) is None


@pytest.fixture(scope="module")
def document(simulator):
    context = simulator.context | {
        "drafters": FACTS,
        "left_out": [{"drafter": "a", "draft": "k=9", "reason": "k=9 has depth 9, a drafts at most 2 tokens ahead"}],
    }
    return summarise(run({"a k=2": 1.8, "b k=2": 1.8, "a k=2 LOSSY typical": 1.9}), context=context)


def test_both_reports_show_it(document):
    text, page = report.render_markdown(document), report.render_page(document)
    lines = [line for line in text.splitlines() if re.match(r"\| (\d=?|–) \|", line)]
    assert [line.split(" | ")[0] for line in lines] == ["| 1=", "| 1=", "| 3", "| –"]
    assert "a k=2 LOSSY typical (another law than the target's)" in lines[-1]
    table = page[page.index("<h3>Leaderboard</h3>") : page.index("<h3>All contenders</h3>")]
    rows = re.findall(r'<th scope="row">(?:<span class="lossy">)?([^<]+).*?</th>\n<td>(\d=?|–)</td>', table)
    assert "<td>3.0</td><td>0.0</td>\n<td>1,234</td><td>56,789</td></tr>" in table
    assert "<td>–</td><td>–</td><td>–</td><td>–</td><td>0</td>\n<td>–</td><td>–</td></tr>" in table
    assert rows == [(line.split(" | ")[1].split(" (")[0], line.split(" | ")[0].strip("| ")) for line in lines]
    for shown in (text, page):
        assert "Left out: a k=9: k=9 has depth 9, a drafts at most 2 tokens ahead." in shown
        assert shown.count("k=9 has depth 9") == 1


def test_reports_without_one_say_nothing_of_it(document):
    single = copy.deepcopy(document)
    single["samplers"][0]["leaderboard"] = None
    del single["context"]["left_out"]
    assert "Leaderboard" not in report.render_page(single)
    assert "| rank |" not in report.render_markdown(single)
    assert "Left out" not in report.render_markdown(single)


def test_a_missing_part_is_named(document):
    broken = copy.deepcopy(document)
    del broken["samplers"][0]["leaderboard"]["ranked"][1]["above"]["ratio"]["low"]
    with pytest.raises(SpectrainError, match=r"leaderboard\.ranked\[1\]\.above\.ratio\.low"):
        check_document(broken)


def test_the_plot_of_several_drafters_has_a_line_for_each(simulator, monkeypatch):
    rows = [
        simulator.forced_row(drafter=d, prefixes=p, kind=kind, depth=depth, alpha=0.5)
        for d in ("a", "b") for p in ("greedy (T=0)", "T=1") for kind in ("everything", "desk") for depth in (0, 1)
    ]  # fmt: skip
    drawn = []
    monkeypatch.setattr(acceptance_plots, "_depths_plot", lambda rows, temperature: drawn.append(rows))
    acceptance_plots.alpha_plots(rows)
    assert [(row["kind"], row["depth"]) for row in drawn[0]] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]


# --- by kind ------------------------------------------------------------------------------------------------------

SPEEDS = {"narrow/sql": {"a k=2": 1.8, "b k=2": 1.2}, "narrow/json": {"a k=2": 1.8, "b k=2": 1.2},
          "open/chat": {"a k=2": 0.6, "b k=2": 1.1}}  # fmt: skip


@pytest.fixture(scope="module")
def by_kind(simulator):
    samples = []
    for kind, speeds in SPEEDS.items():
        for found in run(speeds, conversations=7):
            samples.append(found | {"kind": kind, "conversation": f"{kind} {found['conversation']}"})
    rows = [
        simulator.forced_row(drafter="a", prefixes="greedy (T=0)", kind=kind, depth=0, alpha=alpha)
        for kind, alpha in (("everything", 0.5), ("narrow", 0.75), ("open", 0.25))
    ]
    return summarise(samples, context=simulator.context | {"drafters": FACTS, "teacher_forced": rows})


def test_every_outermost_kind_has_a_board_of_its_own(by_kind):
    found = by_kind["samplers"][0]["leaderboard"]
    assert list(found["by_kind"]) == ["narrow", "open"]
    narrow, broad = found["by_kind"].values()
    assert ranks(narrow) == [("a k=2", "1"), ("b k=2", "2"), ("plain", "3")]
    assert ranks(broad) == [("b k=2", "1"), ("plain", "2"), ("a k=2", "3")]
    alphas = [{row["contender"]: row["alpha"] for row in board["ranked"]}["a k=2"] for board in (found, narrow, broad)]
    assert alphas == [0.5, 0.75, 0.25]
    assert broad["ranked"][0]["speedup"]["decode"]["value"] == pytest.approx(1.1, rel=0.03)
    above = narrow["ranked"][1]["above"]
    assert above["contender"] == "a k=2"
    assert above["ratio"]["high"] < 1
    first = narrow["ranked"][0]
    assert first["tokens_per_second"]["low"] < first["tokens_per_second"]["value"] < first["tokens_per_second"]["high"]


def test_both_reports_have_a_heading_for_each(by_kind):
    text, page = report.render_markdown(by_kind), report.render_page(by_kind)
    assert text.count("| rank |") == 1  # the others are on the page
    for kind in ("narrow", "open"):
        assert f"<h3>Leaderboard, {kind}</h3>" in page
    assert page.count("Of contenders that share a rank") == 1


def test_a_single_kind_and_an_older_document_have_one_board(document, by_kind):
    assert document["samplers"][0]["leaderboard"]["by_kind"] == {}
    older = copy.deepcopy(by_kind)
    del older["samplers"][0]["leaderboard"]["by_kind"]
    assert report.render_markdown(older).count("| rank |") == 1
    assert "Leaderboard, " not in report.render_page(older).replace("Leaderboard, greedy", "")


def test_a_missing_part_of_a_board_by_kind_is_named(by_kind):
    broken = copy.deepcopy(by_kind)
    del broken["samplers"][0]["leaderboard"]["by_kind"]["open"]["ranked"][0]["tokens_per_round"]
    with pytest.raises(SpectrainError, match=r"leaderboard\.by_kind\.open\.ranked\[0\]\.tokens_per_round"):
        check_document(broken)
