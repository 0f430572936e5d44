"""Reports side by side: what was measured alike is shown together, anything else is refused by name."""

import copy
import csv
import re

import pytest
from complete import complete

from spectrain import cli
from spectrain.errors import SpectrainError
from spectrain.evaluation.side_by_side import render_side_by_side
from spectrain.evaluation.summary import summarise
from spectrain.files import write_json

KINDS = {"desk": {"eagle3": 0.8, "ngram": 0.5}, "chat": {"eagle3": 0.3, "ngram": 0.2}}


@pytest.fixture(scope="module")
def document(simulator):
    samples = [*simulator.samples(KINDS, conversations=6), *simulator.samples(KINDS, conversations=6, temperature=1.0)]
    rows = [
        simulator.forced_row(drafter="eagle3", prefixes="T=1", temperature=t, alpha=a) for t, a in ((0, 0.4), (1, 0.6))
    ]
    return complete(summarise(samples, context=simulator.context | {"teacher_forced": rows}))


@pytest.fixture
def write(document, tmp_path):
    def write(name, change=lambda d: None):
        changed = copy.deepcopy(document)
        change(changed)
        path = tmp_path / name / "acceptance.json"
        path.parent.mkdir(exist_ok=True)
        write_json(path, changed)
        return path

    return write


def faster(document):
    for block in document["samplers"]:
        for contender in block["contenders"]:
            if contender["contender"] == "eagle3 k=3":
                contender["pooled"]["speedup"]["decode"] = {"value": 3.25, "low": 3.0, "high": 3.5}
    document["context"]["versions"]["torch"] = "9.9"


def test_both_reports_stand_in_every_table_of_every_form(write, tmp_path):
    first, second = write("a"), write("b", faster)
    markdown, page, table = render_side_by_side([first, second], tmp_path / "out")
    text, html = markdown.read_text(encoding="utf-8"), page.read_text(encoding="utf-8")
    for shown in (text, html):
        assert "3.25 (3.00–3.50)" in shown
        assert "torch is 2.13.0 in a, 9.9 in b." in shown
        assert "0.600 (0.550–0.650)" in shown  # α at the sampler's own temperature
        assert "0.400" not in shown
    assert re.search(r"\| eagle3 k=3 \| b \| 3\.25", text)
    assert "| kind | a | b |" in text
    assert html.count("<svg") == 2
    assert not re.search(r"<(script|link|img|iframe|object)\b|\bsrc=|@import|url\((?!#)|http", html)
    rows = list(csv.DictReader(table.open(encoding="utf-8")))
    assert {row["report"] for row in rows} == {str(first), str(second)}


def test_the_top_table_is_about_the_trained_drafter(write, tmp_path):
    """A report whose prompt lookup is fast does not make its drafter look so."""

    def beaten(document):
        document["context"]["drafter"]["name"] = "eagle3"
        for block in document["samplers"]:
            verdict = block["verdict"]
            verdict["overall"] = copy.deepcopy(verdict["by_drafter"]["ngram"]["overall"])
            verdict["overall"]["best"]["decode_speedup"] = {"value": 1.06, "low": 1.01, "high": 1.11}
            own = verdict["by_drafter"]["eagle3"]["overall"]
            own |= {"decision": "off", "contender": None, "k": 0, "reason": "slower than plain decoding"}
            own["best"]["decode_speedup"] = {"value": 0.72, "low": 0.7, "high": 0.75}

    markdown, page, _ = render_side_by_side([write("med", beaten), write("none")], tmp_path / "out")
    rows = [line for line in markdown.read_text(encoding="utf-8").splitlines() if line.startswith("| med |")]
    for row in rows:
        cells = [cell.strip() for cell in row.split("|")]
        assert cells[2].startswith("eagle3 k=")
        assert cells[3:6] == ["**Leave it off**", "–", "0.72 (0.70–0.75)"]
        assert cells[7:9] == ["slower than plain decoding", "ngram k=5 1.06 (1.01–1.11)"]
    assert len(rows) == 2
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
        (lambda d: d["samplers"].pop(), "sampler 'T=1'"),
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


def test_a_device_that_was_not_equally_fast_is_noted(write, tmp_path):
    def plain(value):
        found = {"value": value, "low": value - 0.1, "high": value + 0.1}
        return lambda d: d["samplers"][0]["contenders"][0]["pooled"].update(tokens_per_second=found)

    paths = [write("a", plain(15.0)), write("b", plain(5.0)), write("c", plain(15.1))]
    markdown, *_ = render_side_by_side(paths, tmp_path / "out")
    assert " in c: the device" not in markdown.read_text(encoding="utf-8")
    noted = "15.0 (14.9–15.1) tokens/s in a, 5.0 (4.9–5.1) in b: the device was not equally fast"
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
