"""The report: made from the JSON alone, self-contained, safe with any name, whole or not at all."""

import ast
import copy
import json
import re
from pathlib import Path

import pytest
from complete import complete, without_sampler
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.text import Text
from pages import read

import spectrain.evaluation.report as report
from spectrain.errors import SpectrainError
from spectrain.evaluation.acceptance_plots import alpha_plots, draw_survival, law_plot, visited_plot
from spectrain.evaluation.axes import styled
from spectrain.evaluation.load_plots import load_plots
from spectrain.evaluation.plots import cost_plot, sampler_plots
from spectrain.evaluation.summary import summarise
from spectrain.evaluation.svg import INK
from spectrain.evaluation.wording import interval, kind_sentence, law_test_sentence
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
    context = simulator.context | {"teacher_forced": forced}
    context["traffic"] = context["traffic"] | {"chose_the_step": True}
    return complete(summarise(samples, context=context))


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
    reports = {"report.html", "report.md", "report.png", "acceptance.csv", "speculation_profile.json"}
    assert {path.name for path in folder.iterdir()} == reports
    assert {path.name for path in written} == {path.name for path in folder.iterdir()}
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "report.md").read_text(encoding="utf-8") == report.render_markdown(document)


def test_both_forms_hold_the_numbers_of_the_document(document, page):
    for text in (report.render_markdown(document), read(page)):
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
    assert page.count("<svg") == page.count("</svg>") == 2 * (7 + 1) + 2 + 2 + 2 + 1
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


def test_names_cannot_break_out(simulator):
    samples = simulator.samples({"desk": ALPHAS["desk"], NASTY: ALPHAS["chat"]}, conversations=8)
    for sample in samples:
        for key in ("contender", "drafter"):
            sample[key] = sample[key].replace("ngram", NASTY)
    traffic = simulator.context["traffic"] | {"name": NASTY}
    nasty = complete(summarise(samples, context=simulator.context | {"traffic": traffic, "extra": NASTY}))
    for block in nasty["samplers"]:
        assert NASTY in block["kinds"]
        assert f"{NASTY} k=5" in [contender["contender"] for contender in block["contenders"]]
    page, text = report.render_page(nasty), report.render_markdown(nasty)
    assert "<script" not in page
    assert "<script" not in text
    tables = [line for line in text.splitlines() if line.startswith("| ") and "alert" in line]
    assert tables
    assert all(line.endswith("|") for line in tables)


def test_plots_are_deterministic(document, page):
    plots = sampler_plots(copy.deepcopy(document["samplers"][1]), "s1")
    assert all(plot.svg in page for plot in plots)


def plain_alone(document):
    """Nothing else was measured: no load, no law test."""
    document["samplers"][0]["verdict"]["overall"] |= {"up_to_batch": None, "would_change": "a drafter"}
    costs = {
        "chains": [],
        "largest_difference": {"single": None, "from_larger_k": None, "by_batch": None},
        "goodput": None,
    }
    return document | {"load": None, "cost_model": costs}


def test_one_conversation_and_plain_alone_still_render(simulator, tmp_path):
    single = complete(
        summarise(simulator.samples({"desk": {"eagle3": 0.8}}, conversations=1), context=simulator.context)
    )
    assert "no interval" in report.render_page(single)
    assert report.render_picture(single, tmp_path / "one.png").stat().st_size > 1000
    alone = plain_alone(summarise(simulator.samples({"desk": {}}, conversations=6), context=simulator.context))
    assert "no drafter of this target was measured" in report.render_markdown(alone)
    assert "no drafter of this target was measured" in report.render_page(alone)
    assert report.render_picture(alone, tmp_path / "none.png").stat().st_size > 1000


def numbers(document):
    return document["samplers"][0]["contenders"][1]["pooled"]


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
        (lambda d: numbers(d)["latency_ms"].update(token_p50="x"), r"latency_ms\.token_p50 is 'x', expected number"),
        (
            lambda d: numbers(d)["accepted_prefix"].update(histogram=[1, "x"]),
            r"histogram\[1\] is 'x', expected integer",
        ),
        (lambda d: d["context"]["versions"].update(torch=3), r"context\.versions\.torch is 3, expected string"),
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


@pytest.mark.parametrize(("p", "shown"), [(1.0, "= 1;"), (0.997, "= 1;"), (0.62, "≥ 0.62;")])
def test_a_probability_is_never_said_to_be_at_least_one(p, shown):
    test = {"contender": "a k=2", "lossy": False, "agrees": True, "adjusted_p_value": p, "detectable": 0.02}
    assert f"(adjusted p {shown}" in law_test_sentence([test])


@pytest.mark.parametrize(
    ("value", "low", "high", "shown"),
    [
        (1.44, 1.0031, 1.764, "1.44 (1.003–1.76)"),
        (0.9, 0.7, 0.99996, "0.90 (0.70–0.99996)"),
        (1.0041, 1.0022, 1.3, "1.004 (1.002–1.30)"),
        (1.0, 1.0, 1.0, "1.00 (1.00–1.00)"),
        (1.2, 1 + 1e-12, 1.4, "1.20 (1.00–1.40)"),
        (1.5, 1.006, 2.0, "1.50 (1.01–2.00)"),
    ],
)
def test_a_bound_beside_one_tells_on_which_side_it_lies(value, low, high, shown):
    assert interval({"value": value, "low": low, "high": high}) == shown


def test_rows_of_tables_are_whole_pixels_so_that_lines_of_the_fixed_column_do_not_break_off(page):
    """Browsers round the place of what sticks by itself; what is a sixteenth of a rem is a pixel."""
    rules = re.findall(r"(?:[{}]\s*)(?:table|th, td|td \.badge|th \.note) \{([^}]*)(?=\})", page)
    heights = [
        size
        for rule in rules
        for name, sizes in re.findall(r"(line-height|padding-block|padding): ([^;]*);", rule)
        for size in (sizes.split()[::2] if name == "padding" else sizes.split())
    ]
    assert len(heights) >= 8
    for height in heights:
        assert height.endswith("rem")
        assert (16 * float(height.removesuffix("rem"))).is_integer(), height


def test_missing_and_unreadable_files_are_named(tmp_path):
    with pytest.raises(SpectrainError, match=r"none\.json"):
        report.render_report(tmp_path / "none.json", tmp_path)
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(SpectrainError, match="not JSON"):
        report.render_report(tmp_path / "bad.json", tmp_path)


@pytest.mark.parametrize("constant", [float("nan"), float("inf")])
def test_what_is_no_number_is_refused(document, tmp_path, constant):
    broken = copy.deepcopy(document)
    broken["samplers"][0]["contenders"][1]["pooled"]["tokens_per_round"]["value"] = constant
    (tmp_path / "acceptance.json").write_text(json.dumps(broken))
    with pytest.raises(
        SpectrainError, match=r"acceptance.json: not JSON \(it holds (NaN|Infinity), which is no number"
    ):
        report.render_report(tmp_path / "acceptance.json", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_picture_that_cannot_be_drawn_leaves_nothing_behind(written, tmp_path, monkeypatch):
    def fails(*_):
        raise OSError("no space left")

    monkeypatch.setattr(report, "draw_picture", fails)
    with pytest.raises(OSError, match="no space left"):
        report.render_report(written[0].parent.parent / "acceptance.json", tmp_path / "out")
    assert not [path for path in (tmp_path / "out").glob("*") if path.is_file()]


def test_kinds_with_too_few_conversations_are_told_apart_from_those_where_it_does_not_pay():
    off = {"decision": "off", "reason": "slower than plain decoding"}
    few = {"decision": "off", "reason": "too few conversations: 6, at least 9 are needed"}
    assert kind_sentence({"a": off, "b": few, "c": off}) == (
        "By kind: off for a, c; off, too few conversations to tell, for b."
    )


def test_kinds_that_lie_in_one_are_told_apart():
    """Parents stand for what they hold, unless one holds everything."""
    off = {"decision": "off", "reason": "slower than plain decoding"}
    on = {"decision": "on", "best": {"contender": "d k=3", "decode_speedup": {"value": 2.0}}}
    nested = {"a": off, "a/b": off, "a/b/x": on, "a/b/y": off}
    assert kind_sentence(nested) == "By kind: on for a/b/x (d k=3, 2.00×); off for a/b/y."
    assert kind_sentence(nested | {"c": on}) == "By kind: on for c (d k=3, 2.00×); off for a."
    assert kind_sentence({"a": off, "a/b": on}) == kind_sentence({"a": off}) == ""


def test_the_report_computes_nothing():
    """It may import errors, files, its own pages and what checks documents, and those no more than that."""
    allowed = {"spectrain.errors", "spectrain.files"}
    names = {"acceptance_plots", "axes", "csv_tables", "document", "faults", "glossary", "kinds", "learning", "leaves",
             "load_plots", "picture", "plots", "profile", "report", "side_by_side", "svg", "view", "wording",
             "cautions", "consistency", "contradictions", "load_checks", "shape", "steadiness", "sums",
             "trained"}  # fmt: skip
    own = {f"spectrain.evaluation.{name}" for name in names}
    folder = Path(report.__file__).parent
    for name in names:
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
    return complete(summarise(samples, context=simulator.context))


@pytest.fixture(scope="module")
def paying(simulator):
    """A document whose verdict is on, with a tree and a lossy contender."""
    samples = simulator.samples({"desk": {"eagle3": 0.9}}, conversations=12, more=(simulator.tree, simulator.lossy))
    found = complete(summarise(samples, context=simulator.context))
    assert found["samplers"][0]["verdict"]["overall"]["decision"] == "on"
    return found


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
    # Every plot of contenders names it, at either temperature; the law test at one, and the load once.
    assert len(labels) == 2 * (6 + 1 + 1) + 1 + 1
    assert all("fill: var(--lossy)" in style for style in labels)
    others = re.findall(r"<text ([^>]*)>eagle3 k=5</text>", body)
    assert others
    assert not any("lossy" in style for style in others)
    assert "#010103" not in page
    assert f"\n| {name} |" in text


def test_the_report_says_which_contenders_have_the_targets_law(wide, simulator):
    greedy = f"Exact in law, whatever is drafted: eagle3 k=3, eagle3 k=5, {simulator.tree}."
    sampled = "Exact in law, whatever is drafted: eagle3 k=3, eagle3 k=5."
    lossy = f"Not exact: {simulator.lossy} has another law than the target's, and no part in the verdict."
    text = report.render_markdown(wide)
    for page in (text, report.render_page(wide).replace("&#39;", "'")):
        assert f"{greedy} {lossy}" in page
        assert f"{sampled} {lossy}" in page  # where nothing can be compared token by token, too
    assert f"{simulator.lossy} 0/8 (8 otherwise)." in text
    assert "not exact:" not in text
    best = wide["samplers"][0]["verdict"]["overall"]["best"]["contender"]
    assert best != simulator.lossy


def test_a_verdict_on_a_changed_target_says_whose_law_it_keeps(paying, simulator, monkeypatch, tmp_path):
    document = copy.deepcopy(paying)
    document["context"]["target"]["derived_from"] = {"name": "original", "weights": "0"}
    verdict, own = document["samplers"][0]["verdict"]["overall"], "the bundle's own, changed target"
    titles = []
    monkeypatch.setattr(report, "draw_picture", lambda block, title, words, file: titles.append(words))
    report.render_picture(document, tmp_path / "a.png")
    assert titles == [f"Turn it on: {verdict['contender']}, with {own}"]
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
    assert f"\n| {simulator.tree} |" in text
    assert f'<th scope="row">{simulator.tree}</th><td>5.00</td><td>15.00</td><td>–</td>' in page
    assert f"Drafting it costs {cost['draft_cost_per_round']:.2f} steps a round." in page
    plots = sampler_plots(wide["samplers"][0], "s")
    assert all(simulator.tree in plot.svg for plot in plots)
    drawn = cost_plot(wide["samplers"][0], "s")
    assert "eagle3 k=5" in drawn.svg
    assert simulator.tree not in drawn.svg  # it has no length to stand at


def test_a_document_of_trees_alone_has_no_plot_of_lengths(simulator):
    found = simulator.samples({"desk": {"eagle3": 0.7}}, conversations=8, more=(simulator.tree,))
    samples = [sample for sample in found if sample["contender"] in ("plain", simulator.tree)]
    document = summarise(samples, context=simulator.context)
    assert cost_plot(document["samplers"][0], "s") is None
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
    document = complete(summarise(simulator.samples({"desk": {"eagle3": 0.8}}), context=simulator.context))
    first, both = ([plot.svg for plot in alpha_plots(chosen)] for chosen in (rows[:2], rows))
    assert first == both
    page = read(report.render_page(document | {"teacher_forced": rows}))
    assert "answers by" in page
    assert page.count("0.750 (0.700–0.800)") == page.count("0.250 (0.200–0.300)") == 2


# --- what is there and what is not ------------------------------------------------------------------------------------


def test_an_interval_may_go_below_its_number_but_is_not_broken(document, page):
    """So that narrow columns are enough for both, on a phone."""
    speedup = document["samplers"][0]["contenders"][1]["pooled"]["speedup"]["decode"]
    value, low, high = (f"{speedup[key]:.2f}" for key in ("value", "low", "high"))
    assert f'<td>{value} <span class="bounds">({low}–{high})</span></td>' in page
    assert re.search(r"\.bounds \{ white-space: nowrap; \}", page)
    assert not re.search(r"\d \(\d+\.\d+–", re.sub(r"<p[ >].*?</p>|<li>.*?</li>", "", page, flags=re.DOTALL))


def headings(page):
    return re.findall(r"<h[23]>([^<]*)</h[23]>", page)


def test_every_section_is_there_where_it_was_measured(document, page):
    found = headings(page)
    sampled = found[found.index("T=1") :]
    for heading in ("Where decoding went", "Memory and energy", "How many conversations it takes", "Under load",
                    "By turn, prompt and place in the answer", "Cost model", "Goodput at a request rate",
                    "Acceptance without decoding", "Draft vocabulary"):  # fmt: skip
        assert heading in sampled, heading
    assert "Where decoding went" not in found[: found.index("T=1")]  # greedy decoding visits what it drafts
    assert "Test of the output's law" in page.replace("&#39;", "'")
    assert "Calibration over given answers" in page


def test_sections_of_what_was_not_measured_are_left_out_and_said_how_to_get(document):
    gone = {"load": None, "calibration": [], "draft_vocabulary": [], "teacher_forced": []}
    bare = without_sampler(document, 1) | gone
    bare["cost_model"]["goodput"] = None
    for contender in bare["samplers"][0]["contenders"]:
        contender["pooled"]["energy_j_per_token"] = None
    page = report.render_page(bare)
    for heading in ("Under load", "Goodput at a request rate", "Acceptance without decoding", "Draft vocabulary"):
        assert heading not in headings(page)
    assert "run evaluate with --batch 1,2,4,8,16" in page
    assert "run evaluate with --temperature 0,1" in page
    assert "Energy: the device reports none." in page
    assert "Not in this report" not in report.render_page(document)


def test_the_verdict_says_up_to_which_batch_and_what_would_change_it(document, page, paying):
    verdict = document["samplers"][0]["verdict"]["overall"]
    on = copy.deepcopy(paying)
    on["samplers"][0]["verdict"]["overall"]["up_to_batch"] = 8
    for shown in (report.render_markdown(on), report.render_page(on)):
        assert "Measured in batches, it pays up to batch 8." in shown
    on["samplers"][0]["verdict"]["overall"]["up_to_batch"] = 1  # which batches of one may contradict
    assert "Measured in batches, it is not seen to pay in any beyond batch 1." in report.render_markdown(on)
    for shown in (report.render_markdown(document), page):
        assert f"What would change it: {verdict['would_change']}." in shown


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda d: d["context"]["traffic"].update(chose_the_step=False), "also chose the training step"),
        (lambda d: d["context"].update(stopped_early=None), "Stopped early, by the rule half-width of τ"),
        (lambda d: d["statistics"].update(comparisons=1), "rests on an interval of 98.3% (Bonferroni)"),
    ],
)
def test_what_a_reader_should_hold_against_the_numbers_is_said(document, page, change, sentence):
    assert sentence in page
    assert sentence in report.render_markdown(document)
    without = copy.deepcopy(document)
    change(without)
    assert sentence not in report.render_page(without)


def test_where_nobody_can_tell_what_chose_the_step_that_is_said(document):
    """Bundles of earlier versions, trained on answers of their target, do not say what was asked."""
    untold = copy.deepcopy(document)
    untold["context"]["traffic"]["chose_the_step"] = None
    for shown in (report.render_page(untold), report.render_markdown(untold)):
        assert "chose the training step cannot be told" in shown
        assert "or train again" in shown
    assert "cannot be told" not in report.render_markdown(document)


def turn_off(verdicts):
    for verdict in verdicts:
        verdict |= {"decision": "off", "contender": None, "k": 0}


def test_a_fault_in_the_law_is_called_one_and_a_lossy_rule_is_not(wide, simulator):
    page = report.render_page(wide).replace("&#39;", "'")
    assert f"{simulator.lossy} has another law (adjusted p &lt; 0.0001), as a lossy rule does." in page
    assert '<span class="badge">differs</span>' in page
    broken = copy.deepcopy(wide)
    test = next(t for t in broken["samplers"][1]["distribution"] if t["contender"] == "eagle3 k=3")
    test |= {"agrees": False, "p_value": 1e-8, "adjusted_p_value": 1e-7}
    for block in broken["samplers"]:
        for holder in (block["verdict"], *block["verdict"]["by_drafter"].values()):
            turn_off([holder["overall"], *holder["by_kind"].values()])
    turn_off(broken["load"]["by_batch"])
    page = report.render_page(broken)
    assert "eagle3 k=3 has another law (adjusted p &lt; 0.0001), which an exact rule does not: this is a fault." in page
    assert '<span class="badge fault">differs</span>' in page


def drawn(monkeypatch, draw):
    """The figures that ``draw`` makes, as they are when they are saved."""
    figures, real = [], Figure.savefig

    def savefig(figure, *arguments, **keywords):
        figures.append(figure)
        real(figure, *arguments, **keywords)

    monkeypatch.setattr(Figure, "savefig", savefig)
    draw()
    return figures


def test_positions_count_from_one_in_plots_and_tables(simulator, monkeypatch):
    """The document's depth 0 is the first draft token: as a position it is 1, as in every other plot."""
    rows = [simulator.forced_row(depth=depth, alpha=0.9 - 0.1 * depth) for depth in (0, 1, 2)]
    _, figure = drawn(monkeypatch, lambda: alpha_plots(rows))
    (axes,) = figure.axes
    assert axes.get_xlabel() == "draft position i"
    assert list(axes.lines[0].get_xdata()) == [1, 2, 3]
    document = complete(summarise(simulator.samples({"desk": {"eagle3": 0.8}}), context=simulator.context))
    page = report.render_page(document | {"teacher_forced": rows})
    table = page[page.index('aria-label="Teacher-forced acceptance"') :]
    assert [int(place) for place in re.findall(r"<td>1.0</td><td>(\d+)</td>", table)] == [1, 2, 3]


def test_no_two_series_of_a_plot_look_alike_and_the_total_is_in_the_colour_of_the_text(simulator, monkeypatch):
    kinds = ["everything", *(f"kind {letter}" for letter in "abcdefghijkl")]
    rows = [simulator.forced_row(kind=kind, depth=depth) for kind in reversed(kinds) for depth in (0, 1)]
    _, figure = drawn(monkeypatch, lambda: alpha_plots(rows))
    lines = [line for line in figure.axes[0].lines if line.get_label() in kinds]
    assert [line.get_label() for line in lines] == kinds
    assert [line.get_color() for line in lines].count(INK) == 1
    assert (lines[0].get_color(), lines[0].get_linestyle()) == (INK, "-")
    looks = {(colour, str(dash)) for _, colour, _, dash in styled(range(36))}
    assert len(looks) == 36
    assert "currentColor" in alpha_plots(rows)[1].svg


def test_a_contender_looks_the_same_in_every_plot(document, simulator, monkeypatch):
    """Also where plain decoding is drawn, which takes none of the colours, or only some of the contenders are."""
    block = document["samplers"][1]
    drafters = [c for c in block["contenders"] if c["shape"]]
    rows = [row | {"contender": c["contender"], "lossy": False, "drafter": c["drafter"], "k": c["k"], "given": None}
            for c in drafters for row in c["pooled"]["visited_alpha"]]  # fmt: skip

    def draw():
        sampler_plots(block, "s1")
        law_plot(block["distribution"], "s1")
        visited_plot(rows, drafters, "s1")

    looks = {}
    for figure in drawn(monkeypatch, draw):
        for handle in figure.axes[0].lines:
            looks.setdefault(handle.get_label(), set()).add(handle.get_color())
    assert looks["plain"] == {INK}
    assert len(set.union(*(looks[c["contender"]] for c in drafters))) == len(drafters) == 3


def test_what_names_an_axis_is_no_longer_than_the_axis(document, monkeypatch):
    """A longer one would run into the title."""

    def draw():
        load_plots(document["load"])
        sampler_plots(document["samplers"][1], "s1")
        alpha_plots(document["teacher_forced"])

    for figure in drawn(monkeypatch, draw):
        (axes,) = figure.axes
        label, box = axes.yaxis.label.get_window_extent(), axes.get_window_extent()
        assert box.y0 <= label.y0 <= label.y1 <= box.y1, axes.get_ylabel()


@pytest.mark.parametrize("name", ["desk", "a title that would run out of the picture " * 5])
def test_both_titles_of_the_picture_start_at_one_place_and_end_in_it(document, monkeypatch, tmp_path, name):
    changed = copy.deepcopy(document)
    changed["context"]["traffic"]["name"] = name
    (figure,) = drawn(monkeypatch, lambda: report.render_picture(changed, tmp_path / "a.png"))
    titles = (figure.axes[0]._left_title, figure._suptitle)
    below, heading = (text.get_window_extent() for text in titles)
    assert below.x0 == pytest.approx(heading.x0, abs=0.5)
    assert max(below.x1, heading.x1) <= figure.bbox.width
    assert below.y1 <= heading.y0


def test_survival_is_drawn_with_its_intervals(document):
    figure = Figure()
    contenders = [c for c in document["samplers"][0]["contenders"] if c["shape"]]
    draw_survival(figure, contenders)
    (axes,) = figure.axes
    bands = [patch for patch in axes.collections if isinstance(patch, PolyCollection)]
    assert len(bands) == len(contenders)
    rows = contenders[0]["pooled"]["marginal_survival"]
    heights = bands[0].get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == (min(r["low"] for r in rows), max(r["high"] for r in rows))
    assert len({(line.get_marker(), line.get_linestyle()) for line in axes.lines}) == len(contenders)


def test_markdown_is_short_enough_for_a_pull_request(document):
    text = report.render_markdown(document)
    unfolded = re.sub(r"<details>.*?</details>", "", text, flags=re.DOTALL)
    assert len(unfolded.splitlines()) < 60
    assert "\n\n\n" not in text
    assert text.count("<details>") == text.count("</details>") == len(document["samplers"]) + 1
