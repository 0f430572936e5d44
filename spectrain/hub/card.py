"""The model card: what the bundle is, what was measured, how to serve it, whose law is exact, what it cannot do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from spectrain.evaluation.cautions import CHOSE_THE_STEP
from spectrain.evaluation.faults import departures
from spectrain.evaluation.leaves import LOSSY, PLAIN
from spectrain.evaluation.report import PICTURE, template_environment
from spectrain.evaluation.steadiness import unsteady
from spectrain.evaluation.training_cost import training_cost
from spectrain.evaluation.wording import (
    drift_sentence,
    headline,
    kind_sentence,
    law_sentence,
    percent,
    sentence,
)
from spectrain.hub.metadata import card_data, eval_results
from spectrain.hub.report import own_contenders, served_k
from spectrain.interop import vllm_command
from spectrain.manifest import MANIFEST_FILE, REPORT_FILE, Manifest, public_target, read_manifest
from spectrain.tracking import flatten
from spectrain.weights import OWN_TARGET

_NOT_TRAINING = {"evaluation", "baselines", "output", "prepared"}  # of a recipe


def write_card(repo: str, bundle: Path, manifest: Manifest, document: Mapping[str, Any], given: Mapping[str, Any],
               method: str | None, notes: str) -> str:  # fmt: skip
    """README.md: metadata and text. ``given`` is the owner's metadata, ``notes`` their text, put at the end.

    ``manifest`` is the one to be published, ``bundle`` the folder whose run may tell what training took.
    """
    name = document["context"]["drafter"]["name"]
    data = card_data(repo, manifest, eval_results(document, name), given, method)
    view = _view(repo, bundle, manifest, document, method)
    text = template_environment(Path(__file__).parent, markdown=True).get_template("card.md.j2").render(view)
    return _card(data, "\n\n".join(filter(None, (text.rstrip(), notes))) + "\n")


def _card(data: ModelCardData, text: str) -> str:
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}"))


def _view(repo: str, bundle: Path, manifest: Manifest, document: Mapping[str, Any],
          method: str | None) -> dict[str, Any]:  # fmt: skip
    context, name = document["context"], document["context"]["drafter"]["name"]
    target, changed = public_target(manifest), manifest.derived_from is not None
    confidence = percent(document["statistics"]["confidence"])
    blocks = [{"name": b["name"], "contenders": own_contenders(b, name)} for b in document["samplers"]]
    own = [c for block in blocks for c in block["contenders"]]
    verdicts = document["samplers"][0]["verdict"]["by_drafter"][name]
    best, k = document["samplers"][0]["verdict"]["overall"]["best"], served_k(document, name)
    versions = [("spectrain", manifest.spectrain_version), *sorted(manifest.versions.items())]
    return {
        "repo": repo,
        "family": manifest.drafter["type"],
        "target": target.name,
        "revision": target.revision,
        "changed": changed,
        "own_target": OWN_TARGET,
        "headline": headline(verdicts["overall"], changed=changed),
        "sentence": sentence(verdicts["overall"], confidence, changed=changed),
        "kinds": kind_sentence(verdicts["by_kind"]),
        "faster": best["contender"] if best and best["drafter"] not in (name, PLAIN) else None,
        "picture": PICTURE,
        "traffic": context["traffic"],
        "chosen": CHOSE_THE_STEP[context["traffic"]["chose_the_step"]],
        "unsteady": unsteady(document),
        "device": context["device"],
        "confidence": confidence,
        "report_file": REPORT_FILE,
        "manifest_file": MANIFEST_FILE,
        "blocks": blocks,
        "law": law_sentence(_once(own), changed=changed, faulty=departures(document["samplers"])),
        "exactness": _exactness(document, own),
        "drift": [drift_sentence(key, found) for key, found in (document.get("drift") or {}).items() if key == name],
        "k": k,
        "serving": serving(repo, target.name or "", target.revision or "", changed, method, k),
        "cost": training_cost(bundle, read_manifest(bundle)),
        "imported": manifest.imported_from,
        "recipe": _settings(manifest.recipe),
        "data": ", ".join(f"{key} `{digest}`" for key, digest in sorted(manifest.data_digests.items())),
        "versions": ", ".join(f"{library} {version}" for library, version in versions),
        "reduced": manifest.draft_vocabulary_digest is not None,
        "lossy": any(c["lossy"] for c in own),
        "lossy_mark": LOSSY,
    }


def _settings(recipe: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What training was told, without what was left open and what came after it."""
    told = {key: value for key, value in recipe.items() if key not in _NOT_TRAINING}
    return [(key.replace("/", "."), json.dumps(v)) for key, v in flatten(told).items() if v is not None]


def serving(repo: str, target: str, revision: str, changed: bool, method: str | None, k: int) -> list[str]:
    """The lines that serve the bundle with vLLM; none where it has no ``method`` for such drafters.

    A target that lies in the bundle has no id of its own there, so such a bundle is fetched first.
    """
    if method is None:
        return []
    if not changed:
        return [vllm_command(target, revision, repo, method, k)]
    folder = repo.rsplit("/", 1)[-1]
    fetch = f"hf download {repo} --local-dir {folder}"
    return [fetch, vllm_command(f"./{folder}/{OWN_TARGET}", None, f"./{folder}", method, k)]


def _once(contenders: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Contenders of several samplers go by one name."""
    return list({c["contender"]: c for c in contenders}.values())


def _exactness(document: Mapping[str, Any], own: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    names = {c["contender"] for c in own}
    return [e for block in document["samplers"] for e in block["exactness"] if e["contender"] in names]
