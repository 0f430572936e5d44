"""A thousand random edits of stored tokenizers: what does harm is found and named, what does not is let pass.

Harm is told apart here without the identity: by the library's own account of a tokenizer, id by id.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from edits import HARMFUL, HARMLESS, TRAFFIC, edited
from kinds import BUILT, CORPUS, build, form, stored

from spectrain.identity import compare, tokenizer_identity

REAL = Path(__file__).parent.parent / "targets" / "smollm2-135m-instruct"
COMPONENTS = {edit.__name__: name for group in (HARMFUL, TRAFFIC, HARMLESS) for edit, name in group.items()}
TEXTS = [*CORPUS, "Hello <think> x<tool_call>y </s>", " \n\n\t a  b", "١٢٣ ²½ 𝔘"]
real = pytest.mark.skipif(
    not (REAL / "tokenizer.json").is_file(), reason=f"no real target in {REAL}: run `make target`"
)


def account(tokenizer):
    """What the library says of a tokenizer: of ids, and of text and its settings."""
    backend = tokenizer.backend_tokenizer
    ids = range(backend.get_vocab_size())
    decoded = backend.decode_batch([[i] for i in ids] + [[i, i] for i in ids], skip_special_tokens=False)
    names = ("bos_token_id", "eos_token_id", "unk_token_id")
    meaning = [backend.get_vocab(), decoded, [getattr(tokenizer, name) for name in names]]
    stages = {key: value for key, value in json.loads(backend.to_str()).items() if key not in ("truncation", "padding")}
    template = tokenizer.chat_template.replace("\r\n", "\n").replace("\r", "\n")
    return meaning, [stages, template, tokenizer.pad_token_id]


def tokens_of(tokenizer):
    def ids(text):
        try:
            return tokenizer.encode(text)
        except Exception:
            return None

    return [ids(text) for text in TEXTS]


def judge(edit, found, strict, differences):
    """Is this what had to be found? ``differences``: whether ids mean something else, whether text becomes others."""
    harm, cut = differences
    name, parts = COMPONENTS[edit.__name__], [text.split(":")[0] for text in found.differences]
    if harm:
        assert found.level == strict.level == "different"
    elif edit not in HARMFUL:  # another decoder is refused whether or not a single id shows it
        assert found.level == "compatible"
        assert parts[0] == name
        assert strict.level == ("compatible" if edit in HARMLESS else "different")
    if cut:
        assert strict.level == "different"
    assert name in parts
    assert edit not in HARMFUL or parts[0] == name


def check_edits(original, count, seed=0):
    """Judge edits of one tokenizer: how many of each kind there were, and how many of them were none at all."""
    before = build(original)
    identity, (meaning, rest), tokens = tokenizer_identity(before), account(before), tokens_of(before)
    seen, idle = Counter(), Counter()
    for edit, changed in edited(original, count, seed):
        after = build(changed)
        its_identity, (its_meaning, its_rest) = tokenizer_identity(after), account(after)
        found, strict = (compare(identity, its_identity, traffic=traffic) for traffic in (False, True))
        seen[edit.__name__] += 1
        try:
            if its_meaning == meaning and its_rest == rest:
                idle[edit.__name__] += 1
                assert found.level == strict.level == "identical"
                assert tokens_of(after) == tokens
            else:
                judge(edit, found, strict, (its_meaning != meaning, tokens_of(after) != tokens))
        except AssertionError as error:
            error.add_note(f"{edit.__name__}: {found}")
            raise
    return seen, idle


def run(forms, seed=0):
    """Edits of several tokenizers, as (form, count)."""
    totals = [check_edits(form, count, seed) for form, count in forms]
    return [sum(counts, Counter()) for counts in zip(*totals, strict=True)]


def test_edits_of_every_kind_of_model():
    seen, _ = run((form(kind), 23) for kind in BUILT)
    assert sum(seen.values()) == 138
    assert seen.keys() == COMPONENTS.keys()


@pytest.mark.slow
@real
def test_a_thousand_edits():
    seen, idle = run(((form(kind), 120) for kind in BUILT), seed=1)
    more, none = run([(stored(REAL, 600), 276), (stored(REAL), 4)], seed=2)
    seen, idle = seen + more, idle + none
    assert sum(seen.values()) == 1000
    assert min(seen.values()) >= 10
    for edit in HARMLESS:
        if COMPONENTS[edit.__name__] is None:
            assert idle[edit.__name__] == seen[edit.__name__]
    for name in ("swap_ids", "rename_token", "add_token", "drop_token", "drop_merge", "add_merge"):
        assert idle[name] < seen[name] / 4  # nothing is tested by edits that are none
