"""A document that contradicts itself is refused by name, whatever is wrong with it; what is not is harmless."""

import copy
import json
import math
import re

import pytest
from complete import complete
from known_server import line, load_of

from spectrain.errors import SpectrainError
from spectrain.evaluation import report
from spectrain.evaluation.csv_tables import acceptance_csv
from spectrain.evaluation.document import check_document, read_document
from spectrain.evaluation.profile import speculation_profile
from spectrain.evaluation.summary import summarise

ALPHAS = {"desk": {"eagle3": 0.8}}


@pytest.fixture(scope="module")
def document(simulator):
    samples = [s for t in (0.0, 1.0) for s in simulator.samples(ALPHAS, conversations=8, temperature=t)]
    context = simulator.context | {
        "teacher_forced": [simulator.forced_row(drafter="eagle3", prefixes="T=1")],
        "drafters": {"eagle3": {"bytes": 5, "training": None}},
        "load": load_of([line(1), line(4)], sampler="greedy (T=0)"),
        "request_rates": [0.5],
    }
    return json.loads(json.dumps(complete(summarise(samples, context=context))))


@pytest.fixture
def broken(document):
    return copy.deepcopy(document)


def places(value, path=()):
    """The numbers of a document; of the items of a list the last one's, which stands for all."""
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list) and value:
        yield from places(value[-1], (*path, len(value) - 1))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path


def written(path):
    return re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", ".".join(map(str, path)))


def named(message, path):
    """Whether a message names a place, or what holds it, or a place beside it that it must agree with."""
    return written(path[:2]) in message or path[0] in message or "contradicts itself" in message


def refusal(document):
    try:
        check_document(document)
    except SpectrainError as error:
        return str(error)
    return None


def read(document):
    """What every reader makes of it."""
    report.render_markdown(document)
    acceptance_csv(document)
    json.dumps(speculation_profile(document), allow_nan=False)


FAULTS = {
    "negative": lambda number: -abs(number) - 1,
    "not a number": lambda number: math.nan,
    "null": lambda number: None,
    "text": lambda number: "x",
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_number_is_wrong_it_is_refused_by_name_or_harmless(document, broken, fault):
    accepted, found = [], list(places(document))
    assert len(found) > 300
    for path in found:
        holder = broken
        for key in path[:-1]:
            holder = holder[key]
        number = holder[path[-1]]
        holder[path[-1]] = FAULTS[fault](number)
        message = refusal(broken)
        if message is None:
            if path[-1] not in [other[-1] for other in accepted]:
                read(broken)
            accepted.append(path)
        else:
            assert named(message, path), (path, message)
        holder[path[-1]] = number
    assert broken == document
    if fault == "null":  # where the shape allows it
        return
    free = {path for path in accepted if path[0] == "context" or path[-1] in UNSHAPED or "shares" in path}
    assert {path[-1] for path in set(accepted) - free} <= (SIGNED if fault == "negative" else set())
    assert not accepted or fault != "not a number"


UNSHAPED = {"plain_step_ms", "greedy_conditional", "top_k", "top_p"}  # written for people; nothing reads them
SIGNED = {"unaccounted", "floor_s", "seconds_per_row"}


def one(document):
    """A contender that drafts: its numbers."""
    return document["samplers"][0]["contenders"][2]["pooled"]


def overall(document):
    return document["samplers"][0]["verdict"]["overall"]


def swap(found):
    found["low"], found["high"] = found["high"], found["low"]


def rename(name):
    return lambda d: overall(d).update(contender=name, best=overall(d)["best"] | {"contender": name})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: one(d)["seconds"].update(draft=-1.0), r"contenders\[2\]\.pooled\.seconds\.draft is -1\.0, expected"),
        (lambda d: one(d)["tokens_per_round"].update(value=None), r"pooled\.tokens_per_round\.value is None, expected"),
        (lambda d: one(d)["tokens_per_round"].update(value=9.0), r"pooled\.tokens_per_round is .* does not hold it"),
        (lambda d: swap(one(d)["tokens_per_round"]), r"pooled\.tokens_per_round is .* does not hold it"),
        (lambda d: swap(d["load"]["rows"][-1]["speedup"]), r"load\.rows\[\d\]\.speedup is .* does not hold it"),
        (lambda d: one(d)["tokens_per_round"].update(low=None), "with both ends or with none"),
        (lambda d: one(d).update(accepted_draft_tokens=10**6), r"pooled\.accepted_draft_tokens is 1000000, but"),
        (lambda d: one(d).update(decoded=10**6), r"pooled\.decoded is 1000000, but"),
        (lambda d: one(d)["accepted_prefix"]["histogram"].append(3), r"pooled\.accepted_prefix\.histogram is \d+, but"),
        (
            lambda d: one(d)["conditional_acceptance"][0].update(accepted=10**6),
            r"conditional_acceptance\[0\]\.accepted",
        ),
        (lambda d: one(d)["marginal_survival"].pop(), "marginal_survival has a length that is 4, but"),
        (lambda d: one(d).update(rounds=0, clipped_rounds=0), "pooled.rounds leaves 0"),
        (lambda d: one(d)["latency_ms"].update(token_p95=0.0), r"latency_ms\.token_p50 is"),
        (lambda d: one(d)["speedup"].update(decode={"value": 9.0, "low": 8.0, "high": 9.5}), "(best|cost|pooled)"),
        (lambda d: one(d).update(speedup=None), r"pooled\.speedup \(whether it is there\) is False"),
        (
            lambda d: d["samplers"][0]["contenders"].append(d["samplers"][0]["contenders"][1]),
            "'eagle3 k=3' is there twice",
        ),
        (lambda d: d["samplers"].append(d["samplers"][0]), "samplers: 'greedy .T=0.' is there twice"),
        (lambda d: d["samplers"][0]["contenders"].pop(0), "of which one is plain decoding"),
        (lambda d: overall(d).update(decision="perhaps"), r"decision is 'perhaps', expected 'on' or 'off'"),
        (rename("medusa"), r"verdict\.overall\.best\.contender is 'medusa', which was not measured; found"),
        (lambda d: overall(d).update(contender="medusa"), r"verdict\.overall\.contender is 'medusa', but"),
        (lambda d: overall(d).update(adjusted={"value": 1.1, "low": 0.9, "high": 1.3}), "is not above 1"),
        (lambda d: overall(d)["best"].update(conversations=99), r"verdict\.overall\.best\.conversations is 99"),
        (lambda d: d["samplers"][0]["leaderboard"]["ranked"].pop(), "leaderboard has contenders that"),
        (lambda d: d["samplers"][0]["exactness"][0].update(equal=0), r"exactness\[0\]\.compared"),
        (lambda d: d["samplers"][1]["distribution"][0].update(tokens=1), r"distribution\[0\]\.tokens is 1"),
        (lambda d: d["samplers"][0]["contenders"][1].update(k=4), r"contenders\[1\]\.k is 4, but its shape has 3"),
        (lambda d: d["samplers"][0]["contenders"][1].update(lossy=True), "must be called LOSSY"),
        (lambda d: d["load"]["rows"].append(d["load"]["rows"][0]), "'plain at batch 1' is there twice"),
        (lambda d: d["load"]["rows"].pop(), "load.rows of eagle3 k=5 have batches that"),
        (lambda d: d["load"]["rows"][-1].update(contender="x"), r"load\.rows\[5\]\.contender is 'x', which was not"),
        (
            lambda d: d["load"]["rows"][0].update(batch=0),
            r"load\.rows\[0\]\.batch is 0, expected integer of at least 1",
        ),
        (lambda d: d["cost_model"]["chains"][0].update(contender="x"), r"chains\[0\]\.contender is 'x', which was not"),
        (lambda d: d["cost_model"]["chains"][0].update(predicted=7.0), r"chains\[0\]\.predicted is 7\.0, but"),
        (lambda d: d["calibration"][0].update(positions=1), r"calibration\[0\]\.positions is 1, but its bins"),
        (lambda d: d["context"].update(note=10**400), r"context\.note is too large"),
    ],
)
def test_what_cannot_be_is_named(document, broken, change, message):
    check_document(document)
    change(broken)
    with pytest.raises(SpectrainError, match=message):
        check_document(broken)


def test_a_file_with_a_number_beyond_all_bounds_is_refused(document, broken, tmp_path):
    one(broken)["seconds"]["total"] = 12345.5
    text = json.dumps(broken).replace("12345.5", "1e999")
    (tmp_path / "acceptance.json").write_text(text)
    with pytest.raises(SpectrainError, match=r"acceptance\.json: .*pooled\.seconds\.total is inf, expected number"):
        read_document(tmp_path / "acceptance.json")
