"""A run that is killed again and again, at any moment and with no chance to clean up, is the unbroken run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from processes import run_script
from training_lab import assert_bit_equal, metrics

KILLS = 20
# One process that has loaded everything forks the runs, so that a new one starts at once.
CHAIN = """
import json, os, random, signal, sys, time
from pathlib import Path
tests, out, kills = sys.argv[1:]
sys.path.insert(0, tests)
import torch
from forks import forked
from training_lab import Lab

torch.set_num_threads(1)
lab, out, kills = Lab(Path(out) / "lab"), Path(out), int(kills)

def run(folder):
    trainer = lab.trainer(folder, epochs=15, checkpoint_every=2, validate_every=6, select="best", keep=1)
    trainer.run()
    torch.save((trainer.chosen, trainer.drafter.state_dict(), trainer.optimizer.state_dict()["state"]), folder / "end")

def steps():
    found = (out / "killed" / "checkpoints").glob("step-*")
    return max((int(path.name[5:]) for path in found), default=0)

started = time.perf_counter()
assert os.waitstatus_to_exitcode(os.waitpid(forked(lambda: run(out / "whole")), 0)[1]) == 0
step = (time.perf_counter() - started) / 120
chance, reached = random.Random(0), []
for number in range(kills):
    child, before, late = forked(lambda: run(out / "killed")), steps(), chance.uniform(0, 5 * step)
    # At any moment, but mostly late enough that the chain gets on; it is 120 steps long.
    while number % 4 and steps() == before and os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(step / 10)
    time.sleep(late if steps() < 110 else 0)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    reached.append((steps(), os.WIFSIGNALED(status)))
assert os.waitstatus_to_exitcode(os.waitpid(forked(lambda: run(out / "killed")), 0)[1]) == 0
(out / "reached.json").write_text(json.dumps(reached))
"""


@pytest.mark.slow
def test_20_kills_at_any_moment_change_nothing(tmp_path):
    run_script(CHAIN, tmp_path, [str(tmp_path), str(KILLS)])
    reached = json.loads((tmp_path / "reached.json").read_text())
    assert [killed for _, killed in reached] == [True] * KILLS
    assert len({step for step, _ in reached}) > KILLS / 2
    whole, killed = (torch.load(tmp_path / name / "end") for name in ("whole", "killed"))
    assert whole[0] == killed[0]
    assert_bit_equal(whole[1], killed[1])
    for key, values in whole[2].items():
        assert_bit_equal(values, killed[2][key])
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "killed")
    assert names(tmp_path / "whole") == names(tmp_path / "killed")


def names(folder: Path) -> list[str]:
    """What is there for a reader; hidden files are those that a killed writer left."""
    found = (path.relative_to(folder) for path in folder.rglob("*"))
    return sorted(str(path) for path in found if not any(part.startswith(".") for part in path.parts))
