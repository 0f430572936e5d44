"""From bundles to a report: measured in one run with what is beside them, and written down."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from spectrain.bundle import REPORT_FILE
from spectrain.data.conversations import Conversation
from spectrain.data.split import conversations_digest
from spectrain.distributed import processes
from spectrain.drafters import FAMILIES, AnyDrafterConfig, Drafter, family_of
from spectrain.errors import SpectrainError
from spectrain.evaluation.answers import gather
from spectrain.evaluation.calibration import Calibration
from spectrain.evaluation.contenders import AcceptanceConfig, contenders, unfillable
from spectrain.evaluation.drift import drift
from spectrain.evaluation.entrants import Entrant, load_entrant, names_of
from spectrain.evaluation.load import check_load, load_block
from spectrain.evaluation.measured_trees import filled, resolve
from spectrain.evaluation.measurement import DRIFT_FILE, Measured, in_order, measure
from spectrain.evaluation.memory import weight_bytes
from spectrain.evaluation.report import render_report
from spectrain.evaluation.samples import seen
from spectrain.evaluation.summary import document_of
from spectrain.evaluation.teacher_forced import TeacherForced
from spectrain.evaluation.training_cost import training_cost
from spectrain.evaluation.workbench import LIBRARIES, device_name, shown_name
from spectrain.files import json_digest, write_json
from spectrain.interop import WEIGHTS_FILE
from spectrain.manifest import chose_the_step, read_manifest
from spectrain.occupied import working_in
from spectrain.shapes import check_shape
from spectrain.target import Target


@dataclass(frozen=True)
class Asked:
    """On which chats something is measured, how, beside which drafters that need no training, and where it goes.

    ``traffic`` names the chats for people; ``dropped``: unusable rows of theirs, by reason.
    """

    conversations: Sequence[Conversation]
    config: AcceptanceConfig
    output: Path
    traffic: str
    baselines: Sequence[AnyDrafterConfig] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)
    progress: bool = True


def evaluate_bundle(bundle: Path, target: Target, asked: Asked, original: Target | None = None) -> Path:
    """Measure a bundle beside plain decoding and baselines; the path of ``acceptance.json`` (reports beside it).

    ``target`` may be the one that the bundle's own was derived from: then its own is loaded and measured. Where it is
    the bundle's own, ``original`` is what the drift is measured against.
    """
    entrant = load_entrant(bundle, target, original)
    manifest, drafter = entrant.manifest, entrant.drafter
    family = manifest.drafter["type"]
    for tree in asked.config.trees:  # what only a baseline could fill says nothing of the bundle
        check_shape(filled(tree), deepest=drafter.deepest, columns=drafter.columns, trees=drafter.trees, name=family)
    identity = {"weights": manifest.target.weights_digest, "bundle": manifest.files[WEIGHTS_FILE]}
    named = {"name": family, "weights": manifest.files[WEIGHTS_FILE], **entrant.described()}
    return _evaluate({family: entrant}, entrant.target, asked, identity, {"drafter": named})


def compare_bundles(bundles: Mapping[str, Path], target: Target, asked: Asked) -> Path:
    """Measure several bundles of one target in one run; ``acceptance.json`` with a leaderboard (reports beside it).

    Those whose own target was derived from ``target`` are measured with their own, beside plain decoding of it.

    ``bundles`` are what ``resolve_bundles`` returns; each is named by its family, and its folder too where others share
    it.
    """
    names = names_of(list(bundles), [read_manifest(folder).drafter["type"] for folder in bundles.values()])
    entrants = {name: load_entrant(folder, target) for name, folder in zip(names, bundles.values(), strict=True)}
    manifests = {name: entrant.manifest for name, entrant in entrants.items()}
    identity = {
        "weights": target.identity().weights_digest,
        "bundles": {name: json_digest(manifest.files) for name, manifest in manifests.items()},
    }
    facts: dict[str, Any] = {
        name: {
            "type": entrant.manifest.drafter["type"],
            **entrant.described(),
            "bytes": weight_bytes(entrant.drafter),
            "training": training_cost(entrant.contents.folder, entrant.manifest),
        }
        for name, entrant in entrants.items()
    }
    facts |= {b.type: {**b.model_dump(mode="json"), "bytes": 0, "training": None} for b in asked.baselines}
    about = {"drafter": {"name": ", ".join(names)}, "drafters": facts}
    return _evaluate(entrants, target, asked, identity, about)


def parse_baselines(text: str) -> tuple[AnyDrafterConfig, ...]:
    """Training-free drafters by name, with commas; "none" for none of them."""
    kinds: dict[str, Any] = {kind.model_fields["type"].default: kind for kind in FAMILIES}
    known = {name: config for name, kind in kinds.items() if not (config := kind()).trainable}
    names = [] if text == "none" else text.split(",")
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None or len(set(names)) < len(names):
        what = f"{unknown!r} is none" if unknown is not None else "one is there twice"
        raise SpectrainError(f"--baselines {text!r}: {what}; expected some of {', '.join(sorted(known))}, or none")
    return tuple(known[name] for name in names)


def _evaluate(entrants: Mapping[str, Entrant], target: Target, asked: Asked, identity: dict[str, Any],
              about: Mapping[str, Any]) -> Path:  # fmt: skip
    """``identity``: what raw samples are recognised by; ``about``: the drafters' part of the document's context."""
    config, raw, path = asked.config, asked.output / "evaluation", asked.output / REPORT_FILE
    drafters: dict[str, Drafter] = {b.type: family_of(b)(b) for b in asked.baselines}
    drafters |= {name: entrant.drafter for name, entrant in entrants.items()}
    folders = {name: entrant.contents.folder for name, entrant in entrants.items()}
    measured = resolve(config.trees, drafters, folders, config.samplers)
    left_out = unfillable(drafters, config.k, config.trees, measured)
    for draft in left_out:
        print(f"note: {draft}", flush=True)
    identity |= {"baselines": [b.model_dump(mode="json") for b in asked.baselines]}
    identity |= {"measured_trees": measured.identity()} if measured.trees else {}
    targets = {name: entrant.target for name, entrant in entrants.items() if entrant.target is not target}
    entries = contenders(drafters, config.k, config.trees, config.verification, leave_out=True, measured=measured,
                         targets=targets)  # fmt: skip
    check_load(target, entries, asked.conversations, config, raw, identity)
    with working_in(raw):
        found = measure(target, entries, asked.conversations, config, raw, identity, progress=asked.progress)
        if not processes().is_main_process:
            return path
        chosen = in_order(asked.conversations, config)[: found.count]
        context = {**about, "dropped": dict(asked.dropped), **_context(target, asked, found, chosen)}
        context["target"] |= _origin(target, entrants.values())
        given = conversations_digest(asked.conversations)
        context["traffic"]["chose_the_step"] = chose_the_step((e.manifest for e in entrants.values()), given)
        context["memory"] = {
            "target": weight_bytes(target.model),
            "drafters": {name: weight_bytes(drafter) for name, drafter in drafters.items()},
        }
        if config.load is not None:
            context["load"] = load_block(target, entries, asked.conversations, config, raw, identity,
                                         progress=asked.progress)  # fmt: skip
            context["request_rates"] = list(config.load.request_rates)
        context |= {"left_out": [asdict(draft) for draft in left_out]} if left_out else {}
        context["drift"] = {
            name: drift(name, entrant.original, entrant.target, chosen, config.max_new_tokens, raw / DRIFT_FILE)
            for name, entrant in entrants.items()
            if entrant.original is not None
        }
        write_json(path, _document(found, context))
        render_report(path, asked.output)
        return path


def _document(found: Measured, context: dict[str, Any]) -> dict[str, Any]:
    """The acceptance document of all samples, which are read once."""
    forced, calibration = TeacherForced(), Calibration()
    groups = gather(seen(found.samples(), forced.add, calibration.add))
    context |= {"teacher_forced": forced.rows(), "calibration": calibration.rows()}
    return document_of(groups, context={**context, "draft_vocabulary": calibration.vocabulary_rows()})


def _origin(target: Target, entrants: Iterable[Entrant]) -> dict[str, Any]:
    """What the measured target was derived from, where a bundle changed it in training."""
    records = (entrant.manifest.derived_from for entrant in entrants if entrant.target is target)
    record = next((found for found in records if found is not None), None)
    if record is None:
        return {}
    return {"derived_from": {"name": record.name and shown_name(record.name), "weights": record.weights_digest}}


def _context(target: Target, asked: Asked, found: Measured, chosen: Sequence[Conversation]) -> dict[str, Any]:
    identity = target.identity()
    return {
        "target": {"name": shown_name(target.name),
                   "architecture": identity.architecture, "weights": identity.weights_digest},
        "traffic": {"name": asked.traffic, "conversations": len(chosen), "digest": conversations_digest(chosen)},
        "device": {"name": device_name(target.device), "threads": found.threads,
                   "dtype": str(target.dtype).removeprefix("torch.")},
        "processes": found.processes,
        "stopped_early": found.stopped_early,
        "versions": {name: version(name) for name in (*LIBRARIES, "accelerate", "tokenizers")},
        "max_new_tokens": asked.config.max_new_tokens,
        "seed": asked.config.seed,
    }  # fmt: skip
