"""A run on several processes is the run of one: gradients, learning rates, noise, metrics, sharded weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from processes import run_script
from safetensors.torch import load_file
from training_lab import LONGEST, Lab, first_gradients, metrics, weights

from spectrain.bundle import read_bundle

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_accelerator")]
ROWS = 8


WARM_UP_STEPS = 24  # a whole number of epochs with 1, 2 or 4 processes and accumulation 1 or 4
RATES = """
import json, sys
from pathlib import Path
tests, folder, out, total = sys.argv[1:]
sys.path.insert(0, tests)
import torch
from training_lab import LONGEST, Lab, first_gradients, metrics

torch.set_num_threads(1)
lab, out, total = Lab(Path(folder)), Path(out), int(total)
processes = lab.trainer(out / "any").accelerator.num_processes
main = lab.trainer(out / "any").accelerator.is_main_process

rates = {}
for accumulation in (1, 4):
    steps = -(-8 // (processes * accumulation))
    trainer = lab.trainer(out / f"rates-{accumulation}", accumulation=accumulation, epochs=total // steps, depths=1,
                          optim={"warmup": 0.4}, validate_every=1000, checkpoint_every=1000)
    trainer.run()
    rates[accumulation] = [values["lr"] for values in metrics(out / f"rates-{accumulation}")]
if main:
    (out / "rates.json").write_text(json.dumps(rates))
"""
MORE = """
for name, noise in (("plain", None), ("noisy", 0.1)):
    gradients, values = first_gradients(lab.trainer(out / name, accumulation=8 // processes, noise=noise))
    if main:
        torch.save((gradients, values), out / f"{name}.pt")

# Steps of 6: the last one of an epoch leaves a process without rows.
lab.trainer(out / "run", accumulation=6 // processes, epochs=10, checkpoint_every=7, optim={"warmup": 0.34}).run()
"""


@pytest.fixture(scope="module")
def alone(lab, tmp_path_factory) -> Path:
    """What one process makes of it."""
    return parallel(lab, tmp_path_factory.mktemp("one"), 1)


@pytest.fixture(scope="module")
def two(lab, tmp_path_factory) -> Path:
    return parallel(lab, tmp_path_factory.mktemp("two"), 2)


def parallel(lab: Lab, folder: Path, processes: int, script: str = RATES + MORE) -> Path:
    run_script(script, folder, [str(lab.folder), str(folder), str(WARM_UP_STEPS)], processes)
    return folder


def test_1x8_and_8x1_and_2x4_have_the_same_gradients(lab, alone, two, tmp_path):
    whole, want = first_gradients(lab.trainer(tmp_path, micro_batch_tokens=8 * LONGEST))
    for folder in (alone, two):
        split, got = torch.load(folder / "plain.pt")
        assert (whole - split).norm() < 1e-6 * whole.norm()
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-6)
        assert got["gradient_norm"] == pytest.approx(want["gradient_norm"], rel=1e-6)
        assert got["supervised"] == want["supervised"]


def test_noise_goes_by_the_micro_batch_and_not_by_the_process(alone, two):
    one, other = (torch.load(folder / "noisy.pt")[0] for folder in (alone, two))
    assert (one - other).norm() < 1e-6 * one.norm()


def test_two_processes_are_one_with_twice_the_accumulation(alone, two):
    a_run, b_run = metrics(alone / "run"), metrics(two / "run")
    assert len(a_run) == len(b_run) == 20
    for a, b in zip(a_run, b_run, strict=True):
        assert (a["step"], a["epoch"], a["supervised"], a["lr"]) == (b["step"], b["epoch"], b["supervised"], b["lr"])
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)
        assert b["gradient_norm"] == pytest.approx(a["gradient_norm"], rel=1e-3)
        if "validation" in a:
            assert a["validation"]["positions"] == b["validation"]["positions"]
            assert a["validation"]["alpha"] == pytest.approx(b["validation"]["alpha"], rel=1e-3)
    rates = [values["lr"] for values in b_run]
    assert rates.index(max(rates)) == 6  # ceil(0.34 x 20) = 7 optimizer steps of warm-up
    names = [sorted(path.name for path in (folder / "run" / "checkpoints").iterdir()) for folder in (alone, two)]
    assert names[0] == names[1] == ["step-000014", "step-000020"]


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_warm_up_peaks_at_optimizer_step_10(lab, alone, two, tmp_path, processes):
    """CASES C14."""
    folder = {1: alone, 2: two}.get(processes) or parallel(lab, tmp_path, 4, RATES)
    for rates in json.loads((folder / "rates.json").read_text()).values():
        assert len(rates) == WARM_UP_STEPS
        assert rates[:10] == pytest.approx([1e-3 * step / 10 for step in range(1, 11)])
        assert max(rates) == rates[9] == pytest.approx(1e-3)
        assert rates[10] < rates[9]


COMMAND = """
import sys
tests, recipe = sys.argv[1:]
from spectrain.cli import train
train([recipe])
"""


def test_the_command_leaves_one_bundle(make_recipe, tmp_path):
    """Processes still wait for each other when training is over."""
    said = run_script(COMMAND, tmp_path / "script", [str(make_recipe(tmp_path))], 2)
    contents = read_bundle(tmp_path / "run" / "bundle")
    assert contents.manifest.drafter["type"] == "eagle3"
    assert said.count("bundle: ") == 1
    best = json.loads((tmp_path / "run" / "training" / "checkpoints" / "best.json").read_text())
    assert f"(step {best['step']} of " in said


# --- sharded --------------------------------------------------------------------------------------------------------

SHARDED = """
import sys
from pathlib import Path
tests, folder, out = sys.argv[1:]
sys.path.insert(0, tests)
import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from training_lab import Killed, Lab, stop_at

torch.set_num_threads(1)
# Accelerate shards on accelerators only; on CPUs everything after this check is the same.
PartialState(cpu=True)._shared_state["distributed_type"] = DistributedType.MULTI_GPU
lab, out = Lab(Path(folder)), Path(out)

def trainer(name):
    return lab.trainer(out / name, accumulation=3, epochs=5, checkpoint_every=4, optim={"clip": 0.5}, select="best")

unbroken = trainer("unbroken")
assert all(isinstance(p, DTensor) for p in unbroken.parameters)
assert sum(p.to_local().numel() for p in unbroken.parameters) < 0.6 * sum(p.numel() for p in unbroken.parameters)
unbroken.run()
try:
    stop_at(trainer("broken"), 7).run()
except Killed:
    pass
trainer("broken").run()
"""


def test_a_sharded_run_is_the_run_of_one_process_also_when_it_is_resumed(lab, tmp_path):
    run_script(SHARDED, tmp_path, [str(lab.folder), str(tmp_path)], 2, ACCELERATE_USE_FSDP="true", FSDP_VERSION="2",
               FSDP_AUTO_WRAP_POLICY="NO_WRAP")  # fmt: skip
    alone = lab.trainer(tmp_path / "alone", accumulation=6, epochs=5, checkpoint_every=4, optim={"clip": 0.5},
                        select="best")  # fmt: skip
    alone.run()
    assert metrics(tmp_path / "broken") == metrics(tmp_path / "unbroken")
    for a, b in zip(metrics(tmp_path / "alone"), metrics(tmp_path / "unbroken"), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)
        assert b.get("validation", {}).get("positions") == a.get("validation", {}).get("positions")
    for name in ("unbroken", "broken"):
        bundle = load_file(tmp_path / name / "checkpoints" / "step-000010" / "bundle" / "model.safetensors")
        last = load_file(tmp_path / "alone" / "checkpoints" / "step-000010" / "bundle" / "model.safetensors")
        assert bundle.keys() == last.keys() == weights(alone).keys()
        for key, value in last.items():
            assert (bundle[key].double() - value.double()).norm() <= 1e-5 * value.double().norm(), key
