"""The what-if calculator: published numbers, measured ones, and mistakes."""

import json
import re
import shlex

import pytest
from known_server import DRAFT, OVER, document, forward, line, round_s

from spectrain import cli
from spectrain.evaluation.summary import summarise
from spectrain.exact.cost import expected_tokens
from spectrain.files import write_json


@pytest.fixture
def plan(capsys):
    def plan(arguments, code=0):
        assert cli.guarded(cli.COMMANDS["plan"], shlex.split(arguments), "spectrain plan") == code
        captured = capsys.readouterr()
        assert bool(captured.out) == (code == 0)
        return captured.err.strip() if code else captured.out

    return plan


@pytest.fixture(scope="module")
def report(simulator, tmp_path_factory):
    samples = simulator.samples({"desk": {"eagle3": 0.7, "ngram": 0.3}}, conversations=12)
    lines = [line(b) for b in (1, 4, 16)]
    path = tmp_path_factory.mktemp("plan") / "acceptance.json"
    write_json(path, document(samples, simulator, lines))
    return path


# --- given numbers ------------------------------------------------------------------------------------------------


def test_every_length_by_its_formula(plan):
    found = json.loads(plan("--alpha .7 --c .1 --v 1.2 --batch 8 --json"))
    assert [row["k"] for row in found["rows"]] == list(range(1, 9))
    for row in found["rows"]:
        k = row["k"]
        assert row["tokens_per_round"] == pytest.approx((1 - 0.7 ** (k + 1)) / 0.3)
        assert row["speedup"] == pytest.approx(row["tokens_per_round"] / (0.1 * k + 1.2))
        assert expected_tokens(row["break_even_alpha"], k) == pytest.approx(0.1 * k + 1.2)
        assert row["tokens_per_round"] == pytest.approx(row["break_even_c"] * k + 1.2)
    assert found["best"] == {"k": 4, "speedup": pytest.approx(2.7731 / 1.6)}


def test_the_table_names_the_best_length(plan):
    text = plan("--alpha .7 --c .1 --v 1.2 --batch 8 --k 1,4")
    assert text.startswith("batch 8, α 0.700, c 0.1, v 1.2, o 0")
    assert [row.split()[0] for row in text.splitlines()[2:5]] == ["k", "1", "4"]
    assert "best: k=4, 1.73 times as fast as plain decoding" in text
    assert "best: off: no length here pays" in plan("--alpha .2 --c .3")


def test_published_tokens_per_round_imply_alpha(plan):
    found = json.loads(plan("--tau 3.5 --k 5 --c .08 --json"))
    assert expected_tokens(found["alpha"], 5) == pytest.approx(3.5)
    assert found["rows"][4]["speedup"] == pytest.approx(3.5 / 1.4)
    assert "v = 1 is assumed" in found["notes"][0]


def test_survival_and_verification_by_length_replace_alpha_and_a_constant(plan):
    found = json.loads(plan("--survival .8,.6,.4 --c .1 --v 1.1,1.2,1.9 --o .05 --json"))
    assert [row["round_cost"] for row in found["rows"]] == pytest.approx([1.25, 1.45, 2.25])
    assert found["best"]["k"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--c .1", "no acceptance: expected one of --alpha, --survival, --tau, or --report, a report"),
        ("--alpha .7", "--c is missing"),
        ("--alpha .7 --tau 3 --k 5 --c .1", "--alpha and --tau both say the acceptance"),
        ("--alpha 1.2 --c .1", "alpha: found 1.2"),
        ("--alpha nan --c .1", "alpha: found nan"),
        ("--alpha .7 --c -1", "--c -1: expected a cost in plain decoding steps, from 0 to 1e+06"),
        ("--alpha .7 --c inf", "--c inf: expected a cost"),
        ("--alpha .7 --c nan", "--c nan: expected a cost"),
        ("--alpha .7 --c .1 --o -5", "--o -5: expected a cost"),
        ("--alpha .7 --c .1 --v nan", "--v nan: expected costs in plain decoding steps, each from 1e-06 to 1e+06"),
        ("--alpha .7 --c .1 --v 0", "--v 0: expected costs"),
        (
            "--alpha .7 --c .1 --k 1..99999999999",
            "--k: expected draft lengths from 1 to 64, for instance 5, 1,3,5 or 1..8 (found '1..99999999999')",
        ),
        ("--alpha .7 --c .1 --batch 8", "--batch 8: what a verification costs at that batch is not known"),
        ("--alpha .7 --c .1 --batch 0 --v 1", "--batch: expected whole numbers of at least 1"),
        ("--alpha .7 --c .1 --batch 1,2 --v 1", "--batch: expected one number (found 1,2)"),
        ("--alpha .7 --c .1 --k 0", "--k: expected draft lengths from 1"),
        ("--alpha .7 --c .1 --k 5..3", "--k: expected draft lengths"),
        ("--alpha .7 --c .1 --v 1,2", "--v 1,2: 2 costs for draft lengths up to 8"),
        ("--alpha .7 --c .1 --batch x --v 1", "--batch: expected whole numbers of at least 1"),
        ("--alpha .7 --c 1e308", "--c 1e+308: expected a cost"),
        ("--alpha .7 --c 0 --v 1e-320", "--v 9.99989e-321: expected costs"),
        ("--alpha .7 --c .1 --k ''", "--k: expected draft lengths from 1"),
        ("--survival .5,.6 --c .1", "multiplied up"),
        ("--survival .5,x --c .1", "--survival: expected numbers with commas, for instance 0,0.7 (found '.5,x')"),
        ("--survival .5,.4 --c .1 --k 3", "--k 3: survival is known up to 2"),
        ("--tau 3.5 --c .1", "--tau: give the draft length that it was measured at"),
        ("--tau 7 --k 5 --c .1", "--tau 7: a round of k=5 commits at most 6 tokens"),
        ("--tau .7 --k 5 --c .1", "tokens per round: found 0.7"),
        ("--alpha .7 --c .1 --contender x", "--contender names one of a report"),
        ("--report none.json", "none.json: cannot be read"),
    ],
)
def test_mistakes_are_named(plan, arguments, message):
    assert message in plan(arguments, code=2)


# --- measured ones ------------------------------------------------------------------------------------------------


def test_a_report_gives_what_was_measured(plan, report):
    found = json.loads(plan(f"--report {report} --json"))
    sampler = json.loads(report.read_text())["samplers"][0]
    best = sampler["verdict"]["overall"]["best"]["contender"]
    numbers = next(c for c in sampler["contenders"] if c["contender"] == best)["pooled"]
    assert found["contender"] == best
    assert found["c"] == pytest.approx(numbers["cost"]["draft_cost_per_round"] / int(best[-1]))
    last = found["rows"][-1]
    assert last["round_cost"] == pytest.approx(numbers["cost"]["break_even_tokens_per_round"])
    assert last["speedup"] == pytest.approx(numbers["speedup"]["decode"]["value"], rel=0.05)


def test_what_is_given_takes_the_place_of_what_was_measured(plan, report):
    first, other = (json.loads(plan(f"--report {report} --contender 'eagle3 k=5' --json {more}"))
                    for more in ("", "--c .01 --o 0 --alpha .9 --k 5"))  # fmt: skip
    assert len(first["rows"]) == 5
    (row,) = other["rows"]
    assert row["tokens_per_round"] == pytest.approx(expected_tokens(0.9, 5))
    assert row["round_cost"] == pytest.approx(0.05 + first["v"][5])


def test_a_batch_of_a_report_has_its_own_costs(plan, report):
    found = json.loads(plan(f"--report {report} --contender 'eagle3 k=5' --batch 4 --json"))
    step = round_s("plain", 4)
    assert [found["v"][k] for k in (0, 3, 5)] == pytest.approx([forward(4, k + 1) / step for k in (0, 3, 5)])
    assert found["rows"][4]["round_cost"] == pytest.approx(5 * found["c"] + (forward(4, 6) + OVER) / step)
    assert found["c"] == pytest.approx(DRAFT / step, rel=0.05)  # near the budget fewer tokens are drafted


def test_a_report_without_batches_is_of_single_requests(plan, simulator, tmp_path):
    samples = simulator.samples({"desk": {"eagle3": 0.7, "ngram": 0.3}}, conversations=12)
    write_json(tmp_path / "acceptance.json", summarise(samples, context=simulator.context))
    one, default = (
        json.loads(plan(f"--report {tmp_path}/acceptance.json --json {more}")) for more in ("--batch 1", "")
    )
    assert one == default | {"batch": 1}
    assert "it was measured without batches" in plan(f"--report {tmp_path}/acceptance.json --batch 2", code=2)


def test_lengths_beyond_those_measured_are_said_to_be_guessed(plan, report):
    found = json.loads(plan(f"--report {report} --contender 'eagle3 k=3' --alpha .9 --k 1..9 --json"))
    assert found["notes"] == ["v was measured up to k=5, and is taken to stay what it is there; give --v to change it"]
    assert not json.loads(plan(f"--report {report} --contender 'eagle3 k=3' --alpha .9 --k 1..5 --json"))["notes"]


def test_a_report_of_another_version_is_to_be_measured_again(plan, report, tmp_path):
    older = json.loads(report.read_text())
    del older["load"]["rows"][0]["rounds_by_running"]
    write_json(tmp_path / "older.json", older)
    message = plan(f"--report {tmp_path}/older.json", code=2)
    assert "key load.rows[0].rounds_by_running is missing; it is of another version: evaluate again" in message


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--batch 8 --contender 'eagle3 k=3'", "--batch 8: .*eagle3 k=3 was measured at 1, 4, 16; evaluate with"),
        ("--contender medusa", "'medusa' is no chain of this report; found ngram k=5, eagle3 k=3, eagle3 k=5"),
        ("--contender 'eagle3 k=3' --k 4", "survival is known up to 3"),
    ],
)
def test_what_a_report_does_not_hold_is_named(plan, report, more, message):
    assert re.search(message, plan(f"--report {report} {more}", code=2))
