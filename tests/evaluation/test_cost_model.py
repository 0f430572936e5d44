"""The cost model and goodput on servers whose times are known by formula."""

import pytest
from known_server import DRAFT, OVER, TAU, TOKENS, document, forward, line, load_of, round_s

from spectrain.evaluation.cost_model import cost_model
from spectrain.evaluation.goodput import goodput
from spectrain.evaluation.summary import summarise
from spectrain.evaluation.verdict import up_to_batch


@pytest.fixture(scope="module")
def samples(simulator):
    return simulator.samples({"desk": {"eagle3": 0.7}}, conversations=12)


@pytest.fixture(scope="module")
def known(samples, simulator):
    return document(samples, simulator, [line(b) for b in (1, 4, 16)], rates=(0.1, 1.5, 50.0))


def test_known_costs_predict_the_speedup_at_every_batch(known):
    chains = {c["contender"]: c for c in known["cost_model"]["chains"]}
    assert list(chains) == ["eagle3 k=3", "eagle3 k=5"]
    for name, chain in chains.items():
        assert [row["batch"] for row in chain["by_batch"]] == [1, 4, 16]
        for row in chain["by_batch"]:
            truth = TAU[name] * round_s("plain", row["batch"]) / round_s(name, row["batch"])
            assert row["predicted"] == pytest.approx(truth)
            assert row["measured"]["value"] == pytest.approx(truth)
            assert row["unaccounted"] == pytest.approx(0, abs=0.01)
            step = round_s("plain", row["batch"])
            assert row["c"] == pytest.approx(DRAFT / step)
            assert row["v"] == pytest.approx(forward(row["batch"], chain["k"] + 1) / step)
            assert row["o"] == pytest.approx(OVER / step)
    assert known["cost_model"]["largest_difference"]["by_batch"] < 0.001


def test_a_batch_that_shrinks_as_answers_end_is_predicted_round_by_round(samples, simulator):
    """At the mean number of requests the same rounds would be told too cheap or too dear."""
    lines = [line(b, ending=True) for b in (1, 2, 4, 8, 16)]
    found = document(samples, simulator, lines)
    assert found["cost_model"]["largest_difference"]["by_batch"] < 0.001
    row = next(r for r in found["load"]["rows"] if (r["contender"], r["batch"]) == ("eagle3 k=5", 16))
    assert set(row["rounds_by_running"]) == {"8", "16"}
    assert row["running_in_decode"] == pytest.approx(12)


def test_a_size_that_kernels_dislike_is_predicted_by_its_own_rounds(samples, simulator):
    """On a CPU a batch of 13 took 1.7 times as long as one of 16: nothing between two other sizes says so."""
    found = document(samples, simulator, [line(16, ending=True, other=1.7)])
    assert found["load"]["batches"] == [16]
    assert found["cost_model"]["largest_difference"]["by_batch"] < 0.001
    assert {row["running"] for row in found["load"]["drafting"]} == {8, 16}


def test_what_no_part_accounts_for_stays_visible(samples, simulator):
    found = document(samples, simulator, [line(b, lost=0.25) for b in (1, 4)])["cost_model"]
    for chain in found["chains"]:
        for row in chain["by_batch"]:
            assert row["relative_difference"] == pytest.approx(0.25)
            assert row["unaccounted"] == pytest.approx(0.2, abs=0.005)
    assert found["largest_difference"]["by_batch"] == pytest.approx(0.25)


def test_the_best_length_shrinks_with_the_batch_and_alpha_has_to_rise(known):
    chain = known["cost_model"]["chains"][1]
    best = chain["best_k_by_batch"]
    assert best["1"] >= best["4"] >= best["16"]
    assert best["1"] > best["16"]
    alphas = [row["break_even_alpha"] for row in chain["by_batch"]]
    assert alphas == sorted(alphas)
    assert alphas[0] < 0.5 < alphas[-1]


def test_the_verdict_differs_by_batch(known, samples, simulator):
    at = {row["batch"]: row for row in known["load"]["by_batch"]}
    truth = {b: {n: TAU[n] * round_s("plain", b) / round_s(n, b) for n in TAU} for b in (1, 16)}
    assert max(truth[1].values()) > 1 > max(truth[16].values())  # what is made here
    assert (at[1]["decision"], at[16]["decision"]) == ("on", "off")
    assert at[16]["contender"] is None
    overall = known["samplers"][0]["verdict"]["overall"]
    assert overall["decision"] == "on"
    assert overall["up_to_batch"] == 4
    assert "batches of 16, where it is slower" in overall["would_change"]
    small = document(samples, simulator, [line(b) for b in (1, 2, 4)])["samplers"][0]["verdict"]["overall"]
    assert small["up_to_batch"] == 4
    assert small["would_change"].endswith("no batch that was measured, up to 4")


def test_batches_of_another_sampler_say_nothing(samples, simulator):
    found = summarise(samples, context=simulator.context)
    model = cost_model(found["samplers"], load_of([line(1)], sampler="T=0.7"), ())
    assert [chain["by_batch"] for chain in model["chains"]] == [[], []]
    assert found["samplers"][0]["verdict"]["overall"]["up_to_batch"] is None


def test_up_to_batch_stops_where_it_is_certainly_slower():
    def load(*bounds):
        rows = [{"contender": "x", "batch": 2**i, "speedup": {"low": low, "high": high}, "pays": low > 1}
                for i, (low, high) in enumerate(bounds)]  # fmt: skip
        return {"rows": rows}

    assert up_to_batch(load((1.1, 1.3), (0.9, 1.2), (1.05, 1.1)), "x") == 4  # 2 is only unclear
    assert up_to_batch(load((1.1, 1.3), (0.7, 0.9), (1.05, 1.1)), "x") == 1
    assert up_to_batch(load((0.7, 0.9)), "x") == 1
    assert up_to_batch(load((0.7, 0.9)), "y") is None


def test_without_batches_only_single_requests_are_told(samples, simulator):
    found = summarise(samples, context=simulator.context)
    assert found["load"] is None
    model = found["cost_model"]
    assert model["goodput"] is None
    assert model["largest_difference"]["by_batch"] is None
    assert model["largest_difference"]["single"] < 0.03
    chain = model["chains"][1]
    assert chain["v_by_k"] == {"0": pytest.approx(1 / 1.02, abs=0.03), "3": pytest.approx(1.42, abs=0.04),
                               "5": pytest.approx(1.52, abs=0.04)}  # fmt: skip
    # 5 · 0.1 + 1.55 + 0.05 steps; α of 0.7 commits about 2.94 tokens for them.
    assert chain["alpha"] == pytest.approx(0.7, abs=0.05)
    assert chain["break_even_alpha"] == pytest.approx(0.54, abs=0.03)


# --- goodput ------------------------------------------------------------------------------------------------------


def test_the_steady_state_makes_what_is_asked_for(known):
    for found in known["cost_model"]["goodput"]:
        for state in found["contenders"]:
            if state["saturated"]:
                assert state["running"] is None
                continue
            # Little's law: as many running as arrive while one is answered, prefill's share of the time apart.
            rate = found["request_rate"]
            assert state["tokens_per_second"] == pytest.approx(rate * TOKENS)
            latency = state["latency_ms_per_token"] / 1e3
            assert state["running"] == pytest.approx(rate * TOKENS * latency)
            assert rate <= state["capacity"]


def test_a_rate_beyond_all_batches_is_called_saturated(known):
    quiet, _, flooded = known["cost_model"]["goodput"]
    assert all(state["saturated"] for state in flooded["contenders"])
    assert "every contender is saturated" in flooded["sentence"]
    assert not any(state["saturated"] for state in quiet["contenders"])
    assert quiet["best"]["k"] > 0  # the server is all but empty: speculation is faster


def test_the_fixed_point_is_where_the_measured_line_meets_the_demand():
    row = {"contender": "plain", "k": 0, "prefill_s_per_request": 0.0, "answer_tokens": 10}
    rows = [{**row, "running_in_decode": b, "decode_tokens_per_second": t} for b, t in ((1, 20), (4, 50), (8, 60))]
    load = {"rows": rows, "prompt_tokens": 5}
    found = {rate: goodput(load, [rate])[0]["contenders"][0] for rate in (1.0, 3.5, 5.5, 6.5)}
    assert found[1.0]["running"] == pytest.approx(0.5)  # it rests half the time
    assert found[1.0]["latency_ms_per_token"] == pytest.approx(50)
    assert found[3.5]["running"] == pytest.approx(2.5)
    assert found[5.5]["running"] == pytest.approx(6)
    assert found[6.5]["saturated"]
    assert found[6.5]["capacity"] == pytest.approx(6.0)


def test_prefill_takes_time_from_decoding():
    row = {"contender": "plain", "k": 0, "answer_tokens": 10, "running_in_decode": 1, "decode_tokens_per_second": 20}
    loads = ({"rows": [{**row, "prefill_s_per_request": p}], "prompt_tokens": 5} for p in (0.0, 0.25))
    free, busy = (goodput(load, [1.0])[0]["contenders"][0] for load in loads)
    assert busy["running"] == pytest.approx(free["running"] / 0.75)
    assert busy["capacity"] == pytest.approx(20 / (10 + 20 * 0.25))
