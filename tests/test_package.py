"""The wheel: it holds what the package needs, and works from a folder that has nothing else."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, since building leaves folders behind."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "spectrain", source / "spectrain", ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "-q", "-w", str(out)]
    done = subprocess.run(build, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (found,) = out.glob("*.whl")
    return found


def test_every_file_of_the_package_is_in_the_wheel_and_nothing_else(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    here = {p for p in (ROOT / "spectrain").rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    assert names == {str(path.relative_to(ROOT)) for path in here}
    assert "spectrain/py.typed" in names
    assert {Path(name).suffix for name in names} == {".py", ".j2", ".json", ".txt", ".yaml", ".typed"}


def test_the_wheel_works_where_there_is_nothing_else(wheel, finished_run, tmp_path):
    """Its data files are found, its command runs, and its public names are there."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    empty = tmp_path / "empty"
    empty.mkdir()
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "installed"), "OMP_NUM_THREADS": "1"}

    def run(*arguments):
        done = subprocess.run([sys.executable, *arguments], cwd=empty, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = (
        "import spectrain; print(spectrain.__file__); from spectrain import load_bundle, generate, stream, DynamicTree"
    )
    assert run("-c", where).strip() == str(tmp_path / "installed" / "spectrain" / "__init__.py")
    run("-m", "spectrain", "recipe", "eagle3", "my.yaml")
    report = json.loads(run("-m", "spectrain", "report", str(finished_run / "run" / "acceptance.json"),
                            "--output", "report", "--json"))  # fmt: skip
    assert (empty / "report" / "report.html").is_file()
    assert report["document"].endswith("acceptance.json")
    assert {path.name for path in empty.iterdir()} == {"my.yaml", "report"}
