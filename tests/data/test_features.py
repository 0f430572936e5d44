"""The feature store: what it holds is what the target says, and no interruption or foreign file changes that."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from spectrain.data import features
from spectrain.data.features import INDEX, FeatureStore, extract_features, row_features, store_key
from spectrain.errors import SpectrainError

TAPS = (1, 4, 6)
SHARD = 30  # tokens: the rows below fill several shards


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target("llama", dtype=torch.float32)


@pytest.fixture(scope="module")
def rows(make_rows, target):
    return make_rows(target, 9)


@pytest.fixture
def key(target, rows):
    return store_key(rows, target, "digest", TAPS, "float32")


def extract(folder, rows, target, key):
    return extract_features(folder, rows, target, key, shard_tokens=SHARD, progress=False)


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


# --- what is stored -------------------------------------------------------------------------------------------------


def test_every_row_comes_back_as_the_model_computes_it_alone(tmp_path, target, rows, key):
    store = extract(tmp_path, rows, target, key)
    assert len(store) == len(rows)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    for number, row in enumerate(rows):
        stored = store.row(number)
        ids = torch.tensor([row.ids])
        with torch.no_grad():
            out = target.model(ids, output_hidden_states=True)
        assert store.length(number) == len(row.ids)
        assert stored["ids"].tolist() == row.ids
        assert stored["answer"].tolist() == store.answer(number).tolist() == [bool(m) for m in row.mask]
        torch.testing.assert_close(stored["hidden"], out.hidden_states[-1][0])  # HF's last one is after the norm
        torch.testing.assert_close(stored["taps"], torch.cat([out.hidden_states[k][0] for k in TAPS], dim=-1))
    size = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert store.bytes_per_token() == size / sum(len(row.ids) for row in rows)


def test_head_of_the_stored_state_is_the_models_law(tmp_path, tiny_target, make_rows, make_store, architecture):
    """Final norms with weights that are not one, soft caps and biases included; greedy answers are its argmax."""
    target = tiny_target(architecture, dtype=torch.float32)
    rows = make_rows(target, 4)
    store = make_store(tmp_path, target, rows, TAPS)
    for number, row in enumerate(rows):
        stored = store.row(number)
        with torch.no_grad():
            logits = target.model(torch.tensor([row.ids])).logits[0]
        torch.testing.assert_close(target.head.logits(stored["hidden"]), logits, rtol=1e-4, atol=1e-4)
        filled = [t for t in range(len(row.ids) - 1) if row.mask[t + 1]]
        torch.testing.assert_close(stored["log_normaliser"][filled], logits.logsumexp(-1)[filled], rtol=1e-4, atol=1e-4)
        assert stored["greedy"][filled].tolist() == [row.ids[t + 1] for t in filled]
        empty = [t for t in range(len(row.ids)) if t not in filled]
        assert not stored["log_normaliser"][empty].any()
        assert not stored["greedy"][empty].any()


def test_padded_vocabulary_rows_have_no_part_in_the_law(tmp_path, tiny_target, make_rows, make_store):
    target = tiny_target("llama", vocab=24, padding=8, dtype=torch.float32)
    rows = make_rows(target, 2)
    stored = make_store(tmp_path, target, rows).row(0)
    with torch.no_grad():
        logits = target.model(torch.tensor([rows[0].ids])).logits[0, :, :24]
    filled = [t for t in range(len(rows[0].ids) - 1) if rows[0].mask[t + 1]]
    torch.testing.assert_close(stored["log_normaliser"][filled], logits.logsumexp(-1)[filled])
    assert (stored["greedy"] < 24).all()
    assert stored["taps"].shape == (len(rows[0].ids), 0)  # a family that taps nothing


def test_padding_on_the_right_changes_no_row(tiny_target, make_rows, architecture):
    target = tiny_target(architecture, dtype=torch.float32)
    target.tap(TAPS)
    rows = make_rows(target, 4, answer=(3, 20))
    together = row_features(rows, target, torch.float32)
    for number, row in enumerate(rows):
        alone = row_features([row], target, torch.float32)
        for name in together:
            torch.testing.assert_close(together[name][number], alone[name][0], rtol=1e-4, atol=1e-4)


def test_half_precision_stores_states_in_half_and_the_law_in_full(tmp_path, target, rows):
    half = store_key(rows, target, "digest", TAPS, "bfloat16")
    full = store_key(rows, target, "digest", TAPS, "float32")
    stored = extract(tmp_path / "half", rows, target, half).row(0)
    want = extract(tmp_path / "full", rows, target, full).row(0)
    assert stored["hidden"].dtype == stored["taps"].dtype == torch.bfloat16
    assert torch.equal(stored["hidden"], want["hidden"].bfloat16())
    assert torch.equal(stored["log_normaliser"], want["log_normaliser"])


def test_the_likeliest_tokens_are_those_of_the_model(tmp_path, tiny_target, make_rows):
    target = tiny_target("llama", vocab=24, padding=8, dtype=torch.float32)
    rows, plain = make_rows(target, 3), make_rows(target, 3)
    store = extract(tmp_path / "top", rows, target, store_key(rows, target, "digest", TAPS, "bfloat16", 5))
    without = extract(tmp_path / "plain", plain, target, store_key(plain, target, "digest", TAPS, "bfloat16"))
    for number, row in enumerate(rows):
        stored = store.row(number)
        with torch.no_grad():
            law = target.model(torch.tensor([row.ids])).logits[0, :, :24].log_softmax(-1)
        assert stored["top_ids"].dtype == torch.int32
        assert stored["top_log_p"].dtype == torch.float32
        filled = [t for t in range(len(row.ids) - 1) if row.mask[t + 1]]
        values, ids = law.topk(5)
        torch.testing.assert_close(stored["top_log_p"][filled], values[filled], rtol=1e-4, atol=1e-4)
        assert torch.equal(stored["top_ids"][filled].long(), ids[filled])
        empty = [t for t in range(len(row.ids)) if t not in filled]
        assert not stored["top_ids"][empty].any()
        assert not stored["top_log_p"][empty].any()
        others = {name: value for name, value in stored.items() if not name.startswith("top_")}
        assert others.keys() == without.row(number).keys()
        assert all(torch.equal(value, without.row(number)[name]) for name, value in others.items())


@pytest.mark.parametrize("k", [0, 25])
def test_more_likeliest_tokens_than_there_are_is_refused(target, rows, k):
    with pytest.raises(SpectrainError, match=rf"data\.teacher_top_k: found {k}, expected 1 to 24"):
        store_key(rows, target, "digest", TAPS, "float32", k)


def test_a_row_longer_than_the_context_is_refused_by_name(tmp_path, tiny_target, make_rows):
    target = tiny_target("llama", dtype=torch.float32)
    row = replace(make_rows(target, 1)[0], ids=[1] * 129, mask=[1] * 129)
    with pytest.raises(SpectrainError, match=r"'row-0' has 129 tokens, the target's context is 128"):
        extract_features(tmp_path, [row], target, store_key([row], target, "digest", (), "float32"), progress=False)
    assert not list(tmp_path.iterdir())


# --- the key --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rows", "other"),
        ("model", "other"),
        ("taps", [1, 2, 3]),
        ("store_dtype", "bfloat16"),
        ("compute_dtype", "torch.bfloat16"),
        ("tap_convention", "stream leaving layer k"),
        ("final_state", "before the final norm"),
        ("tokenizer_size", 23),
        ("teacher_top_k", 4),
    ],
)
def test_another_key_is_refused_naming_the_field(tmp_path, target, rows, key, field, value):
    extract(tmp_path, rows, target, key)
    with pytest.raises(SpectrainError, match=f"was made with {field} = "):
        extract(tmp_path, rows, target, {**key, field: value})


def test_the_key_follows_ids_masks_and_taps_and_nothing_the_tokenizer_was_used_for(target, rows, key):
    def changed(row, **values):
        return store_key([replace(row, **values), *rows[1:]], target, "digest", TAPS, "float32")["rows"]

    first = rows[0]
    assert changed(first, ids=[*first.ids[:-1], (first.ids[-1] + 1) % 24]) != key["rows"]
    assert changed(first, mask=[*first.mask[:-1], 0]) != key["rows"]
    assert store_key(rows[::-1], target, "digest", TAPS, "float32")["rows"] != key["rows"]
    target.tokenizer.pad_token = "w0"
    target.tokenizer(["w1 w2", "w3"], padding=True)
    assert store_key(rows, target, "digest", TAPS, "float32") == key


# --- interruptions and damage ---------------------------------------------------------------------------------------


class Killed(BaseException):
    """What no code handles."""


def test_an_interrupted_extraction_goes_on_where_it_was(tmp_path, target, rows, key, monkeypatch):
    extract(tmp_path / "whole", rows, target, key)
    saved, save = [], features.save_file

    def dies_at_the_third(tensors, path, metadata):
        if len(saved) == 2:
            save({name: t[:1] for name, t in tensors.items()}, path, metadata=metadata)  # half written
            raise Killed
        saved.append(path)
        save(tensors, path, metadata=metadata)

    monkeypatch.setattr(features, "save_file", dies_at_the_third)
    with pytest.raises(Killed):
        extract(tmp_path / "cut", rows, target, key)
    assert sorted(contents(tmp_path / "cut")) == ["shard-00000.safetensors", "shard-00001.safetensors"]
    monkeypatch.setattr(features, "save_file", save)

    forwards = []
    monkeypatch.setattr(target, "forward", lambda ids: forwards.append(ids) or type(target).forward(target, ids))
    extract(tmp_path / "cut", rows, target, key)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    index = json.loads((tmp_path / "cut" / INDEX).read_text())
    assert sum(ids.shape[0] for ids in forwards) == sum(len(shard["rows"]) for shard in index["shards"][2:])


def test_a_lost_shard_is_made_again_and_the_others_are_kept(tmp_path, target, rows, key):
    extract(tmp_path, rows, target, key)
    before = contents(tmp_path)
    (tmp_path / INDEX).unlink()
    (tmp_path / "shard-00001.safetensors").unlink()
    kept = tmp_path / "shard-00000.safetensors"
    made = kept.stat().st_mtime_ns
    extract(tmp_path, rows, target, key)
    assert contents(tmp_path) == before
    assert kept.stat().st_mtime_ns == made


def damage(path, how):
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes({"flipped": data[:-1] + bytes([data[-1] ^ 1]), "truncated": data[:-9], "empty": b""}[how])


@pytest.mark.parametrize("how", ["missing", "flipped", "truncated", "empty"])
def test_a_damaged_shard_is_refused_by_name(tmp_path, target, rows, key, how):
    extract(tmp_path, rows, target, key)
    damage(tmp_path / "shard-00001.safetensors", how)
    with pytest.raises(SpectrainError, match=r"shard-00001\.safetensors is (damaged|missing)"):
        extract(tmp_path, rows, target, key)


@pytest.mark.parametrize("how", ["truncated", "empty"])
def test_a_damaged_shard_of_an_unfinished_extraction_is_refused_by_name(tmp_path, target, rows, key, how):
    extract(tmp_path, rows, target, key)
    (tmp_path / INDEX).unlink()
    damage(tmp_path / "shard-00001.safetensors", how)
    with pytest.raises(SpectrainError, match=r"shard-00001\.safetensors is damaged .*delete the file"):
        extract(tmp_path, rows, target, key)


def test_a_foreign_shard_of_an_unfinished_extraction_is_refused_by_name(tmp_path, target, rows, key):
    extract(tmp_path, rows, target, key)
    (tmp_path / INDEX).unlink()
    with pytest.raises(SpectrainError, match=r"shard-00000\.safetensors was made from other rows"):
        extract(tmp_path, rows, target, {**key, "model": "other"})


def test_shards_of_another_size_hold_other_rows_and_are_refused(tmp_path, target, rows, key):
    """Their key is the same, but taking them over would file features under the wrong rows."""
    extract(tmp_path, rows, target, key)
    (tmp_path / INDEX).unlink()
    with pytest.raises(SpectrainError, match=r"shard-00000\.safetensors was made from other rows"):
        extract_features(tmp_path, rows, target, key, shard_tokens=2 * SHARD, progress=False)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"key": {}}'])
def test_a_damaged_index_is_refused_by_name(tmp_path, target, rows, key, text):
    extract(tmp_path, rows, target, key)
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(SpectrainError, match=r"index\.json is damaged"):
        FeatureStore(tmp_path, key)
