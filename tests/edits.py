"""Random edits of a stored tokenizer, each with the component that it changes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

from kinds import Form

Edit = Callable[[Form, random.Random], bool | None]  # changes the form in place; False where it has nothing to change

NORMALIZERS = (None, {"type": "NFC"}, {"type": "NFKC"}, {"type": "Lowercase"}, {"type": "StripAccents"},
               {"type": "Prepend", "prepend": "▁"},
               {"type": "Strip", "strip_left": True, "strip_right": False})  # fmt: skip
DECODERS = (None, {"type": "Fuse"}, {"type": "ByteFallback"}, {"type": "WordPiece", "prefix": "##", "cleanup": False},
            {"type": "Strip", "content": "e", "start": 1, "stop": 0}, {"type": "BPEDecoder", "suffix": "e"},
            {"type": "Replace", "pattern": {"String": "e"}, "content": "E"},
            {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True})  # fmt: skip
PATTERNS = (r"\p{N}|\p{L}+|\s+|[^\s\p{L}\p{N}]+", r"\p{N}{1,3}|\p{L}+|\s+|[^\s\p{L}\p{N}]+", r"\s*[\r\n]+|\s+|\S+",
            r"<\w+>|\w+|\s+|[^\w\s]+")  # fmt: skip
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def _model(form: Form) -> dict[str, Any]:
    return form["tokenizer"]["model"]  # type: ignore[no-any-return]


def swap_ids(form: Form, chance: random.Random) -> None:
    vocabulary = _model(form)["vocab"]
    added = {token["content"] for token in form["tokenizer"]["added_tokens"]}
    if isinstance(vocabulary, list):  # unigram: the place is the id
        free = [i for i, (token, _) in enumerate(vocabulary) if token not in added]
        a, b = chance.sample(free, 2)
    else:
        a, b = chance.sample([token for token in vocabulary if token not in added], 2)
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]


def rename_token(form: Form, chance: random.Random) -> bool | None:
    model, new = _model(form), f"q{chance.randrange(10**6)}q"
    used = {part for a, b in model.get("merges", []) for part in (a, b, a + b)}
    used |= {token["content"] for token in form["tokenizer"]["added_tokens"]}
    if isinstance(model["vocab"], list):
        chance.choice([entry for entry in model["vocab"] if entry[0] not in used])[0] = new
    else:
        free = [token for token in model["vocab"] if token not in used]
        if not free:
            return False
        model["vocab"][new] = model["vocab"].pop(chance.choice(free))


def add_token(form: Form, chance: random.Random) -> None:
    tokens = form["tokenizer"]["added_tokens"]
    taken = [token["id"] for token in tokens]
    vocabulary = _model(form)["vocab"]
    taken += range(len(vocabulary)) if isinstance(vocabulary, list) else vocabulary.values()
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    tokens.append({"id": max(taken) + 1, "content": f"<new{chance.randrange(100)}>", **flags})


def _drop_added(form: Form, chance: random.Random, in_vocabulary: bool) -> bool:
    """Remove an added token that is, or is not, a token of the model too; the tokenizer's class adds its own again."""
    tokens, vocabulary = form["tokenizer"]["added_tokens"], _model(form)["vocab"]
    known = {entry[0] for entry in vocabulary} if isinstance(vocabulary, list) else vocabulary.keys()
    free = [token for token in tokens if token["content"] not in form["config"].values()]
    free = [token for token in free if (token["content"] in known) == in_vocabulary]
    if free:
        tokens.remove(chance.choice(free))
    return bool(free)


def drop_token(form: Form, chance: random.Random) -> bool:
    return _drop_added(form, chance, in_vocabulary=False)


def drop_mark(form: Form, chance: random.Random) -> bool:
    return _drop_added(form, chance, in_vocabulary=True)


def drop_merge(form: Form, chance: random.Random) -> bool | None:
    merges = _model(form).get("merges")
    return bool(merges) and merges.pop(chance.randrange(len(merges))) is not None


def add_merge(form: Form, chance: random.Random) -> bool | None:
    model = _model(form)
    if "merges" not in model:
        return False
    known = {tuple(pair) for pair in model["merges"]}
    tokens = [token for token in model["vocab"] if len(token) > 2]
    for token in chance.sample(tokens, min(200, len(tokens))):
        for cut in range(1, len(token)):
            pair = (token[:cut], token[cut:])
            if pair not in known and pair[0] in model["vocab"] and pair[1] in model["vocab"]:
                model["merges"].insert(chance.randint(0, len(known)), list(pair))
                return True
    return False


def swap_merges(form: Form, chance: random.Random) -> bool | None:
    merges = _model(form).get("merges")
    if not merges:
        return False
    a, b = chance.randrange(len(merges)), chance.choice([0, *range(len(merges))])
    merges[a], merges[b] = merges[b], merges[a]
    return True


def change_model(form: Form, chance: random.Random) -> None:
    model = _model(form)
    if model["type"] == "Unigram":
        chance.choice(model["vocab"])[1] -= chance.choice([0.0, 0.25, 1.5])
    elif model["type"] == "BPE":
        name = chance.choice(["fuse_unk", "byte_fallback", "ignore_merges"])
        model[name] = chance.choice([True, False])
    elif model["type"] == "WordPiece":
        model["max_input_chars_per_word"] = chance.choice([3, 100])
    else:
        model["unk_token"] = chance.choice(["<unk>", "<pad>"])


def change_flag(form: Form, chance: random.Random) -> None:
    token = chance.choice(form["tokenizer"]["added_tokens"])
    flag = chance.choice(["lstrip", "rstrip", "single_word", "normalized", "special"])
    token[flag] = not token[flag]


def change_pattern(form: Form, chance: random.Random) -> None:
    split = {"type": "Split", "pattern": {"Regex": chance.choice(PATTERNS)}, "behavior": "Isolated", "invert": False}
    form["tokenizer"]["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, BYTES]}


def change_pre_tokenizer(form: Form, chance: random.Random) -> None:
    form["tokenizer"]["pre_tokenizer"] = chance.choice([
        BYTES, {**BYTES, "add_prefix_space": True}, {**BYTES, "use_regex": True}, {"type": "Whitespace"}, None,
        {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTES]},
    ])  # fmt: skip


def change_normalizer(form: Form, chance: random.Random) -> None:
    form["tokenizer"]["normalizer"] = chance.choice(NORMALIZERS)


def change_decoder(form: Form, chance: random.Random) -> None:
    form["tokenizer"]["decoder"] = chance.choice(DECODERS)


def change_post_processor(form: Form, chance: random.Random) -> None:
    ends = chance.choice(["<s>", "</s>", ""])
    known = {token["content"]: token["id"] for token in form["tokenizer"]["added_tokens"]}
    token = ends if ends in known else next(iter(known))
    single = [{"Sequence": {"id": "A", "type_id": 0}}]
    single.insert(chance.randint(0, 1), {"SpecialToken": {"id": token, "type_id": 0}})
    special = {token: {"id": token, "ids": [known[token]], "tokens": [token]}}
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    form["tokenizer"]["post_processor"] = chance.choice(
        [None, {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}]
    )


def change_special(form: Form, chance: random.Random) -> None:
    special = [token["content"] for token in form["tokenizer"]["added_tokens"] if token["special"]]
    form["config"][chance.choice(["bos_token", "eos_token", "unk_token"])] = chance.choice(special)


def change_padding(form: Form, chance: random.Random) -> None:
    special = [token["content"] for token in form["tokenizer"]["added_tokens"] if token["special"]]
    form["config"]["pad_token"] = chance.choice(special)


def change_template(form: Form, chance: random.Random) -> None:
    template = form["config"]["chat_template"]
    place, letter = chance.randrange(len(template)), chance.choice(" .xX\n{")
    form["config"]["chat_template"] = template[:place] + letter + template[place + chance.randint(0, 1) :]


def change_metadata(form: Form, chance: random.Random) -> None:
    name, value = chance.choice([
        ("name_or_path", "elsewhere"), ("model_max_length", 7), ("padding_side", "left"), ("truncation_side", "left"),
        ("clean_up_tokenization_spaces", True),
    ])  # fmt: skip
    form["config"][name] = value


def change_order(form: Form, chance: random.Random) -> None:
    """Of keys: in the file, in its parts, and in the vocabulary."""

    def shuffled(value: Any) -> Any:
        if not isinstance(value, dict) or value is form["tokenizer"]["added_tokens"]:
            return value
        keys = chance.sample(list(value), len(value))
        return {key: shuffled(value[key]) for key in sorted(keys, key=lambda key: key != "type")}

    form["tokenizer"] = shuffled(form["tokenizer"])
    form["config"] = shuffled(form["config"])


def change_line_ends(form: Form, chance: random.Random) -> None:
    template = form["config"]["chat_template"]
    form["config"]["chat_template"] = template.replace("\n", chance.choice(["\r\n", "\r"]))


def change_batching(form: Form, chance: random.Random) -> None:
    form["tokenizer"]["truncation"] = {"direction": "Right", "max_length": chance.randint(2, 9),
                                       "strategy": "LongestFirst", "stride": 0}  # fmt: skip


HARMFUL: dict[Edit, str] = {  # to a drafter: its ids would mean something else
    swap_ids: "vocabulary",
    rename_token: "vocabulary",
    add_token: "vocabulary",
    drop_token: "vocabulary",
    change_special: "special_ids",
    change_decoder: "decoder",
}
TRAFFIC: dict[Edit, str] = {
    drop_merge: "model",
    add_merge: "model",
    swap_merges: "model",
    change_model: "model",
    change_flag: "added_tokens",
    drop_mark: "added_tokens",
    change_pattern: "pre_tokenizer",
    change_pre_tokenizer: "pre_tokenizer",
    change_normalizer: "normalizer",
    change_post_processor: "post_processor",
    change_template: "chat_template",
}
HARMLESS: dict[Edit, str | None] = {
    change_padding: "padding_id",
    change_metadata: None,
    change_order: None,
    change_line_ends: None,
    change_batching: None,
}


def edited(form: Form, count: int, seed: int) -> Iterator[tuple[Edit, Form]]:
    """``count`` edits of ``form``, of every kind that it has something for, in turn."""
    chance = random.Random(seed)
    kinds = [*HARMFUL, *TRAFFIC, *HARMLESS]
    chance.shuffle(kinds)
    text = json.dumps(form)
    while count:
        for edit in kinds:
            changed = deepcopy(form) if len(text) < 10**6 else json.loads(text)
            if count and edit(changed, chance) is not False:
                count -= 1
                yield edit, changed
