"""What is made of a proposal: probes, absent nodes, proposals that are wrong, and states that are not numbers."""

from dataclasses import replace

import pytest
import torch
from paths import paths_of

from spectrain.decoding import Decoding
from spectrain.drafters.base import Drafter, Probes, Proposal
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler
from spectrain.shapes import ABSENT, Chain, DynamicTree, StaticTree

GREEDY, SAMPLED = Sampler(), Sampler(1.0)


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target("mistral", layers=3)


# --- probes -------------------------------------------------------------------------------------------------------


class Probing(Drafter):
    """Adds probes to another drafter's proposals: some below the pending token, some below its nodes, some below other
    probes; and compares the answers with plain forwards of their paths."""

    trees = True

    def __init__(self, drafter, target, prompts, answers=4):
        self.drafter, self.target, self.answers, self.tap_layers = drafter, target, answers, drafter.tap_layers
        self.seen = [prompt[:1] for prompt in prompts]
        self.running, self.asked, self.compared = list(range(len(prompts))), None, 0
        self.dice = torch.Generator().manual_seed(0)

    def start(self, first):
        return self.drafter.start(first)

    def select(self, state, rows):
        self.running = [self.running[row] for row in rows]
        self.asked = self.asked and [self.asked[row] for row in rows]
        self.drafter.select(state, rows)

    def observe(self, state, committed):
        if committed.answers is not None:
            assert len(committed.answers) == len(self.asked) == len(committed.tokens)
            for paths, answers in zip(self.asked, committed.answers, strict=True):
                rows = [self.target.model(torch.tensor([path]), use_cache=False).logits[0, -1] for path in paths]
                assert answers == [int(logits_V.argmax()) for logits_V in rows]
                self.compared += len(paths)
        self.asked = None
        for i, tokens in zip(self.running, committed.tokens, strict=True):
            self.seen[i] = self.seen[i] + tokens
        self.drafter.observe(state, committed)

    def propose(self, state, sampler, shape, limits, uniforms_BN):
        proposal = self.drafter.propose(state, sampler, shape, limits, uniforms_BN)
        B, N = proposal.tokens_BN.shape
        tokens_B6 = torch.randint(0, 24, (B, 6), generator=self.dice)
        parents_6 = [-1, min(0, N - 1), N - 1, N, N + 3, N + 2]  # the last goes below the third probe
        parents_B6 = torch.tensor([parents_6]).expand(B, -1)
        if proposal.parents_BN is None:
            parents = [[*range(-1, N - 1)]] * B
        else:
            parents = proposal.parents_BN.clamp(min=-1).tolist()
        self.asked = []
        for i, above, tokens, more in zip(self.running, parents, proposal.tokens_BN.tolist(), tokens_B6.tolist(),
                                          strict=True):  # fmt: skip
            paths = paths_of([*above, *parents_6])[N:]
            self.asked.append(
                [[*self.seen[i], *([*tokens, *more][n] for n in path)] for path in paths[-self.answers :]]
            )
        probes = Probes(tokens_B6, parents_B6, self.answers, N + 4)
        return Proposal(proposal.tokens_BN, proposal.parents_BN, proposal.q, proposal.counts, probes)


@pytest.mark.parametrize(("kind", "answers"), [("ngram", 4), ("eagle3", 4), ("noisy", 1), ("noisy", 6)])
def test_probes_are_answered_and_change_nothing(target, tools, kind, answers):
    for name, shape in tools.SHAPES.items():
        for sampler in (GREEDY, Sampler(2.0)):
            want = tools.batch(target, tools.drafter(kind, target), shape, count=6, sampler=sampler)
            probing = Probing(tools.drafter(kind, target), target, tools.PROMPTS, answers)
            got = tools.batch(target, probing, shape, count=6, sampler=sampler)
            assert tools.told(got) == tools.told(want), name
            books = [[(r.proposed, r.accepted, r.nodes) for r in result.rounds] for result in (*got, *want)]
            assert books[:5] == books[5:], name
            assert probing.compared >= 5 * answers


def test_probes_of_requests_that_end_are_forgotten(target, tools):
    free = [tools.plain(target, prompt).tokens for prompt in tools.PROMPTS]
    eos = [free[0][3]]
    probing = Probing(tools.SelfDrafter(target, 2.0), target, tools.PROMPTS)
    got = tools.batch(target, probing, Chain(3), eos=eos)
    want = [tokens[: tokens.index(eos[0]) + 1] if eos[0] in tokens else tokens for tokens in free]
    assert [result.tokens for result in got] == want
    assert len({len(tokens) for tokens in want}) > 1


def test_probes_may_look_beyond_the_context(tiny_target, tools):
    target = tiny_target("gpt2", layers=2, context=20)

    class Unheard(Probing):
        """Behind the end there is nothing to compare with."""

        def observe(self, state, committed):
            super().observe(state, replace(committed, answers=None))

    prompts = [list(range(12)), [7], [5, 3]]
    want = [tools.plain(target, prompt, 8).tokens for prompt in prompts]
    drafter = Unheard(tools.SelfDrafter(target), target, prompts)
    got = tools.batch(target, drafter, Chain(3), prompts, 8)
    assert [result.tokens for result in got] == want


# --- nodes that are not there -------------------------------------------------------------------------------------


class Given(Drafter):
    """The same tree every round."""

    trees = True

    def __init__(self, tokens, parents, q=None):
        self.tokens, self.parents, self.q = tokens, parents, q

    def start(self, first): ...

    def observe(self, state, committed): ...

    def select(self, state, rows): ...

    def propose(self, state, sampler, shape, limits, uniforms_BN):
        B = len(uniforms_BN)
        parents = None if self.parents is None else torch.tensor([self.parents]).expand(B, -1)
        return Proposal(torch.tensor([self.tokens]).expand(B, -1), parents)


def test_what_hangs_from_an_absent_node_is_not_counted(target, tools):
    free = tools.plain(target, count=6).tokens
    shape = StaticTree(((0,), (1,), (0, 0), (1, 0), (1, 0, 0)))
    tokens = [23, free[1], 23, free[2], free[3]]
    assert 23 not in free[1:4]
    for parents, books in [
        ([-1, -1, 0, 1, 3], (3, 3, 5)),
        ([-1, -1, 0, ABSENT, 3], (2, 1, 3)),
        ([-1, ABSENT, 0, 1, 3], (2, 0, 2)),
        ([ABSENT, ABSENT, 0, 1, 3], (0, 0, 0)),
        ([-1, -1, 0, 1, ABSENT], (2, 2, 4)),
    ]:
        result = tools.one(target, Given(tokens, parents), shape, count=6)
        assert result.tokens == free
        first = result.rounds[0]
        assert (first.proposed, first.accepted, first.nodes) == books


def test_a_companion_with_absent_nodes_does_not_take_a_request_beyond_its_limit(target, tools):
    """Nodes behind an absent one stand deeper than their number of ancestors that are there."""
    free = tools.plain(target, count=4).tokens
    shape = StaticTree(((0,), (0, 0), (0, 1), (0, 1, 0)))
    for parents in ([-1, ABSENT, 0, 2], [ABSENT, 0, 0, 2], [-1, 0, ABSENT, 2]):
        for count in (2, 3, 4):
            result = tools.one(target, Given([free[1], 23, free[2], free[3]], parents), shape, count=count)
            assert result.tokens == free[:count]
            tools.check_books(result, shape, count)


# --- proposals that are wrong -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "parents", "shape", "message"),
    [
        ([1, 2, 3, 4], None, Chain(3), r"Given proposed 4 tokens, expected at most 3 \(k=3\)"),
        ([1, 2, 3], [-1, -1, 0], StaticTree(((0,), (1,))), r"proposed 3 tokens, expected at most 2 \(tree of 2\)"),
        ([1, 2, 3], [-1, -1, 0], DynamicTree(2, 2, 2), r"proposed 3 tokens, expected at most 2 \(dynamic tree of 2\)"),
    ],
)
def test_a_drafter_that_proposes_more_than_asked_is_refused(target, tools, tokens, parents, shape, message):
    with pytest.raises(SpectrainError, match=message):
        tools.one(target, Given(tokens, parents), shape)
    with pytest.raises(SpectrainError, match=message):
        tools.batch(target, Given(tokens, parents), shape)


def test_a_tree_that_goes_deeper_than_its_shape_is_cut(target, tools):
    """As many nodes as asked for, but in a row: those beyond the depth do not count, and the answer is the same."""
    free = tools.plain(target, count=8).tokens
    shape = StaticTree(((0,), (1,), (0, 0), (0, 1)))
    result = tools.one(target, Given(free[1:5], [-1, 0, 1, 2]), shape, count=8)
    assert result.tokens == free
    assert (result.rounds[0].proposed, result.rounds[0].accepted) == (2, 2)


# --- states that are not numbers ----------------------------------------------------------------------------------


def spoiled(tiny_target, seed, token):
    """A target that has no state for one token."""
    target = tiny_target(layers=2, seed=seed)
    with torch.no_grad():
        target.embedding_weight[token] = torch.nan
    return target


def late_token(tiny_target, tools, sampler):
    """A seed, its free answer, and a place where something comes for the first time."""
    for seed in range(20):
        free = tools.plain(tiny_target(layers=2, seed=seed), count=12, sampler=sampler).tokens
        for place in range(3, 9):
            if free[place] not in [*free[:place], *tools.PROMPTS[0]]:
                return seed, free, place
    raise AssertionError("every answer repeats itself from the start")


@pytest.mark.parametrize("sampler", [GREEDY, Sampler(0.2)], ids=Sampler.describe)
@pytest.mark.parametrize("kind", ["none", "ngram", "self", "script"])
def test_a_nan_in_the_middle_of_an_answer_is_an_error(tiny_target, tools, kind, sampler):
    """Not token 0, as the argmax of a comparison that never holds."""
    seed, free, place = late_token(tiny_target, tools, sampler)
    target = spoiled(tiny_target, seed, free[place])
    message = r"states or logits are not finite with torch\.float64 and 'sdpa' attention; load it in float32"
    with pytest.raises(SpectrainError, match=message):
        tools.plain(target, count=12, sampler=sampler)
    before = tools.plain(target, count=place + 1, sampler=sampler)
    assert before.tokens == free[: place + 1]
    if not sampler.greedy and kind != "none":
        return  # another stream of uniforms, other tokens
    for shape in (Chain(1), *tools.SHAPES.values()):
        scripts = [[*tools.PROMPTS[0], *free]]
        if kind == "script" and isinstance(shape, DynamicTree):
            continue
        drafter = None if kind == "none" else tools.drafter(kind, target, scripts)
        with pytest.raises(SpectrainError, match=message):
            tools.batch(target, drafter, shape, tools.PROMPTS[:1], 12, sampler)


def test_a_nan_in_a_prompt_is_an_error(tiny_target, tools):
    target = spoiled(tiny_target, 0, 9)
    for drafter, shape in ((None, None), (tools.SelfDrafter(target), Chain(2))):
        with pytest.raises(SpectrainError, match="not finite"):
            tools.batch(target, drafter, shape)
        assert len(tools.one(target, drafter, shape, [0, 0, 0], count=1).tokens) == 1


@pytest.mark.parametrize("sampler", [SAMPLED, Sampler(0.7, top_k=3), Sampler(1.0, top_p=0.5)], ids=Sampler.describe)
def test_logits_that_overflow_are_an_error_where_they_have_no_law(tiny_target, tools, sampler):
    """States are finite, the head's product is not: the softmax of +inf is NaN."""
    target = tiny_target(layers=2, dtype=torch.float32)
    hidden_H = target.forward(torch.tensor(tools.PROMPTS[:1])).hidden_BTH[0, -1]
    with torch.no_grad():
        target.head_weight[5] = 3e38 * hidden_H.sign()
    assert hidden_H.isfinite().all()
    assert target.logits(hidden_H)[5] == torch.inf
    with pytest.raises(SpectrainError, match="states or logits are not finite"):
        tools.plain(target, sampler=sampler)
    with pytest.raises(SpectrainError, match="states or logits are not finite"):
        tools.one(target, tools.drafter("ngram", target), Chain(2), sampler=sampler)


@pytest.mark.parametrize("name", ["chain", "static", "dynamic"])
def test_they_are_in_the_middle_of_an_answer_too(tiny_target, tools, monkeypatch, name):
    target, calls, logits = tiny_target(layers=2), [], tiny_target(layers=2).logits

    def overflowing(hidden_XH):
        calls.append(len(calls))
        found = logits(hidden_XH)
        if len(calls) == 4:
            found[-1, -1, ..., 5] = torch.inf
        return found

    monkeypatch.setattr(target, "logits", overflowing)
    decoding = Decoding(target, tools.drafter("ngram", target), tools.PROMPTS, seeds=range(5), sampler=SAMPLED,
                        max_new_tokens=24, shape=tools.SHAPES[name], eos_ids=())  # fmt: skip
    with pytest.raises(SpectrainError, match="states or logits are not finite"):
        list(decoding)
    assert len(calls) == 4
