"""Where an answer ends: EOS, stop strings, budget, shortest length. Everywhere as plain decoding ends it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import PASS, PROMPT, REJECT, TARGET, TableDrafter, TableTarget, p_value, results_of, until_eos
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from spectrain.decoding.requests import Options
from spectrain.decoding.stopping import Stopping, TextStream
from spectrain.drafters.ngram import NgramConfig, NgramDrafter
from spectrain.errors import SpectrainError
from spectrain.exact.law import target_law
from spectrain.exact.sampler import Sampler
from spectrain.shapes import Chain, DynamicTree, StaticTree
from spectrain.target import Features

GREEDY = Sampler()


# --- a target that tells a given story ----------------------------------------------------------------------------


class Story(TableTarget):
    """Its greedy answer to any prompt of ``PROMPT``'s length is one given list of ids."""

    def __init__(self, tokenizer, ids):
        self.tokenizer, self.vocab_size = tokenizer, len(tokenizer)
        self.tokenizer_size = self.vocab_size
        generator = torch.Generator().manual_seed(0)
        self.ids = ids
        self.rows = torch.randn(len(PROMPT) + len(ids), self.vocab_size, generator=generator, dtype=torch.float64)
        self.rows[range(len(PROMPT) - 1, len(PROMPT) + len(ids) - 1), ids] += 20

    def forward(self, ids_BT, *, cache, layout=None):
        _, seen_BMC = self.seen(ids_BT, cache, layout)
        hidden = self.rows[(seen_BMC > 0).sum(-1).clamp(max=len(self.rows)) - 1]
        return Features(hidden, hidden[..., :0])


TEXT = "say hello wörld 12345, it is 3€ or 💡<|im_start|> more hello"
"""With merges hell, hello, 12 and 123, characters of two to four bytes, and a special token in between."""


@pytest.fixture(scope="module")
def story(make_tokenizer):
    tokenizer = make_tokenizer()
    return Story(tokenizer, tokenizer(TEXT).input_ids)


def read(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def ended(story, stop, shortest=0, budget=None):
    """Tokens, text and reason, found without any of the code: the first token after which a stop string stands there
    whole, and did not before."""
    budget = len(story.ids) if budget is None else budget
    for count in range(max(shortest, 1), budget + 1):
        text, before = read(story.tokenizer, story.ids[:count]), read(story.tokenizer, story.ids[: count - 1])
        places = [at for word in stop for at in range(len(text)) if text.startswith(word, at)
                  and at + len(word) > len(before.rstrip("�"))]  # fmt: skip
        if places:
            return story.ids[:count], text[: min(places)], "stop"
    return story.ids[:budget], read(story.tokenizer, story.ids[:budget]), "budget"


STOPS = {
    "inside a token": ["ell"],
    "a whole token": ["hello"],
    "across tokens": ["lo w"],
    "far across tokens": ["hello wörld 123"],
    "the first token": ["s"],
    "two complete at once, the longer began first": ["123", "23"],
    "two complete at once, the shorter began first": ["34", "234"],
    "one inside another that is never completed": ["rld 9", "ld"],
    "a character of two bytes": ["ö"],
    "up to half a character": ["w"],
    "from within half a character on": ["örl"],
    "a character of four bytes": ["💡"],
    "across a special token": ["💡 more"],
    "the special token itself, which is not in the text": ["<|im_start|>"],
    "the second time it comes": ["e hello"],
    "nowhere": ["xyz", "hello hello"],
    "at the very end": ["more hello"],
}


def everyone(story, tools, **settings):
    """(How, results) of plain decoding, and of drafters and shapes of every kind, in a batch of two."""
    scripts, prompts, count = [[*PROMPT, *story.ids]] * 2, [PROMPT] * 2, len(story.ids)
    yield "plain", [tools.plain(story, PROMPT, count, **settings)]
    yield "a batch without a drafter", tools.batch(story, None, None, prompts, count, **settings)
    for shape in (Chain(1), Chain(2), Chain(7)):
        yield f"right, {shape}", tools.batch(story, tools.FullScript(scripts), shape, prompts, count, **settings)
    for shape in (Chain(5), tools.SHAPES["static"]):
        drafter = tools.ScriptDrafter(scripts, seed=3)
        yield f"right and wrong, {shape}", tools.batch(story, drafter, shape, prompts, count, **settings)
    for shape in (tools.SHAPES["static"], tools.SHAPES["dynamic"]):
        drafter = tools.SelfDrafter(story, 9.0)
        yield f"the story with noise, {shape}", tools.batch(story, drafter, shape, prompts, count, **settings)


def test_the_story_is_told(story, tools):
    for how, results in everyone(story, tools):
        for result in results:
            assert (result.tokens, result.finished, result.text) == (story.ids, "budget", None), how


@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS)
def test_a_stop_string_ends_the_answer_and_is_not_in_its_text(story, tools, stop):
    tokens, text, finished = ended(story, stop)
    assert (finished == "stop") == (stop not in (STOPS["nowhere"], STOPS[list(STOPS)[13]]))
    for how, results in everyone(story, tools, stop=stop):
        for result in results:
            assert (result.tokens, result.text, result.finished) == (tokens, text, finished), how
            if result.rounds and finished == "stop":
                assert result.rounds[-1].clipped == "stop", how
    if finished == "stop":
        assert not any(word in text for word in stop)


def test_a_stop_string_may_be_given_bare(story, tools):
    for how, results in everyone(story, tools, stop="lo w"):
        assert {result.text for result in results} == {"say hel"}, how


@pytest.mark.parametrize("shortest", [1, 2, 5, 9, 30])
def test_stop_strings_are_not_looked_for_before_the_shortest_answer(story, tools, shortest):
    for stop in (["ell"], ["o", "1"], ["hello"]):
        tokens, text, finished = ended(story, stop, shortest)
        for how, results in everyone(story, tools, stop=stop, min_new_tokens=shortest):
            for result in results:
                assert (result.tokens, result.text, result.finished) == (tokens, text, finished), (how, stop)
        assert len(tokens) >= shortest


@pytest.mark.parametrize("budget", range(14))
def test_the_text_of_an_answer_that_the_budget_ends_is_that_of_its_tokens(story, tools, budget):
    """Also when it ends in the middle of a character."""
    tokens, text, finished = ended(story, ["xyz"], budget=budget)
    scripts = [[*PROMPT, *story.ids]]
    for drafter, shape in ((None, None), (tools.FullScript(scripts), Chain(4)), (tools.SelfDrafter(story), Chain(2))):
        result = tools.one(story, drafter, shape, PROMPT, budget, stop=["xyz"])
        assert (result.tokens, result.text, result.finished) == (tokens, text, finished)
    plain = tools.plain(story, PROMPT, budget, stop=["xyz"])
    assert (plain.tokens, plain.text, plain.finished) == (tokens, text, finished)
    halves = [half for n in range(len(story.ids)) if (half := read(story.tokenizer, story.ids[:n])).endswith("�")]
    assert len(halves) >= 4, "no budget ends in the middle of a character"


def test_an_eos_before_the_stop_string_ends_the_answer_and_after_it_does_not(story, tools):
    comma, start = (story.tokenizer.convert_tokens_to_ids(token) for token in (",", "<|im_start|>"))
    for how, results in everyone(story, tools, stop=["3€"], eos=[comma, start]):
        for result in results:
            assert (result.finished, result.text) == ("eos", "say hello wörld 12345,"), how
            assert result.tokens == story.ids[: story.ids.index(comma) + 1], how
    for how, results in everyone(story, tools, stop=["3€"], eos=[start]):
        for result in results:
            assert (result.finished, result.text) == ("stop", "say hello wörld 12345, it is "), how
    for how, results in everyone(story, tools, stop=["xyz"], eos=[start]):  # a special token has no text
        for result in results:
            assert (result.finished, result.text) == ("eos", "say hello wörld 12345, it is 3€ or 💡"), how


def test_a_stop_string_and_the_budget_on_one_token_is_a_stop(story, tools):
    tokens, text, _ = ended(story, ["lo w"])
    for drafter, shape in ((None, None), (tools.FullScript([[*PROMPT, *story.ids]]), Chain(4))):
        result = tools.one(story, drafter, shape, PROMPT, len(tokens), stop=["lo w"])
        assert (result.tokens, result.text, result.finished) == (tokens, text, "stop")


# --- text, piece by piece -----------------------------------------------------------------------------------------


def build_marked_words():
    """A tokenizer like Llama's first: words that begin with a mark for the space, and bytes for what is not in it."""
    merges = [("▁", "h"), ("▁h", "e"), ("l", "l"), ("ll", "o"), ("▁", "w"), ("▁", "▁")]
    pieces = [*"▁helowrdab123é", *(left + right for left, right in merges)]
    names = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocabulary = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def streamed(tokenizer, ids, cuts):
    stream, pieces, at = TextStream(tokenizer), [], 0
    for cut in [*sorted(cuts), len(ids)]:
        pieces.append(stream.feed(ids[at:cut]))
        at = max(at, cut)
        whole = read(tokenizer, ids)
        assert whole.startswith("".join(pieces)), "a piece was given out that later tokens changed"
    return [*pieces, stream.flush()]


SAMPLES = ["hello wörld", "3€ 💡💡 é", "a\n\n b  12345", "日本語 hello", " ", ""]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_pieces_of_text_add_up_to_the_text_of_all_tokens(make_tokenizer, data):
    """Any ids of a byte-level tokenizer: characters cut anywhere, bytes that belong to none, special tokens between."""
    tokenizer = make_tokenizer()
    anything = st.lists(st.integers(0, len(tokenizer) - 1), max_size=12)
    words = st.sampled_from(SAMPLES).map(lambda text: tokenizer(text).input_ids)
    before, between, after = data.draw(words), data.draw(anything), data.draw(words)
    ids = [*before, *between, *after]
    cuts = data.draw(st.sets(st.integers(0, len(ids))))
    assert "".join(streamed(tokenizer, ids, cuts)) == read(tokenizer, ids)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_they_do_where_a_space_belongs_to_the_word_behind_it(data):
    """Whole texts in whatever order, with special tokens in between; the first space of an answer is not shown."""
    tokenizer = build_marked_words()
    texts = data.draw(st.lists(st.sampled_from([*SAMPLES, "<s>"]), max_size=5))
    ids = [i for text in texts for i in tokenizer(text).input_ids]
    cuts = data.draw(st.sets(st.integers(0, len(ids))))
    assert "".join(streamed(tokenizer, ids, cuts)) == read(tokenizer, ids)


def test_a_piece_waits_for_the_rest_of_its_character_and_for_no_more(make_tokenizer):
    tokenizer = make_tokenizer()
    ids = tokenizer("a€b").input_ids
    assert len(ids) == 5
    stream = TextStream(tokenizer)
    assert [stream.feed([i]) for i in ids] == ["a", "", "", "€", "b"]
    assert [stream.flush(), stream.flush()] == ["", ""]
    stream = TextStream(tokenizer)
    assert [stream.feed(ids[:3]), stream.feed(ids[3:])] == ["a", "€b"]  # the end of one and half of the next
    stream = TextStream(tokenizer)
    assert [stream.feed(ids[:3]), stream.flush()] == ["a", "�"]


def test_a_stop_string_is_found_in_front_of_half_a_character(make_tokenizer):
    """Tokens of one end and the beginning of the next character are common; the end counts at once."""
    tokenizer = make_tokenizer()
    end, half, *rest = tokenizer("a€").input_ids
    ending = Stopping(9, (), ["a"], tokenizer=tokenizer)
    decode = tokenizer.decode
    joined = 400  # a token of both

    def split(ids):
        return [part for i in ids for part in ((end, half) if i == joined else (i,))]

    tokenizer.decode = lambda ids, **how: decode(split(ids), **how)
    assert ending.keep([joined, *rest]) == [joined]
    assert (ending.finished, ending.text) == ("stop", "")


# --- the shortest answer ------------------------------------------------------------------------------------------


def test_an_early_eos_is_forbidden_exactly(tiny_target, tools):
    """Plain greedy decoding that takes the best token but EOS, as long as EOS may not come."""
    target = tiny_target("qwen3", layers=3)
    prompts, count = tools.PROMPTS[:3], 10
    free = [tools.plain(target, prompt).tokens for prompt in prompts]
    eos = sorted({free[0][1], free[1][0], free[2][3]})
    for shortest in (0, 1, 4, 10):
        want = []
        for prompt in prompts:
            ids = list(prompt)
            for number in range(count):
                logits_V = target.model(torch.tensor([ids]), use_cache=False).logits[0, -1]
                if number < shortest:
                    logits_V[eos] = -torch.inf
                ids.append(int(logits_V.argmax()))
                if ids[-1] in eos:
                    break
            want.append(ids[len(prompt) :])
        assert all(len(tokens) > shortest or len(tokens) == count for tokens in want)
        settings = {"eos": eos, "min_new_tokens": shortest}
        assert [tools.plain(target, prompt, count, **settings).tokens for prompt in prompts] == want
        for kind, shape, rule in [("none", None, "token"), ("ngram", Chain(3), "block"), ("eagle3", Chain(3), "token"),
                                  *(("noisy", shape, "token") for shape in tools.SHAPES.values())]:  # fmt: skip
            drafter = None if kind == "none" else tools.drafter(kind, target)
            got = tools.batch(target, drafter, shape, prompts, count, verification=rule, **settings)
            assert [result.tokens for result in got] == want, (kind, shape)


NEW, RUNS, EOS, SHORTEST = 4, 2000, [1, 3], 2
PATHS = ((0,), (1,), (0, 0), (0, 1), (1, 0))
SCHEMES = {
    "plain": (None, None, "token"),
    "chain, token": (TableDrafter(), Chain(2), "token"),
    "chain, block": (TableDrafter(), Chain(2), "block"),
    "ngram": (NgramDrafter(NgramConfig(longest=2)), Chain(2), "token"),
    "distinct": (TableDrafter(), StaticTree(PATHS), "token"),
    "independent": (TableDrafter(), StaticTree(PATHS, "independent"), "token"),
    "dynamic": (TableDrafter(), DynamicTree(2, 2, 4), "token"),
}


def early(number):
    return EOS if number < SHORTEST else ()


def runs_of(scheme, sampler):
    drafter, shape, rule = SCHEMES[scheme]
    results = results_of(drafter, shape, sampler, new=NEW, runs=RUNS, verification=rule, eos_ids=EOS,
                         min_new_tokens=SHORTEST)  # fmt: skip
    return [tuple(result.tokens) for result in results]


@pytest.mark.parametrize("sampler", [Sampler(1.0, top_p=0.8), Sampler(0.7, top_k=3)], ids=Sampler.describe)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_sampled_answers_of_a_shortest_length_have_the_law_without_eos(scheme, sampler):
    """EOS is forbidden before the sampler: the others share its mass, and top-k and top-p count without it."""
    law = until_eos(target_law(TARGET.law(sampler, early), NEW), EOS, SHORTEST)
    assert p_value(runs_of(scheme, sampler), law) > PASS


def test_forbidding_eos_after_the_sampler_is_rejected(monkeypatch):
    """A known fault: the mass that top-k left is shared out, instead of top-k being taken of what may come."""

    def law(options, logits_BMV, number_BM, *_):
        p_BMV = options.sampler.probabilities(logits_BMV)
        p_BMV[..., options.eos] *= (number_BM >= options.min_new_tokens).unsqueeze(-1)
        return p_BMV / p_BMV.sum(-1, keepdim=True).clamp(min=1e-9)

    sampler = Sampler(0.7, top_k=3)
    right = until_eos(target_law(TARGET.law(sampler, early), NEW), EOS, SHORTEST)
    assert p_value(runs_of("chain, token", sampler), right) > PASS
    monkeypatch.setattr(Options, "law", law)
    assert p_value(runs_of("chain, token", sampler), right) < REJECT


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stop": ""}, "stop string '': expected text of at least one character"),
        ({"stop": ["a", ""]}, "stop string '': expected text"),
        ({"stop": [7]}, "stop string 7: expected text"),
        ({"stop": 7}, "stop 7: expected a string or a list of strings"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1; expected 0 to max_new_tokens, 16"),
        ({"min_new_tokens": 17}, "min_new_tokens is 17; expected 0 to max_new_tokens, 16"),
        ({"min_new_tokens": 1.5}, "min_new_tokens is 1.5; expected 0 to"),
        ({"count": -1}, "max_new_tokens is -1; expected 0 or more"),
        ({"count": 2.5}, "max_new_tokens is 2.5; expected 0 or more"),
        ({"eos": [3, 24]}, "EOS id 24 does not exist; the tokenizer has ids 0 to 23"),
        ({"eos": [-1]}, "EOS id -1 does not exist"),
        ({"eos": range(24), "min_new_tokens": 1}, "min_new_tokens forbids EOS, and eos_ids names every id"),
    ],
)
def test_ends_that_cannot_be_are_refused(tiny_target, tools, settings, message):
    target = tiny_target(layers=2, padding=8)
    with pytest.raises(SpectrainError, match=message):
        tools.plain(target, **settings)
    for shape in tools.SHAPES.values():
        with pytest.raises(SpectrainError, match=message):
            tools.one(target, tools.SelfDrafter(target), shape, **settings)


def test_stop_strings_need_a_tokenizer():
    with pytest.raises(SpectrainError, match="stop strings need a tokenizer"):
        Stopping(4, (), ["a"])


def test_after_the_end_nothing_is_kept():
    ending = Stopping(5, [9])
    assert ending.keep([1, 2]) == [1, 2]
    assert (ending.finished, ending.left) == (None, 3)
    assert ending.keep([3, 9, 4, 9]) == [3, 9]
    assert (ending.finished, ending.count) == ("eos", 4)
    assert Stopping(2, []).keep([1, 2, 3]) == [1, 2]
    assert Stopping(0, []).finished == "budget"
