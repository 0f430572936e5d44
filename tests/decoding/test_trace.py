"""What is written down of a run: rounds that account for every token, and seconds that are parts of a whole."""

import itertools

import pytest
import torch

from spectrain.decoding import Decoding, Generation, decoder, trace
from spectrain.decoding.trace import Clock
from spectrain.exact.sampler import Sampler
from spectrain.measures import RoundCounts
from spectrain.shapes import Chain, StaticTree

SAMPLERS = [Sampler(), Sampler(2.0)]


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target(layers=3)


def counts_of(results):
    rounds = [round_ for result in results for round_ in result.rounds]
    return RoundCounts.from_rounds((r.proposed, r.accepted, r.committed, r.clipped) for r in rounds)


# --- rounds -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS, ids=Sampler.describe)
@pytest.mark.parametrize("kind", ["ngram", "eagle3", "noisy", "self"])
def test_rounds_account_for_every_token(target, tools, kind, sampler):
    for shape in tools.SHAPES.values():
        for eos in ((), (5, 11)):
            results = tools.batch(target, tools.drafter(kind, target), shape, count=12, sampler=sampler, eos=eos)
            for result in results:
                tools.check_books(result, shape, 12)
                assert sum(round_.committed for round_ in result.rounds) == len(result.tokens) - 1
            counts = counts_of(results)
            assert counts.committed_tokens == sum(len(result.tokens) - 1 for result in results)


def test_a_generation_tells_what_the_drafter_held(target, tools):
    """It grows with the answer; a drafter without a state on the device holds nothing."""
    held = {}
    for kind in ("ngram", "eagle3"):
        for count in (4, 24):
            result = tools.one(target, tools.drafter(kind, target), Chain(2), tools.PROMPTS[0], count=count)
            held[kind, count] = result.state_bytes
    assert held["ngram", 4] == held["ngram", 24] == 0
    assert 0 < held["eagle3", 4] < held["eagle3", 24]
    assert tools.plain(target, tools.PROMPTS[0], 4).state_bytes == 0


def test_accepted_prefixes_are_counted_up_to_the_first_rejection(target, tools):
    """Cases C23 and C24: flags 1011, 1111, 0100, each draft token compared with what plain decoding says there."""
    prompt, k = tools.PROMPTS[0], 4
    free = tools.plain(target, prompt, 24).tokens
    rounds = []
    for start, flags in ((0, "1011"), (6, "1111"), (12, "0100")):
        known = [*prompt, *free[:start]]
        there = free[start + 1 : start + 1 + k]  # token ``start`` comes from the prefill
        drafted = [token if right == "1" else (token + 1) % 24 for token, right in zip(there, flags, strict=True)]
        drafter = tools.FullScript([[*known, free[start], *drafted]])
        rounds.append(tools.one(target, drafter, Chain(k), known, count=k + 2).rounds[0])
    assert [round_.accepted for round_ in rounds] == [1, 4, 0]
    assert [round_.committed for round_ in rounds] == [2, 5, 1]
    counts = counts_of([Generation(rounds=rounds)])
    assert counts.survival == pytest.approx([2 / 3, 1 / 3, 1 / 3, 1 / 3])
    assert counts.conditional == pytest.approx([2 / 3, 1 / 2, 1, 1])
    assert counts.tokens_per_round == pytest.approx(1 + sum(counts.survival)) == pytest.approx(8 / 3)


def test_nodes_are_how_many_a_tree_has_and_proposed_how_deep_it_goes(target, tools):
    shape = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
    (result,) = tools.batch(target, tools.SelfDrafter(target), shape, tools.PROMPTS[:1], count=9)
    seen = [(round_.proposed, round_.nodes) for round_ in result.rounds]
    assert seen == [(3, 6), (3, 6)]  # 1, then 4, then 4 tokens
    (result,) = tools.batch(target, tools.SelfDrafter(target), shape, tools.PROMPTS[:1], count=4)
    assert [(round_.proposed, round_.nodes, round_.clipped) for round_ in result.rounds] == [(2, 5, "budget")]
    (result,) = tools.batch(target, tools.SelfDrafter(target), shape, tools.PROMPTS[:1], count=2)
    assert [(round_.proposed, round_.nodes, round_.clipped) for round_ in result.rounds] == [(0, 0, "budget")]


def test_a_small_support_leaves_nodes_out(target, tools):
    """Children that are drawn without replacement are as many as the sampler leaves tokens; what would hang from the
    others is not counted either."""
    shape = StaticTree(((0,), (1,), (2,), (0, 0), (1, 0), (2, 0), (2, 0, 0)))
    for top_k, nodes in ((1, 2), (2, 4), (3, 7)):
        results = tools.batch(target, tools.SelfDrafter(target), shape, count=16, sampler=Sampler(1.0, top_k=top_k))
        whole = [round_ for result in results for round_ in result.rounds if round_.clipped is None]
        assert {round_.nodes for round_ in whole} == {nodes}
        assert {round_.proposed for round_ in whole} == {3 if top_k == 3 else 2}


def test_a_generation_tells_what_the_targets_cache_held(target, tools):
    """All that is committed but the pending token; the same for every decoder."""
    position = target.new_cache()
    target.forward(torch.tensor([[1]]), cache=position)
    for count in (1, 9):
        prompt = tools.PROMPTS[0]
        expected = position.bytes() * (len(prompt) + count - 1)
        assert tools.plain(target, prompt, count).cache_bytes == expected
        assert tools.one(target, tools.SelfDrafter(target), Chain(3), prompt, count=count).cache_bytes == expected
    batch = tools.batch(target, None, None, count=9)
    longest = max(map(len, tools.PROMPTS))
    assert {result.cache_bytes for result in batch} == {position.bytes() * len(batch) * (longest + 8)}


# --- an observer --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS, ids=Sampler.describe)
@pytest.mark.parametrize("name", ["chain", "static"])
def test_an_observer_sees_every_round_and_changes_none(target, tools, name, sampler):
    shape, seen = tools.SHAPES[name], []
    settings = {"count": 12, "sampler": sampler, "eos": (5, 11)}
    plain = tools.batch(target, tools.eagle3(target), shape, **settings)
    watched = tools.batch(target, tools.eagle3(target), shape, observer=seen.append, **settings)
    assert tools.told(watched) == tools.told(plain)
    by_request = [[] for _ in plain]
    for judged in seen:
        B, N = judged.proposal.tokens_BN.shape
        assert judged.p_BMV.shape == (B, N + 1, target.vocab_size)
        assert judged.p_BMV.sum(-1).double().numpy() == pytest.approx(1, abs=1e-5)
        for row, request in enumerate(judged.requests):
            kept, committed = judged.paths[row], judged.committed[row]
            by_request[request].append((judged.nodes[row], min(len(kept), committed), committed))
    assert by_request == [[(r.nodes, r.accepted, r.committed) for r in result.rounds] for result in plain]


def test_laws_are_kept_for_an_observer_alone(target, tools, monkeypatch):
    kept, evaluate = [], decoder.evaluate

    def spy(*arguments, **keywords):
        outcome = evaluate(*arguments, **keywords)
        kept.append(outcome.p_BMV is not None)
        return outcome

    monkeypatch.setattr(decoder, "evaluate", spy)
    tools.one(target, tools.SelfDrafter(target), Chain(2), count=6)
    assert kept
    assert not any(kept)
    kept.clear()
    tools.one(target, tools.SelfDrafter(target), Chain(2), count=6, observer=lambda judged: None)
    assert all(kept)


# --- seconds ------------------------------------------------------------------------------------------------------


@pytest.fixture
def ticks(monkeypatch):
    """A clock that goes on by one second whenever it is looked at."""
    ticks = itertools.count()
    monkeypatch.setattr(Clock, "_now", lambda self: float(next(ticks)))
    return ticks


@pytest.mark.parametrize("name", ["chain", "static", "dynamic"])
@pytest.mark.parametrize("kind", ["ngram", "eagle3", "none"])
def test_seconds_are_parts_of_a_whole(target, tools, ticks, kind, name):
    """A look at the clock after each part: target and drafter of the prefill; drafting, target, verdict, bookkeeping
    and the drafter's reading of every round."""
    shape, drafter = tools.SHAPES[name], None if kind == "none" else tools.drafter(kind, target)
    for result in tools.batch(target, drafter, shape, count=8):
        rounds = len(result.rounds)
        assert (result.prefill_s, result.prefill_draft_s) == (1.0, 1.0)
        assert (result.verify_s, result.draft_s) == (rounds, 1 + 2 * rounds)
        assert [(r.draft_s, r.verify_s, r.total_s) for r in result.rounds] == [(2.0, 1.0, 5.0)] * rounds
        assert result.total_s == 2 + 5 * rounds
        assert result.overhead_s == 2 * rounds


def test_plain_decoding_has_no_seconds_of_drafting(target, tools, ticks):
    result = tools.plain(target, count=8)
    assert (result.prefill_s, result.prefill_draft_s, result.draft_s, result.verify_s) == (1.0, 0.0, 0.0, 7.0)
    assert (result.total_s, result.overhead_s) == (8.0, 0.0)


def test_the_consumers_pauses_are_not_counted(target, tools, ticks):
    settings = {"seeds": range(5), "sampler": Sampler(), "max_new_tokens": 8, "shape": Chain(2), "eos_ids": ()}
    decoding = Decoding(target, tools.SelfDrafter(target), tools.PROMPTS, **settings)
    for _ in decoding:
        for _ in range(1000):
            next(ticks)
    for result in decoding.results:
        assert result.total_s == 2 + 5 * len(result.rounds)


def test_an_observers_time_is_in_no_part(target, tools, ticks):
    """However slow it is."""

    def slow(judged):
        for _ in range(1000):
            next(ticks)

    for result in tools.batch(target, tools.eagle3(target), Chain(2), count=8, observer=slow):
        assert [(r.draft_s, r.verify_s, r.total_s) for r in result.rounds] == [(2.0, 1.0, 5.0)] * len(result.rounds)
        assert result.total_s == 2 + 5 * len(result.rounds)


class Device:
    """An accelerator that runs behind: work is queued at once, and waiting for it takes its time."""

    def __init__(self, monkeypatch):
        self.now = self.queued = 0.0
        monkeypatch.setattr(trace.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(torch.accelerator, "synchronize", self.wait)

    def wait(self):
        self.now, self.queued = self.now + self.queued, 0.0

    def queues(self, monkeypatch, owner, name, seconds):
        """Every call of a method queues so much work, and takes a second of the host."""
        real = getattr(owner, name)

        def call(*arguments, **keywords):
            self.now, self.queued = self.now + 1, self.queued + seconds
            return real(*arguments, **keywords)

        monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize("timed", [True, False])
def test_the_device_is_waited_for_at_both_ends_of_every_part(target, tools, monkeypatch, timed):
    """Case C25: drafting is in the time, and what a part has queued is charged to it, not to who waits next."""
    device, drafter = Device(monkeypatch), tools.drafter("ngram", target)
    decoding = Decoding(target, drafter, [tools.PROMPTS[0]], seeds=[0], sampler=Sampler(), max_new_tokens=8,
                        shape=Chain(2), eos_ids=())  # fmt: skip
    decoding._clock = Clock(torch.device("cuda"), exact=timed)
    device.queues(monkeypatch, target, "forward", 100.0)
    device.queues(monkeypatch, drafter, "propose", 10.0)
    device.queues(monkeypatch, drafter, "observe", 1000.0)
    device.queued = 5000.0  # somebody else's, from before
    for _ in decoding:
        device.queued += 5000.0  # and from between two rounds
    (result,) = decoding.results
    if not timed:
        assert result.total_s < 100  # the host's alone
        return
    assert (result.prefill_s, result.prefill_draft_s) == (101.0, 1001.0)
    assert {round_.verify_s for round_ in result.rounds} == {101.0}
    *full, last = result.rounds
    assert {round_.draft_s for round_ in full} == {11.0 + 1001.0}
    assert last.draft_s in (0.0, 11.0)  # nobody reads what ends an answer, and a single place asks for no draft
    assert result.total_s == result.prefill_s + result.draft_s + result.verify_s


def test_a_request_is_not_charged_for_rounds_after_its_end(target, tools, ticks):
    free = tools.plain(target).tokens
    results = tools.batch(target, tools.eagle3(target), Chain(2), eos=[free[1]])
    assert len({result.total_s for result in results}) > 1
    for result in results:
        assert result.total_s == 2 + 5 * len(result.rounds)


@pytest.mark.parametrize("kind", ["ngram", "eagle3", "noisy", "none"])
def test_real_seconds_are_parts_of_a_whole_too(target, tools, kind):
    drafter = None if kind == "none" else tools.drafter(kind, target)
    for shape in tools.SHAPES.values():
        for timed in (True, False):
            for result in tools.batch(target, drafter, shape, count=6, timed=timed):
                parts = result.prefill_s + result.draft_s + result.verify_s
                assert result.total_s >= parts > 0
                assert result.overhead_s == pytest.approx(result.total_s - parts)
                assert min(result.prefill_s, result.verify_s, result.overhead_s) > 0
