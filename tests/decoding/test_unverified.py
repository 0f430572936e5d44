"""Text that a drafter writes by itself follows the drafter's own law, whatever the target would have said."""

from __future__ import annotations

import pytest
import torch

from spectrain.cache import right_padded
from spectrain.decoding.requests import uniform_stream
from spectrain.decoding.unverified import draft_text
from spectrain.drafters.base import Committed
from spectrain.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from spectrain.drafters.language_model import LanguageModelConfig, LanguageModelDrafter
from spectrain.drafters.medusa import MedusaConfig, MedusaDrafter
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler, draw
from spectrain.shapes import Chain

PROMPTS = [[3, 4, 5], [6, 7], [8, 9, 10, 11, 12], [13, 14], [15, 16, 17], [18, 19], [20, 21], [22, 23, 1]]
COUNTS = torch.ones(24, dtype=torch.long)


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target("llama", eos=2)


def small_draft(target, **config):
    return LanguageModelDrafter.build(LanguageModelConfig(layers=(0, 4), **config), target, COUNTS).eval()


def manual(drafter, prompt, sampler, uniforms, eos):
    """Ancestral sampling from the draft model: no cache, no batch, no rounds."""
    ids, text = list(prompt), []
    for uniform in uniforms:
        hidden = drafter.model.base_model(torch.tensor([ids]), use_cache=False).last_hidden_state[:, -1]
        token = int(draw(sampler.probabilities(drafter.head().logits(hidden)), uniform[None]))
        ids.append(token)
        text.append(token)
        if token in eos:
            break
    return text


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("sampler", [Sampler(1.0), Sampler(0.7, top_k=6), Sampler(1.5, top_p=0.9), Sampler()])
def test_a_small_draft_samples_its_own_law_token_by_token(target, k, sampler):
    """The same uniforms give the same tokens as sampling by hand: of every request, in any round, after others left."""
    drafter, seeds = small_draft(target), list(range(len(PROMPTS)))
    texts = draft_text(target, drafter, PROMPTS, sampler=sampler, k=k, max_new_tokens=17, seeds=seeds)
    with torch.inference_mode():
        want = [
            manual(drafter, prompt, sampler, uniform_stream(seed)(17), target.eos_ids)
            for prompt, seed in zip(PROMPTS, seeds, strict=True)
        ]
    assert texts == want
    if sampler == Sampler(1.0):
        assert len({len(text) for text in texts}) > 1  # some ended at EOS before the others
        assert any(text[-1] in target.eos_ids for text in texts)
        assert all(not set(text[:-1]) & set(target.eos_ids) for text in texts)


def test_the_frequencies_of_short_texts_are_those_of_the_draft_s_law(tiny_target):
    """All 36 texts of two tokens out of six: chi-square of 4000 draws. At this size a law that is off by 0.08 in total
    variation (the target's is further) has an expected statistic above 4 x 4000 x 0.08^2 + 35 = 137."""
    target = tiny_target("llama", vocab=6)
    drafter, sampler, prompt, draws = small_draft(target), Sampler(1.0), [1, 2, 3], 4000
    texts = draft_text(
        target, drafter, [prompt] * draws, sampler=sampler, k=2, max_new_tokens=2, seeds=range(draws)
    )  # fmt: skip
    rows_36T = torch.tensor([[*prompt, a, b] for a in range(6) for b in range(6)])
    at_36 = torch.arange(36)

    def law(model) -> torch.Tensor:
        p_36TV = model(rows_36T, use_cache=False).logits.softmax(-1)
        return p_36TV[at_36, 2, rows_36T[:, 3]] * p_36TV[at_36, 3, rows_36T[:, 4]]

    with torch.inference_mode():
        q_36, p_36 = law(drafter.model), law(target.model)
    assert (q_36 - p_36).abs().sum() / 2 > 0.08
    seen_36 = torch.bincount(torch.tensor([6 * a + b for a, b in texts]), minlength=36)
    statistic = ((seen_36 - draws * q_36) ** 2 / (draws * q_36)).sum()
    assert statistic < 70  # 35 degrees of freedom: exceeded with probability 0.0004


@pytest.mark.parametrize("family", ["eagle3", "medusa"])
def test_a_feature_drafter_reads_the_target_s_states_of_its_own_text(target, family):
    """Every round is what a fresh drafter proposes after reading the whole text so far."""
    torch.manual_seed(0)
    if family == "eagle3":
        drafter = Eagle3Drafter.build(Eagle3Config(depths=2, draft_vocab_size=16), target, COUNTS).double()
    else:
        drafter = MedusaDrafter.build(MedusaConfig(heads=3), target, COUNTS)
        for block in drafter.blocks:
            torch.nn.init.normal_(block.layers[0].weight, std=0.3)
    drafter.eval()
    texts = draft_text(target, drafter, PROMPTS, sampler=Sampler(), k=3, max_new_tokens=9, seeds=range(len(PROMPTS)))
    assert any(len(text) == 9 for text in texts)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        for start in range(0, len(text), 3):
            read = prompt + text[:start]
            with torch.inference_mode():
                state = drafter.start([read[0]])
                new = [read[1:]]
                features = target.forward(torch.tensor([read[:-1]]))
                drafter.observe(state, Committed(new, right_padded(new, target.device), features))
                proposal = drafter.propose(state, Sampler(), Chain(3), [3], torch.zeros(1, 3, dtype=torch.float64))
            assert text[start : start + 3] == proposal.tokens_BN[0, : len(text) - start].tolist()


def test_a_draft_model_stops_at_the_end_of_its_context(tiny_target):
    target = tiny_target("llama", context=12)
    drafter = small_draft(target)
    drafter._context = 8
    texts = draft_text(target, drafter, [[3, 4, 5]], sampler=Sampler(), k=2, max_new_tokens=9, seeds=[0])
    assert 4 <= len(texts[0]) <= 6


def test_a_prompt_of_one_token_is_refused(target):
    with pytest.raises(SpectrainError, match="a prompt has 1 token"):
        draft_text(target, small_draft(target), [[3]], sampler=Sampler(), k=2, max_new_tokens=4, seeds=[0])
