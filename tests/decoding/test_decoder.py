"""Greedy speculative decoding is plain decoding whatever is drafted (C17); a perfect draft is always kept (C22)."""

import pytest
import torch

from spectrain.decoding import generate, generate_plain
from spectrain.drafters.base import Committed, Drafter
from spectrain.exact.sampler import Sampler
from spectrain.shapes import Chain, DynamicTree, StaticTree
from spectrain.target import Target

GREEDY = Sampler()
SAMPLED = Sampler(temperature=1.0)
KINDS = ["ngram", "eagle3", "noisy", "script"]
LAYERS, COUNT = 3, 12


@pytest.fixture(scope="module")
def target(tiny_target):
    """What does not depend on the architecture; drafters set their own taps on it."""
    return tiny_target(layers=LAYERS)


def scripts_of(prompts, results):
    return [[*prompt, *result.tokens] for prompt, result in zip(prompts, results, strict=True)]


# --- greedy decoding ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 24])
def test_plain_greedy_decoding_is_the_argmax_of_the_model_itself(tiny_target, architecture, tools, count):
    target, ids = tiny_target(architecture, layers=LAYERS), list(tools.PROMPTS[0])
    for _ in range(count):
        ids.append(int(target.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    result = tools.plain(target, count=count)
    assert result.tokens == ids[len(tools.PROMPTS[0]) :]
    assert [(r.proposed, r.accepted, r.committed, r.clipped) for r in result.rounds] == [(0, 0, 1, None)] * (count - 1)


class Pair:
    """A target, with what plain decoding makes of the prompts: an EOS ends them at many different times.

    Prompts and answers go far beyond the windows of Mistral and Gemma-2.
    """

    def __init__(self, target, tools):
        free = [tools.plain(target, prompt, COUNT).tokens for prompt in tools.PROMPTS]

        def ends(eos):
            return [tokens.index(eos) if eos in tokens else COUNT for tokens in free]

        eos = max(range(24), key=lambda token: (len(set(ends(token))), sum(ends(token))))
        assert len(set(ends(eos))) >= 3
        self.target, self.tools, self.settings = target, tools, {"count": COUNT, "eos": [eos]}
        self.want = [tools.plain(target, prompt, **self.settings) for prompt in tools.PROMPTS]

    def check(self, kind, shape, rule, prompts):
        """The first ``prompts`` of them together get what each gets alone and plainly."""
        want, prompts = self.want[:prompts], self.tools.PROMPTS[:prompts]
        drafter = self.tools.drafter(kind, self.target, scripts_of(prompts, want))
        got = self.tools.batch(self.target, drafter, shape, prompts, verification=rule, **self.settings)
        assert self.tools.told(got) == self.tools.told(want), (shape, rule)
        for result in got:
            self.tools.check_books(result, shape, COUNT)


@pytest.fixture(scope="module", params=["llama", "qwen3", "gpt2", "gpt_neox", "mistral", "gemma2"])
def pair(request, tiny_target, tools):
    return Pair(tiny_target(request.param, layers=LAYERS), tools)


def cases_of(tools, kind):
    cases = [(shape, "token") for shape in tools.SHAPES.values()] + [(Chain(4), "block")]
    # A script fills the trees that it is given.
    return [case for case in cases if kind != "script" or not isinstance(case[0], DynamicTree)]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_speculative_decoding_is_plain_decoding(pair, tools, kind):
    for shape, rule in cases_of(tools, kind):
        pair.check(kind, shape, rule, prompts=5)
        pair.check(kind, shape, rule, prompts=1)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "gpt_neox", "mistral"])
def test_it_is_with_eager_attention_too(tiny_model, word_tokenizer, tools, name):
    """Gemma-2 always has it."""
    model = tiny_model(name, layers=LAYERS)
    model.set_attn_implementation("eager")
    pair = Pair(Target(model, word_tokenizer(24), name=name), tools)
    assert model.config._attn_implementation == "eager"
    for shape, rule in cases_of(tools, "noisy"):
        pair.check("noisy", shape, rule, prompts=5)


def test_plain_decoding_in_a_batch_is_plain_decoding(pair, tools):
    got = tools.batch(pair.target, None, None, **pair.settings)
    assert tools.told(got) == tools.told(pair.want)
    assert [[r.committed for r in result.rounds] for result in got] == [[1] * (len(r.tokens) - 1) for r in pair.want]


@pytest.mark.parametrize("seed", range(7))
def test_every_way_a_round_can_go_leaves_plain_decoding(tiny_target, tools, seed):
    """Random nodes right, wrong or absent, in trees of random shape: paths are gathered from everywhere."""
    target = tiny_target("mistral", layers=2, seed=seed)
    want = [tools.plain(target, prompt, count=24) for prompt in tools.PROMPTS]
    for shape in (Chain(5), tools.SHAPES["static"], StaticTree(((0,), (0, 0), (0, 1), (0, 1, 0), (0, 1, 0, 0)))):
        drafter = tools.ScriptDrafter(scripts_of(tools.PROMPTS, want), seed=seed, wrong=seed)
        got = tools.batch(target, drafter, shape, count=24)
        assert tools.told(got) == tools.told(want)
        for result in got:
            tools.check_books(result, shape, 24)
        accepted = {round_.accepted for result in got for round_ in result.rounds}
        assert accepted >= {0, 1, 2}, "rounds went one way only"


@pytest.mark.parametrize("prompt", [[7], [7] * 40, [0, 23]])
@pytest.mark.parametrize("kind", ["ngram", "eagle3"])
def test_short_and_repeated_prompts(tiny_target, tools, prompt, kind):
    target = tiny_target("gemma2", layers=LAYERS)
    want = tools.plain(target, prompt).tokens
    for shape in tools.SHAPES.values():
        assert tools.one(target, tools.drafter(kind, target), shape, prompt).tokens == want


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox"])
def test_float32_is_token_for_token_too(tiny_target, tools, name):
    pair = Pair(tiny_target(name, layers=LAYERS, dtype=torch.float32), tools)
    for kind in ("ngram", "eagle3", "noisy"):
        for shape in tools.SHAPES.values():
            pair.check(kind, shape, "token", prompts=5)


def test_bfloat16_decodes_to_the_end(tiny_target, tools):
    """It may round another way than plain decoding, but must not break."""
    target = tiny_target(layers=LAYERS, dtype=torch.bfloat16)
    for kind, shape in zip(("ngram", "eagle3", "noisy"), tools.SHAPES.values(), strict=True):
        for result in tools.batch(target, tools.drafter(kind, target), shape, count=8):
            tools.check_books(result, shape, 8)


# --- the end: EOS and budget ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [Chain(5), StaticTree(((0,), (1,), (0, 0), (0, 0, 0), (0, 0, 0, 0))),
                                   DynamicTree(5, 2, 8)],
                         ids=lambda shape: shape.describe())  # fmt: skip
@pytest.mark.parametrize("kind", ["ngram", "eagle3", "noisy", "self"])
def test_the_third_greedy_token_ends_the_answer(target, tools, kind, shape):
    """Case C17, alone and beside others."""
    free = tools.plain(target).tokens
    assert free[2] not in free[:2]
    want = tools.plain(target, eos=[free[2]])
    assert (want.tokens, want.finished) == (free[:3], "eos")
    result = tools.one(target, tools.drafter(kind, target), shape, eos=[free[2]])
    together = tools.batch(target, tools.drafter(kind, target), shape, eos=[free[2]])
    assert tools.told([result, together[0]]) == tools.told([want, want])
    tools.check_books(result, shape, 16)
    tools.check_books(together[0], shape, 16)
    if kind == "self":  # drafted past the end; only what was kept counts
        (round_,) = result.rounds
        assert round_.proposed > 2
        assert (round_.accepted, round_.committed, round_.clipped) == (2, 2, "eos")


@pytest.mark.parametrize("kind", [*KINDS, "self"])
def test_wherever_the_answer_ends_it_ends_as_plain_decoding_does(target, tools, kind):
    free = [tools.plain(target, prompt) for prompt in tools.PROMPTS]
    for number, eos in enumerate(sorted(set(free[0].tokens))[:4]):
        want = [result.tokens[: result.tokens.index(eos) + 1] if eos in result.tokens else result.tokens
                for result in free]  # fmt: skip
        shape = tools.SHAPES["static" if number % 2 else "chain"]
        drafter = tools.drafter(kind, target, scripts_of(tools.PROMPTS, free))
        got = tools.batch(target, drafter, shape, eos=[eos])
        assert [result.tokens for result in got] == want
        assert [result.finished == "eos" for result in got] == [eos in tokens for tokens in want]
        for result in got:
            tools.check_books(result, shape, 16)


def test_the_first_of_several_eos_ids_ends_the_answer(target, tools):
    free = tools.plain(target).tokens
    absent = next(i for i in range(24) if i not in free)
    first = min(free.index(free[2]), free.index(free[4]))
    for shape in tools.SHAPES.values():
        result = tools.one(target, tools.SelfDrafter(target), shape, eos=[free[4], absent, free[2]])
        assert (result.tokens, result.finished) == (free[: first + 1], "eos")
        assert tools.one(target, tools.SelfDrafter(target), shape, eos=[absent]).tokens == free


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_an_eos_is_noticed_as_first_token_accepted_token_repair_and_bonus(target, tools, place):
    free, prompt = tools.plain(target).tokens, tools.PROMPTS[0]
    eos = free[place]
    end = free.index(eos) + 1
    script = [*prompt, *free[:1], *free[1:3], 0, 0]  # k = 2: tokens 1 and 2 are accepted, token 3 is the bonus
    result = tools.one(target, tools.FullScript([script]), Chain(2), eos=[eos])
    assert (result.tokens, result.finished) == (free[:end], "eos")
    wrong = next(i for i in range(24) if i != free[1])
    script = [*prompt, free[0], wrong, 0, 0]
    repaired = tools.one(target, tools.FullScript([script]), Chain(2), eos=[free[1]])
    assert (repaired.tokens, repaired.finished) == (free[: free.index(free[1]) + 1], "eos")


def test_eos_ids_default_to_the_targets(tiny_target, target, tools):
    free, prompt = tools.plain(target).tokens, tools.PROMPTS[0]
    with_eos = tiny_target(layers=LAYERS, eos=free[2])
    request = {"sampler": GREEDY, "max_new_tokens": 16}
    assert generate_plain(with_eos, prompt, **request).tokens == free[:3]
    for shape in tools.SHAPES.values():
        result = generate(with_eos, tools.SelfDrafter(with_eos), prompt, shape=shape, **request)
        assert (result.tokens, result.finished) == (free[:3], "eos")
    assert tools.plain(with_eos).tokens == free  # none given is none, not the default


@pytest.mark.parametrize("shape", [Chain(1), Chain(3), Chain(50), StaticTree(((0,), (1,), (0, 0), (1, 0), (1, 0, 0))),
                                   DynamicTree(4, 2, 6)], ids=lambda shape: shape.describe())  # fmt: skip
@pytest.mark.parametrize("kind", ["ngram", "eagle3", "self"])
def test_the_budget_is_met_and_never_exceeded(target, tools, kind, shape):
    free = [tools.plain(target, prompt, count=9).tokens for prompt in tools.PROMPTS[:3]]
    for count in (0, 1, 2, 3, 6, 9):
        assert tools.plain(target, count=count).tokens == free[0][:count]
        for result, want in zip(
            tools.batch(target, tools.drafter(kind, target), shape, tools.PROMPTS[:3], count=count), free, strict=True
        ):
            assert (result.tokens, result.finished) == (want[:count], "budget")
            tools.check_books(result, shape, count)  # never a draft token that has no room beside the bonus
            if count == 0:
                assert (result.rounds, result.prefill_s, result.total_s) == ([], 0.0, 0.0)


def test_an_answer_that_ends_with_the_budget_ends_by_eos(target, tools):
    free = tools.plain(target).tokens
    speculative = [tools.one(target, tools.SelfDrafter(target), shape, count=3, eos=[free[2]])
                   for shape in tools.SHAPES.values()]  # fmt: skip
    for result in (tools.plain(target, count=3, eos=[free[2]]), *speculative):
        assert (result.tokens, result.finished) == (free[:3], "eos")


def test_the_context_can_be_filled_to_the_last_position(tiny_target, tools):
    target = tiny_target("gpt2", layers=LAYERS, context=20)
    want = tools.plain(target, count=12).tokens
    for kind in ("ngram", "eagle3", "self"):
        for shape in (Chain(6), *tools.SHAPES.values()):
            assert tools.one(target, tools.drafter(kind, target), shape, count=12).tokens == want


@pytest.mark.parametrize("seed", range(4))
def test_a_companion_that_drafts_deeper_does_not_push_a_request_out_of_its_context(tiny_target, tools, seed):
    """One request stands a token before the end of the context while the others still ask for whole proposals."""
    target = tiny_target("gpt2", layers=2, context=20)
    prompts = [list(range(12)), [7], [5, 3]]
    want = [tools.plain(target, prompt, count=8) for prompt in prompts]
    scripts = scripts_of(prompts, want)
    wrong = [scripts[0], *([*prompt, *[23] * 8] for prompt in prompts[1:])]
    for shape in (Chain(5), tools.SHAPES["static"]):
        got = tools.batch(target, tools.ScriptDrafter(wrong, seed=seed), shape, prompts, count=8)
        assert tools.told(got) == tools.told(want)


# --- a perfect draft ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("sampler", [GREEDY, Sampler(0.7, top_k=5, top_p=0.9)], ids=Sampler.describe)
def test_a_target_that_drafts_for_itself_is_always_accepted(tiny_target, architecture, tools, sampler, rule):
    """Case C22: every depth, k + 1 tokens a round."""
    target = tiny_target(architecture, layers=2)
    for k in (1, 2, 3, 4, 5):
        count = 1 + 2 * (k + 1)
        results = tools.batch(target, tools.SelfDrafter(target), Chain(k), tools.PROMPTS[:2], count, sampler,
                              verification=rule)  # fmt: skip
        for result in results:
            assert [(r.proposed, r.accepted, r.committed) for r in result.rounds] == [(k, k, k + 1)] * 2
        if sampler.greedy:
            assert results[0].tokens == tools.plain(target, count=count).tokens


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_trees_of_a_target_that_drafts_for_itself_are_always_followed_to_the_end(target, tools, k):
    """Greedily every tree with a full first branch; sampled, a branch that is drawn from the target's own law."""
    spine = tuple((0,) * depth for depth in range(1, k + 1))
    bushy = StaticTree((*spine, (1,), *((*path, 1) for path in spine[:-1])))
    count = 1 + 3 * (k + 1)
    for shape, sampler in [(bushy, GREEDY), (DynamicTree(k, 1, k), GREEDY), (StaticTree(spine), SAMPLED),
                           (StaticTree(spine, "independent"), SAMPLED)]:  # fmt: skip
        results = tools.batch(target, tools.SelfDrafter(target), shape, count=count, sampler=sampler)
        for result in results:
            assert [(r.proposed, r.accepted, r.committed, r.nodes) for r in result.rounds] == [
                (k, k, k + 1, shape.nodes)
            ] * 3
        if sampler.greedy:
            assert results[0].tokens == tools.plain(target, count=count).tokens


def test_the_first_level_of_a_tree_of_the_target_itself_is_always_entered(target, tools):
    """Drawn from the target's own law the first child passes; greedily the likeliest child is the answer."""
    level = ((0,), (1,), (2,))
    for shape, sampler in [(StaticTree(level), SAMPLED), (StaticTree(level, "independent"), SAMPLED),
                           (DynamicTree(1, 3, 3), GREEDY), (DynamicTree(3, 3, 8), GREEDY)]:  # fmt: skip
        for result in tools.batch(target, tools.SelfDrafter(target), shape, sampler=sampler):
            assert all(round_.accepted >= 1 for round_ in result.rounds if round_.proposed)


class Witness(Drafter):
    """Watches an EAGLE-3 drafter: at every proposal it is compared with one that sees the prefix for the first time."""

    def __init__(self, drafter, target, prompts):
        self.drafter, self.target, self.tap_layers, self.trees = drafter, target, drafter.tap_layers, True
        self.seen = [prompt[:1] for prompt in prompts]
        self.running, self.compared = list(range(len(prompts))), 0

    def start(self, first):
        return self.drafter.start(first)

    def select(self, state, rows):
        self.running = [self.running[row] for row in rows]
        self.drafter.select(state, rows)

    def observe(self, state, committed):
        for i, tokens in zip(self.running, committed.tokens, strict=True):
            self.seen[i] = self.seen[i] + tokens
        self.drafter.observe(state, committed)

    def propose(self, state, sampler, shape, limits, uniforms_BN):
        got = self.drafter.propose(state, sampler, shape, limits, uniforms_BN)
        for row, i in enumerate(self.running):
            seen, depth = self.seen[i], min(shape.depth, limits[row])
            if not depth:
                continue
            fresh = self.fresh(seen)
            want = self.drafter.propose(fresh, sampler, shape, [limits[row]], uniforms_BN[row : row + 1])
            N = want.tokens_BN.shape[1]
            assert got.tokens_BN[row, :N].tolist() == want.tokens_BN[0].tolist()
            if want.parents_BN is not None:
                assert got.parents_BN[row, :N].tolist() == want.parents_BN[0].tolist()
            if want.q is not None:
                drawn_from = want.q[0].sum(-1) > 0  # others may have gone deeper
                q = got.q[row, : len(drawn_from)][drawn_from]
                torch.testing.assert_close(q, want.q[0][drawn_from], rtol=1e-4, atol=1e-5)
            assert state.lengths[row] == fresh.lengths[0] == len(seen) - 1
            for mine, theirs in zip(state.cache.layers, fresh.cache.layers, strict=True):
                for name in ("keys", "values"):
                    kept, whole = (getattr(layer, name)[..., : fresh.lengths[0], :] for layer in (mine, theirs))
                    torch.testing.assert_close(kept[row], whole[0], rtol=1e-4, atol=1e-4)
            self.compared += 1
        return got

    def fresh(self, seen):
        state = self.drafter.start(seen[:1])
        features = self.target.forward(torch.tensor([seen[:-1]]))
        self.drafter.observe(state, Committed([seen[1:]], torch.tensor([seen[1:]]), features))
        return state


@pytest.mark.parametrize("sampler", [GREEDY, Sampler(temperature=4.0)], ids=Sampler.describe)  # hot laws overlap
def test_after_every_round_the_drafters_state_is_a_fresh_prefill(tiny_target, architecture, tools, sampler):
    """Case C22, in a ragged batch, behind chains and trees."""
    target, prompts = tiny_target(architecture, layers=LAYERS), tools.PROMPTS[:3]
    for shape in tools.SHAPES.values():
        witness = Witness(tools.eagle3(target), target, prompts)
        results = tools.batch(target, witness, shape, prompts, count=10, sampler=sampler)
        rounds = [round_ for result in results for round_ in result.rounds]
        assert witness.compared == sum(round_.proposed > 0 for round_ in rounds) > 5
        if not sampler.greedy:
            assert any(round_.accepted for round_ in rounds), "nothing was accepted, so little was tested"


# --- ids that exist -------------------------------------------------------------------------------------------


def loud_padding(target):
    """Padding rows that the raw model would always prefer."""
    with torch.no_grad():
        target.head_weight[24:] = 40 * target.head_weight[:12]
    return target


@pytest.mark.parametrize("sampler", [GREEDY, SAMPLED, Sampler(1.0, top_p=0.9)], ids=Sampler.describe)
@pytest.mark.parametrize("kind", ["ngram", "eagle3", "self", "none"])
def test_no_id_beyond_the_tokenizer_is_ever_emitted(tiny_target, tools, kind, sampler):
    """Case C05."""
    target = loud_padding(tiny_target(padding=12, layers=LAYERS))
    raw = target.model(input_ids=torch.tensor(tools.PROMPTS[:1])).logits[0, -1]
    assert raw.argmax() >= 24
    for shape in tools.SHAPES.values():
        drafter = None if kind == "none" else tools.drafter(kind, target)
        for result in tools.batch(target, drafter, shape, count=20, sampler=sampler):
            assert max(result.tokens) < 24
            assert len(result.tokens) == 20
    assert max(tools.plain(target, count=20, sampler=sampler).tokens) < 24


def test_padding_rows_change_nothing(tiny_target, tools):
    bare, padded = tiny_target(layers=LAYERS), loud_padding(tiny_target(layers=LAYERS, padding=12))
    with torch.no_grad():
        for mine, theirs in zip(padded.model.parameters(), bare.model.parameters(), strict=True):
            mine[: len(theirs)] = theirs
    want = tools.plain(bare).tokens
    assert tools.plain(padded).tokens == want
    for shape in tools.SHAPES.values():
        assert tools.one(padded, tools.eagle3(padded), shape).tokens == want


# --- streams and taps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ngram", "eagle3", "self", "none"])
def test_a_seed_is_an_answer(target, tools, kind):
    def answer(seed, shape):
        if kind == "none":
            return tools.plain(target, count=8, sampler=SAMPLED, seed=seed).tokens
        return tools.one(target, tools.drafter(kind, target), shape, count=8, sampler=SAMPLED, seed=seed).tokens

    for shape in tools.SHAPES.values():
        assert answer(5, shape) == answer(5, shape)
        assert len({tuple(answer(seed, shape)) for seed in range(3)}) == 3


def test_a_drafter_leaves_nothing_behind_for_the_next(target, tools):
    want = tools.plain(target).tokens
    for kind in ("eagle3", "ngram", "eagle3", "self"):
        drafter = tools.drafter(kind, target)
        assert tools.one(target, drafter, Chain(3)).tokens == want
        assert target.forward(torch.tensor(tools.PROMPTS[:1])).taps_BTF.shape[-1] == 32 * len(drafter.tap_layers)
        assert tools.one(target, drafter, Chain(2)).tokens == want, "one drafter serves one request after the other"
