"""A measurement by several processes, one that is killed, one that ends early: the same samples but for times."""

import json
import os
from pathlib import Path

import pytest
from processes import run_script

from spectrain.evaluation.running import FEWEST

TIMES = {"prefill_s", "draft_s", "verify_s", "overhead_s", "total_s", "energy_j"}
WHOLE = 9  # conversations of a measurement that is not asked to end early; each gives SAMPLES lines
SAMPLES = 6
# A start costs more than what is measured, so each start measures several things.
SETUP = """
import json, os, signal, sys, time
from pathlib import Path
tests, model, out = sys.argv[1:4]
sys.path.insert(0, tests)
import torch
from forks import forked
from spectrain.data.conversations import parse_conversation
from spectrain.distributed import processes
from spectrain.drafters.ngram import NgramConfig, NgramDrafter
from spectrain.evaluation.contenders import AcceptanceConfig, contenders
from spectrain.evaluation.measurement import measure
from spectrain.exact.sampler import Sampler
from spectrain.target import load_target

torch.set_num_threads(1)
texts = ["hello there", "ab ab ab", "a", "the cat sat on the mat", "one two one two"]

def measured(name, count, stop_at=None):
    rows = [{"id": f"c{i}", "kind": ("even", "odd")[i % 2], "prompt": texts[i % 5] + " " * i} for i in range(count)]
    chats = [parse_conversation(row, "row") for row in rows]
    config = AcceptanceConfig(k=(2,), samplers=(Sampler(), Sampler(1.0)), max_new_tokens=12, stop_at=stop_at)
    entries, folder = contenders({"ngram": NgramDrafter(NgramConfig())}, config.k), Path(out, name)
    found = measure(load_target(model), entries, chats, config, folder, {"weights": "w"}, progress=False)
    if processes().is_main_process:
        summary = {"samples": list(found.samples()), "count": found.count, "stopped": found.stopped_early}
        (folder / "found.json").write_text(json.dumps(summary))
"""
LET_ALONE = """
whole, most = map(int, sys.argv[4:])
measured("whole", whole)
measured("early", most, stop_at=5.0)
"""
# One process that has loaded everything forks those that are killed, and then goes on where the last of them was.
KILLED = """
whole, per_conversation = map(int, sys.argv[4:])
lines, signals = Path(out, "whole", "samples.jsonl"), []
for least in (1, 3, 5):  # conversations that are there when it is killed
    child = forked(lambda: measured("whole", whole))
    status = (0, 0)
    while status[0] == 0 and (not lines.exists() or lines.read_bytes().count(b"\\n") < per_conversation * least):
        time.sleep(0.002)
        status = os.waitpid(child, os.WNOHANG)
    if status[0] == 0:
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)
    signals.append(os.WIFSIGNALED(status[1]))
measured("whole", whole)
print(json.dumps(signals))
"""


def run(script: str, model: Path, folder: Path, last: int, processes: int = 1) -> tuple[dict[str, dict], str]:
    """What each measurement found, samples without their times; and what was printed."""
    printed = run_script(SETUP + script, folder, [str(model), str(folder), str(WHOLE), str(last)], processes)
    found = {file.parent.name: json.loads(file.read_text()) for file in folder.glob("*/found.json")}
    for measurement in found.values():
        measurement["samples"] = [{k: v for k, v in s.items() if k not in TIMES} for s in measurement["samples"]]
    return found, printed


@pytest.fixture(scope="module")
def one(chat_folder, tmp_path_factory):
    """What one process measures that is let alone."""
    return run(LET_ALONE, chat_folder, tmp_path_factory.mktemp("one"), 2 * FEWEST)[0]


@pytest.fixture(scope="module")
def folder_of_two(chat_folder, tmp_path_factory):
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def two(chat_folder, folder_of_two):
    return run(LET_ALONE, chat_folder, folder_of_two, 2 * FEWEST, processes=2)[0]


@pytest.mark.slow
def test_two_processes_measure_what_one_does(one, two, folder_of_two):
    assert [s["conversation"] for s in one["whole"]["samples"][::SAMPLES]] == [f"c{i}" for i in range(WHOLE)]
    assert two["whole"] == one["whole"]
    folder = folder_of_two / "whole"
    assert sorted(path.name for path in folder.glob("samples*")) == ["samples.json", "samples.jsonl"]
    assert json.loads((folder / "samples.json").read_text())["processes"] == 2


@pytest.mark.slow
def test_an_early_end_comes_after_the_same_conversation(one, two):
    alone = one["early"]
    assert alone["count"] == FEWEST
    assert alone["stopped"]["half_width"] <= 5.0
    assert two["early"] == alone
    in_order = list(dict.fromkeys(s["conversation"] for s in alone["samples"]))
    assert len(in_order) == FEWEST
    assert in_order != sorted(in_order, key=lambda name: int(name[1:]))  # any first part is like the whole


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
def test_a_killed_measurement_goes_on_to_the_same_samples(one, chat_folder, tmp_path):
    found, printed = run(KILLED, chat_folder, tmp_path, SAMPLES)
    assert any(json.loads(printed.splitlines()[-1]))  # at least one did not end by itself before
    assert found["whole"] == one["whole"]
