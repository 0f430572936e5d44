"""Peak memory: the gauge sees what was allocated, and every variant is set beside what it has to hold."""

from __future__ import annotations

import json
import mmap

import pytest
import torch

from spectrain.drafters.ngram import NgramConfig, NgramDrafter
from spectrain.evaluation import memory
from spectrain.evaluation.memory import MEBIBYTE, Gauge, Job, Watched, compared, peak, render, weight_bytes


@pytest.fixture(scope="module")
def job(chat_folder, tmp_path_factory):
    traffic = tmp_path_factory.mktemp("traffic") / "chats.jsonl"
    traffic.write_text(json.dumps({"id": "a", "prompt": "hello"}) + "\n", encoding="utf-8")
    return Job(memory.PLAIN, str(chat_folder), None, (str(traffic),), 3, 20, "float32", 0)


def test_the_gauge_sees_what_was_held_and_let_go():
    gauge = Gauge(torch.device("cpu"))
    gauge.reset()
    before = gauge.now()
    with mmap.mmap(-1, 48 * MEBIBYTE) as held:  # malloc might find room in what earlier tests have freed
        for page in range(0, len(held), mmap.PAGESIZE):
            held[page] = 1
    assert gauge.peak() - before > 40 * MEBIBYTE


@pytest.mark.parametrize("variant", [memory.PLAIN, memory.NGRAM, memory.DRAFT])
def test_a_run_tells_what_it_held(job, variant, chat_target):
    found = peak(Job(**{**vars(job), "variant": variant}))
    assert (found["variant"], found["tokens"]) == (variant, 20)
    assert found["target_bytes"] == weight_bytes(chat_target.model)
    assert found["peak_bytes"] >= found["loaded_bytes"] > found["target_bytes"]
    assert (found["drafter_bytes"] > 0) == (found["drafter_cache_bytes"] > 0) == (variant == memory.DRAFT)
    if variant == memory.DRAFT:
        config = chat_target.config
        entry = 3 * 2 * config.num_key_value_heads * config.head_dim * 4  # three layers' keys and values
        assert found["drafter_cache_bytes"] % entry == 0
        assert 20 < found["drafter_cache_bytes"] // entry < 60


def test_a_tied_head_counts_once(tiny_model):
    sizes = [weight_bytes(tiny_model("llama", layers=1, tie_word_embeddings=tied)) for tied in (True, False)]
    assert sizes[1] - sizes[0] == 24 * 32 * 8


def test_a_watched_drafter_remembers_the_most(chat_target):
    class Growing(NgramDrafter):
        sizes = iter((3, 8, 5))

        def memory(self, state):
            return next(self.sizes)

    watched = Watched(Growing(NgramConfig()))
    state = watched.start([1])
    for _ in range(3):
        watched.propose(state, memory.GREEDY, memory.Chain(1), [1], torch.zeros(1, 1))
    assert watched.most == 8


def row(variant, peak_bytes, **more):
    base = {"drafter_bytes": 0, "drafter_cache_bytes": 0, "loaded_bytes": 600 * MEBIBYTE}
    return {"variant": variant, "peak_bytes": peak_bytes * MEBIBYTE, "machine": {}, **base, **more}


def test_a_row_is_set_beside_plain_and_what_its_drafter_holds():
    own = {"drafter_bytes": 200 * MEBIBYTE, "drafter_cache_bytes": 100 * MEBIBYTE}
    plain, draft = compared([row("plain", 700), row("small draft", 1100, **own)])
    assert plain["ratio"] == 1
    assert plain["growth_bytes"] == 100 * MEBIBYTE
    assert draft["ratio"] == pytest.approx(1100 / (700 + 200 + 100))
    assert "machine" not in draft
    last = render({"rows": [plain, draft]}).splitlines()[-1]
    assert [cell.strip() for cell in last.strip("|").split("|")] == [
        "small draft", "1,100.0", "500.0", "200.0", "100.0", "1.100",
    ]  # fmt: skip


@pytest.mark.slow
def test_every_variant_has_a_process_of_its_own(job):
    document = memory.measure(job, progress=False)
    assert [found["variant"] for found in document["rows"]] == [memory.PLAIN, memory.NGRAM, memory.DRAFT]
    assert document["machine"]["threads"] >= 1
    # Beside the interpreter's own memory a toy target is nothing: no variant may differ by much.
    assert all(0.9 < found["ratio"] < 1.1 for found in document["rows"])
