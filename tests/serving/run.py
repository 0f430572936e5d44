"""Serve bundles with vLLM and compare: python tests/serving/run.py --target FOLDER [--bundles DIR ...].

For every bundle, and for prompt lookup as the control of the counting: does the server start, are its greedy tokens
those of its own plain decoding, and does it accept what spectrain's decoder accepts on the same prompts? Exits 0 when
all agrees or the server cannot be had here, 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environment import UnavailableError, serving_python
from ours import EarliestNgram, measured, plain
from small_bundles import small_bundles
from verdict import Finding, compare_acceptance, compare_tokens, render

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


# The server's name of each format; without it the folder's name decides.
@dataclass(frozen=True)
class Server:
    """vLLM's interpreter, and where its jobs, results and logs go."""

    python: Path
    output: Path
    timeout: float

    def run(self, name: str, job: dict[str, Any]) -> dict[str, Any] | str:
        """The result of a start, or the end of the log of one that failed."""
        folder = self.output / name
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "job.json", job)
        command = [str(self.python), "-P", str(Path(__file__).with_name("engine.py")),
                   str(folder / "job.json"), str(folder / "served.json")]  # fmt: skip
        own = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1",
               "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # fmt: skip
        inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        (folder / "served.json").unlink(missing_ok=True)
        with (folder / "log.txt").open("w", encoding="utf-8") as log:
            try:
                code = subprocess.run(command, env={**inherited, **own}, stdout=log, stderr=subprocess.STDOUT,
                                      timeout=self.timeout, check=False).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                return f"no result within {self.timeout:g} s; its log is {folder / 'log.txt'}"
        if code:
            lines = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
            return "\n".join([f"exit status {code}; the end of {folder / 'log.txt'}:", *lines[-5:]])
        return json.loads((folder / "served.json").read_text(encoding="utf-8"))


class Comparison:
    """One target: its prompts, and its plain answers on both sides."""

    def __init__(self, server: Server, folder: Path, name: str, options: argparse.Namespace) -> None:
        self.server, self.folder, self.options = server, folder, options
        self.target: Target = load_target(str(folder), device="cpu")
        chats = load_conversations(options.traffic)
        self.prompts: list[Prompt] = prompts_of(self.target, chats, options.prompts, options.max_new_tokens, 0)
        self.findings: list[Finding] = []
        finding, served = self._serve(name, None)
        self.plain = served["tokens"] if served else None
        if served:
            self._tokens(finding, served, plain(self.target, self.prompts, options.max_new_tokens))

    def add(self, name: str, drafter: Drafter, speculative: dict[str, Any]) -> None:
        """Serve a drafter and compare what it does with ours."""
        k = self.options.k if drafter.deepest is None else min(self.options.k, drafter.deepest)
        ours = measured(self.target, drafter, self.prompts, self.options.max_new_tokens, k)
        write_json(self.server.output / name / "ours.json", ours)
        finding, served = self._serve(name, {**speculative, "num_speculative_tokens": k})
        if served:
            if self.plain is not None:
                self._tokens(finding, served, self.plain)
            compare_acceptance(finding, served, ours)

    def _serve(self, name: str, speculative: dict[str, Any] | None) -> tuple[Finding, dict[str, Any] | None]:
        finding = Finding(name)
        self.findings.append(finding)
        ids = [prompt.ids for prompt in self.prompts]
        longest = max(map(len, ids)) + self.options.max_new_tokens + 2 * self.options.k
        job = {"model": str(self.folder), "prompts": ids, "max_new_tokens": self.options.max_new_tokens,
               "max_model_len": longest, "speculative_config": speculative}  # fmt: skip
        print(f"serving {name}", flush=True)
        result = self.server.run(name, job)
        if isinstance(result, str):
            finding.fault(result)
            return finding, None
        finding.starts = True
        return finding, result

    def _tokens(self, finding: Finding, served: dict[str, Any], expected: list[list[int]]) -> None:
        def gap(number: int, tokens: Sequence[int], reference: Sequence[int]) -> tuple[int, float | None]:
            self.target.tap(())
            found = output_difference(self.target, self.prompts[number].ids, list(tokens), list(reference))
            return found["position"], found["logit_gap"]

        compare_tokens(finding, served["tokens"], expected, gap, near_tie_gap("float32"))


def compare(server: Server, bundles: Sequence[Path], options: argparse.Namespace) -> list[Finding]:
    """Every bundle with its target: the common one, or its own."""
    common = Comparison(server, options.target, "plain", options)
    lookup = {"method": "ngram", "prompt_lookup_max": LONGEST_SUFFIX, "prompt_lookup_min": 1}
    common.add("ngram", EarliestNgram(LONGEST_SUFFIX), lookup)
    findings = list(common.findings)
    for name, bundle in named(bundles).items():
        manifest = read_manifest(bundle)
        place, before = common, len(common.findings)
        if manifest.derived_from is not None:
            place, before = Comparison(server, Path(str(target_of(bundle, manifest))), f"{name}-plain", options), 0
        drafter, _, notes = load_drafter(bundle, place.target)
        for note in notes:
            print(f"note: {note}", flush=True)
        place.add(name, drafter, {"method": format_of(bundle).SERVED.vllm, "model": str(bundle.resolve())})
        findings += place.findings[before:]
    return findings


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
    bundles = options.bundles or small_bundles(recipes, RECIPES / "traffic", options.target, options.output)
    findings = compare(Server(python, options.output, options.timeout), bundles, options)
    print(render(findings, options.k))
    return int(any(finding.faults for finding in findings))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SpectrainError as error:
        sys.exit(f"error: {error}")
