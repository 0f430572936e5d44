"""Learning curves in the report of a comparison, from the document alone."""

import copy
import json

import pytest
from matplotlib.figure import Figure

import spectrain.evaluation.report as report
from spectrain.evaluation.learning import _draw, learning_curves, learning_plot, without_curve
from spectrain.evaluation.summary import summarise

POINTS = [
    {"seconds": 10.0, "step": 5, "answer_tokens": 1000, "tokens_per_round": 1.25, "alpha": 0.125},
    {"seconds": 20.0, "step": 10, "answer_tokens": None, "tokens_per_round": 2.5, "alpha": 0.5},
]
TRAINED = {"bytes": 1, "training": {"seconds": 20.0, "answer_tokens": 2000, "curve": POINTS}}


@pytest.fixture(scope="module")
def document(simulator):
    samples = simulator.samples({"desk": {"eagle3": 0.8, "ngram": 0.5}}, conversations=6)
    drafters = {"eagle3": TRAINED, "ngram": {"bytes": 0, "training": None}}
    return summarise(samples, context=simulator.context | {"drafters": drafters})


def test_curves_are_those_of_drafters_that_have_one(document):
    assert learning_curves(document["context"]) == [("eagle3", POINTS)]
    assert learning_curves({"drafters": {"a": {"training": {"curve": []}}, "b": None}}) == []
    assert learning_curves({}) == []
    assert learning_plot([]) is None


def test_a_line_a_drafter_with_a_legend():
    figure = Figure()
    _draw(figure, [("a", POINTS), ("b", POINTS[:1])])
    (axes,) = figure.axes
    assert [list(line.get_xdata()) for line in axes.lines] == [[10.0, 20.0], [10.0]]
    assert [list(line.get_ydata()) for line in axes.lines] == [[1.25, 2.5], [1.25]]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == 2


def test_the_page_shows_them(document):
    text, page = report.render_markdown(document), report.render_page(document)
    assert "<td>10</td><td>5</td><td>1,000</td><td>1.25</td><td>0.125</td>" in page
    assert "<td>20</td><td>10</td><td>–</td><td>2.50</td><td>0.500</td>" in page
    section = page[page.index("<h2>Learning curves</h2>") : page.index("<h2>How this was measured</h2>")]
    assert 'aria-label="Learning curves"' in section
    assert "<td>2.50</td><td>0.500</td>" in section
    for shown in (text, page):  # the curve is no setting; what else is known of the drafter is
        assert "tokens_per_round" not in shown
        assert "2000" in shown


@pytest.mark.parametrize("training", [None, {"seconds": 20.0, "answer_tokens": 2000}])
def test_documents_without_curves_say_nothing_of_them(document, training):
    older = copy.deepcopy(document)
    older["context"]["drafters"]["eagle3"]["training"] = training
    assert "Learning curves" not in report.render_markdown(older)
    assert "Learning curves" not in report.render_page(older)


def test_nothing_else_is_taken_from_what_is_known():
    assert without_curve(TRAINED) == {"bytes": 1, "training": {"seconds": 20.0, "answer_tokens": 2000}}
    assert without_curve({"training": None}) == {"training": None}
    assert "curve" in json.dumps(TRAINED)
