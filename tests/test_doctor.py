"""What the doctor says of any machine: good ones, and each thing that can be wrong."""

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from spectrain import cli, machine
from spectrain.doctor import Subject, examine, render, usable
from spectrain.machine import Device, Disk, Driver, Machine, Package, limits, observe

GIB = 1 << 30
CACHE, HERE = Disk("Hub cache", Path("/cache"), 50 * GIB, True), Disk("output", Path("runs/my"), 50 * GIB, True)
H100 = Device("H100", True, 80 * GIB, 79 * GIB)
CPU = Machine(
    packages=(Package("python", "3.11.7", ">=3.11"), Package("torch", "2.13.0+cpu", ">=2.9")),
    cpu_bf16=True, processors=8, cores=8, threads=8, memory=32 * GIB, memory_free=30 * GIB, shared_memory=16 * GIB,
    disks=(HERE, CACHE), launcher_file=Path("/hf/default_config.yaml"),
)  # fmt: skip
GPU = replace(CPU, devices=(H100,), torch_cuda="12.8", driver=Driver("570.1", "12.8"), threads=1, omp_threads="1")
SUBJECT = Subject("my.yaml", "org/model", "Hub", output=HERE.path, memory=20 * GIB, disk=40 * GIB, target_bytes=GIB)


def settings(**values):
    return {"num_processes": 1, "distributed_type": "NO"} | values


@pytest.mark.parametrize("good", [CPU, GPU, replace(GPU, devices=(H100, H100))])
def test_a_good_machine_has_nothing_to_change(good):
    found = examine(good, SUBJECT)
    assert [finding for finding in found if finding.level != "ok"] == []
    assert usable(found)
    assert render(found).splitlines()[-1] == "usable"


@pytest.mark.parametrize(
    ("ill", "level", "about", "found", "mend"),
    [
        (replace(CPU, packages=(Package("transformers", "5.30.0", ">=5.16,<5.25"),)), "fault", "transformers",
         "5.30.0; >=5.16,<5.25 is supported", "pip install 'transformers>=5.16,<5.25'"),
        (replace(CPU, packages=(Package("peft", None, ">=0.18"),)), "fault", "peft", "not installed", "pip install"),
        (replace(CPU, packages=(Package("python", "3.10.2", ">=3.11"),)), "fault", "python", "3.10.2", "python3.11 -m"),
        (replace(CPU, torch_fault="OSError: libgomp"), "fault", "torch", "does not load: OSError: libgomp", "pip"),
        (replace(CPU, driver=Driver("550.1", "12.4")), "change", "driver", "torch is a build for CPUs", "up to 12.4"),
        (replace(CPU, torch_cuda="13.0", driver=Driver("550.1", "12.4")), "change", "driver",
         "built for CUDA 13.0, the driver 550.1 runs up to 12.4", "a newer driver"),
        (replace(CPU, torch_cuda="12.4", driver=Driver("550.1", "12.4")), "change", "driver", "yet no device",
         "CUDA_VISIBLE_DEVICES"),
        (replace(CPU, driver=Driver(fault="NVML: no driver")), "change", "driver", "NVML: no driver", "nvidia-smi"),
        (replace(CPU, cores=2, threads=8), "change", "threads", "2 of 8 cores", "export OMP_NUM_THREADS=2"),
        (replace(CPU, cores=2.5, threads=8), "change", "threads", "2.5 of 8 cores", "export OMP_NUM_THREADS=2"),
        (replace(CPU, cores=0.5, threads=8), "change", "threads", "0.5 of 8 cores", "export OMP_NUM_THREADS=1"),
        (replace(CPU, threads=1, omp_threads="1"), "change", "threads", "OMP_NUM_THREADS=1", "OMP_NUM_THREADS=8"),
        (replace(GPU, devices=(H100, H100), shared_memory=64 << 20), "change", "/dev/shm", "64.0 MiB", "--shm-size"),
        (replace(CPU, disks=(replace(HERE, writable=False), CACHE)), "fault", "output", "cannot be written", "output="),
        (replace(CPU, disks=(HERE, replace(CACHE, writable=False))), "fault", "Hub cache", "/cache", "HF_HOME"),
        (replace(CPU, disks=(Disk("temporary files", Path("/tmp"), 9 << 20, True),)), "change", "temporary files",
         "9.0 MiB free", "TMPDIR"),
        (replace(CPU, launcher="YAMLError: x"), "change", "launcher", "cannot be read", "accelerate config"),
        (replace(GPU, launcher=settings(num_processes=8)), "change", "launcher", "num_processes 8, and 1 device", ""),
        (replace(CPU, launcher=settings(distributed_type="MULTI_GPU")), "change", "launcher", "there are none", ""),
        (replace(GPU, launcher=settings(use_cpu=True)), "change", "launcher", "leaves 1 device(s) idle", ""),
        (replace(CPU, launcher=settings(use_cpu=True, num_processes=9)), "change", "launcher", "9 on 8 cores", ""),
        (replace(GPU, devices=(replace(H100, bf16=False),), launcher=settings(mixed_precision="bf16")), "change",
         "launcher", "mixed_precision bf16", ""),
        (replace(CPU, hub_fault="ConnectError: refused"), "change", "Hub", "does not answer: ConnectError", "HTTPS_PR"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_found_and_mended(ill, level, about, found, mend):
    (finding,) = [finding for finding in examine(ill) if finding.level != "ok"]
    assert (finding.level, finding.about) == (level, about)
    assert found in finding.found
    assert mend in finding.mend
    assert finding.mend
    assert usable([finding]) == (level == "change")
    assert f"-> {finding.mend}" in render([finding])


@pytest.mark.parametrize(
    ("place", "subject", "level", "about", "found"),
    [
        (CPU, replace(SUBJECT, trouble="there is no such folder"), "fault", "target", "no such folder"),
        (replace(CPU, offline=("HF_HUB_OFFLINE",)), SUBJECT, "fault", "target", "HF_HUB_OFFLINE is set"),
        (replace(CPU, disks=(HERE, replace(CACHE, free=2 * GIB))), replace(SUBJECT, target_bytes=3 * GIB), "fault",
         "target", "takes 3.00 GiB, its cache has 2.00 GiB"),
        (CPU, replace(SUBJECT, disk=60 * GIB, held=9 * GIB), "fault", "disk of the run", "writes 51.00 GiB"),
        (CPU, replace(SUBJECT, memory=33 * GIB), "fault", "memory of the run", "33.00 GiB"),
        (CPU, replace(SUBJECT, memory=31 * GIB), "change", "memory of the run", "30.00 GiB of 32.00 GiB are free"),
        (GPU, replace(SUBJECT, memory=81 * GIB), "fault", "memory of the run", "79.00 GiB of 80.00 GiB"),
        (replace(CPU, cpu_bf16=False), replace(SUBJECT, dtype="bfloat16"), "change", "precision", "bfloat16, which"),
        (replace(GPU, devices=(replace(H100, bf16=False),)), replace(SUBJECT, precision="bf16"), "change", "precision",
         "training.precision=bf16"),
        (CPU, replace(SUBJECT, memory=None, disk=None, unknown="chats.jsonl is not here"), "change", "estimate",
         "chats.jsonl is not here"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_found(place, subject, level, about, found):
    (finding,) = [finding for finding in examine(place, subject) if finding.level != "ok"]
    assert (finding.level, finding.about) == (level, about)
    assert found in finding.found
    assert finding.mend


def test_what_was_written_already_counts(tmp_path):
    assert usable(examine(CPU, replace(SUBJECT, disk=60 * GIB, held=11 * GIB)))


# --- facts --------------------------------------------------------------------------------------------------------


def tree(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


INFO = "MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable: 8388608 kB\n"
V2 = {
    "proc/meminfo": INFO, "proc/self/cgroup": "0::/pod/app\n",
    "sys/fs/cgroup/pod/cpu.max": "50000 100000\n", "sys/fs/cgroup/pod/app/cpu.max": "max 100000\n",
    "sys/fs/cgroup/pod/memory.max": "max\n", "sys/fs/cgroup/pod/app/memory.max": f"{4 * GIB}\n",
    "sys/fs/cgroup/pod/app/memory.current": f"{3 * GIB}\n",
    "sys/fs/cgroup/pod/app/memory.stat": f"anon {GIB}\ninactive_file {2 * GIB}\n",
}  # fmt: skip
V1 = {
    "proc/meminfo": INFO, "proc/self/cgroup": "5:cpu:/x\n4:memory:/x\n1:name=systemd:/\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{3 * GIB}\n",
    "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {2 * GIB}\n",
}  # fmt: skip
FREE = {"proc/meminfo": INFO, "proc/self/cgroup": "4:memory:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n"}  # fmt: skip


@pytest.mark.parametrize(
    ("files", "cores", "memory", "free"),
    [(V2, 0.5, 4 * GIB, 3 * GIB), (V1, 0.5, 4 * GIB, 3 * GIB), (FREE, None, 16 * GIB, 8 * GIB)],
)
def test_a_container_s_limits_count(tmp_path, files, cores, memory, free):
    """Cached files are given up when memory is asked for; a group's ancestors limit it, too."""
    cores = cores or float(len(os.sched_getaffinity(0)))
    assert limits(tree(tmp_path, files)) == (cores, memory, free)


@pytest.fixture
def hugging_face(tmp_path, monkeypatch):
    for name in ("HF_HUB_CACHE", "HF_TOKEN", "HF_TOKEN_PATH", *machine.SWITCHES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path / "hf"


def test_this_machine_is_observed(hugging_face, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tree(hugging_face, {"accelerate/default_config.yaml": "num_processes: 8\n"})
    found = observe({"output": tmp_path / "not" / "yet"})
    assert {"python", "torch", "transformers", "accelerate"} <= {package.name for package in found.packages}
    assert found.torch_fault == ""
    assert found.threads > 0
    assert found.memory_free <= found.memory
    output, cache, temporary = found.disks
    assert (output.path, output.writable) == (tmp_path / "not" / "yet", True)
    assert cache.path == hugging_face / "hub"
    assert temporary.free > 0
    assert found.launcher == {"num_processes": 8}
    assert (found.offline, found.token, found.hub_fault) == (("HF_HUB_OFFLINE",), True, None)
    assert "hf_secret" not in render(examine(found)) + repr(found)


def test_a_launcher_file_that_is_no_yaml_is_told(hugging_face):
    tree(hugging_face, {"accelerate/default_config.yaml": "a: [\n"})
    assert "ParserError" in observe({}).launcher


@pytest.mark.parametrize(
    ("script", "driver"),
    [
        ("echo '| NVIDIA-SMI 570.1   Driver Version: 570.124.06   CUDA Version: 12.8 |'", Driver("570.124.06", "12.8")),
        ("echo 'NVIDIA-SMI has failed'; exit 9", Driver(fault="NVIDIA-SMI has failed")),
    ],
)
def test_the_driver_is_asked(tmp_path, monkeypatch, script, driver):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert machine._driver() == driver


def test_a_torch_that_does_not_load_is_a_fact(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert machine._torch()["torch_fault"].startswith("ModuleNotFoundError: import of torch halted")


def test_a_hub_that_does_not_answer_is_a_fact(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert machine._ask_hub().startswith("ConnectError")


# --- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def doctor(capsys, hugging_face):
    """The command's exit code and findings by what they are about."""

    def doctor(*arguments):
        code = cli.guarded(cli.doctor, [*map(str, arguments), "--json"], "spectrain doctor")
        said = capsys.readouterr()
        document = json.loads(said.out)
        assert document["usable"] == (code == 0)
        return code, {finding["about"]: finding for finding in document["findings"]}

    return doctor


def test_a_recipe_is_held_against_the_machine(doctor, make_recipe, tmp_path):
    code, found = doctor(make_recipe(tmp_path))
    assert code == 0
    assert found["target"]["found"].endswith(" is a folder here")
    assert found["memory of the run"]["level"] == found["disk of the run"]["level"] == "ok"
    assert found["output"]["found"].startswith(str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_chats_that_cannot_be_used_are_a_fault_of_theirs(doctor, make_recipe, tmp_path):
    """It was one of the estimate, with a remedy that is none: how many tokens there are."""
    recipe, robot = make_recipe(tmp_path), json.dumps({"messages": [{"role": "robot", "content": "x"}]})
    with (tmp_path / "train.jsonl").open("a", encoding="utf-8") as file:
        file.write(f"{{\n{robot}\n[1]\n")
    code, found = doctor(recipe)
    assert (code, found["chats"]["level"]) == (1, "fault")
    path = tmp_path / "train.jsonl"
    told = (f"not valid JSON: {path}:9", f"with an unknown role: {path}:10", f"not a conversation: {path}:11")
    assert all(part in found["chats"]["found"] for part in told)
    assert found["chats"]["mend"] == "data.bad_rows=drop, or mend these rows"
    assert "estimate" not in found
    assert doctor(recipe, "data.bad_rows=drop")[0] == 0
    path.unlink()
    code, found = doctor(recipe)
    assert (code, found["chats"]["found"].split(";")[0]) == (1, f"data.train: {path}: no such file")


@pytest.mark.parametrize("broken", ["/no/such/folder", "empty"])
def test_a_target_that_cannot_be_read_is_a_fault(doctor, make_recipe, tmp_path, broken, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    code, found = doctor(make_recipe(tmp_path), f"target.name={broken}")
    assert (code, found["target"]["level"]) == (1, "fault")


def test_a_target_without_a_chat_template_is_a_fault_and_so_is_a_setting_it_does_not_read(
    doctor, make_recipe, chat_folder, tmp_path
):
    bare = shutil.copytree(chat_folder, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    code, found = doctor(make_recipe(tmp_path), f"target.name={bare}")
    assert (code, found["target"]["level"]) == (1, "fault")
    assert f"the chat template of {bare} is missing; set tokenizer.chat_template" in found["target"]["found"]
    code, found = doctor(tmp_path / "recipe.yaml", "data.chat_template_kwargs={thinking: false}")
    assert "reads no variable 'thinking'" in found["target"]["found"]


def test_a_target_of_the_hub_is_not_fetched(doctor, make_recipe, tmp_path):
    code, found = doctor(make_recipe(tmp_path), "target.name=org/none")
    assert (code, found["target"]["level"]) == (0, "ok")
    assert found["target"]["found"] == "org/none will be fetched from the Hub"
    assert "--online" in found["estimate"]["found"]


def test_a_bundle_s_target_is_looked_for(doctor, finished_run, chat_folder, tmp_path):
    code, found = doctor(finished_run / "run" / "bundle")
    assert (code, found["target"]["found"]) == (0, f"{chat_folder} is a folder here")


def test_a_recipe_that_is_wrong_is_bad_input(make_recipe, tmp_path, capsys, hugging_face):
    for arguments in (["none.yaml"], [str(make_recipe(tmp_path)), "optim.lrr=1"], [str(tmp_path)]):
        assert cli.guarded(cli.doctor, arguments, "spectrain doctor") == 2
        assert capsys.readouterr().err.startswith("error: ")
