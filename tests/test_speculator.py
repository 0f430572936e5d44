"""The short way in: one call, one prompt or many, streaming, and settings that mean what they say."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import spectrain
from spectrain import Chain, DynamicTree, Penalties, Speculator, StaticTree, generate, load_bundle, stream
from spectrain.data.conversations import Message, render_prompt
from spectrain.decoding import generate_plain
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler

CHAT = [{"role": "user", "content": "7 + 7?"}]
SHAPES = [Chain(3), StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0))), DynamicTree(3, 3, 8)]


@pytest.fixture(scope="module")
def speculator(finished_run) -> Speculator:
    return load_bundle(finished_run / "run" / "bundle")


def plain(speculator, ids, count=24, **settings):
    return generate_plain(speculator.target, ids, sampler=Sampler(), max_new_tokens=count, **settings)


def chat_ids(speculator):
    return render_prompt([Message(**turn) for turn in CHAT], speculator.target.tokenizer)


def test_the_target_a_bundle_was_trained_for_is_found(speculator, chat_folder):
    assert speculator.target.folder == chat_folder
    assert speculator.notes == ()


def test_another_target_is_refused(finished_run, tiny_target):
    with pytest.raises(SpectrainError):
        load_bundle(finished_run / "run" / "bundle", target=tiny_target())


@pytest.mark.parametrize("shape", SHAPES)
def test_an_answer_is_the_targets_own(speculator, shape):
    answer = generate(speculator, CHAT, max_new_tokens=24, shape=shape)
    want = plain(speculator, chat_ids(speculator))
    assert (answer.tokens, answer.finished) == (want.tokens, want.finished)
    assert answer.text == speculator.target.tokenizer.decode(want.tokens, skip_special_tokens=True)
    assert answer.tokens_per_round == sum(r.committed for r in answer.trace.rounds) / len(answer.trace.rounds)
    assert all(r.nodes <= shape.nodes and r.accepted <= r.proposed <= shape.depth for r in answer.trace.rounds)


def test_the_trace_of_an_answer_has_its_text(speculator):
    for settings in ({}, {"stop": ["a", "e"]}):
        answer = generate(speculator, CHAT, max_new_tokens=12, **settings)
        assert answer.trace.text == answer.text
        assert answer.trace.tokens == answer.tokens


@pytest.mark.parametrize("more", [{"top_k": 1}, {"top_k": 3}, {"top_p": 1e-6}, {"top_k": 5, "top_p": 0.5}], ids=str)
def test_top_k_and_top_p_change_nothing_of_a_greedy_answer(speculator, more):
    """The likeliest token is always among those that are kept."""
    logits = torch.randn(64, 30, generator=torch.Generator().manual_seed(0))
    assert torch.equal(Sampler(0.0, **more).probabilities(logits), Sampler().probabilities(logits))
    kept = Sampler(1.0, **more).probabilities(logits)
    assert (kept.gather(-1, logits.argmax(-1, keepdim=True)) > 0).all()
    whole = generate(speculator, CHAT, max_new_tokens=12)
    assert generate(speculator, CHAT, max_new_tokens=12, **more).tokens == whole.tokens


def test_text_ids_and_chats_are_prompts(speculator):
    ids = speculator.target.tokenizer("hello 123")["input_ids"]
    assert generate(speculator, "hello 123", max_new_tokens=5).tokens == plain(speculator, ids, 5).tokens
    assert generate(speculator, ids, max_new_tokens=5).tokens == plain(speculator, ids, 5).tokens


def test_many_prompts_are_answered_as_each_alone(speculator):
    prompts = ["hello 123", CHAT, [1, 2, 3]]
    together = generate(speculator, prompts, max_new_tokens=10)
    assert [a.tokens for a in together] == [generate(speculator, p, max_new_tokens=10).tokens for p in prompts]
    assert generate(speculator, [], max_new_tokens=10) == []


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.8, "seed": 3}, {"stop": ["a", "hello"]}, {"shape": SHAPES[2]}, {"max_new_tokens": 1}],
    ids=str,
)
def test_the_pieces_of_a_stream_add_up(speculator, settings):
    settings = {"max_new_tokens": 30, **settings}
    pieces, whole = list(stream(speculator, "hello", **settings)), generate(speculator, "hello", **settings)
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [token for piece in pieces for token in piece.tokens] == whole.tokens
    assert [piece.finished for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finished == whole.finished


def test_a_stop_string_never_shows_in_a_stream(speculator):
    free = generate(speculator, "hello", max_new_tokens=40).text
    word = free[len(free) // 2 : len(free) // 2 + 3]
    pieces = list(stream(speculator, "hello", max_new_tokens=40, stop=word))
    assert "".join(piece.text for piece in pieces) == free[: free.index(word)]


def test_streaming_can_be_left_early(speculator):
    first = next(stream(speculator, "hello", max_new_tokens=30))
    assert first.tokens == plain(speculator, speculator.target.tokenizer("hello")["input_ids"], 30).tokens[:1]
    assert generate(speculator, "hello", max_new_tokens=3).tokens  # the speculator is as good as new


def test_without_a_drafter_it_decodes_plainly(speculator):
    alone = Speculator(speculator.target, None)
    assert generate(alone, CHAT, max_new_tokens=9).tokens == plain(speculator, chat_ids(speculator), 9).tokens


def test_penalties_are_part_of_the_targets_law(speculator):
    penalties = Penalties(1.3, 0.2, 0.1)
    want = plain(speculator, chat_ids(speculator), penalties=penalties)
    assert want.tokens != plain(speculator, chat_ids(speculator)).tokens
    for shape in SHAPES:
        assert generate(speculator, CHAT, max_new_tokens=24, penalties=penalties, shape=shape).tokens == want.tokens


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ("x", {"no_repeat_ngram_size": 3}, "no setting 'no_repeat_ngram_size'"),
        ("x", {"repetition_penalty": 1.1}, "no setting 'repetition_penalty'"),
        ("x", {"k": 3, "shape": Chain(3)}, "not both"),
        ("x", {"k": 0}, "draft length"),
        ("x", {"temperature": -1}, "temperature"),
        ("x", {"stop": [""]}, "stop string ''"),
        ("x", {"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens is 9"),
        ("x", {"max_new_tokens": 10**6}, "context"),
        ("x", {"verification": "block", "shape": DynamicTree(3, 3, 8)}, "for chains"),
        ("x", {"verification": "typical"}, "typical_lossy"),
        ([], {}, None),
        ([[]], {}, "no tokens"),
        ([{"role": "user"}], {}, "role and content"),
        ([{"role": "user", "content": 3}], {}, "role and content"),
        ([10**9], {}, "does not exist"),
        ("x", {"stop": 5}, "stop 5"),
        ("x", {"eos_ids": 2}, "eos_ids 2"),
        ("x", {"eos_ids": [2.5]}, "eos_ids"),
        ("x", {"shape": "dynamic"}, "shape 'dynamic'"),
        ("x", {"k": 10**9}, "draft length"),
        ("x", {"penalties": 1.2}, "penalties 1.2"),
        ("x", {"seed": None}, "seed None"),
        ("x", {"seed": -1}, "seed -1"),
        ("x", {"max_new_tokens": True}, "max_new_tokens is True"),
        (None, {}, "the prompt is a NoneType"),
        ({"role": "user", "content": "x"}, {}, "the prompt is a dict"),
        (torch.tensor([1, 2]), {}, "the prompt is a Tensor"),
        (b"ab", {}, "the prompt is a bytes"),
        ([1, "a"], {}, "holds 'a'"),
        ([True, False], {}, "holds True"),
        (["a", 5], {}, "prompt 5"),
        ([{"role": "user", "content": "x"}, "y"], {}, "role and content"),
        ("\ud83d", {}, "no text"),
    ],
)
def test_bad_requests_are_refused_with_a_reason(speculator, prompt, settings, message):
    if message is None:
        assert generate(speculator, prompt, **settings) == []
        return
    with pytest.raises(SpectrainError, match=message):
        generate(speculator, prompt, **{"max_new_tokens": 4, **settings})


def test_stream_wants_one_prompt_and_says_so_at_once(speculator):
    with pytest.raises(SpectrainError, match="one prompt"):
        stream(speculator, ["a", "b"])
    with pytest.raises(SpectrainError, match="draft length"):
        stream(speculator, "a", k=-1)


def test_an_answer_says_whether_it_is_lossy(speculator):
    assert not generate(speculator, "hello", max_new_tokens=4).lossy
    assert generate(speculator, "hello", max_new_tokens=4, verification="typical_lossy").lossy


def test_a_prompt_of_a_list_draws_from_its_own_seed(speculator):
    settings = {"max_new_tokens": 8, "temperature": 1.0}
    together = generate(speculator, ["hello", "hello"], seed=7, **settings)
    alone = [generate(speculator, "hello", seed=seed, **settings).tokens for seed in (7, 8)]
    assert [answer.tokens for answer in together] == alone


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target": object()}, "target object"),
        ({"dtype": "float"}, None),
        ({"dtype": "int8"}, "int8"),
        ({"device": "banana"}, "device 'banana'"),
    ],
)
def test_a_bundle_that_cannot_be_loaded_as_asked(finished_run, settings, message):
    folder = finished_run / "run" / "bundle"
    if message is None:
        assert load_bundle(folder, **settings).target.dtype == torch.float32
        return
    with pytest.raises(SpectrainError, match=message):
        load_bundle(folder, **settings)


def test_a_torch_dtype_is_a_dtype(finished_run):
    assert load_bundle(finished_run / "run" / "bundle", dtype=torch.float32).target.dtype == torch.float32


def test_importing_spectrain_does_not_import_torch():
    code = "import sys, spectrain; print('torch' in sys.modules, spectrain.__version__)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.split() == ["False", spectrain.__version__]


def test_every_public_name_is_there():
    assert all(getattr(spectrain, name) is not None for name in spectrain.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = spectrain.nothing
