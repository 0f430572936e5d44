"""Greedy speculative decoding is plain decoding whatever is drafted (C17); a perfect draft is always kept (C22)."""

from typing import Any

import pytest
import torch

from spectrain.cache import cached_length
from spectrain.decoding import Round, generate, generate_plain
from spectrain.decoding.trace import Clock
from spectrain.drafters.base import Drafter, Proposal
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler

GREEDY = Sampler()
SAMPLED = Sampler(temperature=1.0)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
NO_EOS: tuple[int, ...] = ()


@pytest.fixture(scope="module")
def target(tiny_target):
    """Three layers, for what does not depend on the architecture; drafters set their own taps on it."""
    return tiny_target(layers=3)


def plain(target, prompt=PROMPT, count=24, sampler=GREEDY, eos=NO_EOS, seed=0):
    return generate_plain(target, prompt, sampler=sampler, max_new_tokens=count, eos_ids=eos, seed=seed)


def speculative(target, drafter, k, prompt=PROMPT, count=24, sampler=GREEDY, eos=NO_EOS, seed=0):
    return generate(
        target,
        drafter,
        prompt,
        sampler=sampler,
        draft_length=k,
        max_new_tokens=count,
        eos_ids=eos,
        seed=seed,
    )


def check_books(result, k, count):
    """The rounds account for every token but the first, which came from the prefill."""
    assert len(result.tokens) == bool(result.tokens) + sum(r.committed for r in result.rounds) <= count
    for round_ in result.rounds:
        assert 0 <= round_.accepted <= round_.proposed <= k
        assert round_.accepted <= round_.committed <= round_.accepted + 1
        if round_.clipped != "eos":
            assert round_.committed == round_.accepted + 1
    assert all(round_.clipped is None for round_ in result.rounds[:-1] if round_.clipped != "budget")
    if result.finished == "budget":
        assert len(result.tokens) == count


# --- greedy decoding ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 30])
def test_plain_greedy_decoding_is_the_argmax_of_the_model_itself(tiny_target, architecture, count):
    target = tiny_target(architecture)
    ids = list(PROMPT)
    for _ in range(count):
        ids.append(int(target.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    result = plain(target, count=count)
    assert result.tokens == ids[len(PROMPT) :]
    assert result.rounds == [Round(proposed=0, accepted=0, committed=1)] * (count - 1)


@pytest.mark.parametrize("kind", ["ngram", "eagle3", "script", "self"])
def test_greedy_speculative_decoding_is_plain_decoding(tiny_target, make_drafter, architecture, kind):
    target = tiny_target(architecture, layers=7 if kind == "eagle3" else 3)  # 7: with the default taps
    want = plain(target).tokens
    for k in (1, 4):
        drafter = make_drafter(kind, target, PROMPT, want)
        result = speculative(target, drafter, k)
        assert result.tokens == want
        check_books(result, k, 24)


@pytest.mark.parametrize("seed", range(12))
def test_every_way_a_round_can_go_leaves_plain_decoding(tiny_target, script_drafter, seed):
    target = tiny_target("mistral", layers=2, seed=seed)
    want = plain(target, count=40).tokens
    drafter = script_drafter(PROMPT, want, seed=seed, wrong=seed)
    result = speculative(target, drafter, 5, count=40)
    assert result.tokens == want
    check_books(result, 5, 40)


@pytest.mark.parametrize("prompt", [[7], [7] * 40, [0, 23]])
@pytest.mark.parametrize("kind", ["ngram", "eagle3"])
def test_short_and_repeated_prompts(tiny_target, make_drafter, prompt, kind):
    target = tiny_target("gemma2", layers=3)
    want = plain(target, prompt).tokens
    assert speculative(target, make_drafter(kind, target, prompt, want), 3, prompt).tokens == want


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_decodes_by_its_own_law(tiny_target, make_drafter, dtype):
    """Equal up to ties: float32 is token for token here; bfloat16 may round another way, but must not break."""
    target = tiny_target(layers=3, dtype=dtype)
    want = plain(target).tokens
    for kind in ("ngram", "eagle3"):
        result = speculative(target, make_drafter(kind, target, PROMPT, want), 4)
        check_books(result, 4, 24)
        if dtype == torch.float32:
            assert result.tokens == want


# --- the end: EOS and budget ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ngram", "eagle3", "script", "self"])
def test_the_third_greedy_token_ends_the_answer(target, make_drafter, kind):
    free = plain(target).tokens
    assert free[2] not in free[:2]
    want = plain(target, eos=[free[2]])
    assert (want.tokens, want.finished) == (free[:3], "eos")
    result = speculative(target, make_drafter(kind, target, PROMPT, free), 5, eos=[free[2]])
    assert (result.tokens, result.finished) == (free[:3], "eos")
    check_books(result, 5, 24)


def test_a_self_draft_past_the_end_counts_only_what_was_kept(target, self_drafter):
    free = plain(target).tokens
    result = speculative(target, self_drafter(target), 5, eos=[free[2]])
    assert result.rounds == [Round(proposed=5, accepted=2, committed=2, clipped="eos")]


@pytest.mark.parametrize("kind", ["ngram", "eagle3", "script", "self"])
def test_wherever_the_answer_ends_it_ends_as_plain_decoding_does(target, make_drafter, kind):
    free = plain(target, count=20).tokens
    for eos in sorted(set(free)):
        want = plain(target, count=20, eos=[eos])
        assert want.tokens == free[: free.index(eos) + 1]
        result = speculative(target, make_drafter(kind, target, PROMPT, free), 4, count=20, eos=[eos])
        assert (result.tokens, result.finished) == (want.tokens, "eos")
        check_books(result, 4, 20)


def test_the_first_of_several_eos_ids_ends_the_answer(target, self_drafter):
    free = plain(target).tokens
    absent = next(i for i in range(24) if i not in free)
    first = min(free.index(free[2]), free.index(free[4]))
    result = speculative(target, self_drafter(target), 3, eos=[free[4], absent, free[2]])
    assert (result.tokens, result.finished) == (free[: first + 1], "eos")
    assert speculative(target, self_drafter(target), 3, eos=[absent]).tokens == free


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_an_eos_is_noticed_as_first_token_accepted_token_repair_and_bonus(target, full_script, place):
    free = plain(target).tokens
    eos = free[place]
    end = free.index(eos) + 1
    script = [*free[:1], *free[1:3], 0, 0]  # k = 2: tokens 1 and 2 are accepted, token 3 is the bonus
    result = speculative(target, full_script(PROMPT, script), 2, eos=[eos])
    assert (result.tokens, result.finished) == (free[:end], "eos")
    wrong = next(i for i in range(24) if i != free[1])
    repaired = speculative(target, full_script(PROMPT, [free[0], wrong, 0, 0]), 2, eos=[free[1]])
    assert (repaired.tokens, repaired.finished) == (free[: free.index(free[1]) + 1], "eos")


def test_eos_ids_default_to_the_targets(tiny_target, self_drafter):
    free = plain(tiny_target(layers=3)).tokens
    target = tiny_target(layers=3, eos=free[2])
    request: dict[str, Any] = {"sampler": GREEDY, "max_new_tokens": 24}
    assert generate_plain(target, PROMPT, **request).tokens == free[:3]
    result = generate(target, self_drafter(target), PROMPT, draft_length=5, **request)
    assert (result.tokens, result.finished) == (free[:3], "eos")
    assert plain(target).tokens == free  # none given is none, not the default


@pytest.mark.parametrize("k", [1, 3, 50])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 9])
@pytest.mark.parametrize("kind", ["ngram", "eagle3", "script", "self"])
def test_the_budget_is_met_and_never_exceeded(target, make_drafter, kind, k, count):
    free = plain(target).tokens
    assert plain(target, count=count).tokens == free[:count]
    result = speculative(target, make_drafter(kind, target, PROMPT, free), k, count=count)
    assert (result.tokens, result.finished) == (free[:count], "budget")
    check_books(result, k, count)
    left = count - 1
    for round_ in result.rounds:  # never a draft token that could not be kept together with the bonus
        assert round_.proposed <= left - 1
        assert (round_.clipped == "budget") == (left - 1 < k)
        left -= round_.committed
    if count == 0:
        assert (result.rounds, result.prefill_s) == ([], 0.0)


def test_an_answer_that_ends_with_the_budget_ends_by_eos(target, self_drafter):
    free = plain(target).tokens
    for result in (
        plain(target, count=3, eos=[free[2]]),
        speculative(target, self_drafter(target), 2, count=3, eos=[free[2]]),
    ):
        assert (result.tokens, result.finished) == (free[:3], "eos")


def test_the_context_can_be_filled_to_the_last_position(tiny_target, make_drafter):
    target = tiny_target("gpt2", layers=3, context=20)
    want = plain(target, count=12).tokens
    for kind in ("ngram", "eagle3", "self"):
        assert speculative(target, make_drafter(kind, target, PROMPT, want), 6, count=12).tokens == want


# --- a perfect draft ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", [GREEDY, Sampler(0.7, top_k=5, top_p=0.9)], ids=Sampler.describe)
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_a_target_that_drafts_for_itself_is_always_accepted(tiny_target, self_drafter, architecture, sampler, k):
    target = tiny_target(architecture, layers=3)
    count = 1 + 3 * (k + 1)
    result = speculative(target, self_drafter(target), k, count=count, sampler=sampler, seed=k)
    assert result.rounds == [Round(proposed=k, accepted=k, committed=k + 1)] * 3
    if sampler.greedy:
        assert result.tokens == plain(target, count=count).tokens


class Witness(Drafter):
    """Watches an EAGLE-3 drafter: at every proposal it is compared with one that sees the prefix for the first time."""

    def __init__(self, drafter, target):
        self.drafter, self.target, self.tap_layers = drafter, target, drafter.tap_layers
        self.seen: list[int] = []
        self.compared = 0

    def start(self):
        return self.drafter.start()

    def observe(self, state, ids, features):
        self.seen.extend(ids)
        self.drafter.observe(state, ids, features)

    def propose(self, state, sampler, length, uniforms_K):
        fresh = self.drafter.start()
        self.drafter.observe(fresh, self.seen, self.target.forward(torch.tensor([self.seen[:-1]])))
        got = self.drafter.propose(state, sampler, length, uniforms_K)
        want = self.drafter.propose(fresh, sampler, length, uniforms_K)
        assert got.tokens_K.tolist() == want.tokens_K.tolist()
        if want.q_KV is not None:
            torch.testing.assert_close(got.q_KV, want.q_KV, rtol=1e-4, atol=1e-5)
        assert state.length == fresh.length == len(self.seen) - 1
        assert cached_length(state.cache) == cached_length(fresh.cache) == len(self.seen) - 1 + length - 1
        for mine, theirs in zip(state.cache.layers, fresh.cache.layers, strict=True):
            torch.testing.assert_close(mine.keys, theirs.keys, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(mine.values, theirs.values, rtol=1e-4, atol=1e-4)
        self.compared += 1
        return got


@pytest.mark.parametrize("sampler", [GREEDY, Sampler(temperature=4.0)], ids=Sampler.describe)  # hot laws overlap
@pytest.mark.parametrize("k", [1, 2, 5])
def test_after_every_round_the_eagle_state_is_a_fresh_prefill(
    tiny_target, make_eagle3_drafter, architecture, sampler, k
):
    target = tiny_target(architecture, layers=3)
    witness = Witness(make_eagle3_drafter(target), target)
    result = speculative(target, witness, k, count=16, sampler=sampler, seed=1)
    assert witness.compared == sum(round_.proposed > 0 for round_ in result.rounds) > 3
    if not sampler.greedy:
        assert any(round_.accepted for round_ in result.rounds), "nothing was accepted, so little was tested"


# --- ids that exist -------------------------------------------------------------------------------------------


def loud_padding(target):
    """Padding rows that the raw model would always prefer."""
    with torch.no_grad():
        target.head_weight[24:] = 40 * target.head_weight[:12]
    return target


@pytest.mark.parametrize("sampler", [GREEDY, SAMPLED, Sampler(1.0, top_p=0.9)], ids=Sampler.describe)
@pytest.mark.parametrize("kind", ["ngram", "eagle3", "self", "none"])
def test_no_id_beyond_the_tokenizer_is_ever_emitted(tiny_target, make_drafter, kind, sampler):
    target = loud_padding(tiny_target(padding=12, layers=3))
    raw = target.model(input_ids=torch.tensor([PROMPT])).logits[0, -1]
    assert raw.argmax() >= 24
    if kind == "none":
        result = plain(target, count=40, sampler=sampler)
    else:
        result = speculative(target, make_drafter(kind, target, PROMPT, []), 4, count=40, sampler=sampler)
    assert max(result.tokens) < 24
    assert len(result.tokens) == 40


def test_padding_rows_change_nothing(tiny_target, make_drafter):
    bare, padded = tiny_target(layers=3), loud_padding(tiny_target(layers=3, padding=12))
    with torch.no_grad():
        for mine, theirs in zip(padded.model.parameters(), bare.model.parameters(), strict=True):
            mine[: len(theirs)] = theirs
    want = plain(bare).tokens
    assert plain(padded).tokens == want
    assert speculative(padded, make_drafter("eagle3", padded, PROMPT, want), 3).tokens == want


# --- requests and drafters that are wrong ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": []}, "the prompt has no tokens"),
        ({"prompt": [1, 24]}, "prompt id 24 does not exist; the tokenizer has ids 0 to 23"),
        ({"prompt": [-1]}, "prompt id -1 does not exist"),
        ({"count": -1}, "max_new_tokens is -1; expected 0 or more"),
        ({"count": 121}, "a prompt of 8 tokens and 121 new ones exceed the target's context of 128"),
    ],
)
def test_requests_that_cannot_be_met_are_refused(tiny_target, self_drafter, change, message):
    target = tiny_target(layers=2, padding=8)
    with pytest.raises(SpectrainError, match=message):
        plain(target, **change)
    with pytest.raises(SpectrainError, match=message):
        speculative(target, self_drafter(target), 2, **change)


@pytest.mark.parametrize("k", [0, -3])
def test_a_draft_length_below_one_is_refused(tiny_target, self_drafter, k):
    target = tiny_target(layers=2)
    with pytest.raises(SpectrainError, match=f"draft_length is {k}; expected 1 or more"):
        speculative(target, self_drafter(target), k)


class Overeager(Drafter):
    def start(self):
        return None

    def observe(self, state, ids, features): ...

    def propose(self, state, sampler, length, uniforms_K):
        return Proposal(torch.zeros(length + 1, dtype=torch.long), None)


def test_a_drafter_that_proposes_more_than_asked_is_refused(tiny_target):
    with pytest.raises(SpectrainError, match="Overeager proposed 4 tokens, expected at most 3"):
        speculative(tiny_target(layers=2), Overeager(), 3)


# --- streams, taps, clocks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ngram", "eagle3", "self", "none"])
def test_a_seed_is_an_answer(target, make_drafter, kind):

    def answer(seed):
        if kind == "none":
            return plain(target, sampler=SAMPLED, seed=seed).tokens
        return speculative(target, make_drafter(kind, target, PROMPT, []), 3, sampler=SAMPLED, seed=seed).tokens

    assert answer(5) == answer(5)
    assert len({tuple(answer(seed)) for seed in range(4)}) == 4


def test_a_drafter_leaves_nothing_behind_for_the_next(target, make_drafter):
    want = plain(target).tokens
    for kind in ("eagle3", "ngram", "eagle3", "self"):
        drafter = make_drafter(kind, target, PROMPT, want)
        assert speculative(target, drafter, 3).tokens == want
        assert target.forward(torch.tensor([PROMPT])).taps_BTF.shape[-1] == 32 * len(drafter.tap_layers)
        assert speculative(target, drafter, 2).tokens == want, "one drafter serves one request after the other"


def test_times_are_parts_of_a_whole(target, make_drafter, monkeypatch):
    ticks = iter(range(10**6))
    monkeypatch.setattr(Clock, "_now", lambda self: float(next(ticks)))
    result = speculative(target, make_drafter("eagle3", target, PROMPT, []), 3, count=12)
    rounds = len(result.rounds)
    assert (result.prefill_s, result.verify_s, result.draft_s) == (1.0, rounds, 2 * rounds)
    assert result.total_s == 1 + 1 + 5 * rounds
    assert result.overhead_s == result.total_s - result.prefill_s - result.verify_s - result.draft_s
    alone = plain(target, count=12)
    assert (alone.prefill_s, alone.draft_s, alone.verify_s, alone.total_s) == (1.0, 0.0, 11.0, 25.0)
