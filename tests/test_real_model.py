"""The main path on the real demonstration target: `make target` puts it where these tests look."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spectrain.data.conversations import encode, load_conversations, render_prompt
from spectrain.decoding import generate, generate_plain
from spectrain.decoding.batched import generate_batch
from spectrain.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from spectrain.drafters.ngram import NgramConfig, NgramDrafter
from spectrain.exact.sampler import Sampler
from spectrain.target import load_target

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "targets" / "smollm2-135m-instruct"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (FOLDER / "config.json").is_file(), reason=f"no real target in {FOLDER}: run `make target`"),
]
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def target():
    return load_target(str(FOLDER))


@pytest.fixture(scope="module")
def prompts(target):
    narrow = load_conversations(ROOT / "recipes/traffic/narrow_heldout.jsonl")[::11]
    general = load_conversations(ROOT / "recipes/traffic/open_heldout.jsonl")[::9]
    return [render_prompt(chat.prompt, target.tokenizer) for chat in narrow + general]


@pytest.fixture(scope="module")
def plain(target, prompts):
    return [generate_plain(target, prompt, sampler=Sampler(), max_new_tokens=NEW_TOKENS).tokens for prompt in prompts]


def test_it_is_the_model_it_says(target):
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (30, 576, 49152)
    assert [target.tokenizer.decode([i]) for i in target.eos_ids] == ["<|im_end|>"]


def test_speculative_greedy_equals_plain_token_by_token(target, prompts, plain):
    start = Eagle3Config(depths=3, draft_vocab_size=2048, start="target_layer")
    eagle = Eagle3Drafter.build(start, target, torch.zeros(target.vocab_size, dtype=torch.long)).eval()
    for drafter in (NgramDrafter(NgramConfig()), eagle):
        for prompt, want in zip(prompts, plain, strict=True):
            got = generate(target, drafter, prompt, sampler=Sampler(), draft_length=4, max_new_tokens=NEW_TOKENS)
            assert got.tokens == want


def test_batched_greedy_equals_plain(target, prompts, plain):
    seeds = [0] * len(prompts)
    got = generate_batch(target, prompts, sampler=Sampler(), max_new_tokens=NEW_TOKENS, seeds=seeds)
    assert [one.tokens for one in got] == plain


def test_answers_are_masked_from_the_prompt_to_the_end_of_the_turn(target):
    chat = load_conversations(ROOT / "recipes/traffic/narrow_train.jsonl")[0]
    (row,) = encode(chat, target.tokenizer)  # its worked example is an answer
    answer = [token for token, supervised in zip(row.ids, row.mask, strict=True) if supervised]
    example = next(message.content for message in chat.messages if message.role == "assistant")
    assert target.tokenizer.decode(answer) == example + "<|im_end|>"
