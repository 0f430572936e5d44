"""Speed beside transformers: the same tokens from every decoder, the same drafts on both sides, rates of sums."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig

from spectrain.data.conversations import parse_conversation
from spectrain.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from spectrain.drafters.language_model import LanguageModelConfig, LanguageModelDrafter
from spectrain.errors import SpectrainError
from spectrain.evaluation import speed
from spectrain.evaluation.speed import PLAIN, Answer, contenders, measure, render, summarise
from spectrain.evaluation.workbench import Prompt, prompts_of, table
from spectrain.shapes import DynamicTree

BUDGET, K = 9, 3
OURS = ["plain", "small draft k=3", "ngram k=3", "ngram of 2 k=3", "eagle3 k=3", "eagle3 dynamic tree of 7"]
THEIRS = ["plain", "assisted k=3", "assisted, defaults", "lookup k=3"]


def chats(*texts):
    return [parse_conversation({"id": f"c{i}", "kind": "all", "prompt": text}, "row") for i, text in enumerate(texts)]


@pytest.fixture(scope="module")
def prompts(chat_target):
    return prompts_of(chat_target, chats("hello hello", "ab", "a"), None, BUDGET, 0)


def whole_target(target):
    """The target as its own draft model: every draft is right."""
    layers = tuple(range(target.num_layers))
    return LanguageModelDrafter.build(LanguageModelConfig(layers=layers), target, torch.zeros(target.vocab_size)).eval()


@pytest.fixture(scope="module")
def entries(chat_target):
    torch.manual_seed(0)
    counts_V = torch.arange(chat_target.vocab_size)
    eagle = Eagle3Drafter.build(Eagle3Config(depths=2, draft_vocab_size=64), chat_target, counts_V).eval()
    return contenders(chat_target, K, whole_target(chat_target), eagle, speed.widest_tree(K, 7))


@pytest.fixture(scope="module")
def samples(chat_target, entries, prompts):
    return measure(chat_target, entries, prompts, BUDGET, 0, progress=False)


def of(samples, name):
    return [sample for sample in samples if sample["contender"] == name]


# --- the decoders -------------------------------------------------------------------------------------------------


def test_every_decoder_gives_the_same_tokens(samples, prompts):
    names = {sample["contender"] for sample in samples}
    assert names == {f"spectrain {name}" for name in OURS} | {f"transformers {name}" for name in THEIRS}
    assert len(samples) == len(names) * len(prompts)
    assert all(sample["difference"] is None and sample["tokens"] == BUDGET for sample in samples)


def test_both_sides_draft_k_tokens_with_the_same_model(samples):
    # Nine tokens, four of each forward. Ours reads the prompt by itself, which gives the first one.
    assert {sample["forwards"] for sample in of(samples, "transformers assisted k=3")} == {3}
    assert {sample["forwards"] for sample in of(samples, "spectrain small draft k=3")} == {1 + 2}
    assert all(s["rounds"] == [[3, 3, 4, None]] * 2 for s in of(samples, "spectrain small draft k=3"))


def test_transformers_runs_once_a_token_when_plain(samples):
    assert {sample["forwards"] for sample in of(samples, PLAIN)} == {BUDGET}
    assert {sample["forwards"] for sample in of(samples, "spectrain plain")} == {BUDGET}


def test_the_defaults_of_the_assistant_are_transformers_own(chat_target, entries, prompts):
    draft = next(entry.drafter for entry in entries if entry.name == "spectrain small draft k=3")
    by_name = {entry.name: entry for entry in entries}
    by_name["transformers assisted k=3"].run(prompts[0].ids, 2, False)
    set_ = draft.model.generation_config
    assert (set_.num_assistant_tokens, set_.num_assistant_tokens_schedule, set_.assistant_confidence_threshold) == (
        K, "constant", 0.0,
    )  # fmt: skip
    by_name["transformers assisted, defaults"].run(prompts[0].ids, 2, False)
    assert draft.model.generation_config.to_diff_dict() == GenerationConfig().to_diff_dict()


def test_the_targets_own_generation_config_does_not_change_the_law(chat_target, entries, prompts, monkeypatch):
    settings = chat_target.model.generation_config
    monkeypatch.setattr(settings, "repetition_penalty", 50.0)
    monkeypatch.setattr(settings, "no_repeat_ngram_size", 1)
    monkeypatch.setattr(settings, "num_beams", 3)
    plain = [entry for entry in entries if entry.name in (PLAIN, "spectrain plain")]
    found = measure(chat_target, plain, prompts, BUDGET, 0, progress=False)
    assert all(sample["difference"] is None for sample in found)


def test_taps_of_an_earlier_contender_are_off_while_transformers_runs(chat_target, entries, prompts):
    eagle = next(entry for entry in entries if entry.name == "spectrain eagle3 k=3")
    eagle.run(prompts[0].ids, 3, False)
    assert chat_target._hooks
    next(entry for entry in entries if entry.name == PLAIN).run(prompts[0].ids, 3, False)
    assert not chat_target._hooks


def test_a_trained_drafter_that_makes_chains_gets_no_tree(chat_target):
    chains = SimpleNamespace(config=SimpleNamespace(type="other"), trees=False)
    found = contenders(chat_target, 2, SimpleNamespace(model=None), chains, DynamicTree(2, 2, 4))
    assert [entry.name for entry in found if "other" in entry.name] == ["spectrain other k=2"]


def test_the_small_draft_is_cut_from_the_target(chat_target):
    draft = speed.small_draft(chat_target)
    assert draft.model.config.num_hidden_layers == 3
    assert torch.equal(draft.model.get_input_embeddings().weight, chat_target.embedding_weight)


@pytest.mark.parametrize(("depth", "nodes", "kept"), [(1, 15, 4), (5, 15, 15), (2, 99, 20)])
def test_a_tree_has_as_many_nodes_as_it_can(depth, nodes, kept):
    assert speed.widest_tree(depth, nodes) == DynamicTree(depth, 4, kept)


# --- the measurement ----------------------------------------------------------------------------------------------


def noted(calls, name, tokens=None, plain=PLAIN, peers=()):
    """A contender that only notes its turns."""

    def run(prompt, max_new_tokens, parts):
        calls.append((name, len(prompt), max_new_tokens))
        return Answer(list(tokens or range(max_new_tokens)), 1)

    return speed.Contender(name, run, plain, peers)


def test_turns_are_drawn_anew_for_each_prompt_and_the_warm_up_is_thrown_away(chat_target):
    calls: list = []
    names = [PLAIN, *"abcde"]
    prompts = [Prompt(f"p{i}", "all", [1] * (i + 1)) for i in range(4)]
    samples = measure(chat_target, [noted(calls, name) for name in names], prompts, 20, 0, progress=False)
    assert calls[:6] == [(name, 1, speed.WARM_UP) for name in names]
    turns = [[name for name, _, _ in calls[6 + 6 * i : 12 + 6 * i]] for i in range(4)]
    assert all(sorted(turn) == sorted(names) for turn in turns)
    assert len({tuple(turn) for turn in turns}) > 1
    assert len(samples) == 24
    assert {sample["tokens"] for sample in samples} == {20}


def test_a_decoder_that_differs_is_found_and_shown(chat_target, entries, prompts):
    ours = next(entry for entry in entries if entry.name == "spectrain plain")

    def altered(prompt, max_new_tokens, parts):
        answer = ours.run(prompt, max_new_tokens, parts)
        return replace(answer, tokens=[*answer.tokens[:4], (answer.tokens[4] + 1) % 256, *answer.tokens[5:]])

    pair = [next(entry for entry in entries if entry.name == PLAIN), replace(ours, run=altered)]
    samples = measure(chat_target, pair, prompts, BUDGET, 0, progress=False)
    assert [sample["difference"]["position"] for sample in of(samples, ours.name)] == [4, 4, 4]
    assert all(sample["difference"]["logit_gap"] > 0 for sample in of(samples, ours.name))
    text = render(summarise(samples, pair))
    assert "0/3" in text
    assert f"differs: {ours.name}, c0, token 4: logit gap" in text


def test_an_id_of_the_heads_padding_is_told_from_a_fault(tiny_target):
    target = tiny_target("llama", padding=3)
    head = target.model.get_output_embeddings().weight
    with torch.no_grad():
        head[-1] = 5 * head[: target.tokenizer_size].max(0).values  # likely, and no token
    found = contenders(target, 1, SimpleNamespace(model=None))[:2]
    samples = measure(target, found, [Prompt("a", "all", [1, 2]), Prompt("b", "all", [3])], 24, 0, progress=False)
    differences = [sample["difference"] for sample in of(samples, "spectrain plain") if sample["difference"]]
    assert differences
    assert all(d["padding"] and d["logit_gap"] is None for d in differences)
    assert "transformers gives an id of the head's padding" in render(summarise(samples, found))


def test_the_parts_of_a_call_add_up(samples):
    for sample in samples:
        if sample["contender"].startswith("transformers"):
            assert sample["parts"] is None
            continue
        parts = sample["parts"]
        inside = parts["total_s"] - parts["outside_s"]
        assert 0 < parts["outside_s"] < parts["total_s"] == sample["seconds"]
        # Looking an n-gram up is no forward; drafting with a model is one.
        drafted = 0 if "ngram" in sample["contender"] or sample["contender"] == "spectrain plain" else parts["draft_s"]
        assert inside == pytest.approx(parts["prefill_s"] + parts["verify_s"] + drafted)


def test_a_prompt_without_room_for_the_answer_is_named(chat_target):
    with pytest.raises(SpectrainError, match=r"conversation 'c0': a prompt of \d+ tokens and 300 new ones"):
        prompts_of(chat_target, chats("a"), None, 300, 0)


# --- the numbers --------------------------------------------------------------------------------------------------


def sample(name, prompt, tokens, seconds, *, rounds=None, outside=0.0, forwards=1):
    parts = {"total_s": seconds, "outside_s": outside} if rounds is not None else None
    return {"contender": name, "prompt": prompt, "kind": "all", "tokens": tokens, "seconds": seconds,
            "forwards": forwards, "rounds": rounds, "parts": parts, "difference": None}  # fmt: skip


@pytest.fixture
def summary():
    calls: list = []
    pair = [noted(calls, PLAIN), noted(calls, "spectrain x", plain=PLAIN, peers=(PLAIN,))]
    samples = [
        sample(PLAIN, "a", 100, 1.0, forwards=100),
        sample(PLAIN, "b", 300, 6.0, forwards=300),
        sample("spectrain x", "a", 100, 0.5, rounds=[[3, 2, 3, None], [3, 0, 1, None]], outside=0.1),
        sample("spectrain x", "b", 300, 3.0, rounds=[[3, 3, 4, None]], outside=0.25),
    ]
    return summarise(samples, pair)


def test_rates_are_sums_over_sums(summary):
    plain, ours = summary["rows"]
    assert plain["tokens_per_second"] == pytest.approx(400 / 7)  # not the mean of 100 and 50
    assert ours["tokens_per_second"] == pytest.approx(400 / 3.5)
    assert ours["tokens_per_round"] == pytest.approx(8 / 3)
    assert plain["tokens_per_round"] == 1
    assert ours["overhead"] == pytest.approx(0.35 / 3.5)
    assert plain["overhead"] is None
    assert plain["speedup"] is None
    assert ours["identical"] == ours["prompts"] == 2


def test_ratios_have_intervals_over_prompts(summary):
    (found,) = summary["comparisons"]
    # Twice as fast on either prompt: resampling cannot change that.
    assert found["ratio"] == pytest.approx({"value": 2.0, "low": 2.0, "high": 2.0})
    assert summary["rows"][1]["speedup"] == pytest.approx({"value": 2.0, "low": 2.0, "high": 2.0})


def test_the_tables_say_what_was_found(summary):
    lines = render(summary).splitlines()
    assert [cell.strip() for cell in lines[3].strip("|").split("|")] == [
        "spectrain x", "114.3", "2.00 (2.00–2.00)", "2.67", "10.0%", "2/2",
    ]  # fmt: skip
    assert "x ÷ plain" in lines[-1]
    assert len({len(line) for line in lines[:4]}) == 1


def test_a_table_aligns_numbers_right():
    assert table(["a", "bb"], [["long", "1"]]) == "| a    | bb |\n| ---- | -: |\n| long |  1 |"


def test_every_comparison_is_of_ours_with_theirs(samples, entries):
    document = summarise(samples, entries)
    pairs = [(c["spectrain"], c["transformers"]) for c in document["comparisons"]]
    assert pairs == [
        ("spectrain plain", PLAIN),
        ("spectrain small draft k=3", "transformers assisted k=3"),
        ("spectrain small draft k=3", "transformers assisted, defaults"),
        ("spectrain ngram k=3", "transformers lookup k=3"),
        ("spectrain ngram of 2 k=3", "transformers lookup k=3"),
    ]
    bases = {row["contender"]: row["speedup"] is None for row in document["rows"]}
    assert [name for name, base in bases.items() if base] == [PLAIN, "spectrain plain"]
    assert render(document).count("| spectrain ") == len(OURS) + 1  # and the head of the second table


def test_drafters_are_what_their_names_say(entries):
    drafted = {entry.name: entry.drafter for entry in entries}
    assert drafted["spectrain ngram of 2 k=3"].config.longest == 2
    assert drafted["spectrain ngram k=3"].config.longest > 2
    assert drafted["spectrain plain"] is None
