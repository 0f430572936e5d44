"""The exact commands that serve a bundle, with the k that its report recommends."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spectrain.bundle import ADDED_LATER
from spectrain.errors import SpectrainError
from spectrain.evaluation.own_report import own_report
from spectrain.interop import Served, check_listing, format_of_config, read_config, vllm_command
from spectrain.interop.layouts import layouts_of
from spectrain.manifest import MANIFEST_FILE, Manifest, read_manifest, report_file, target_of

INSTEAD = ", or --k"  # of a report


class LeaveOffError(SpectrainError):
    """The bundle's report says not to draft."""


def shell(found: Mapping[str, Any]) -> str:
    """What ``invocations`` found, as text for a shell; what to mind as comments."""
    lines = [f"# {found['k']} draft tokens a round: {found['reason']}", *found["notes"]]
    return "\n".join([*lines, *(line for name, own in found["servers"].items() for line in ("", f"# {name}", *own))])


def invocations(bundle: Path, k: int | None = None, report: Path | None = None) -> dict[str, Any]:
    """How vLLM, SGLang and transformers are started with a bundle: k, the reason for it, notes, and lines by server.

    ``k`` is the number of draft tokens a round; by default what the report recommends, which is the bundle's own unless
    given. Raises SpectrainError where a file is not as the manifest lists it, there is no report of this bundle, it
    recommends a tree, or nobody else takes such drafters, and LeaveOffError where it says to leave the drafter off.
    """
    manifest = read_manifest(bundle)
    check_listing(bundle, manifest.files, MANIFEST_FILE, ADDED_LATER)  # a server would load whatever is there
    config = read_config(bundle)
    how = format_of_config(config, str(bundle)).SERVED
    if how.vllm is None and how.sglang is None and not how.assistant:
        raise SpectrainError(
            f"{bundle}: neither vLLM nor SGLang nor transformers takes {_family(manifest)} drafters; spectrain's own "
            f"decoder does: spectrain.generate(spectrain.load_bundle({str(bundle)!r}), PROMPT)"
        )
    deepest = None if how.most is None else config.get(how.most)
    if k is None:
        k, why = _recommended(bundle, manifest, report)
    else:
        why = "as given"
    if k < 1 or (deepest is not None and k > deepest):
        most = "" if deepest is None else f" to {deepest}, the number of heads"
        raise SpectrainError(f"--k {k}: expected a whole number from 1{most}")
    target = target_of(bundle, manifest)
    if target is None:
        raise SpectrainError(f"{bundle} does not say which target it belongs to, so there is nothing to serve")
    servers = {
        "vLLM": [_vllm(bundle, target, manifest, how, k)],
        "SGLang": _sglang(bundle, target, manifest, how, k),
        "transformers": _transformers(bundle, target, manifest, how, k),
    }
    notes = [*_warnings(target, manifest), *_deeper(k, manifest)]
    return {"k": k, "reason": why, "notes": notes, "servers": servers}


def _deeper(k: int, manifest: Manifest) -> list[str]:
    depths = manifest.drafter.get("depths")
    if not isinstance(depths, int) or k <= depths:
        return []
    return [f"# the drafter was trained {depths} deep: of {k} draft tokens the later ones are accepted less and less"]


def _family(manifest: Manifest) -> str:
    return str(manifest.drafter["type"])


def _recommended(bundle: Path, manifest: Manifest, report: Path | None) -> tuple[int, str]:
    """k of the report's first sampler, for the bundle's own drafter, and the reason in words."""
    path, family = report_file(bundle, report, INSTEAD), _family(manifest)
    block = own_report(bundle, manifest, report, INSTEAD)["samplers"][0]
    overall, own = block["verdict"]["overall"], block["verdict"]["by_drafter"].get(family)
    if own is None:
        raise SpectrainError(f"{path} did not measure {family}; evaluate the bundle, or give --k")
    # What the report's headline says, where that is about this drafter: older reports say another k of it elsewhere.
    ours = overall["decision"] == "on" and overall["best"]["drafter"] == family
    found, whose = (overall, "its verdict") if ours else (own["overall"], f"its verdict on {family} by itself")
    if found["decision"] != "on":
        raise LeaveOffError(
            f"{path} says to leave it off ({block['name']}): {found['reason']}; to serve it all the same, give --k"
        )
    if not found["k"]:
        raise SpectrainError(
            f"{path} recommends the tree {found['contender']}, which these servers do not take; give --k"
        )
    return int(found["k"]), f"{path.name} says on, with {found['contender']} ({block['name']}; {whose})"


def _warnings(target: str, manifest: Manifest) -> list[str]:
    if manifest.derived_from is not None:
        return [f"# the target is the bundle's own, trained with the drafter: serve {target}, not what it came from"]
    if Path(target).exists():
        return [
            f"# the target {target} is a folder of this machine: give the same model by a name that the server knows"
        ]
    return []


def _revision(manifest: Manifest) -> str | None:
    """Of the target's Hub id; none where the target lies in the bundle."""
    return manifest.target.revision if manifest.derived_from is None else None


def _vllm(bundle: Path, target: str, manifest: Manifest, how: Served, k: int) -> str:
    if how.vllm is None:
        return f"# vLLM has no {_family(manifest)} drafters"
    return vllm_command(target, _revision(manifest), str(bundle), how.vllm, k)


def _sglang(bundle: Path, target: str, manifest: Manifest, how: Served, k: int) -> list[str]:
    if how.sglang is None:
        return [f"# SGLang has no {_family(manifest)} drafters"]
    lines, draft = [], str(bundle)
    if how.sglang_layout is not None:
        if how.sglang_layout not in {layout.NAME for layout in layouts_of(manifest.checkpoint_format)}:
            raise SpectrainError(f"there is no layout {how.sglang_layout} of {manifest.checkpoint_format}")
        if manifest.drafter.get("embedding") == "own":
            return ["# SGLang puts the target's embedding in the place of this drafter's own: it cannot serve it"]
        draft = f"{bundle}-{how.sglang_layout}"
        lines.append(shlex.join(["spectrain", "export", str(bundle), how.sglang_layout, draft]))
    revision = _revision(manifest)
    at = ["--revision", revision] if revision else []
    words = ["python", "-m", "sglang.launch_server", "--model-path", target, *at,
             "--speculative-algorithm", how.sglang, "--speculative-draft-model-path", draft,
             "--speculative-num-steps", str(k), "--speculative-eagle-topk", "1",
             "--speculative-num-draft-tokens", str(k + 1)]  # fmt: skip
    return [*lines, shlex.join(words)]


def _transformers(bundle: Path, target: str, manifest: Manifest, how: Served, k: int) -> list[str]:
    if not how.assistant:
        says = f"# transformers' generate has no {_family(manifest)} drafters; spectrain's own does:"
        return [says, *_spectrain(bundle, k)]
    revision = _revision(manifest)
    at = f", revision={revision!r}" if revision else ""
    program = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        f"tokenizer = AutoTokenizer.from_pretrained({target!r}{at})",
        f"target = AutoModelForCausalLM.from_pretrained({target!r}{at})",
        f"draft = AutoModelForCausalLM.from_pretrained({str(bundle)!r})",
        # generate() does not hand these two on to the assistant.
        f"draft.generation_config.num_assistant_tokens = {k}",
        'draft.generation_config.num_assistant_tokens_schedule = "constant"',
        'prompt = tokenizer("Once upon a time", return_tensors="pt")',
        "print(tokenizer.decode(target.generate(**prompt, assistant_model=draft, max_new_tokens=64)[0]))",
    ]
    return _python(program)


def _spectrain(bundle: Path, k: int) -> list[str]:
    return _python(
        [
            "from spectrain import generate, load_bundle",
            f'print(generate(load_bundle({str(bundle)!r}), "Once upon a time", k={k}).text)',
        ]
    )


def _python(program: list[str]) -> list[str]:
    return [f"python -c {shlex.quote(chr(10).join(program))}"]
