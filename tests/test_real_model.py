"""The main path on the real demonstration target: `make target` puts it where these tests look."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spectrain.data.conversations import encode, load_conversations, render_prompt
from spectrain.decoding import generate_batch, generate_plain
from spectrain.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from spectrain.drafters.ngram import NgramConfig, NgramDrafter
from spectrain.exact.sampler import Sampler
from spectrain.shapes import Chain, DynamicTree, StaticTree
from spectrain.target import load_target

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "targets" / "smollm2-135m-instruct"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (FOLDER / "config.json").is_file(), reason=f"no real target in {FOLDER}: run `make target`"),
]
NEW_TOKENS = 32
SHAPES = {
    "chain": Chain(4),
    "static": StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))),
    "dynamic": DynamicTree(3, 3, 7),
}


@pytest.fixture(scope="module")
def target():
    return load_target(str(FOLDER))


@pytest.fixture(scope="module")
def prompts(target):
    """Two of each kind of traffic, of unlike lengths."""
    narrow = load_conversations(ROOT / "recipes/traffic/narrow_heldout.jsonl")[::25]
    general = load_conversations(ROOT / "recipes/traffic/open_heldout.jsonl")[::20]
    found = [render_prompt(chat.prompt, target.tokenizer) for chat in (*narrow[:2], *general[:2])]
    assert len({len(prompt) for prompt in found}) > 1
    return found


@pytest.fixture(scope="module")
def plain(target, prompts):
    return [generate_plain(target, prompt, sampler=Sampler(), max_new_tokens=NEW_TOKENS).tokens for prompt in prompts]


@pytest.fixture(scope="module")
def drafters(target):
    start = Eagle3Config(depths=3, draft_vocab_size=2048, start="target_layer")
    eagle = Eagle3Drafter.build(start, target, torch.zeros(target.vocab_size, dtype=torch.long)).eval()
    return {"ngram": NgramDrafter(NgramConfig()), "eagle3": eagle}


def decoded(target, drafter, shape, prompts):
    seeds = range(len(prompts))
    results = generate_batch(target, drafter, prompts, seeds=seeds, sampler=Sampler(), max_new_tokens=NEW_TOKENS,
                             shape=shape)  # fmt: skip
    return [result.tokens for result in results]


def test_it_is_the_model_it_says(target):
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (30, 576, 49152)
    assert [target.tokenizer.decode([i]) for i in target.eos_ids] == ["<|im_end|>"]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_speculative_greedy_in_a_batch_equals_plain_token_by_token(target, prompts, plain, drafters, shape):
    assert decoded(target, drafters["eagle3"], shape, prompts) == plain


@pytest.mark.parametrize(("kind", "shape"), [("ngram", "chain"), ("ngram", "static"), ("ngram", "dynamic"),
                                             ("eagle3", "chain")])  # fmt: skip
def test_speculative_greedy_alone_equals_plain_token_by_token(target, prompts, plain, drafters, kind, shape):
    number = list(SHAPES).index(shape)
    assert decoded(target, drafters[kind], SHAPES[shape], prompts[number : number + 1]) == plain[number : number + 1]


def test_batched_greedy_equals_plain(target, prompts, plain):
    assert decoded(target, None, None, prompts) == plain


def test_answers_are_masked_from_the_prompt_to_the_end_of_the_turn(target):
    chat = load_conversations(ROOT / "recipes/traffic/narrow_train.jsonl")[0]
    (row,) = encode(chat, target.tokenizer)  # its worked example is an answer
    answer = [token for token, supervised in zip(row.ids, row.mask, strict=True) if supervised]
    example = next(message.content for message in chat.messages if message.role == "assistant")
    assert target.tokenizer.decode(answer) == example + "<|im_end|>"
