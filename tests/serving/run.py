"""Serve bundles with vLLM and compare: python tests/serving/run.py --target FOLDER [--bundles DIR ...].

For every bundle, and for prompt lookup as the control of the counting: does the server start, are its greedy tokens
those of its own plain decoding, and does it accept what spectrain's decoder accepts on the same prompts? Then copies of
the bundles that are broken on purpose, each of which that comparison has to find; and an exchange of EAGLE-3 drafters
with the public speculators library. Exits 0 when all agrees or the server cannot be had here, 1 otherwise.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from broken import break_bundle, breakages
from environment import UnavailableError, serving_python
from exchange import exchange, render_exchanges
from ours import EarliestNgram, measured, plain
from server import Server
from small_bundles import small_bundles
from verdict import Control, Finding, compare_acceptance, compare_tokens, render, render_controls

from spectrain.bundle import load_drafter
from spectrain.data.conversations import load_conversations
from spectrain.drafters.base import Drafter
from spectrain.errors import SpectrainError
from spectrain.evaluation.acceptance import output_difference
from spectrain.evaluation.verdict import near_tie_gap
from spectrain.evaluation.workbench import Prompt, prompts_of
from spectrain.files import write_json
from spectrain.interop import format_of
from spectrain.manifest import read_manifest, target_of
from spectrain.target import Target, load_target

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
LONGEST_SUFFIX = 5  # of prompt lookup, on both sides


class Comparison:
    """One target: its prompts, and its plain answers on both sides."""

    def __init__(self, server: Server, folder: Path, name: str, options: argparse.Namespace) -> None:
        self.server, self.folder, self.options = server, folder, options
        self.target: Target = load_target(str(folder), device="cpu")
        chats = load_conversations(options.traffic)
        self.prompts: list[Prompt] = prompts_of(self.target, chats, options.prompts, options.max_new_tokens, 0)
        self.findings = [Finding(name)]
        self.plain: list[list[int]] | None = plain(self.target, self.prompts, options.max_new_tokens)
        served = self._serve(self.findings[0], None)
        self.plain = served["tokens"] if served else None

    def add(self, name: str, drafter: Drafter, speculative: dict[str, Any]) -> dict[str, Any]:
        """Serve a drafter and compare what it does with ours, which is returned."""
        k = self.options.k if drafter.deepest is None else min(self.options.k, drafter.deepest)
        ours = measured(self.target, drafter, self.prompts, self.options.max_new_tokens, k)
        write_json(self.server.output / name / "ours.json", ours)
        finding = Finding(name)
        self.findings.append(finding)
        served = self._serve(finding, {**speculative, "num_speculative_tokens": k})
        if served:
            compare_acceptance(finding, served, ours)
        return ours

    def control(self, name: str, broken: Path, method: str, ours: dict[str, Any]) -> Control:
        """Serve a bundle that was broken after ``ours`` was measured: its acceptance has to give it away."""
        control = Control(Finding(name))
        config = {"method": method, "model": str(broken.resolve()), "num_speculative_tokens": ours["k"]}
        served = self._serve(control.finding, config)
        if served:
            seen = Finding(name)
            compare_acceptance(seen, served, ours)
            control.found = seen.faults
        else:  # it did not start, which tells as much
            control.found, control.finding.faults = control.finding.faults, []
        return control

    def _serve(self, finding: Finding, speculative: dict[str, Any] | None) -> dict[str, Any] | None:
        """What the server did, its greedy tokens compared with plain decoding; None, and a fault, where it failed."""
        ids = [prompt.ids for prompt in self.prompts]
        longest = max(map(len, ids)) + self.options.max_new_tokens + 2 * self.options.k
        job = {"model": str(self.folder), "prompts": ids, "max_new_tokens": self.options.max_new_tokens,
               "max_model_len": longest, "speculative_config": speculative}  # fmt: skip
        print(f"serving {finding.name}", flush=True)
        result = self.server.run(finding.name.replace(", ", "-").replace(" ", "-"), job)
        if isinstance(result, str):
            finding.fault(result)
            return None
        finding.starts = True
        if self.plain is not None:
            self._tokens(finding, result, self.plain)
        return result

    def _tokens(self, finding: Finding, served: dict[str, Any], expected: list[list[int]]) -> None:
        def gap(number: int, tokens: Sequence[int], reference: Sequence[int]) -> tuple[int, float | None]:
            self.target.tap(())
            found = output_difference(self.target, self.prompts[number].ids, list(tokens), list(reference))
            return found["position"], found["logit_gap"]

        compare_tokens(finding, served["tokens"], expected, gap, near_tie_gap("float32"))


def compare(
    server: Server, bundles: dict[str, Path], options: argparse.Namespace
) -> tuple[list[Finding], list[Control]]:
    """Every bundle with its target, the common one or its own; and those that are broken on purpose."""
    common = Comparison(server, options.target, "plain", options)
    lookup = {"method": "ngram", "prompt_lookup_max": LONGEST_SUFFIX, "prompt_lookup_min": 1}
    common.add("ngram", EarliestNgram(LONGEST_SUFFIX), lookup)
    findings, controls = common.findings, list[Control]()
    for name, bundle in bundles.items():
        manifest, place = read_manifest(bundle), common
        if manifest.derived_from is not None:
            place = Comparison(server, Path(str(target_of(bundle, manifest))), f"{name}-plain", options)
        drafter, _, notes = load_drafter(bundle, place.target)
        for note in notes:
            print(f"note: {note}", flush=True)
        method = format_of(bundle).SERVED.vllm
        if method is None:
            print(f"note: vLLM has no such drafters: {bundle} is left out", flush=True)
            continue
        ours = place.add(name, drafter, {"method": method, "model": str(bundle.resolve())})
        if place is not common:
            if place.plain == common.plain:
                what = "answers every prompt as the original does, so nothing shows which is served; give other prompts"
                place.findings[0].fault(what)
            findings += place.findings
        if place is not common or not findings[-1].starts:  # what is served beside the common target has them too
            continue
        for what, change in breakages(bundle).items():
            broken = break_bundle(bundle, change, server.output / "broken" / name)
            controls.append(place.control(f"{name}, {what}", broken, method, ours))
    return findings, controls


def named(bundles: Sequence[Path]) -> dict[str, Path]:
    """Bundles by the run that they lie in, which also names the folder of what is served."""
    names: dict[str, Path] = {}
    for bundle in bundles:
        name = bundle.resolve().parent.name
        if name in {*names, "plain", "ngram"}:
            raise SpectrainError(f"bundle {bundle}: there is another {name!r}; give bundles of runs with unlike names")
        names[name] = bundle
    return names


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options, with the recipes' held-out traffic by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    traffic = [RECIPES / "traffic" / f"{kind}_heldout.jsonl" for kind in ("narrow", "open")]
    parser.add_argument("--target", type=Path, required=True, help="folder of the model to serve")
    parser.add_argument("--bundles", type=Path, nargs="*", help="bundles of it; without any, small ones are made")
    parser.add_argument("--environment", type=Path, default=ROOT / ".venv-serving", help="the server's own packages")
    parser.add_argument("--pins", type=Path, default=ROOT / "constraints-serving.txt")
    parser.add_argument("--traffic", type=Path, nargs="+", default=traffic, help="chats to answer")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--k", type=int, default=4, help="draft tokens a round, where the drafter has as many")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "serving")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one start with its answers")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    try:
        python = serving_python(options.environment, options.pins)
    except UnavailableError as error:
        print(f"SKIPPED: bundles were NOT served. {error}", flush=True)
        return 0
    recipes = RECIPES / options.target.name
    bundles = named(options.bundles or small_bundles(recipes, RECIPES / "traffic", options.target, options.output))
    server = Server(python, options.output, options.timeout)
    findings, controls = compare(server, bundles, options)
    print("", render(findings, options.k), render_controls(controls), "", sep="\n\n", flush=True)
    exchanges = exchange(server, bundles, options)
    print(render_exchanges(exchanges))
    return int(any(part.faults for part in (*findings, *controls, *exchanges)))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SpectrainError as error:
        sys.exit(f"error: {error}")
