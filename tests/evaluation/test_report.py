"""The report: made from the JSON alone, self-contained, safe with any name, whole or not at all."""

import ast
import copy
import re
from pathlib import Path

import pytest
from matplotlib.text import Text

import spectrain.evaluation.report as report
from spectrain.errors import SpectrainError
from spectrain.evaluation.plots import cost_plot, sampler_plots
from spectrain.evaluation.summary import summarise
from spectrain.files import write_json

NASTY = '<script>alert("$x$")</script>|&\n#'
ALPHAS = {"desk": {"eagle3": 0.8, "ngram": 0.5}, "chat": {"eagle3": 0.3, "ngram": 0.2}}


@pytest.fixture(scope="module")
def document(simulator):
    samples = simulator.samples(ALPHAS, conversations=8) + simulator.samples(ALPHAS, conversations=8, temperature=1.0)
    samples[1] |= {"equal_to_plain": False, "first_difference": {"position": 3, "logit_gap": 2e-5}}
    forced = [
        simulator.forced_row(kind=kind, depth=depth, alpha=0.8 - 0.1 * depth) for kind in ALPHAS for depth in (1, 2, 3)
    ]
    return summarise(samples, context=simulator.context | {"teacher_forced": forced})


@pytest.fixture(scope="module")
def written(document, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    write_json(folder / "acceptance.json", document)
    return report.render_report(folder / "acceptance.json", folder / "out")


@pytest.fixture(scope="module")
def page(written):
    return next(path for path in written if path.suffix == ".html").read_text(encoding="utf-8")


def test_files_are_written_from_the_json(document, written):
    folder = written[0].parent
    assert {path.name for path in folder.iterdir()} == {"report.html", "report.md", "report.png"}
    assert {path.name for path in written} == {path.name for path in folder.iterdir()}
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "report.md").read_text(encoding="utf-8") == report.render_markdown(document)


def test_both_forms_hold_the_numbers_of_the_document(document, page):
    for text in (report.render_markdown(document), page):
        for contender in document["samplers"][0]["contenders"][1:]:
            speedup = contender["pooled"]["speedup"]["decode"]
            assert f"{speedup['value']:.2f} ({speedup['low']:.2f}–{speedup['high']:.2f})" in text
            assert f"{contender['pooled']['accepted_prefix']['mean']:.2f}" in text
        assert "slower than plain decoding" in text
        assert "2-core CPU, 2 threads, float32" in text
        assert "torch" in text
        assert "5e1f" in text


def test_verdict_is_a_sentence(document):
    overall = document["samplers"][0]["verdict"]["overall"]
    text = report.render_markdown(document)
    best = overall["best"]
    assert f"{best['contender']} decodes {best['decode_speedup']['value']:.2f} times as fast as plain decoding" in text
    assert "on for desk (eagle3 k=5" in text
    assert "off for chat" in text


def test_page_is_self_contained(page):
    assert "http" not in page
    assert not re.search(r"<(script|link|img|iframe|object)\b|\bsrc=|@import|url\((?!#)", page)
    assert page.count("<svg") == page.count("</svg>") == 2 * 7 + 1
    assert "prefers-color-scheme: dark" in page


def test_every_id_is_unique_and_every_reference_resolves(page):
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(set(ids)) == len(ids)
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', page)) <= set(ids)


def test_plots_take_their_colours_from_the_page(page):
    body = page[page.index("<body>") :]
    assert "var(--series-1)" in body
    assert "currentColor" in body
    assert not re.search(r"#010[0-9a-f]{3}", body)


def test_names_cannot_break_out(document):
    nasty = copy.deepcopy(document)
    del nasty["samplers"][1]
    for block in nasty["samplers"]:
        block["kinds"] = [NASTY if kind == "chat" else kind for kind in block["kinds"]]
        for holder in [c["by_kind"] for c in block["contenders"]] + [block["verdict"]["by_kind"]]:
            holder[NASTY] = holder.pop("chat")
        for contender in block["contenders"]:
            contender["contender"] = contender["contender"].replace("ngram", NASTY)
    nasty["context"]["traffic"]["name"] = nasty["context"]["extra"] = NASTY
    page, text = report.render_page(nasty), report.render_markdown(nasty)
    assert "<script" not in page
    assert "<script" not in text
    tables = [line for line in text.splitlines() if line.startswith("| ") and "alert" in line]
    assert tables
    assert all(line.endswith("|") for line in tables)


def test_plots_are_deterministic(document, page):
    plots = sampler_plots(copy.deepcopy(document["samplers"][1]), "s1")
    assert all(plot.svg in page for plot in plots)


def test_one_conversation_and_plain_alone_still_render(simulator, tmp_path):
    single = summarise(simulator.samples({"desk": {"eagle3": 0.8}}, conversations=1), context=simulator.context)
    assert "no interval" in report.render_page(single)
    assert report.render_picture(single, tmp_path / "one.png").stat().st_size > 1000
    alone = summarise(simulator.samples({"desk": {}}, conversations=6), context=simulator.context)
    assert "no drafter was measured" in report.render_markdown(alone)
    assert "no drafter was measured" in report.render_page(alone)
    assert report.render_picture(alone, tmp_path / "none.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema="spectrain.acceptance/3"), "spectrain.acceptance/4"),
        (lambda d: d["context"]["device"].pop("threads"), r"context\.device\.threads"),
        (
            lambda d: d["samplers"][1]["contenders"][2]["by_kind"]["chat"].pop("tokens_per_round"),
            r"samplers\[1\]\.contenders\[2\]\.by_kind\.chat\.tokens_per_round",
        ),
        (lambda d: d["samplers"][0]["verdict"].update(overall=None), r"samplers\[0\]\.verdict\.overall"),
        (lambda d: d["samplers"].clear(), "samplers is empty"),
    ],
)
def test_broken_documents_are_named_and_nothing_is_written(document, tmp_path, change, message):
    broken = copy.deepcopy(document)
    change(broken)
    write_json(tmp_path / "acceptance.json", broken)
    with pytest.raises(SpectrainError, match=message) as error:
        report.render_report(tmp_path / "acceptance.json", tmp_path / "out")
    assert "acceptance.json" in str(error.value)
    assert not (tmp_path / "out").exists()


def test_missing_and_unreadable_files_are_named(tmp_path):
    with pytest.raises(SpectrainError, match=r"none\.json"):
        report.render_report(tmp_path / "none.json", tmp_path)
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(SpectrainError, match="not JSON"):
        report.render_report(tmp_path / "bad.json", tmp_path)


def test_the_report_computes_nothing():
    """It may import errors, files and its own pages, and those no more than that."""
    allowed = {"spectrain.errors", "spectrain.files"}
    own = {f"spectrain.evaluation.{name}" for name in ("document", "learning", "picture", "plots", "svg", "wording")}
    folder = Path(report.__file__).parent
    for name in ("report", "document", "learning", "picture", "plots", "svg", "wording"):
        tree = ast.parse((folder / f"{name}.py").read_text(encoding="utf-8"))
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
        imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert {module for module in imported if module.startswith("spectrain")} <= allowed | own, name
        assert "torch" not in imported


@pytest.fixture(scope="module")
def wide(simulator):
    """A document with a tree and with a lossy contender whose outputs all differ."""
    samples = simulator.samples({"desk": {"eagle3": 0.7}}, conversations=8, more=(simulator.tree, simulator.lossy))
    samples += simulator.samples({"desk": {"eagle3": 0.7}}, conversations=8, temperature=1.0, more=(simulator.lossy,))
    for found in samples:
        if found["lossy"] and found["temperature"] == 0:
            found |= {"equal_to_plain": False, "first_difference": {"position": 3, "logit_gap": 4.0}}
    return summarise(samples, context=simulator.context)


def test_lossy_contenders_are_called_so_in_every_table_and_plot_and_are_red(wide, simulator):
    page, text = report.render_page(wide), report.render_markdown(wide)
    name = simulator.lossy
    assert "LOSSY" in name
    body = page[page.index("<main>") :]
    cells = re.findall(rf'<(th scope="row"|b|summary)>([^\n]*?{re.escape(name)})', body)
    assert len(cells) > 12
    assert {before.removesuffix(name) for _, before in cells} == {'<span class="lossy">'}
    assert ".lossy { color: var(--lossy)" in page
    labels = re.findall(rf"<text ([^>]*)>{re.escape(name)}</text>", body)
    assert len(labels) == 6 + 1 + 6 + 1  # every plot of contenders names it, at either temperature
    assert all("fill: var(--lossy)" in style for style in labels)
    others = re.findall(r"<text ([^>]*)>eagle3 k=5</text>", body)
    assert others
    assert not any("lossy" in style for style in others)
    assert "#010103" not in page
    tables = [line for line in text.splitlines() if line.startswith("| eagle3 k=5")]
    assert any(line.startswith(f"| {name} |") for line in tables)


def test_the_report_says_which_contenders_have_the_targets_law(wide, simulator):
    greedy = f"Exact in law, whatever is drafted: eagle3 k=3, eagle3 k=5, {simulator.tree}."
    sampled = "Exact in law, whatever is drafted: eagle3 k=3, eagle3 k=5."
    lossy = f"Not exact: {simulator.lossy} has another law than the target's, and no part in the verdict."
    text = report.render_markdown(wide)
    for page in (text, report.render_page(wide).replace("&#39;", "'")):
        assert f"{greedy} {lossy}" in page
        assert f"{sampled} {lossy}" in page  # where nothing can be compared token by token, too
    assert f"| {simulator.lossy} | 8 | 0 | 0 | 8 |" in text
    assert "not exact:" not in text
    best = wide["samplers"][0]["verdict"]["overall"]["best"]["contender"]
    assert best != simulator.lossy


def test_a_verdict_on_a_changed_target_says_whose_law_it_keeps(wide, simulator, monkeypatch, tmp_path):
    document = copy.deepcopy(wide)
    document["context"]["target"]["derived_from"] = {"name": "original", "weights": "0"}
    verdict, own = document["samplers"][0]["verdict"]["overall"], "the bundle's own, changed target"
    verdict |= {"decision": "on", "contender": "eagle3 k=3"}
    titles = []
    monkeypatch.setattr(report, "draw_picture", lambda block, title, words, file: titles.append(words))
    report.render_picture(document, tmp_path / "a.png")
    assert titles == [f"Turn it on: eagle3 k=3, with {own}"]
    for page in (report.render_markdown(document), report.render_page(document).replace("&#39;", "'")):
        assert titles[0] in page
        assert f"as fast as plain decoding of {own} (" in page
        law = f"Exact in the law of {own}, which is not the original's: eagle3 k=3, eagle3 k=5, {simulator.tree}."
        assert law in page
        assert "Exact in law, whatever" not in page


def test_a_tree_has_rows_of_its_own_with_depth_and_nodes(wide, simulator):
    text, page = report.render_markdown(wide), report.render_page(wide)
    contender = next(c for c in wide["samplers"][0]["contenders"] if c["contender"] == simulator.tree)
    cost = contender["pooled"]["cost"]
    assert f"| {simulator.tree} | 5.00 | 15.00 | – | {cost['draft_cost_per_round']:.3f} |" in text
    assert f'<th scope="row">{simulator.tree}</th><td>5.00</td><td>15.00</td><td>–</td>' in page
    assert f"Drafting it costs {cost['draft_cost_per_round']:.2f} steps a round." in page
    plots = sampler_plots(wide["samplers"][0], "s")
    assert all(simulator.tree in plot.svg for plot in plots)
    drawn = cost_plot(wide["samplers"][0], "s")
    assert "eagle3 k=5" in drawn.svg
    assert simulator.tree not in drawn.svg  # it has no length to stand at


def test_a_document_of_trees_alone_has_no_plot_of_lengths(wide, simulator):
    block = copy.deepcopy(wide["samplers"][0])
    block["contenders"] = [c for c in block["contenders"] if c["contender"] in ("plain", simulator.tree)]
    assert cost_plot(block, "s") is None
    document = wide | {"samplers": [block]}
    assert "Cost model and measurement" not in report.render_page(document)
    assert "What a round costs" in report.render_page(document)


def test_the_picture_writes_a_lossy_name_in_red(wide, simulator, monkeypatch, tmp_path):
    colours = {}
    real = Text.set_color

    def set_color(text, colour):
        colours[text.get_text()] = colour
        real(text, colour)

    monkeypatch.setattr(Text, "set_color", set_color)
    report.render_picture(wide, tmp_path / "a.png")
    assert colours[simulator.lossy] == "#c00018"
    assert simulator.tree not in colours or colours[simulator.tree] != "#c00018"


def test_teacher_forced_rows_on_several_samplers_answers_are_told_apart(simulator):
    """One line a kind in the plot, of the first sampler's answers; the tables name whose answers they were."""
    rows = [
        simulator.forced_row(drafter="eagle3", prefixes=prefixes, kind="desk", depth=depth, alpha=alpha)
        for prefixes, alpha in (("greedy (T=0)", 0.75), ("T=1", 0.25))
        for depth in (0, 1)
    ]
    context = simulator.context | {"teacher_forced": rows}
    document = summarise(simulator.samples({"desk": {"eagle3": 0.8}}), context=context)
    alone = summarise(simulator.samples({"desk": {"eagle3": 0.8}}), context=context | {"teacher_forced": rows[:2]})
    assert report._alpha_plot(document).svg == report._alpha_plot(alone).svg
    for text in (report.render_markdown(document), report.render_page(document)):
        assert "answers by" in text
        assert text.count("0.750") == text.count("0.250") == 2
