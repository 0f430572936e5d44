"""The acceptance document: hand-worked numbers, known laws inside their intervals, contradictions refused."""

import copy
import html
import json
import random

import pytest
from complete import complete

from spectrain.errors import SpectrainError
from spectrain.evaluation.csv_tables import acceptance_csv
from spectrain.evaluation.decisions import conversations_needed
from spectrain.evaluation.document import check_document
from spectrain.evaluation.profile import speculation_profile
from spectrain.evaluation.report import render_markdown, render_page
from spectrain.evaluation.samples import is_of, kind_and_parents, parse_sample
from spectrain.evaluation.summary import summarise
from spectrain.exact.block_law import block_round
from spectrain.exact.cost import expected_tokens
from spectrain.exact.proof import random_laws

PAYING = {"desk": {"eagle3": 0.9, "ngram": 0.5}}
ALPHAS = {"desk": {"eagle3": 0.8, "ngram": 0.5}, "chat": {"eagle3": 0.3, "ngram": 0.2}}


def sample(contender, k, rounds, *, conversation="a", kind="desk", seconds=(0.1, 0.0, 0.9, 0.0), **changes):
    """Rounds may leave the nodes out: a chain has as many as it proposed."""
    prefill, draft, verify, overhead = seconds
    shape = {"type": "chain", "depth": k, "nodes": k} if k else None
    return {
        "conversation": conversation,
        "kind": kind,
        "contender": contender,
        "drafter": contender.split()[0],
        "k": k,
        "shape": shape,
        "verification": "token" if k else None,
        "lossy": False,
        "temperature": 0.0,
        "sampler": {"temperature": 0.0, "top_k": None, "top_p": None},
        "seed": 0,
        "prompt_tokens": 3,
        "new_tokens": 1 + sum(r[2] for r in rounds),
        "finished": "budget",
        "rounds": [r if len(r) == 5 else [*r, r[0]] for r in rounds],
        "prefill_s": prefill,
        "draft_s": draft,
        "verify_s": verify,
        "overhead_s": overhead,
        "total_s": sum(seconds),
        "equal_to_plain": True,
        "first_difference": None,
        **changes,
    }


def plain(tokens, **changes):
    return sample("plain", 0, [[0, 0, 1, None]] * tokens, **changes)


def by_name(document, sampler=0):
    return {c["contender"]: c for c in document["samplers"][sampler]["contenders"]}


def test_hand_worked_rounds(simulator):
    """Accept flags 1011, 1111, 0100: accepted prefixes 1, 4, 0."""
    rounds = [[4, 1, 2, None], [4, 4, 5, None], [4, 0, 1, None]]
    seconds = (0.1, 0.3, 0.6, 0.1)
    document = summarise(
        [plain(8, seconds=(0.1, 0.0, 1.6, 0.0)), sample("medusa k=4", 4, rounds, seconds=seconds)],
        context=simulator.context,
    )
    numbers = by_name(document)["medusa k=4"]["pooled"]
    assert numbers["accepted_prefix"]["mean"] == pytest.approx(5 / 3)
    assert numbers["accepted_prefix"]["histogram"] == [1, 1, 0, 0, 1]
    assert [row["share"] for row in numbers["accepted_prefix"]["shares"]] == pytest.approx([1 / 3, 1 / 3, 0, 0, 1 / 3])
    assert [row["rate"] for row in numbers["marginal_survival"]] == pytest.approx([2 / 3, 1 / 3, 1 / 3, 1 / 3])
    assert [row["accepted"] for row in numbers["marginal_survival"]] == [2, 1, 1, 1]
    assert [row["rate"] for row in numbers["conditional_acceptance"]] == pytest.approx([2 / 3, 1 / 2, 1, 1])
    assert [row["proposed"] for row in numbers["conditional_acceptance"]] == [3, 2, 1, 1]
    assert numbers["tokens_per_full_round"] == {"value": pytest.approx(8 / 3), "low": None, "high": None}
    assert numbers["tokens_per_round"] == {"value": pytest.approx(8 / 3), "low": None, "high": None}
    assert numbers["speedup"]["decode"]["value"] == pytest.approx((8 / 1.0) / (8 / 1.6))
    assert numbers["speedup"]["total"]["value"] == pytest.approx((9 / 1.1) / (9 / 1.7))
    assert numbers["accepted_draft_tokens_per_second"]["value"] == pytest.approx(5 / 1.1)
    assert numbers["shares"]["draft"] == pytest.approx(0.3 / 1.1)
    cost = numbers["cost"]
    assert cost["plain_step_ms"] == pytest.approx(200)
    assert cost["draft_cost_per_token"] == pytest.approx(0.3 / 12 / 0.2)
    assert cost["verify_cost_per_round"] == pytest.approx(1.0)
    assert cost["break_even_tokens_per_round"] == pytest.approx(1.0 / 3 / 0.2)
    assert cost["predicted_speedup"] == pytest.approx(cost["measured_speedup"])
    assert cost["by_k"][0]["speedup"] == pytest.approx((5 / 3) / (1 + (1.0 / 3 / 0.2 - 1) / 4))


def test_rates_are_pooled(simulator):
    samples = [
        plain(99, conversation="a", seconds=(0.1, 0.0, 0.9, 0.0)),
        plain(299, conversation="b", seconds=(0.5, 0.0, 5.5, 0.0)),
    ]
    numbers = by_name(summarise(samples, context=simulator.context))["plain"]["pooled"]
    assert numbers["tokens_per_second"]["value"] == pytest.approx(400 / 7)
    assert numbers["speedup"] is None
    assert numbers["cost"] is None


def test_speed_is_pooled_and_holds_drafting(simulator):
    """Case C25: 100 tokens in 1 s and 300 in 6 s are 57.14 a second, not 75; and what drafting takes counts."""
    times = {"a": (0.0, 0.4, 0.5, 0.1), "b": (0.0, 2.4, 3.0, 0.6)}
    samples = []
    for name, tokens in (("a", 100), ("b", 300)):
        samples.append(plain(tokens - 1, conversation=name, seconds=(0.0, 0.0, tokens / 50, 0.0)))
        rounds = [[1, 1, 2, None]] * (tokens // 2 - 1) + [[1, 0, 1, None]]
        samples.append(sample("eagle3 k=1", 1, rounds, conversation=name, seconds=times[name]))
    numbers = by_name(summarise(samples, context=simulator.context))["eagle3 k=1"]["pooled"]
    assert numbers["tokens_per_second"]["value"] == pytest.approx(57.142857)
    assert numbers["speedup"]["total"]["value"] == pytest.approx(400 / 7 / 50)
    assert numbers["seconds"] == pytest.approx(
        {"prefill": 0, "draft": 2.8, "verify": 3.5, "overhead": 0.7, "unaccounted": 0, "total": 7}
    )


def test_clipped_rounds_stand_apart(simulator):
    rounds = [[3, 1, 2, None], [3, 3, 2, "eos"]]
    document = summarise([plain(4), sample("eagle3 k=3", 3, rounds)], context=simulator.context)
    numbers = by_name(document)["eagle3 k=3"]["pooled"]
    assert (numbers["rounds"], numbers["clipped_rounds"], numbers["tokens"]) == (2, 1, 4)
    assert numbers["accepted_draft_tokens"] == 3  # the third accepted token of the clipped round was thrown away
    assert numbers["tokens_per_round"]["value"] == 2
    assert numbers["accepted_prefix"]["histogram"] == [0, 1, 0, 0]
    assert numbers["marginal_survival"][0] == {
        "position": 1, "rate": 1.0, "low": None, "high": None, "accepted": 1, "rounds": 1
    }  # fmt: skip


def test_known_acceptance_is_inside_the_intervals(simulator):
    samples = simulator.samples({"desk": {"eagle3": 0.7}}, conversations=30, new_tokens=300)
    document = summarise(samples, context=simulator.context)
    numbers = by_name(document)["eagle3 k=5"]["pooled"]
    tokens = expected_tokens(0.7, 5)
    assert numbers["tokens_per_round"]["low"] < tokens < numbers["tokens_per_round"]["high"]
    for row in numbers["conditional_acceptance"]:
        assert row["rate"] == pytest.approx(0.7, abs=0.04)
    for row in numbers["marginal_survival"]:
        assert row["rate"] == pytest.approx(0.7 ** row["position"], abs=0.04)
    # costs of the simulator: a plain step takes 1.02, a round 5·0.10 + 1.55 + 0.05
    speedup = numbers["speedup"]["decode"]
    assert speedup["low"] < tokens * 1.02 / 2.10 < speedup["high"]
    assert numbers["cost"]["draft_cost_per_token"] == pytest.approx(0.10 / 1.02, rel=0.03)
    assert numbers["cost"]["relative_difference"] == pytest.approx(0.002, abs=0.001)
    shorter = by_name(document)["eagle3 k=3"]["pooled"]["cost"]["from_sibling"]
    assert shorter["contender"] == "eagle3 k=5"
    assert shorter["tokens_per_round"] == pytest.approx(expected_tokens(0.7, 3), rel=0.03)
    assert numbers["cost"]["from_sibling"] is None


def test_document_is_json_and_checks(simulator):
    samples = simulator.samples(ALPHAS, conversations=6) + simulator.samples(ALPHAS, conversations=6, temperature=1.0)
    document = summarise(samples, context=simulator.context | {"teacher_forced": []})
    check_document(json.loads(json.dumps(document, allow_nan=False)))
    assert [block["name"] for block in document["samplers"]] == ["greedy (T=0)", "T=1"]
    assert document["samplers"][1]["exactness"] == []
    assert "teacher_forced" not in document["context"]


def test_order_of_samples_does_not_matter(simulator):
    samples = simulator.samples(ALPHAS, conversations=6)
    shuffled = random.Random(1).sample(samples, len(samples))
    first, second = (by_name(summarise(s, context=simulator.context)) for s in (samples, shuffled))
    assert first["eagle3 k=5"]["by_kind"]["chat"]["speedup"] == second["eagle3 k=5"]["by_kind"]["chat"]["speedup"]
    assert first["eagle3 k=5"]["pooled"]["tokens_per_round"] == second["eagle3 k=5"]["pooled"]["tokens_per_round"]


def test_verdict_by_kind(simulator):
    document = summarise(simulator.samples(ALPHAS, conversations=12), context=simulator.context)
    verdict = document["samplers"][0]["verdict"]
    desk, chat = verdict["by_kind"]["desk"], verdict["by_kind"]["chat"]
    assert (desk["decision"], desk["contender"], desk["k"]) == ("on", "eagle3 k=5", 5)
    assert desk["best"]["decode_speedup"]["low"] > 1
    assert (chat["decision"], chat["contender"], chat["k"]) == ("off", None, 0)
    assert chat["reason"] == "slower than plain decoding"
    assert chat["best"]["decode_speedup"]["high"] < 1


def test_every_drafter_has_a_verdict_of_its_own(simulator):
    """One drafter being best does not hide whether another pays."""
    document = summarise(simulator.samples(ALPHAS, conversations=12), context=simulator.context)
    verdict, names = document["samplers"][0]["verdict"], {}
    for contender in document["samplers"][0]["contenders"][1:]:
        names.setdefault(contender["drafter"], []).append(contender)
    assert set(verdict["by_drafter"]) == set(names)
    for drafter, contenders in names.items():
        own = verdict["by_drafter"][drafter]
        best = max(contenders, key=lambda c: c["pooled"]["speedup"]["decode"]["value"])
        assert own["overall"]["best"]["contender"] == best["contender"]
        assert own["overall"]["comparisons"] == verdict["overall"]["comparisons"] == 3
        low = best["by_kind"]["desk"]["speedup"]["decode"]["low"]
        assert (own["by_kind"]["desk"]["decision"] == "on") == (low > 1)


def test_undecided_is_off_and_says_how_many_conversations_it_takes():
    assert conversations_needed({"value": 1.1, "low": 0.99, "high": 1.22}, 10) == 13
    assert conversations_needed({"value": 0.99, "low": 0.9, "high": 1.1}, 10) is None
    assert conversations_needed({"value": 1.0001, "low": 0.9, "high": 1.1}, 10) is None


def test_interval_that_includes_one_is_off(simulator):
    # break-even α of the simulator's eagle3 at k=5, scattered widely between conversations
    samples = simulator.samples({"desk": {"eagle3": 0.52}}, conversations=10, spread=0.12, seed=3)
    verdict = summarise(samples, context=simulator.context)["samplers"][0]["verdict"]["overall"]
    low, high = verdict["best"]["decode_speedup"]["low"], verdict["best"]["decode_speedup"]["high"]
    assert low < 1 < high
    assert verdict["decision"] == "off"
    assert verdict["reason"].startswith("the interval includes 1")


@pytest.mark.parametrize("count", [1, 6])
def test_too_few_conversations_are_off(simulator, count):
    samples = simulator.samples({"desk": {"eagle3": 0.9}}, conversations=count)
    verdict = summarise(samples, context=simulator.context)["samplers"][0]["verdict"]["overall"]
    assert verdict["decision"] == "off"
    assert verdict["reason"] == f"too few conversations: {count}, at least 7 are needed to choose among 2"
    assert verdict["best"]["decode_speedup"]["value"] > 1


def cut_to_one_token(samples, spared):
    """The same answers, all but those of ``spared`` ended by their first token."""
    cut = {"rounds": [], "new_tokens": 1, "draft_s": 0.0, "verify_s": 0.0, "overhead_s": 0.0}
    return [s if s["conversation"] in spared else {**s, **cut, "total_s": s["prefill_s"]} for s in samples]


def test_answers_of_one_token_are_no_evidence_of_decoding(simulator):
    """Twenty conversations of which two are decoded at all are two, however narrow an interval they make."""
    samples = simulator.samples({"desk": {"eagle3": 0.9}}, conversations=20)
    few = cut_to_one_token(samples, {"desk-0", "desk-1"})
    verdict = summarise(few, context=simulator.context)["samplers"][0]["verdict"]["overall"]
    assert verdict["best"]["decode_speedup"]["low"] > 1
    found = (verdict["decision"], verdict["best"]["conversations"], verdict["conversations_needed"])
    assert found == ("off", 20, 70)  # seven that are decoded, of which one in ten is
    assert verdict["reason"].startswith("too few conversations with more than one token: 2, at least 7 are needed")
    assert verdict["would_change"] == "about 50 more conversations"
    enough = cut_to_one_token(samples, {f"desk-{i}" for i in range(7)})
    assert summarise(enough, context=simulator.context)["samplers"][0]["verdict"]["overall"]["decision"] == "on"


def test_a_contender_that_samples_from_another_law_is_not_turned_on(simulator):
    samples = simulator.samples({"desk": {"eagle3": 0.9}}, conversations=8, temperature=1.0)
    samples = [s | {"pit": {"bins": [5] * 20}} for s in samples]
    context = simulator.context | {"drafters": {"eagle3": {"bytes": 5, "training": None}}}
    right = summarise(samples, context=context)["samplers"][0]["verdict"]["overall"]
    assert (right["decision"], right["contender"], right["comparisons"]) == ("on", "eagle3 k=5", 2)

    def faulty(*names):
        bins = [9, 1] * 10
        broken = [s | {"pit": {"bins": bins}} if s["contender"] in names else s for s in samples]
        block = summarise(broken, context=context)["samplers"][0]
        return block["verdict"]["overall"], {row["contender"]: row["why"] for row in block["leaderboard"]["apart"]}

    one, apart = faulty("eagle3 k=5")
    assert (one["decision"], one["best"]) == ("off", None)
    assert apart == {"eagle3 k=5": "samples from another law than the target's at T=1"}
    both, _ = faulty("eagle3 k=3", "eagle3 k=5")
    assert (both["decision"], both["best"]) == ("off", None)
    assert both["reason"] == "not exact: eagle3 k=3, eagle3 k=5 (samples from another law than the target's at T=1)"


def decisions(document):
    """Every verdict of a document: overall and by kind, of all and of each drafter, and by batch."""
    blocks = [block["verdict"] for block in document["samplers"]]
    holders = [holder for block in blocks for holder in (block, *block["by_drafter"].values())]
    found = [verdict for holder in holders for verdict in (holder["overall"], *holder["by_kind"].values())]
    return [*found, *(document["load"] or {"by_batch": ()})["by_batch"]]


@pytest.mark.parametrize(
    ("contender", "faulty", "reason"),
    [
        ("ngram k=5", 0.0, "ngram k=5 (changes the greedy output)"),
        ("ngram k=5", 1.0, "ngram k=5 (samples from another law than the target's at T=1)"),
        ("eagle3 k=5", 0.0, "eagle3 k=5 (changes the greedy output)"),
    ],
)
def test_a_fault_in_one_sampler_leaves_nothing_on_in_any(simulator, contender, faulty, reason):
    """What is not exact is a fault of decoding, which all contenders and temperatures share."""
    samples = [s for t in (0.0, 1.0) for s in simulator.samples(PAYING, conversations=8, temperature=t)]
    samples = [s | ({"pit": {"bins": [5] * 20}} if s["temperature"] else {}) for s in samples]
    load = complete(summarise(samples, context=simulator.context))["load"]
    context = simulator.context | {"load": load}
    right = summarise(samples, context=context)
    assert {block["verdict"]["overall"]["decision"] for block in right["samplers"]} == {"on"}
    assert any(row["decision"] == "on" for row in right["load"]["by_batch"])
    wrong = (
        {"pit": {"bins": [9, 1] * 10}}
        if faulty
        else {"equal_to_plain": False, "first_difference": {"position": 7, "logit_gap": 1.5}}
    )
    broken = [s | wrong if (s["contender"], s["temperature"]) == (contender, faulty) else s for s in samples]
    document = summarise(broken, context=context)
    assert {found["decision"] for found in decisions(document)} == {"off"}
    assert {found["reason"] for found in decisions(document)} == {f"not exact: {reason}"}
    assert any(row["decision"] == "on" for row in context["load"]["by_batch"])
    page, text = render_page(document), render_markdown(document)
    for shown in (html.unescape(page), text):
        assert f"A check of the output failed, not exact: {reason}: that is a fault of decoding." in shown
        assert "Turn it on" not in shown
        assert f"Exact in law by the rule, but found not to be: {contender}." in shown


def test_a_document_that_turns_on_what_is_not_exact_is_refused(simulator):
    samples = [s for t in (0.0, 1.0) for s in simulator.samples(PAYING, conversations=8, temperature=t)]
    document = summarise(samples, context=simulator.context)
    row = document["samplers"][0]["exactness"][0]
    row |= {"equal": row["equal"] - 1, "unexplained": 1}
    row["differences"].append({"conversation": "a", "kind": "desk", "position": 3, "logit_gap": 2.0})
    with pytest.raises(SpectrainError, match=r"decision is 'on', but a check failed, not exact: ngram k=5 \("):
        check_document(document)


def test_a_kind_of_which_nothing_was_decoded_is_too_few(simulator):
    """Every answer of one kind ends with its first token: it has no figures, and the others keep theirs."""
    silent = {f"chat-{i}" for i in range(12)}
    samples = simulator.samples(ALPHAS, conversations=12)
    context = simulator.context | {"drafters": {"eagle3": {"bytes": 5, "training": None}}}
    cut = cut_to_one_token(samples, {s["conversation"] for s in samples} - silent)
    document = summarise(cut, context=context)
    check_document(json.loads(json.dumps(document)))
    (block,) = document["samplers"]
    assert {json.dumps(contender["by_kind"]["chat"]) for contender in block["contenders"]} == {"null"}
    assert by_name(document)["eagle3 k=5"]["by_kind"]["desk"]["conversations"] == 12
    chat = block["verdict"]["by_kind"]["chat"]
    assert (chat["decision"], chat["best"]) == ("off", None)
    assert (
        chat["reason"] == "too few conversations with more than one token: 0, at least 7 are needed to choose among 3"
    )
    assert block["verdict"]["by_kind"]["desk"]["decision"] == "on"
    for form in (render_page, render_markdown, acceptance_csv, speculation_profile):
        form(document)
    page = render_page(document)
    assert "By kind: on for desk (eagle3 k=5" in page
    assert "off, too few conversations to tell, for chat." in page
    assert "Every answer ended with its first token" in page
    document["samplers"][0]["contenders"][1]["by_kind"]["desk"] = None
    with pytest.raises(SpectrainError, match="has figures of kinds that"):
        check_document(document)


def test_every_kind_is_another_look(simulator):
    """Three contenders on two kinds are six looks; a kind with too few conversations to be on is none, nor is one that
    is all that its parent has."""
    samples = simulator.samples(ALPHAS, conversations=12)
    verdict = summarise(samples, context=simulator.context)["samplers"][0]["verdict"]
    assert verdict["overall"]["comparisons"] == 3
    for found in (verdict, *verdict["by_drafter"].values()):
        assert {kind["comparisons"] for kind in found["by_kind"].values()} == {6}
    desk = verdict["by_kind"]["desk"]
    assert desk["adjusted"]["low"] < desk["best"]["decode_speedup"]["low"]
    assert "also at 99.2%, for it was chosen among 3 on each of 2 kinds" in desk["reason"]
    few = [s for s in samples if s["kind"] == "desk" or s["conversation"] in {"chat-0", "chat-1"}]
    kinds = summarise(few, context=simulator.context)["samplers"][0]["verdict"]["by_kind"]
    assert (kinds["desk"]["comparisons"], kinds["chat"]["decision"]) == (3, "off")
    nested = [s | {"kind": "all/desk" if s["kind"] == "desk" else "chat/a"} for s in samples]
    kinds = summarise(nested, context=simulator.context)["samplers"][0]["verdict"]["by_kind"]
    assert {kind: verdict["comparisons"] for kind, verdict in kinds.items()} == dict.fromkeys(kinds, 6)
    assert len(kinds) == 4


def _differ(samples, contender, **difference):
    found = next(s for s in samples if s["contender"] == contender)
    found |= {"equal_to_plain": False, "first_difference": difference}


def test_near_ties_are_told_from_wrong_outputs(simulator):
    samples = simulator.samples({"desk": {"eagle3": 0.8, "ngram": 0.5}}, conversations=8)
    _differ(samples, "eagle3 k=3", position=4, logit_gap=1e-5)
    _differ(samples, "eagle3 k=5", position=7, logit_gap=1.5)
    block = summarise(samples, context=simulator.context)["samplers"][0]
    exactness = {e["contender"]: e for e in block["exactness"]}
    assert (exactness["eagle3 k=3"]["equal"], exactness["eagle3 k=3"]["near_ties"]) == (7, 1)
    assert exactness["eagle3 k=5"]["unexplained"] == 1
    assert exactness["eagle3 k=5"]["differences"] == [
        {"conversation": "desk-0", "kind": "desk", "position": 7, "logit_gap": 1.5}
    ]
    assert block["verdict"]["overall"]["decision"] == "off"
    assert block["verdict"]["overall"]["reason"] == "not exact: eagle3 k=5 (changes the greedy output)"


def test_no_exact_contender_is_off(simulator):
    samples = simulator.samples({"desk": {"ngram": 0.9}}, conversations=8)
    _differ(samples, "ngram k=5", position=0, logit_gap=None)
    verdict = summarise(samples, context=simulator.context)["samplers"][0]["verdict"]["overall"]
    assert (verdict["decision"], verdict["best"]) == ("off", None)
    assert verdict["reason"] == "not exact: ngram k=5 (changes the greedy output)"


def test_a_tree_has_measured_costs_and_no_predictions(simulator):
    samples = simulator.samples({"desk": {"eagle3": 0.7}}, conversations=12, more=(simulator.tree,))
    contenders = by_name(summarise(samples, context=simulator.context))
    tree, chain = contenders[simulator.tree], contenders["eagle3 k=5"]
    assert (tree["k"], tree["depth"], tree["nodes"], tree["shape"]["type"]) == (None, 5, 16, "dynamic tree")
    assert (chain["k"], chain["depth"], chain["nodes"], chain["shape"]["type"]) == (5, 5, 5, "chain")
    numbers, cost = tree["pooled"], tree["pooled"]["cost"]
    assert numbers["proposed_draft_tokens"] == 3 * 5 * numbers["rounds"]
    assert (cost["proposed_per_round"], cost["nodes_per_round"]) == (5, 15)
    assert cost["by_k"] == []
    assert (cost["draft_cost_per_token"], cost["best_k"], cost["from_sibling"]) == (None, None, None)
    # the simulator's tree: a plain step takes 1.02, a round 5·0.12 + 1.9 + 0.05
    assert cost["draft_cost_per_round"] == pytest.approx(0.6 / 1.02, rel=0.03)
    assert cost["break_even_tokens_per_round"] == pytest.approx(2.55 / 1.02, rel=0.03)
    assert cost["predicted_speedup"] == pytest.approx(cost["measured_speedup"], rel=0.01)
    assert len(numbers["marginal_survival"]) == len(numbers["conditional_acceptance"]) == 5
    assert len(numbers["accepted_prefix"]["histogram"]) == 6
    # the tree does not stand in for a longer chain
    assert contenders["eagle3 k=3"]["pooled"]["cost"]["from_sibling"]["contender"] == "eagle3 k=5"
    assert chain["pooled"]["cost"]["from_sibling"] is None
    assert len(chain["pooled"]["cost"]["by_k"]) == 5


def test_a_tree_can_be_the_verdict(simulator):
    samples = simulator.samples({"desk": {"eagle3": 0.8}}, conversations=10, more=(simulator.tree,))
    for found in samples:
        if found["contender"] == simulator.tree:
            found |= {"verify_s": found["verify_s"] / 2, "total_s": found["total_s"] - found["verify_s"] / 2}
    verdict = summarise(samples, context=simulator.context)["samplers"][0]["verdict"]["overall"]
    assert (verdict["decision"], verdict["contender"], verdict["k"]) == ("on", simulator.tree, None)
    assert (verdict["best"]["depth"], verdict["best"]["nodes"], verdict["best"]["verification"]) == (5, 16, "token")


def block_wise(samples, contender):
    """The same rounds as another contender, judged as blocks."""
    return [
        s | {"contender": f"{contender} block", "verification": "block"} for s in samples if s["contender"] == contender
    ]


def test_predictions_come_from_a_sibling_under_the_same_rule(simulator):
    samples = simulator.samples({"desk": {"eagle3": 0.7}}, conversations=8)
    samples += block_wise(samples, "eagle3 k=3")
    contenders = by_name(summarise(samples, context=simulator.context))
    assert contenders["eagle3 k=3 block"]["pooled"]["cost"]["from_sibling"] is None  # no longer chain under this rule
    assert contenders["eagle3 k=3"]["pooled"]["cost"]["from_sibling"]["contender"] == "eagle3 k=5"
    samples += block_wise(samples, "eagle3 k=5")
    contenders = by_name(summarise(samples, context=simulator.context))
    sibling = contenders["eagle3 k=3 block"]["pooled"]["cost"]["from_sibling"]
    assert sibling["contender"] == "eagle3 k=5 block"


def test_survival_under_block_verification_does_not_depend_on_the_length():
    """So that a longer block predicts a shorter one."""
    for seed in range(20):
        dice = random.Random(seed)
        p, q = random_laws(dice), random_laws(dice)
        survival = []
        for k in (1, 2):
            outcomes = block_round(p, q, k)
            survival.append(sum(weight for tokens, weight in outcomes.items() if len(tokens) > 1))
        assert survival[0] == survival[1]


def lossy_samples(simulator):
    """The lossy contender is the fastest by far, and all of its outputs differ."""
    samples = simulator.samples({"desk": {"eagle3": 0.8}}, conversations=8, more=(simulator.lossy,))
    for found in samples:
        if found["lossy"]:
            found |= {"draft_s": 0.0, "total_s": found["total_s"] - found["draft_s"], "equal_to_plain": False}
            found["first_difference"] = {"position": 3, "logit_gap": 4.0}
    return samples


def test_a_lossy_contender_is_shown_and_never_recommended(simulator):
    samples = lossy_samples(simulator)
    block = summarise(samples, context=simulator.context)["samplers"][0]
    lossy = next(c for c in block["contenders"] if c["lossy"])
    assert lossy["contender"] == simulator.lossy
    speedups = {c["contender"]: c["pooled"]["speedup"]["decode"]["value"] for c in block["contenders"][1:]}
    assert max(speedups, key=speedups.get) == simulator.lossy
    best, verdict = max(speedups.keys() - {simulator.lossy}, key=speedups.get), block["verdict"]
    for found in (verdict["overall"], verdict["by_kind"]["desk"], verdict["by_drafter"]["eagle3"]["overall"]):
        assert (found["decision"], found["contender"]) == ("on", best)
    exactness = {e["contender"]: e for e in block["exactness"]}
    assert (exactness[simulator.lossy]["lossy"], exactness[simulator.lossy]["unexplained"]) == (True, 8)
    assert exactness["eagle3 k=5"] | {"lossy": False, "equal": 8, "unexplained": 0} == exactness["eagle3 k=5"]


def test_lossy_contenders_alone_have_no_verdict(simulator):
    samples = [s for s in lossy_samples(simulator) if s["lossy"] or s["contender"] == "plain"]
    verdict = summarise(samples, context=simulator.context)["samplers"][0]["verdict"]["overall"]
    assert (verdict["decision"], verdict["best"], verdict["reason"]) == ("off", None, "every contender is lossy")


@pytest.mark.parametrize(
    "changes",
    [
        {"contender": "eagle3 k=5"},
        {"lossy": False},
        {"verification": "token"},
        {"contender": "eagle3 k=5", "lossy": False},
        {"lossy": False, "verification": "token"},
    ],
)
def test_lossy_samples_cannot_pass_for_exact_ones(simulator, changes):
    samples = [s | changes if s["lossy"] else s for s in lossy_samples(simulator)]
    with pytest.raises(SpectrainError, match="a lossy rule must be called so"):
        summarise(samples, context=simulator.context)


def test_speedup_above_tokens_per_round_fails(simulator):
    samples = simulator.samples({"desk": {"eagle3": 0.5}}, conversations=8)
    for found in samples:
        if found["contender"] == "plain":
            for part in ("verify_s", "total_s"):
                found[part] *= 3
    with pytest.raises(SpectrainError, match=r"'eagle3 k=[35]'.* decode speedup of .* exceeds .* tokens per round"):
        summarise(samples, context=simulator.context)


def test_unclipped_round_that_loses_a_token_fails(simulator):
    with pytest.raises(SpectrainError, match=r"'eagle3 k=3'.*accepted \+ 1"):
        summarise([plain(2), sample("eagle3 k=3", 3, [[3, 2, 2, None]])], context=simulator.context)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"new_tokens": 9}, "9 new tokens"),
        ({"total_s": 0.2}, "of a total of 0.2000 s"),
        ({"draft_s": -0.1}, "draft_s is not a duration"),
        ({"draft_s": "x"}, "draft_s is 'x': Input should be a valid number"),
        ({"verify_s": float("nan")}, "verify_s is nan: Input should be a finite number"),
        ({"total_s": float("inf")}, "total_s is inf: Input should be a finite number"),
        ({"total_s": 0.0}, "total_s is not a duration"),
        ({"rounds": [[3, "1", 2, None, 3]]}, r"rounds\.0\.1 is '1': Input should be a valid integer"),
        ({"rounds": [[3, 1, 2, None, 3], ["x", 1, 2, None, 3]]}, r"rounds\.1\.0 is 'x': Input should be a valid"),
        ({"rounds": [[True, 1, 2, None, 3]]}, r"rounds\.0\.0 is True: Input should be a valid integer"),
        ({"rounds": "x"}, "rounds is 'x'"),
        ({"new_tokens": "4"}, "new_tokens is '4'"),
        ({"visited_alpha": [["x", 1]]}, r"visited_alpha\.0\.0 is 'x'"),
        ({"teacher_forced": {"alpha": ["x"]}}, r"teacher_forced\.alpha\..* is"),
        ({"rounds": [[4, 1, 2, None, 4]]}, "proposed 4"),
        ({"rounds": [[3, 1, 2, "length", 3]]}, "'length'"),
        (
            {"rounds": [[3, 1, 2, None]]},
            r"\[3, 1, 2, None\], expected \[proposed, accepted, committed, clipped, nodes\]",
        ),
        ({"rounds": [[3, 1, 2, None, 4]]}, "had 4 nodes, expected 3, as many as it is deep"),
        ({"shape": {"type": "chain", "depth": 3}}, "shape is .* expected type, depth, nodes"),
        ({"k": 4}, "k is 4, but its drafts are 3 deep"),
    ],
)
def test_malformed_samples_are_named(simulator, changes, message):
    bad = sample("eagle3 k=3", 3, [[3, 1, 2, None]]) | changes
    with pytest.raises(SpectrainError, match=message) as error:
        summarise([plain(2), bad], context=simulator.context)
    assert "'eagle3 k=3'" in str(error.value)


@pytest.mark.parametrize("nodes", [1, 17])
def test_a_tree_has_at_least_as_many_nodes_as_it_is_deep_and_no_more_than_asked_for(nodes):
    shape = {"type": "dynamic tree", "depth": 3, "nodes": 16, "top_k": 4}
    tree = sample("eagle3 dynamic tree of 16", 3, [[2, 1, 2, None, nodes]]) | {"k": None, "shape": shape}
    with pytest.raises(SpectrainError, match=f"round 0 had {nodes} nodes, expected from 2 to 16"):
        parse_sample(tree)


def test_missing_field_is_named(simulator):
    bad = plain(2)
    del bad["verify_s"]
    with pytest.raises(SpectrainError, match="verify_s"):
        summarise([bad], context=simulator.context)


def test_contenders_must_answer_the_same_conversations(simulator):
    pair = [plain(2), sample("eagle3 k=3", 3, [[3, 1, 2, None]])]
    with pytest.raises(SpectrainError, match=r"'eagle3 k=3'.*'b'"):
        summarise([*pair, plain(2, conversation="b")], context=simulator.context)
    with pytest.raises(SpectrainError, match="more than once"):
        summarise([*pair, copy.deepcopy(pair[1])], context=simulator.context)
    with pytest.raises(SpectrainError, match="plain"):
        summarise(pair[1:], context=simulator.context)
    with pytest.raises(SpectrainError, match="no raw samples"):
        summarise([], context=simulator.context)


def test_answers_of_one_token_are_refused(simulator):
    with pytest.raises(SpectrainError, match="not one round"):
        summarise([plain(0)], context=simulator.context)


def test_context_is_checked(simulator):
    context = copy.deepcopy(simulator.context)
    del context["device"]["dtype"]
    with pytest.raises(SpectrainError, match=r"device\.dtype"):
        summarise([plain(2)], context=context)


def test_teacher_forced_rows_are_checked(simulator):
    context = simulator.context | {"teacher_forced": [{"temperature": 1.0, "kind": "desk", "depth": 1}]}
    with pytest.raises(SpectrainError, match=r"teacher_forced\[0\]\.alpha"):
        summarise([plain(2)], context=context)


def test_the_document_keeps_its_own_context(simulator):
    context = copy.deepcopy(simulator.context)
    document = summarise([plain(2)], context=context)
    context["device"]["name"] = "another"
    assert document["context"]["device"]["name"] == "2-core CPU"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("a", ["a"]), ("narrow/sql", ["narrow", "narrow/sql"]), ("a/b/c", ["a", "a/b", "a/b/c"])],
)
def test_a_kind_lies_in_its_parents(kind, expected):
    assert kind_and_parents(kind) == expected


def test_a_sample_is_of_its_kind_and_of_those_above_it_and_of_no_namesake():
    assert is_of("narrow/sql", "narrow")
    assert is_of("narrow/sql", "narrow/sql")
    assert not any(is_of("narrow/sql", kind) for kind in ("narrow/s", "nar", "sql", "narrow/sql/join", "open"))


def test_nested_kinds_count_in_their_parents(simulator):
    alphas = {
        "narrow/sql": {"eagle3": 0.9},
        "narrow/json": {"eagle3": 0.8},
        "narrower": {"eagle3": 0.2},
        "open/chat": {"eagle3": 0.3},
    }
    block = summarise(simulator.samples(alphas, conversations=8), context=simulator.context)["samplers"][0]
    assert block["kinds"] == ["narrow", "narrow/json", "narrow/sql", "narrower", "open", "open/chat"]
    assert set(block["verdict"]["by_kind"]) == set(block["kinds"])
    for contender in block["contenders"]:
        kinds, pooled = contender["by_kind"], contender["pooled"]
        assert (kinds["narrow"]["conversations"], kinds["narrow/sql"]["conversations"]) == (16, 8)
        for count in ("rounds", "clipped_rounds", "tokens", "new_tokens", "accepted_draft_tokens"):
            assert kinds["narrow"][count] == kinds["narrow/sql"][count] + kinds["narrow/json"][count]
            assert kinds["open"][count] == kinds["open/chat"][count]
            tops = ("narrow", "narrower", "open")
            assert pooled[count] == sum(kinds[kind][count] for kind in tops)  # nothing counts twice
        if contender["contender"] != "plain":
            assert kinds["open"]["speedup"] == kinds["open/chat"]["speedup"]
    by_kind = block["verdict"]["by_kind"]
    assert (by_kind["narrow"]["decision"], by_kind["open"]["decision"]) == ("on", "off")


def test_a_conversation_of_the_parent_kind_itself_counts_there_alone(simulator):
    pair = [plain(8), sample("eagle3 k=3", 3, [[3, 1, 2, None]] * 4)]
    samples = [s | {"kind": "narrow"} for s in pair] + [s | {"conversation": "b", "kind": "narrow/sql"} for s in pair]
    block = summarise(samples, context=simulator.context)["samplers"][0]
    kinds = block["contenders"][1]["by_kind"]
    assert (kinds["narrow"]["conversations"], kinds["narrow/sql"]["conversations"]) == (2, 1)
