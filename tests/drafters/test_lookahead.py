"""Lookahead decoding: what the pool keeps, how the window is probed and moves on, and that answers are the target's."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from paths import paths_of
from pydantic import TypeAdapter, ValidationError

from spectrain.decoding import generate, generate_batch, generate_plain, verification
from spectrain.decoding.outcome import _counts
from spectrain.drafters import AnyDrafterConfig, family_of
from spectrain.drafters.base import Committed, Proposal
from spectrain.drafters.lookahead import LookaheadConfig, LookaheadDrafter, Pool
from spectrain.drafters.ngram import NgramConfig, NgramDrafter
from spectrain.exact.sampler import Sampler
from spectrain.exact.verify.tree import TreeVerdict
from spectrain.shapes import ABSENT, Chain, DynamicTree, StaticTree
from spectrain.target import Features

GREEDY = Sampler()
NOTHING = Features(torch.empty(1, 0, 4), torch.empty(1, 0, 0))
TREE = DynamicTree(depth=3, top_k=5, nodes=15)
SHAPES = [Chain(3), StaticTree(((0,), (1,), (0, 0), (0, 1), (0, 0, 0))), TREE]
PROMPTS = [[1, 2, 3, 4, 5], [7, 8], [3, 3, 3, 3, 3, 3, 3, 1, 2, 3], [5], [9, 8, 7]]


def lookahead(**config):
    return LookaheadDrafter(LookaheadConfig(**config))


def described(value):
    return value.describe() if hasattr(value, "describe") else str(value)


# --- the pool ---------------------------------------------------------------------------------------------------


def test_the_pool_keeps_the_latest_of_each_first_token():
    pool = Pool(2)
    for ngram in [(1, 2, 3), (1, 4, 5), (7, 2, 3), (1, 6, 7)]:
        pool.add(ngram)
    assert pool.after(1) == [(6, 7), (4, 5)]
    assert pool.after(7) == [(2, 3)]
    assert pool.after(2) == []


def test_an_ngram_that_is_met_again_is_the_latest_and_stays():
    pool = Pool(2)
    for ngram in [(1, 2, 3), (1, 4, 5), (1, 2, 3), (1, 6, 7)]:
        pool.add(ngram)
    assert pool.after(1) == [(6, 7), (2, 3)]


# --- the window, against a rule in place of a target --------------------------------------------------------------


@dataclass
class Probe:
    path: list[int]  # the tokens from below the pending one down to this one
    answer: int


class Player:
    """Plays the target's part by hand: the next token is ``rule`` of everything before it."""

    def __init__(self, drafter, prompts, rule):
        self.drafter, self.rule = drafter, rule
        self.texts = [[*prompt, rule(prompt)] for prompt in prompts]
        self.state = drafter.start([prompt[0] for prompt in prompts])
        self._observe([text[1:] for text in self.texts])

    def _observe(self, tokens, answers=None):
        width = max(map(len, tokens))
        padded = torch.tensor([[*row, *[0] * (width - len(row))] for row in tokens])
        self.drafter.observe(self.state, Committed(tokens, padded, NOTHING, answers))

    def propose(self, shape, limits):
        return self.drafter.propose(self.state, GREEDY, shape, limits, torch.zeros(len(self.texts), shape.nodes))

    def probes(self, proposal, row):
        """Every probe of a row, absent ones as None."""
        if proposal.probes is None:
            return []
        N, parents = proposal.tokens_BN.shape[1], proposal.probes.parents_BN[row].tolist()
        found = []
        for token, parent in zip(proposal.probes.tokens_BN[row].tolist(), parents, strict=True):
            if parent == ABSENT:
                found.append(None)
                continue
            assert parent == -1 or N <= parent < N + len(found), "a probe hangs from a proposal, or from one behind it"
            path = [*([] if parent < 0 else found[parent - N].path), token]
            found.append(Probe(path, self.rule([*self.texts[row], *path])))
        return found

    def round(self, shape, limits):
        """Accept the longest right path of each row."""
        proposal, committed, answers = self.propose(shape, limits), [], []
        asked = proposal.probes.answers if proposal.probes else 0
        for row, text in enumerate(self.texts):
            children = children_of(proposal, row)
            new, at = [self.rule(text)], -1
            while (at, new[-1]) in children and len(new) <= limits[row]:
                at = children[at, new[-1]]
                new.append(self.rule([*text, *new]))
            committed.append(new)
            probes = self.probes(proposal, row)[-asked:] if asked else []
            answers.append([probe.answer if probe else 0 for probe in probes])
        for text, new in zip(self.texts, committed, strict=True):
            text.extend(new)
        self._observe(committed, answers if asked else None)
        return committed


def children_of(proposal, row):
    tokens, count = proposal.tokens_BN[row].tolist(), proposal.counts[row]
    chain = list(range(-1, len(tokens) - 1))
    parents = chain if proposal.parents_BN is None else proposal.parents_BN[row].tolist()
    return {(parents[node], tokens[node]): node for node in range(count)}


def deepest(proposal):
    """How deep the first row's nodes go."""
    if proposal.parents_BN is None:
        return proposal.counts[0]
    return max(map(len, paths_of(proposal.parents_BN[0].tolist())), default=0)


def counting(text):
    return (text[-1] + 1) % 11


def mixing(text):
    return (3 * text[-1] + 5 * text[-2] + len(text)) % 13 if len(text) > 1 else 1


@pytest.mark.parametrize(("window", "ngram"), [(1, 3), (2, 3), (5, 4), (4, 6)])
def test_the_probes_are_the_window(window, ngram):
    """Level j of column i stands i + j places ahead, below the heads up to its column and the column itself."""
    player = Player(lookahead(window=window, ngram=ngram), [[4, 2, 9, 4, 2]], mixing)
    for _ in range(6):
        proposal, columns = player.propose(TREE, [50]), player.state[0].columns
        probes = player.probes(proposal, 0)
        assert len(probes) == window * (ngram - 1) - 1
        assert (proposal.probes.answers, proposal.probes.depth) == (window, window + ngram - 3)
        heads = [column[0] for column in columns]
        want = [heads[1 : i + 1] for i in range(1, window)]
        want += [heads[1 : i + 1] + columns[i][1 : j + 1] for j in range(1, ngram - 1) for i in range(window)]
        assert [probe.path for probe in probes] == want
        assert heads[0] == player.texts[0][-1]
        player.round(TREE, [50])


def test_the_window_moves_one_place_ahead_and_takes_the_answers():
    player = Player(lookahead(window=3, ngram=4, text=False), [[4, 2, 9]], mixing)
    for number in range(6):
        before = [list(column) for column in player.state[0].columns]
        answers = [probe.answer for probe in player.probes(player.propose(TREE, [50]), 0)[-3:]]
        player.round(TREE, [50])
        after = player.state[0].columns
        assert [column[-1] for column in after] == answers
        assert [column[1:-1] for column in after] == [column[2:] for column in before]
        assert after[0][0] == player.texts[0][-1]
        for column, answer in zip(before, answers, strict=True):
            pooled = (*column[1:], answer) in player.state[0].pool.after(column[0])
            assert pooled == (number >= 2)  # by then whatever follows a head was an answer


def test_the_first_window_is_the_latest_text_and_waits_for_answers():
    player = Player(lookahead(window=3, ngram=4), [[6, 1, 2, 3]], lambda text: 4)
    assert player.state[0].columns == [[4, 1, 2], [1, 2, 3], [2, 3, 4]]
    short = Player(lookahead(window=3, ngram=4), [[6]], lambda text: 4)
    assert short.state[0].columns == [[4, 6, 4], [6, 4, 6], [4, 6, 4]]


def test_what_the_target_said_in_the_window_is_proposed_where_it_comes_true():
    """The text never repeats, so prompt lookup is blind. A guess at 20 lets the target count on from there at once."""
    rounds = {}
    for name, drafter in {"window": lookahead(text=False), "lookup": NgramDrafter(NgramConfig())}.items():
        player = Player(drafter, [[20, 1]], lambda text: text[-1] + 1)
        rounds[name] = [len(player.round(TREE, [50])[0]) for _ in range(22)]
        assert player.texts[0][1:] == list(range(1, len(player.texts[0])))
    assert rounds["lookup"] == [1] * 22
    assert rounds["window"] == [1] * 18 + [4] * 4


def test_text_in_the_pool():
    player = Player(lookahead(ngram=3), [[1, 2, 3, 1, 5, 6, 2]], lambda text: 1)
    assert player.state[0].pool.after(1) == [(5, 6), (2, 3)]
    assert player.propose(TREE, [9]).tokens_BN.tolist() == [[5, 2, 6, 3]]
    assert player.propose(TREE, [9]).parents_BN.tolist() == [[-1, -1, 0, 1]]
    assert player.propose(Chain(4), [9]).tokens_BN.tolist() == [[5, 6]]  # the latest alone
    assert player.propose(Chain(1), [9]).tokens_BN.tolist() == [[5]]
    bare = Player(lookahead(ngram=3, text=False), [[1, 2, 3, 1, 5, 6, 2]], lambda text: 1)
    assert bare.propose(TREE, [9]).tokens_BN.shape == (1, 0)


def test_proposing_changes_nothing():
    player = Player(lookahead(), [[1, 2, 3], [4, 5]], mixing)
    for _ in range(5):
        first, second = player.propose(TREE, [9, 4]), player.propose(TREE, [9, 4])
        assert torch.equal(first.tokens_BN, second.tokens_BN)
        assert torch.equal(first.probes.tokens_BN, second.probes.tokens_BN)
        player.round(TREE, [9, 4])


# --- limits, companions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=described)
def test_towards_the_end_the_window_narrows_and_closes(shape):
    """No token or probe lies beyond the limit, and no column that has room is left out."""
    player = Player(lookahead(window=4, ngram=4), [[1, 2, 3, 1, 2, 3, 1]], counting)
    widths = []
    for limit in [9, 6, 5, 4, 3, 2, 1]:
        proposal = player.propose(shape, [limit])
        depths = [len(probe.path) for probe in player.probes(proposal, 0)]
        widths.append(proposal.probes.answers if proposal.probes else 0)
        assert max(depths, default=0) <= limit
        assert deepest(proposal) <= limit
        assert proposal.counts[0] <= shape.nodes
        assert len(player.round(shape, [limit])[0]) <= limit + 1
    assert widths == [4, 4, 4, 3, 2, 1, 0]


def test_rows_with_less_room_lack_columns_on_the_right():
    player = Player(lookahead(window=3, ngram=4), [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]], mixing)
    proposal = player.propose(TREE, [50, 3, 0])
    found = [player.probes(proposal, row) for row in range(3)]
    assert [sum(probe is not None for probe in row) for row in found] == [8, 5, 0]
    assert proposal.probes.answers == 3
    assert [probe is not None for probe in found[1][-3:]] == [True, True, False]
    assert proposal.counts[2] == 0
    for one, other in zip(found[0], found[1], strict=True):
        assert other is None or one.path == other.path


@pytest.mark.parametrize("shape", [Chain(3), TREE], ids=described)
def test_a_request_plays_the_same_alone_and_in_company(shape):
    prompts, limits = [[1, 2, 3], [4, 5, 4, 5], [9], [2, 2, 2]], [30, 7, 30, 12]
    together = Player(lookahead(), prompts, mixing)
    alone = [Player(lookahead(), [prompt], mixing) for prompt in prompts]
    rows = list(range(4))
    for number in range(12):
        if number == 4:  # some have finished, the others change places
            rows = [3, 0]
            together.drafter.select(together.state, rows)
            together.texts = [together.texts[row] for row in rows]
        left = [max(0, limits[row] - 2 * number) for row in rows]
        committed = together.round(shape, left)
        for place, row in enumerate(rows):
            assert committed[place] == alone[row].round(shape, [left[place]])[0]
            mine, own = together.state[place], alone[row].state[0]
            assert (mine.ids, mine.columns, mine.answered) == (own.ids, own.columns, own.answered)
            assert [mine.pool.after(token) for token in range(13)] == [own.pool.after(token) for token in range(13)]


# --- with a target ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target(layers=3)


@pytest.fixture(params=["llama", "gpt2", "gemma2"])  # rotary; learned positions; a sliding window and soft caps
def kind(request, tiny_target):
    return tiny_target(request.param, layers=2, context=40, dtype=torch.float64)


def asked(sampler=GREEDY, count=24, shape=TREE, **rest):
    return {"sampler": sampler, "max_new_tokens": count, "shape": shape, "eos_ids": (), **rest}


def plainly(target, prompt, count=24, **rest):
    settings = {"sampler": GREEDY, "max_new_tokens": count, "eos_ids": (), **rest}
    return generate_plain(target, prompt, **settings).tokens


@pytest.mark.parametrize("shape", SHAPES, ids=described)
def test_greedy_answers_are_the_targets(kind, shape):
    got = generate_batch(kind, lookahead(), PROMPTS, seeds=range(5), **asked(shape=shape))
    assert [result.tokens for result in got] == [plainly(kind, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize(("window", "ngram", "text"), [(1, 3, False), (3, 3, True), (8, 5, False)])
def test_greedy_answers_whatever_the_window(target, window, ngram, text):
    drafter = lookahead(window=window, ngram=ngram, text=text, pool=3)
    eos = (plainly(target, PROMPTS[0])[7],)  # requests leave at different times
    got = generate_batch(target, drafter, PROMPTS, seeds=range(5), **asked(eos_ids=eos))
    assert [result.tokens for result in got] == [plainly(target, prompt, eos_ids=eos) for prompt in PROMPTS]
    assert len({len(result.tokens) for result in got}) > 1


@pytest.mark.parametrize("rule", ["block", "typical_lossy"])
def test_the_other_rules_take_its_chains(target, rule):
    """At T=0 none of them may change a token."""
    got = generate(target, lookahead(), PROMPTS[0], **asked(shape=Chain(3), verification=rule))
    assert got.tokens == plainly(target, PROMPTS[0])


@pytest.mark.parametrize("sampler", [GREEDY, Sampler(1.0, top_k=4)], ids=described)
@pytest.mark.parametrize("shape", [Chain(3), TREE], ids=described)
def test_a_batch_gives_what_each_gets_alone(target, sampler, shape):
    request = asked(sampler, shape=shape)
    got = generate_batch(target, lookahead(), PROMPTS, seeds=range(5), **request)
    alone = [generate(target, lookahead(), prompt, seed=seed, **request) for seed, prompt in enumerate(PROMPTS)]
    assert [result.tokens for result in got] == [result.tokens for result in alone]
    assert [[r.accepted for r in result.rounds] for result in got] == [
        [r.accepted for r in result.rounds] for result in alone
    ]


class Recorder(LookaheadDrafter):
    """Notes every window that was answered, with the text it stood behind, and what was committed from which state."""

    def __init__(self, **config):
        super().__init__(LookaheadConfig(**config))
        self.windows: list[tuple[list[int], list[list[int]], list[int], int]] = []
        self.decided: list[tuple[list[int], torch.Tensor]] = []

    def observe(self, state, committed):
        for row, request in enumerate(state):
            if committed.answers:
                columns = [list(column) for column in request.columns[: request.asked]]
                self.windows.append((list(request.ids), columns, committed.answers[row], request.answered))
                for i, _ in enumerate(committed.tokens[row]):
                    before = [*request.ids, *committed.tokens[row][:i]]
                    self.decided.append((before, committed.features.hidden_BTH[row, i].clone()))
        super().observe(state, committed)


@pytest.mark.parametrize("sampler", [GREEDY, Sampler(1.0)], ids=described)
def test_what_is_pooled_was_really_said_by_the_target(kind, sampler):
    """Every answer is the target's most likely token after the text, the heads, and its column, by a plain forward."""
    drafter = Recorder(window=4, ngram=4, text=False)
    generate_batch(kind, drafter, PROMPTS[:3], seeds=range(3), **asked(sampler, 14))
    checked, pooled = 0, Counter()
    for ids, columns, answers, answered in drafter.windows:
        for i, (column, answer) in enumerate(zip(columns, answers, strict=False)):
            path = [*ids, *(head for head, *_ in columns[1 : i + 1]), *column[1:]]
            hidden_1TH = kind.forward(torch.tensor([path])).hidden_BTH
            assert int(kind.logits(hidden_1TH[0, -1]).argmax()) == answer
            checked += 1
            pooled[answered >= 2] += 1
    assert checked > 60
    assert pooled[True] > pooled[False] > 0


def test_probes_do_not_touch_what_is_committed(target):
    """The features that go with committed tokens are the target's own, whatever was evaluated beside them."""
    drafter = Recorder()
    results = generate_batch(target, drafter, PROMPTS[:3], seeds=range(3), **asked(count=16))
    assert sum(r.accepted for result in results for r in result.rounds) > 0
    for before, hidden_H in drafter.decided:
        want_H = target.forward(torch.tensor([before])).hidden_BTH[0, -1]
        torch.testing.assert_close(hidden_H, want_H, rtol=0, atol=1e-10)


def test_rounds_count_what_was_proposed_not_what_was_probed(target):
    result = generate(target, lookahead(window=6, ngram=4, text=False), [5], **asked())
    first = result.rounds[0]
    assert (first.proposed, first.nodes, first.committed) == (0, 0, 1)  # probed, but nothing was known yet
    assert max(r.nodes for r in result.rounds) > 3 >= max(r.proposed for r in result.rounds)


def test_on_a_text_that_repeats_it_needs_fewer_rounds_than_prompt_lookup(target):
    prompt = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
    counts = {
        name: len(generate(target, drafter, prompt, **asked(count=60, shape=TREE)).rounds)
        for name, drafter in {
            "lookup": NgramDrafter(NgramConfig()),
            "window": lookahead(text=False),
            "both": lookahead(),
        }.items()
    }
    assert counts["window"] < 59  # one token a round
    assert counts["both"] < counts["lookup"]


@pytest.mark.parametrize("shape", [Chain(3), TREE], ids=described)
def test_nothing_is_placed_beyond_the_targets_context(kind, shape, monkeypatch):
    """One request fills the context to its last position, its companion is far from it."""
    prompts, count = [list(range(16)), [3, 1]], 24
    deepest, forward = [], kind.forward

    def watched(ids_BT, *, cache=None, layout=None):
        if layout is not None:
            start_B1 = torch.tensor(cache.lengths)[:, None]
            deepest.append(int((start_B1 + layout.depth_BX).max()))
        return forward(ids_BT, cache=cache, layout=layout)

    monkeypatch.setattr(kind, "forward", watched)
    got = generate_batch(kind, lookahead(window=6), prompts, seeds=range(2), **asked(count=count, shape=shape))
    monkeypatch.undo()
    assert [result.tokens for result in got] == [plainly(kind, prompt, count) for prompt in prompts]
    assert max(deepest) >= kind.config.max_position_embeddings - 2  # the last token is never read
    if shape is TREE:  # a chain's padding has places behind it, which are never looked at
        assert max(deepest) < kind.config.max_position_embeddings


def test_it_is_deterministic_and_leaves_the_global_random_state_alone(target):
    states = torch.get_rng_state(), random.getstate()
    runs = [generate_batch(target, lookahead(), PROMPTS, seeds=range(5), **asked(Sampler(1.0))) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    one, two = ([(g.tokens, [(r.nodes, r.accepted) for r in g.rounds]) for g in run] for run in runs)
    assert one == two


def test_absent_nodes_do_not_lengthen_what_counts():
    """An absent node stands at depth 1, but may be numbered behind nodes that are too deep."""
    parents_BN = torch.tensor([[-1, -1, 0, ABSENT, ABSENT], [-1, ABSENT, 0, 2, ABSENT]])
    proposal = Proposal(torch.zeros(2, 5, dtype=torch.long), parents_BN)
    depth_BM = torch.tensor([[0, 1, 1, 2, 1, 1], [0, 1, 1, 2, 3, 1]])
    assert _counts(proposal, depth_BM, [1, 1]).tolist() == [2, 2]
    assert _counts(proposal, depth_BM, [2, 2]).tolist() == [5, 3]
    assert _counts(proposal, depth_BM, [9, 0]).tolist() == [5, 0]


# --- the law at T > 0 ---------------------------------------------------------------------------------------------

WORDS, LENGTH, RUNS = 3, 5, 2500
START = [1, 2, 0, 1, 2, 0, 1]
SIX = DynamicTree(depth=2, top_k=3, nodes=6)


@pytest.fixture(scope="module")
def three_words(tiny_target):
    target = tiny_target("llama", layers=2, hidden=16, vocab=WORDS, padding=3, seed=1)
    with torch.no_grad():
        target.head_weight.mul_(0.3)
    return target


def p_value(target, sequences, sampler):
    """Pearson's chi-square test of whole answers against the target's law, enumerated by plain forwards."""
    answers = list(product(range(WORDS), repeat=LENGTH))
    ids = torch.tensor([[*START, *answer[:-1]] for answer in answers])
    law = sampler.probabilities(target.logits(target.forward(ids).hidden_BTH[:, -LENGTH:]))
    expected = RUNS * law.gather(-1, torch.tensor(answers).unsqueeze(-1)).squeeze(-1).prod(-1)
    seen = Counter(sequences)
    observed = torch.tensor([seen[answer] for answer in answers], dtype=torch.float64)
    rare = expected < 5
    expected, observed = (torch.cat([t[~rare], t[rare].sum()[None]]) for t in (expected, observed))
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), statistic / 2))


def sampled(target, shape, sampler):
    drafter = lookahead(window=2, ngram=3)
    got = generate_batch(target, drafter, [START] * RUNS, seeds=range(RUNS), **asked(sampler, LENGTH, shape))
    assert sum(r.accepted for result in got for r in result.rounds) > RUNS / 4
    return [tuple(result.tokens) for result in got]


@pytest.mark.parametrize(
    ("shape", "sampler"),
    [(Chain(2), Sampler(1.0)), (SIX, Sampler(1.0)), (SIX, Sampler(0.8, top_p=0.95))],
    ids=described,
)
def test_sampled_answers_have_the_targets_law(three_words, shape, sampler):
    assert p_value(three_words, sampled(three_words, shape, sampler), sampler) > 1e-4


def test_the_same_sample_would_show_a_repair_that_is_drawn_from_p_again(three_words, monkeypatch):
    """A known fault: where no child was drawn, the token comes from a second draw."""

    def faulty(p_BMV, q, tokens_BN, parents_BN, uniforms_BM, lengths_B=None, **rest):
        right = verification_tree(p_BMV, q, tokens_BN, parents_BN, uniforms_BM, lengths_B, **rest)
        again = verification_tree(p_BMV, q, tokens_BN, parents_BN, uniforms_BM.flip(1), lengths_B, **rest)
        return TreeVerdict(right.path, right.accepted, torch.where(right.accepted > 0, right.token, again.token))

    verification_tree = verification.verify_tree
    monkeypatch.setattr(verification, "verify_tree", faulty)
    sequences = sampled(three_words, SIX, Sampler(1.0))
    assert p_value(three_words, sequences, Sampler(1.0)) < 1e-8


# --- settings -----------------------------------------------------------------------------------------------------


def test_settings():
    config = TypeAdapter(AnyDrafterConfig).validate_python({"type": "lookahead", "window": 7})
    assert config == LookaheadConfig(window=7)
    assert not config.trainable
    assert isinstance(family_of(config)(config), LookaheadDrafter)
    for bad in ({"window": 0}, {"ngram": 2}, {"pool": 0}, {"window": 65}, {"ngram": 17}, {"windows": 3}):
        with pytest.raises(ValidationError):
            LookaheadConfig.model_validate(bad)
