"""Several acceptance documents set side by side: one table of what each measured, where all were measured alike.

Like ``report.py`` it reads documents alone and computes no number. What was measured on other traffic, with another
sampler, target or device is refused: the first difference is named, with both files.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from spectrain.errors import SpectrainError
from spectrain.evaluation.axes import legend, name_rows, points, shifts, styled
from spectrain.evaluation.csv_tables import COLUMNS, acceptance_rows
from spectrain.evaluation.document import read_document
from spectrain.evaluation.glossary import DEFINITIONS
from spectrain.evaluation.leaves import EVERYTHING
from spectrain.evaluation.report import template_environment, write_texts
from spectrain.evaluation.svg import INK, Plot, draw_svg
from spectrain.evaluation.trained import fastest_trained, trained_drafters
from spectrain.evaluation.view import changed, title
from spectrain.evaluation.wording import headline, interval, percent

MARKDOWN, PAGE, TABLE = "side_by_side.md", "side_by_side.html", "side_by_side.csv"
_ALIKE = (
    ("target", "architecture"),
    ("target", "weights"),
    ("target", "name"),
    ("traffic", "digest"),
    ("traffic", "conversations"),
    ("device", "name"),
    ("device", "threads"),
    ("device", "dtype"),
    ("processes",),
    ("max_new_tokens",),
)
_SHOWN = ("tokens per round (τ)", "decode speedup", "speedup with prefill", "α", "ms per token", "verdict", "LOSSY")
_SPEEDUP = "Decoding alone, with intervals. A mark a report; right of the line at 1 is a gain over plain decoding."
Documents = Mapping[str, Mapping[str, Any]]


def render_side_by_side(paths: Sequence[Path | str], output_dir: Path | str) -> list[Path]:
    """Write ``side_by_side.md``, ``.html`` and ``.csv`` into ``output_dir``; returns their paths.

    Raises ``SpectrainError`` for fewer than two documents, one that cannot be read or is given twice, and for
    documents that were not measured alike (see ``check_alike``); then nothing is written.
    """
    documents, folder = _read(paths), Path(output_dir)
    check_alike(documents)
    view = _view(documents)
    templates = Path(__file__).parent
    markdown = template_environment(templates, markdown=True).get_template("side_by_side.md.j2").render(view)
    view["plots"] = {block["name"]: _plot(block, f"s{i}") for i, block in enumerate(view["samplers"])}
    page = template_environment(templates, markdown=False).get_template("side_by_side.html.j2").render(view)
    texts = {folder / MARKDOWN: markdown, folder / PAGE: page, folder / TABLE: _table(documents)}
    write_texts(texts)
    return list(texts)


def _read(paths: Sequence[Path | str]) -> Documents:
    if len(paths) < 2:
        raise SpectrainError(f"{', '.join(map(str, paths)) or 'no document'}: give two acceptance documents or more")
    documents: dict[str, Mapping[str, Any]] = {}
    seen: dict[Path, Path | str] = {}
    for path in paths:
        place = Path(path).resolve()
        if place in seen:
            raise SpectrainError(f"document {path} is given twice (before as {seen[place]}); give every document once")
        seen[place] = path
        documents[str(path)] = read_document(path)
    return documents


def check_alike(documents: Documents) -> None:
    """Raise ``SpectrainError`` naming the first thing in which a document was measured otherwise than the first."""
    (first, reference), *others = documents.items()
    for name, document in others:
        for place in _ALIKE:
            found = [_at(d["context"], place) for d in (reference, document)]
            # A target is its weights: one and the same may go by several names.
            known = place == ("target", "name") and _at(reference["context"], ("target", "weights")) is not None
            if found[0] != found[1] and not known:
                raise _unlike(f"context.{'.'.join(place)}", first, found[0], name, found[1])
        samplers = [{b["name"]: b["sampler"] for b in d["samplers"]} for d in (reference, document)]
        if samplers[0] != samplers[1]:
            missing = next(n for n in [*samplers[0], *samplers[1]] if samplers[0].get(n) != samplers[1].get(n))
            raise _unlike(f"sampler {missing!r}", first, samplers[0].get(missing), name, samplers[1].get(missing))


def _at(context: Mapping[str, Any], place: Sequence[str]) -> Any:
    value: Any = context
    for key in place:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _unlike(what: str, first: str, found: Any, second: str, other: Any) -> SpectrainError:
    return SpectrainError(
        f"not measured alike: {what} is {found!r} in {first}, {other!r} in {second}; measure both with the same "
        "traffic, samplers, target, device and budget, or read them one by one"
    )


# --- what is shown ----------------------------------------------------------------------------------------------------


def _view(documents: Documents) -> dict[str, Any]:
    names, reference = _labels(list(documents)), next(iter(documents.values()))
    labelled = dict(zip(names, documents.values(), strict=True))
    return {
        "title": title(reference),
        "context": reference["context"],
        "conversations": reference["samplers"][0]["conversations"],
        "confidence": percent(reference["statistics"]["confidence"]),
        "reports": dict(zip(names, documents, strict=True)),
        "samplers": [_sampler(block["name"], labelled) for block in reference["samplers"]],
        "notes": list(_notes(labelled)),
        "definitions": [(term, meaning) for term, meaning in DEFINITIONS if term in _SHOWN],
    }


def _labels(paths: Sequence[str]) -> list[str]:
    """What tells the files apart: their folders, where all have one name."""
    parts = [Path(path).with_suffix("").parts for path in paths]
    while all(len(part) > 1 and part[-1] == parts[0][-1] for part in parts):
        parts = [part[:-1] for part in parts]
    while all(len(part) > 1 and part[0] == parts[0][0] for part in parts):
        parts = [part[1:] for part in parts]
    labels = [str(Path(*part)) for part in parts]
    return labels if len(set(labels)) == len(labels) else list(paths)


def _sampler(name: str, documents: Documents) -> dict[str, Any]:
    blocks = {label: next(b for b in d["samplers"] if b["name"] == name) for label, d in documents.items()}
    kinds = list(dict.fromkeys(kind for block in blocks.values() for kind in block["kinds"] if "/" not in kind))
    return {
        "name": name,
        "verdicts": [row for label, b in blocks.items() for row in _verdicts(label, documents[label], b)],
        "kinds": kinds,
        "by_kind": [
            (kind, [(label, _own(documents[label], b)["by_kind"].get(kind)) for label, b in blocks.items()])
            for kind in kinds
        ],
        "rows": sorted(
            (
                {"report": label, "contender": c, "numbers": c["pooled"], "alpha": _alpha(documents[label], b, c)}
                for label, b in blocks.items()
                for c in b["contenders"]
            ),
            key=lambda row: -row["numbers"]["tokens_per_second"]["value"],
        ),
    }


def _own(document: Mapping[str, Any], block: Mapping[str, Any]) -> Mapping[str, Any]:
    """The verdicts on a report's trained drafter, the fastest of several; of one without any, those over all."""
    trained = fastest_trained(document, block)
    found: Mapping[str, Any] = block["verdict"] if trained is None else block["verdict"]["by_drafter"][trained]
    return found


def _verdicts(label: str, document: Mapping[str, Any], block: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each trained drafter of a report, or one over all; and which contender was faster still there."""
    best = block["verdict"]["overall"]["best"]
    own = [block["verdict"]["by_drafter"][name]["overall"] for name in trained_drafters(document, block)]
    return [
        {"report": label, "headline": headline(verdict, changed=changed(document)), "verdict": verdict,
         "faster": best if best and verdict["best"] and best["contender"] != verdict["best"]["contender"] else None}
        for verdict in own or [block["verdict"]["overall"]]
    ]  # fmt: skip


def _alpha(document: Mapping[str, Any], block: Mapping[str, Any], contender: Mapping[str, Any]) -> Any:
    """α of the first draft token on answers by this sampler, at its temperature where that was scored."""
    rows = [
        row
        for row in document["teacher_forced"]
        if (row.get("drafter"), row["kind"], row["depth"]) == (contender["drafter"], EVERYTHING, 0)
        and row.get("prefixes") == block["name"]
    ]
    own = [row for row in rows if row["temperature"] == block["sampler"]["temperature"]]
    return (own or rows)[0]["interval"] if rows else None


def _notes(documents: Documents) -> Iterator[str]:
    """What differs and is no reason to refuse: versions, seeds, and how fast plain decoding was."""
    (first, reference), *others = documents.items()
    for name, document in others:
        for library, version in reference["context"]["versions"].items():
            other = document["context"]["versions"].get(library)
            if other != version:
                yield f"{library} is {version} in {first}, {other or 'not named'} in {name}."
        for block in reference["samplers"]:
            found = next(b for b in document["samplers"] if b["name"] == block["name"])
            plain, other = (b["contenders"][0]["pooled"]["tokens_per_second"] for b in (block, found))
            known = plain["low"] is not None and other["low"] is not None
            if known and (other["high"] < plain["low"] or plain["high"] < other["low"]):
                yield (
                    f"Plain decoding ({block['name']}) made {interval(plain, 1)} tokens/s in {first}, "
                    f"{interval(other, 1)} in {name}: the device was not equally fast; compare speedups, not rates."
                )


def _plot(block: Mapping[str, Any], name: str) -> Plot | None:
    rows = [row for row in block["rows"] if row["numbers"]["speedup"]]
    lossy = [row["contender"]["contender"] for row in rows if row["contender"]["lossy"]]
    heading = f"Decode speedup, {block['name']}"
    return Plot(heading, _SPEEDUP, draw_svg(_draw, rows, name, heading, rows=len(rows), lossy=lossy)) if rows else None


def _draw(figure: Figure, rows: Sequence[Mapping[str, Any]]) -> None:
    axes = figure.subplots()
    contenders = list(dict.fromkeys(row["contender"]["contender"] for row in rows))
    reports = sorted({row["report"] for row in rows})
    for shift, (report, colour, marker, _) in zip(shifts(len(reports)), styled(reports), strict=True):
        own = [row for row in rows if row["report"] == report]
        for number, row in enumerate(own):
            place = contenders.index(row["contender"]["contender"]) + shift
            speedup = row["numbers"]["speedup"]["decode"]
            points(axes, place, speedup, colour, marker, None if number else report)
    axes.axvline(1, color=INK, linewidth=1)
    axes.set_xlabel("decode speedup over plain decoding (×)")
    name_rows(axes, contenders)
    legend(figure)


def _table(documents: Documents) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, ("report", *COLUMNS), restval="")
    writer.writeheader()
    for name, document in documents.items():
        writer.writerows({"report": name} | row for row in acceptance_rows(document))
    return buffer.getvalue()
