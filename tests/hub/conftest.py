from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from fake_hub import FakeHub
from huggingface_hub import constants

from spectrain.hub.contents import gather
from spectrain.hub.request import Request

TARGET, COMMIT = "org/target", "c" * 40  # nobody fetches it, but it has to be there


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A fake Hub that this process takes for the real one, with a token that may write."""
    found = FakeHub()
    there = found.add(TARGET, {"config.json": b"{}"})
    there.commits[COMMIT] = there.files
    template = "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", found.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", found.url + template)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # it knows large files, as Hubs of one's own do
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setenv("HF_TOKEN", "hf_writer")
    yield found
    found.close()


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    """A finished run of one's own: its recipe, chats and ``run/bundle``, trained against a folder."""
    return Path(shutil.copytree(finished_run, tmp_path / "work"))


@pytest.fixture
def bundle(run: Path) -> Path:
    return run / "run" / "bundle"


@pytest.fixture
def request_of(bundle: Path):
    """``request_of(**changes)``: what is to be published, complete but for the changes."""
    whole = Request(bundle, "org/drafter", {"license": "apache-2.0"}, target=TARGET, revision=COMMIT)
    return lambda **changes: replace(whole, **changes)


@pytest.fixture
def publication(request_of):
    return gather(request_of())
