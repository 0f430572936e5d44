from __future__ import annotations

import json

import pytest
import torch
from kinds import BUILT, build, form
from safetensors.torch import save_file
from tiny import LETTERS
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from spectrain.errors import SpectrainError
from spectrain.files import json_digest
from spectrain.identity import (
    DECODE_COMPONENTS,
    PROBES,
    TargetIdentity,
    TokenizerIdentity,
    check_rows,
    compare,
    compare_targets,
    target_identity,
    tokenizer_identity,
)
from spectrain.weights import weights_digest


@pytest.fixture(scope="module")
def original(make_tokenizer):
    return tokenizer_identity(make_tokenizer())


def test_the_same_tokenizer_is_identical_and_its_digests_are_stable(original, make_tokenizer):
    again = tokenizer_identity(make_tokenizer())
    assert compare(original, again).level == "identical"
    assert compare(original, again).first_difference is None
    assert original.decode_digest == again.decode_digest
    assert original.traffic_digest == again.traffic_digest
    assert json_digest(dict(original.components)) == json_digest(json.loads(json.dumps(again.components)))


def test_identity_survives_saving_and_calls_with_padding(original, make_tokenizer, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer(["hello", "hello 123 world"], padding=True, truncation=True, max_length=4)
    assert compare(original, tokenizer_identity(tokenizer)).level == "identical"
    tokenizer.save_pretrained(tmp_path)
    assert compare(original, tokenizer_identity(AutoTokenizer.from_pretrained(tmp_path))).level == "identical"


def test_swapped_ids_are_refused_and_named(original, make_tokenizer):
    vocabulary = original.components["vocabulary"]
    a, b = original.tokens[7], original.tokens[8]
    found = compare(original, tokenizer_identity(make_tokenizer(swap=(a, b))))
    assert found.level == "different"
    assert found.first_difference == f"vocabulary: token {a!r}: id 7 against 8"
    assert vocabulary[a] == 7


@pytest.mark.parametrize("step", [1, 37])
def test_every_swap_is_seen(original, make_tokenizer, step):
    for index in range(0, 200, 25):
        pair = original.tokens[index], original.tokens[index + step]
        found = compare(original, tokenizer_identity(make_tokenizer(swap=pair)))
        assert found.level == "different"
        assert f"{pair[0]!r}: id {index} against {index + step}" in str(found.first_difference)


def test_a_token_that_one_side_lacks_is_named(original, make_tokenizer):
    more = tokenizer_identity(make_tokenizer(added=(AddedToken("<think>"),)))
    assert compare(original, more).first_difference == "vocabulary: token '<think>': id absent against 266"
    assert compare(more, original).first_difference == "vocabulary: token '<think>': id 266 against absent"


def words(pattern):
    """Byte-level BPE with merges of digits, line ends and a tag, cut by ``pattern`` first."""
    merges = [("1", "2"), ("12", "3"), ("Ċ", "Ċ"), ("t", "h"), ("<", "th")]
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges))
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer_identity(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


@pytest.mark.parametrize(
    ("pattern", "probe", "theirs", "ours"),
    [
        (LETTERS.replace(r"\p{N}{1,3}", r"\p{N}"), 1, "['12',", "['1', '2',"),
        (r"\n|" + LETTERS, 2, "['ĊĊ', 't'", "['Ċ', 'Ċ', 't'"),
        (r"<\w+>|" + LETTERS, 3, "['<', 'th',", "['<th', 'i',"),
    ],
    ids=["digits", "newline", "think"],
)
def test_another_pre_tokenizer_names_itself_and_the_first_probe(pattern, probe, theirs, ours):
    """Case C06: same vocabulary, same merges, another way to cut."""
    base, other = words(LETTERS), words(pattern)
    assert base.components["model"] == other.components["model"]
    assert base.traffic_digest != other.traffic_digest
    found, strict = compare(base, other), compare(base, other, traffic=True)
    assert (found.level, strict.level) == ("compatible", "different")
    for message in (str(found.first_difference), str(strict.first_difference)):
        assert message.startswith("pre_tokenizer: pretokenizers[0].pattern.Regex")
        assert f"; probe {PROBES[probe]!r} splits differently from token " in message
        assert f" on: {theirs}" in message
        assert f" against {ours}" in message
    assert len(found.differences) == 1
    assert "harmless in decoding" in str(found.first_difference)
    assert "harmless" not in str(strict.first_difference)


def test_another_way_to_cut_that_the_ids_of_the_probes_do_not_show(original, make_tokenizer):
    found = compare(original, tokenizer_identity(make_tokenizer(pattern=r"\n|" + LETTERS)))
    assert f"probe {PROBES[2]!r} splits differently from token " in str(found.first_difference)
    assert "which become the same tokens" in str(found.first_difference)
    found = compare(original, tokenizer_identity(make_tokenizer(pattern="zzz|" + LETTERS)))
    assert "; no probe shows it (harmless" in str(found.first_difference)
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("\u0915", "\u0916")
    (message,) = compare(original, tokenizer_identity(tokenizer)).differences
    assert "normalizer: None against {'type': 'Replace'" in message
    assert "'\u0915'" not in message.split("probe")[0].split("against")[0]


MILD = {
    "model": {"drop_merge": True},
    "chat_template": {"template": "{{ messages }}"},
    "padding_id": {"pad": "<|endoftext|>"},
}


@pytest.mark.parametrize("component", MILD)
def test_traffic_mutations_are_compatible_and_named(original, make_tokenizer, component):
    other = tokenizer_identity(make_tokenizer(**MILD[component]))
    found = compare(original, other)
    assert found.level == "compatible"
    assert [text.split(":")[0] for text in found.differences] == [component]
    assert original.decode_digest == other.decode_digest
    assert original.traffic_digest != other.traffic_digest


def test_normalizer_and_post_processor_are_traffic(original, make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    found = compare(original, tokenizer_identity(tokenizer))
    assert found.level == "compatible"
    assert [text.split(":")[0] for text in found.differences] == ["normalizer", "post_processor"]
    assert "probe 'e\u0301" in found.differences[0]


def test_every_flag_of_an_added_token_is_seen(make_tokenizer):
    plain = tokenizer_identity(make_tokenizer(added=(AddedToken("<think>", normalized=False),)))
    for flag in ("lstrip", "rstrip", "single_word", "normalized", "special"):
        token = AddedToken("<think>", **{"normalized": False, flag: True})
        found = compare(plain, tokenizer_identity(make_tokenizer(added=(token,))))
        assert found.level == "compatible"
        assert f"added_tokens: 266.{flag}: False against True" in str(found.first_difference)


def test_one_character_of_the_template_matters_but_line_ends_do_not(make_tokenizer):
    template = "a\n{{ x | replace('\\r', '') }}\nb"
    base = tokenizer_identity(make_tokenizer(template=template))
    for same in (template.replace("\n", "\r\n"), template.replace("\n", "\r")):
        assert compare(base, tokenizer_identity(make_tokenizer(template=same))).level == "identical"
    for other in (template + " ", template.replace("'\\r'", "'\\n'"), template.replace("a", "A")):
        found = compare(base, tokenizer_identity(make_tokenizer(template=other)))
        assert found.level == "compatible"
        assert "chat_template" in str(found.first_difference)


def test_what_decodes_differently_is_different(original, make_tokenizer):
    found = compare(original, tokenizer_identity(make_tokenizer(decoder=decoders.Fuse())))
    assert found.level == "different"
    assert found.first_difference.startswith("decoder: {'type': 'ByteLevel'}")
    assert any(text.startswith("decodings: ids ") for text in found.differences)
    # Settings that a ByteLevel decoder never reads are no difference.
    decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    assert compare(original, tokenizer_identity(make_tokenizer(decoder=decoder))).level == "identical"


def test_special_ids_are_decode_identity(original, make_tokenizer):
    found = compare(original, tokenizer_identity(make_tokenizer(eos="<|endoftext|>")))
    assert found.first_difference == "special_ids: eos[0]: 265 against 263"
    assert found.level == "different"
    listed = tokenizer_identity(make_tokenizer(), eos_ids=(263,))
    assert listed.components["special_ids"]["eos"] == [263, 265]
    assert compare(original, listed).level == "different"


def test_harmful_differences_come_first(original, make_tokenizer):
    pair = original.tokens[40], original.tokens[41]
    other = tokenizer_identity(make_tokenizer(swap=pair, template="x", pad="<|im_start|>"))
    names = [text.split(":")[0] for text in compare(original, other).differences]
    assert names[0] == "vocabulary"
    assert set(names[:1]) <= set(DECODE_COMPONENTS)
    assert {"chat_template", "padding_id"} <= set(names)


def test_a_slow_tokenizer_has_an_identity(original):
    slow = tokenizer_identity(ByT5Tokenizer(extra_ids=0))
    assert compare(slow, tokenizer_identity(ByT5Tokenizer(extra_ids=0))).level == "identical"
    assert compare(slow, original).level == "different"
    assert slow.components["pre_tokenizer"] is None
    assert len(slow.components["encodings"]) == len(original.components["encodings"])


def test_the_text_of_every_single_id_is_compared(original):
    texts = original.components["texts"]
    assert [int(index) for index in texts] == sorted(original.tokens)
    other = TokenizerIdentity({**original.components, "texts": {**texts, "77": "?"}})
    found = compare(original, other)
    assert found.level == "different"
    assert found.first_difference == f"texts: ids 77 decode to {texts['77']!r} against '?'"


def test_probes_that_are_read_back_as_other_text_are_different(original):
    trips = {**original.components["round_trips"], PROBES[4]: "?"}
    found = compare(original, TokenizerIdentity({**original.components, "round_trips": trips}))
    assert found.level == "different"
    assert str(found.first_difference).startswith("round_trips: ")


def test_text_of_added_tokens_is_read_as_text_or_as_the_token(original, make_tokenizer):
    """A setting that the tokenizer's file does not hold."""
    tokenizer = make_tokenizer(added=(AddedToken("<x>", special=True, normalized=False),))
    before = tokenizer_identity(tokenizer)
    tokenizer.split_special_tokens = True
    found = compare(before, tokenizer_identity(tokenizer))
    assert found.level == "compatible"
    assert [text.split(":")[0] for text in found.differences] == ["encodings"]


def test_another_cut_of_the_added_tokens_is_explained(original):
    ids = original.components["added_encodings"]
    found = compare(original, TokenizerIdentity({**original.components, "added_encodings": ids[:-1]}))
    assert str(found.first_difference).startswith("added_encodings: text of the added tokens splits differently")


def test_ids_that_are_added_around_a_prompt():
    assert tokenizer_identity(build(form("word_piece"))).components["frame"] == {"before": [1], "after": [2]}
    assert tokenizer_identity(build(form("word_level"))).components["frame"] == {"before": [], "after": []}
    slow = ByT5Tokenizer(extra_ids=0)
    assert tokenizer_identity(slow).components["frame"] == {"before": [], "after": [slow.eos_token_id]}


@pytest.mark.parametrize("kind", BUILT)
def test_every_kind_of_model_has_an_identity_that_survives_saving(kind, tmp_path):
    tokenizer = build(form(kind))
    identity = tokenizer_identity(tokenizer)
    tokenizer.save_pretrained(tmp_path)
    again = tokenizer_identity(AutoTokenizer.from_pretrained(tmp_path))
    assert compare(identity, again, traffic=True).level == "identical"
    assert identity.traffic_digest == again.traffic_digest
    assert json.loads(json.dumps(dict(identity.components))) == identity.components
    for other in BUILT:
        if other != kind:
            assert compare(identity, tokenizer_identity(build(form(other)))).level == "different"


def test_an_error_of_a_tokenizer_that_is_no_missing_token_is_not_hidden(make_tokenizer, monkeypatch):
    def broken(*arguments, **options):
        raise MemoryError

    tokenizer = make_tokenizer()
    monkeypatch.setattr(type(tokenizer), "encode", broken)
    with pytest.raises(MemoryError):
        tokenizer_identity(tokenizer)


def test_several_templates_are_compared_by_name_and_without_line_ends(make_tokenizer):
    def templates(**named):
        tokenizer = make_tokenizer()
        tokenizer.chat_template = named
        return tokenizer_identity(tokenizer)

    assert compare(templates(default="a\nb", tools="c"), templates(default="a\r\nb", tools="c")).level == "identical"
    for other in (templates(default="a\nb", tools="d"), templates(default="a\nb", rag="c")):
        found = compare(templates(default="a\nb", tools="c"), other)
        assert found.level == "compatible"
        assert "chat_template" in str(found.first_difference)


def test_a_tokenizer_that_has_no_token_for_a_text_still_has_an_identity():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    identity = tokenizer_identity(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    assert set(identity.components["encodings"].values()) == {None}
    assert compare(identity, identity).level == "identical"
    unlike = dict(identity.components) | {"encodings": {**identity.components["encodings"], PROBES[0]: [0]}}
    found = compare(identity, TokenizerIdentity(unlike))
    assert f"probe {PROBES[0]!r} splits differently from token 0 on: [] against ['a']" in str(found.first_difference)


def test_padded_rows_are_fine_and_missing_rows_are_named(make_tokenizer):
    tokenizer = make_tokenizer()
    for rows in (266, 384, 512):
        check_rows(tokenizer, rows)
    with pytest.raises(SpectrainError, match=r"token '<\|im_end\|>' has id 265, but the model has 265"):
        check_rows(tokenizer, 265)


def write_target(folder, tensors, shards=1, **config):
    folder.mkdir(parents=True)
    settings = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "dtype": "float32", **config}
    (folder / "config.json").write_text(json.dumps(settings))
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    parts = {f"model-{i + 1:05}-of-{shards:05}.safetensors": names[i::shards] for i in range(shards)}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def weights():
    generator = torch.Generator().manual_seed(1)
    tensors = {f"layers.{i}.weight": torch.randn(5, 3 + i, generator=generator) for i in range(5)}
    return {**tensors, "half": torch.randn(4, generator=generator).bfloat16(), "none": torch.empty(0, 3)}


def test_the_weights_digest_does_not_see_sharding_but_sees_everything_else(weights, tmp_path):
    base = weights_digest(write_target(tmp_path / "one", weights))
    assert weights_digest(write_target(tmp_path / "three", weights, shards=3)) == base
    last_bit = {**weights, "layers.4.weight": weights["layers.4.weight"].clone()}
    last_bit["layers.4.weight"].view(torch.int32)[-1, -1] ^= 1
    mutations = {
        "bit": last_bit,
        "shape": {**weights, "layers.0.weight": weights["layers.0.weight"].reshape(3, 5)},
        "dtype": {**weights, "half": weights["half"].view(torch.float16)},
        "renamed": {name.replace("half", "full"): tensor for name, tensor in weights.items()},
        "dropped": {name: tensor for name, tensor in weights.items() if name != "none"},
    }
    digests = {weights_digest(write_target(tmp_path / name, tensors)) for name, tensors in mutations.items()}
    assert len(digests | {base}) == len(mutations) + 1


def test_broken_weights_are_explained(weights, tmp_path):
    folder = write_target(tmp_path / "cut", weights)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-1])
    with pytest.raises(SpectrainError, match="not a whole safetensors file: it ends inside tensor"):
        weights_digest(folder)
    for broken in (b"", data[:20], b"\xff" * 64):
        (folder / "model.safetensors").write_bytes(broken)
        with pytest.raises(SpectrainError, match="not a whole safetensors file"):
            weights_digest(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(SpectrainError, match=r"model\.safetensors is missing"):
        weights_digest(folder)
    sharded = write_target(tmp_path / "sharded", weights, shards=2)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    with pytest.raises(SpectrainError, match=r"\.\./x\.safetensors is missing"):
        weights_digest(sharded)


def test_a_target_is_its_function_not_its_name(weights, tmp_path):
    a = target_identity(write_target(tmp_path / "a", weights), "org/a", "r1")
    b = target_identity(write_target(tmp_path / "b", weights, dtype="bfloat16", _name_or_path="x"), "b", None)
    assert compare_targets(a, b).level == "identical"
    c = target_identity(write_target(tmp_path / "c", weights, hidden_size=9))
    assert compare_targets(a, c).level == "different"
    assert str(compare_targets(a, c).first_difference).startswith("target config_digest: ")
    other = {**weights, "half": weights["half"] + 1}
    d = target_identity(write_target(tmp_path / "d", other))
    assert str(compare_targets(a, d).first_difference).startswith("target weights_digest: ")
    assert a.digest == b.digest
    assert len({a.digest, c.digest, d.digest}) == 3
    revised = TargetIdentity(a.architecture, a.config_digest, a.weights_digest, "org/a", "r2")
    assert compare_targets(a, revised).level == "compatible"
    assert "r1 against r2" in str(compare_targets(a, revised).first_difference)
    with pytest.raises(SpectrainError, match=r"config\.json is missing"):
        target_identity(tmp_path)
