"""What several test files share: the builders of ``tiny`` as fixtures."""

from __future__ import annotations

from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from tiny import (
    SIZES,
    build_eagle3,
    build_model,
    build_rows,
    build_store,
    build_target,
    build_tokenizer,
    build_words,
    save_chat_model,
    write_recipe,
)
from training_lab import Lab

from spectrain.config import load_recipe
from spectrain.pipeline import Run
from spectrain.target import Target, load_target


@pytest.fixture(scope="session")
def make_tokenizer():
    return build_tokenizer


@pytest.fixture(scope="session")
def make_eagle3():
    return build_eagle3


@pytest.fixture(scope="session")
def tiny_target():
    return build_target


@pytest.fixture(scope="session")
def tiny_model():
    return build_model


@pytest.fixture(scope="session")
def word_tokenizer():
    return build_words


@pytest.fixture(params=sorted(SIZES))
def architecture(request):
    """Every kind of tiny target: rotary, learned positions, parallel residuals, sliding windows, soft caps."""
    return request.param


@pytest.fixture(scope="session")
def make_rows():
    return build_rows


@pytest.fixture(scope="session")
def make_store():
    return build_store


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny target that can chat. Not to be written to."""
    return save_chat_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def chat_target(chat_folder: Path) -> Target:
    return load_target(str(chat_folder))


@pytest.fixture(scope="session")
def make_recipe(chat_folder: Path):
    """A function that writes a small recipe and its chats into a folder; the path of the recipe."""
    return lambda folder: write_recipe(folder, chat_folder)


@pytest.fixture(scope="session")
def finished_run(make_recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a recipe that was run to its end. Not to be written to: copy it."""
    folder = tmp_path_factory.mktemp("finished")
    run = Run(load_recipe(make_recipe(folder)), progress=False)
    run.train()
    run.evaluate()
    return folder


@pytest.fixture
def one_accelerator():
    """Accelerate keeps its state for a whole process: each test starts and leaves without."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A target with features of a few rows, and trainers over them."""
    return Lab(tmp_path_factory.mktemp("lab"))
