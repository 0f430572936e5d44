"""Reports side by side: what was measured alike is shown together, anything else is refused by name."""

import copy
import csv
import json
import re

import pytest
from complete import complete, without_sampler
from pages import read
from simulator import clocked

from spectrain import cli
from spectrain.errors import SpectrainError
from spectrain.evaluation.side_by_side import render_side_by_side
from spectrain.evaluation.summary import summarise
from spectrain.evaluation.wording import interval
from spectrain.files import write_json

KINDS = {"desk": {"eagle3": 0.8, "ngram": 0.5}, "chat": {"eagle3": 0.3, "ngram": 0.2}}


@pytest.fixture(scope="module")
def samples(simulator):
    return [*simulator.samples(KINDS, conversations=6), *simulator.samples(KINDS, conversations=6, temperature=1.0)]


@pytest.fixture(scope="module")
def measured(simulator):
    """Samples → their document."""
    rows = [
        simulator.forced_row(drafter="eagle3", prefixes="T=1", temperature=t, alpha=a) for t, a in ((0, 0.4), (1, 0.6))
    ]
    context = simulator.context | {"teacher_forced": rows}
    return lambda samples: complete(summarise(samples, context=context))


@pytest.fixture(scope="module")
def document(measured, samples):
    return measured(samples)


@pytest.fixture
def write(document, tmp_path):
    def write(name, change=lambda d: None, document=document):
        changed = copy.deepcopy(document)
        changed = change(changed) or changed
        path = tmp_path / name / "acceptance.json"
        path.parent.mkdir(exist_ok=True)
        write_json(path, changed)
        return path

    return write


def pooled(document, name):
    return next(c["pooled"] for c in document["samplers"][0]["contenders"] if c["contender"] == name)


def test_both_reports_stand_in_every_table_of_every_form(write, tmp_path, measured, samples):
    faster = measured(clocked(samples, 0.7, contender="eagle3 k=3"))
    first = write("a")
    second = write("b", lambda d: d["context"]["versions"].update(torch="9.9"), faster)
    speedup = interval(pooled(faster, "eagle3 k=3")["speedup"]["decode"])
    markdown, page, table = render_side_by_side([first, second], tmp_path / "out")
    text, html = markdown.read_text(encoding="utf-8"), read(page.read_text(encoding="utf-8"))
    for shown in (text, html):
        assert speedup in shown
        assert "torch is 2.13.0 in a, 9.9 in b." in shown
        assert "0.600 (0.550–0.650)" in shown  # α at the sampler's own temperature
        assert "0.400" not in shown
    assert f"| eagle3 k=3 | b | {speedup} |" in text
    assert f"| eagle3 k=3 | a | {speedup} |" not in text
    assert "| kind | a | b |" in text
    assert html.count("<svg") == 2
    assert not re.search(r"<(script|link|img|iframe|object)\b|\bsrc=|@import|url\((?!#)|http", html)
    rows = list(csv.DictReader(table.open(encoding="utf-8")))
    assert {row["report"] for row in rows} == {str(first), str(second)}


def test_the_top_table_is_about_the_trained_drafter(write, tmp_path, measured, simulator):
    """A report whose prompt lookup is fast does not make its drafter look so."""
    alphas = {"desk": {"eagle3": 0.1, "ngram": 0.9}}
    beaten = measured([s for t in (0.0, 1.0) for s in simulator.samples(alphas, conversations=12, temperature=t)])
    medusa = write("med", lambda d: d["context"]["drafter"].update(name="eagle3"), beaten)
    markdown, page, _ = render_side_by_side([medusa, write("none")], tmp_path / "out")
    verdicts = [block["verdict"] for block in beaten["samplers"]]
    rows = [line for line in markdown.read_text(encoding="utf-8").splitlines() if line.startswith("| med |")]
    for row, verdict in zip(rows, verdicts, strict=True):
        fastest, own = (v["overall"]["best"] for v in (verdict, verdict["by_drafter"]["eagle3"]))
        cells = [cell.strip() for cell in row.split("|")]
        assert cells[2].startswith("eagle3 k=")
        assert cells[3:6] == ["**Leave it off**", "–", interval(own["decode_speedup"])]
        assert cells[7:9] == ["slower than plain decoding", f"ngram k=5 {interval(fastest['decode_speedup'])}"]
    assert "fastest there" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda d: d["context"]["traffic"].update(digest="sha256:0"), "context.traffic.digest is 'sha256:5e1f'"),
        (lambda d: d["context"]["target"].update(name="other"), "context.target.name"),
        (lambda d: d["context"]["device"].update(name="GPU"), "context.device.name is '2-core CPU'"),
        (lambda d: d["context"]["device"].update(threads=8), "context.device.threads is 2"),
        (lambda d: d["context"].update(processes=5), "context.processes is "),
        (lambda d: d["context"]["device"].update(dtype="bfloat16"), "context.device.dtype"),
        (lambda d: d["context"].update(max_new_tokens=7), "context.max_new_tokens is 96"),
        (lambda d: without_sampler(d, 1), "sampler 'T=1'"),
        (lambda d: d["samplers"][0]["sampler"].update(top_k=5), r"sampler 'greedy \(T=0\)'"),
    ],
)
def test_what_was_not_measured_alike_is_refused_naming_the_first_difference_and_both_files(
    write, tmp_path, change, named
):
    first, second = write("a"), write("b", change)
    with pytest.raises(SpectrainError, match=named) as error:
        render_side_by_side([first, second], tmp_path / "out")
    assert str(first) in str(error.value)
    assert str(second) in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_target_is_its_weights_whatever_it_is_called(write, tmp_path):
    weigh = lambda name, weights: lambda d: d["context"]["target"].update(name=name, weights=weights)  # noqa: E731
    same = [write("a", weigh("a/model", "1")), write("b", weigh("copy", "1"))]
    assert len(render_side_by_side(same, tmp_path / "out")) == 3
    with pytest.raises(SpectrainError, match=r"context\.target\.weights is '1'"):
        render_side_by_side([same[0], write("c", weigh("a/model", "2"))], tmp_path / "out")


def test_a_device_that_was_not_equally_fast_is_noted(write, tmp_path, measured, samples):
    slow = measured(clocked(samples, 3.0))
    paths = [write("a"), write("b", document=slow), write("c", document=measured(clocked(samples, 0.999)))]
    markdown, *_ = render_side_by_side(paths, tmp_path / "out")
    assert " in c: the device" not in markdown.read_text(encoding="utf-8")
    rates = [
        interval(pooled(found, "plain")["tokens_per_second"], 1) for found in (json.loads(paths[0].read_text()), slow)
    ]
    noted = f"{rates[0]} tokens/s in a, {rates[1]} in b: the device was not equally fast"
    assert noted in markdown.read_text(encoding="utf-8")


def test_the_command_compares_documents_and_refuses_with_exit_code_2(write, tmp_path, capsys):
    first, second = write("a"), write("b")
    other = write("c", lambda d: d["context"]["traffic"].update(digest="x"))
    arguments = [str(first), str(second), "--output", str(tmp_path / "out")]
    assert cli.guarded(cli.compare, arguments, "compare") == 0
    assert capsys.readouterr().out.split() == [
        str(tmp_path / "out" / f"side_by_side.{e}") for e in ("md", "html", "csv")
    ]
    for given, message in (
        ([first, other], "not measured alike: context.traffic.digest"),
        ([first, first], "is given twice"),
        ([first], "give two acceptance documents or more"),
        ([first, tmp_path / "bundle"], "is no acceptance document (.json); give documents alone"),
    ):
        assert cli.guarded(cli.compare, [*map(str, given), "--output", str(tmp_path / "no")], "compare") == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
