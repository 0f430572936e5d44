"""A measurement by several processes, one that is killed, one that ends early: the same samples but for times."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import TESTS, run_script

from spectrain.evaluation.running import FEWEST

TIMES = {"prefill_s", "draft_s", "verify_s", "overhead_s", "total_s", "energy_j"}
SCRIPT = """
import json, sys
from pathlib import Path
tests, model, out, count, stop_at = sys.argv[1:6]
sys.path.insert(0, tests)
import torch
from spectrain.data.conversations import parse_conversation
from spectrain.distributed import processes
from spectrain.drafters.ngram import NgramConfig, NgramDrafter
from spectrain.evaluation.contenders import AcceptanceConfig, contenders
from spectrain.evaluation.measurement import measure
from spectrain.exact.sampler import Sampler
from spectrain.target import load_target

torch.set_num_threads(1)
texts = ["hello there", "ab ab ab", "a", "the cat sat on the mat", "one two one two"]
rows = [{"id": f"c{i}", "kind": ("even", "odd")[i % 2], "prompt": texts[i % 5] + " " * i} for i in range(int(count))]
chats = [parse_conversation(row, "row") for row in rows]
config = AcceptanceConfig(k=(2,), samplers=(Sampler(), Sampler(1.0)), max_new_tokens=12,
                          stop_at=float(stop_at) or None)
entries = contenders({"ngram": NgramDrafter(NgramConfig())}, config.k)
found = measure(load_target(model), entries, chats, config, Path(out), {"weights": "w"}, progress=False)
if processes().is_main_process:
    summary = {"samples": list(found.samples()), "count": found.count, "stopped": found.stopped_early}
    (Path(out) / "found.json").write_text(json.dumps(summary))
"""


def measured(model: Path, folder: Path, processes: int = 1, count: int = 9, stop_at: float = 0.0) -> dict:
    """Samples without times, and what else was said."""
    run_script(SCRIPT, folder, [str(model), str(folder), str(count), str(stop_at)], processes)
    found = json.loads((folder / "found.json").read_text())
    found["samples"] = [{k: v for k, v in sample.items() if k not in TIMES} for sample in found["samples"]]
    return found


@pytest.fixture(scope="module")
def one(chat_folder, tmp_path_factory):
    """What one process measures that is let alone."""
    return measured(chat_folder, tmp_path_factory.mktemp("one"))


@pytest.mark.slow
def test_two_processes_measure_what_one_does(one, chat_folder, tmp_path):
    two = measured(chat_folder, tmp_path / "two", processes=2)
    assert [s["conversation"] for s in one["samples"][::6]] == [f"c{i}" for i in range(9)]
    assert two == one
    assert sorted(path.name for path in (tmp_path / "two").glob("samples*")) == ["samples.json", "samples.jsonl"]
    assert json.loads((tmp_path / "two" / "samples.json").read_text())["processes"] == 2


@pytest.mark.slow
def test_an_early_end_comes_after_the_same_conversation(chat_folder, tmp_path):
    one, two = (measured(chat_folder, tmp_path / str(n), n, 2 * FEWEST, 5.0) for n in (1, 2))
    assert one["count"] == FEWEST
    assert one["stopped"]["half_width"] <= 5.0
    assert two == one
    assert len({s["conversation"] for s in one["samples"]}) == FEWEST
    in_order = [s["conversation"] for s in one["samples"]]
    assert in_order != sorted(in_order, key=lambda name: int(name[1:]))  # any first part is like the whole


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this platform cannot kill at once")
def test_a_killed_measurement_goes_on_to_the_same_samples(one, chat_folder, tmp_path):
    folder = tmp_path / "killed"
    folder.mkdir()
    script = folder / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS.parent)}
    for least in (1, 3, 5):  # conversations that are there when it is killed
        process = subprocess.Popen([sys.executable, script, TESTS, chat_folder, folder, "9", "0.0"], env=environment)
        file = folder / "samples.jsonl"
        while process.poll() is None and (not file.exists() or file.read_bytes().count(b"\n") < 6 * least):
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert measured(chat_folder, folder) == one
