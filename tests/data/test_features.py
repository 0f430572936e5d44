"""The feature store: what it holds is what the target says, and no interruption or foreign file changes that."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from spectrain.data import features, shards
from spectrain.data.batches import plan_epoch
from spectrain.data.conversations import Conversation, EncodedRow, Message, encode_all
from spectrain.data.feature_rows import row_features
from spectrain.data.features import INDEX, REPORT, FeatureStore, extract_features, store_key
from spectrain.data.shards import VERIFIED
from spectrain.errors import SpectrainError
from spectrain.settings import FEATURES

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
    """What is read from a store; when it was made and last checked is beside it."""
    apart = {REPORT, VERIFIED}
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name not in apart}


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
    with pytest.raises(SpectrainError, match=re.escape(f"was made with {FEATURES.get(field, field)} = ")):
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


def test_one_character_of_the_template_is_another_key_and_padding_is_not(chat_target, make_tokenizer):
    """CASES C04."""
    chats = [Conversation("a", (Message("user", "hello 12"), Message("assistant", "hello 123")))]
    tokenizer = make_tokenizer(template=chat_target.tokenizer.chat_template)

    def key():
        return store_key(encode_all(chats, tokenizer)[0], chat_target, "digest", TAPS, "float32")

    before = key()
    tokenizer(["hello", "12 12 12"], padding=True)
    assert key() == before
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>\n", "<|im_end|> ")
    changed = key()
    assert {name for name in changed if changed[name] != before[name]} == {"rows"}


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


CUTS = {"empty": 0.0, "in its length": 1e-4, "in its header": 0.05, "in its middle": 0.5, "at its end": 0.999}


def damage(path, how):
    data = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    elif how == "flipped":
        data[-1] ^= 1
        path.write_bytes(data)
    else:
        path.write_bytes(data[: int(CUTS[how] * len(data))])


@pytest.mark.parametrize("how", ["missing", "flipped", *CUTS])
def test_a_damaged_shard_is_refused_by_name(tmp_path, target, rows, key, how):
    extract(tmp_path, rows, target, key)
    damage(tmp_path / "shard-00001.safetensors", how)
    with pytest.raises(SpectrainError, match=r"shard-00001\.safetensors is (damaged|missing)"):
        extract(tmp_path, rows, target, key)


@pytest.mark.parametrize("how", ["flipped", *CUTS])
def test_a_damaged_shard_of_an_unfinished_extraction_is_refused_by_name(tmp_path, target, rows, key, how):
    extract(tmp_path, rows, target, key)
    (tmp_path / INDEX).unlink()
    damage(tmp_path / "shard-00001.safetensors", how)
    for _ in range(2):  # a second try does not take it for right either
        with pytest.raises(SpectrainError, match=r"shard-00001\.safetensors is damaged .*delete the file"):
            extract(tmp_path, rows, target, key)
    (tmp_path / "shard-00001.safetensors").unlink()
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


@pytest.mark.parametrize("finished", [True, False])
def test_swapped_shards_are_refused_by_name(tmp_path, target, rows, key, finished):
    extract(tmp_path, rows, target, key)
    one, other = (tmp_path / f"shard-0000{number}.safetensors" for number in (0, 1))
    for source, place in ((one, tmp_path / "aside"), (other, one), (tmp_path / "aside", other)):
        source.rename(place)
    if not finished:
        (tmp_path / INDEX).unlink()
    with pytest.raises(SpectrainError, match=r"shard-00000\.safetensors (is damaged|was made from other rows)"):
        extract(tmp_path, rows, target, key)


def test_a_shard_of_another_store_is_refused_by_name(tmp_path, target, rows, key):
    extract(tmp_path / "own", rows, target, key)
    extract(tmp_path / "other", rows[::-1], target, store_key(rows[::-1], target, "digest", TAPS, "float32"))
    shutil.copy2(tmp_path / "other" / "shard-00001.safetensors", tmp_path / "own")
    with pytest.raises(SpectrainError, match=r"own.shard-00001\.safetensors is damaged"):
        extract(tmp_path / "own", rows, target, key)


BROKEN = ["", "{", "[]", "\xff", '{"key": {}}', '{"key": 1, "shards": []}', '{"key": {}, "shards": [{"file": "x"}]}']


@pytest.mark.parametrize("text", BROKEN)
def test_a_damaged_index_is_refused_by_name(tmp_path, target, rows, key, text):
    extract(tmp_path, rows, target, key)
    (tmp_path / INDEX).write_text(text, encoding="latin-1")
    with pytest.raises(SpectrainError, match=r"index\.json is damaged"):
        FeatureStore(tmp_path, key)
    (tmp_path / INDEX).unlink()
    with pytest.raises(SpectrainError, match=r"has no index\.json: its extraction did not end; run it again"):
        FeatureStore(tmp_path, key)
    extract(tmp_path, rows, target, key)


@pytest.mark.parametrize("digest", [True, False])
def test_an_index_that_files_rows_elsewhere_is_refused(tmp_path, target, rows, key, digest):
    """Earlier versions wrote no digest: there a row that is named twice still shows."""
    extract(tmp_path, rows, target, key)
    index = json.loads((tmp_path / INDEX).read_text())
    places = index["shards"][0]["rows"]
    places[0], places[1] = (places[1], places[0]) if digest else (places[1], places[1])
    if not digest:
        del index["digest"]
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(SpectrainError, match=r"index\.json is damaged \(its (contents|rows)"):
        FeatureStore(tmp_path, key)


def test_a_store_of_an_earlier_version_opens(tmp_path, target, rows, key):
    extract(tmp_path, rows, target, key)
    index = json.loads((tmp_path / INDEX).read_text())
    del index["digest"]
    (tmp_path / INDEX).write_text(json.dumps(index))
    for name in (VERIFIED, REPORT):
        (tmp_path / name).unlink()
    store = FeatureStore(tmp_path, key)
    assert store.row(0)["ids"].tolist() == rows[0].ids
    assert store.describe() == f"{store.bytes_per_token():,.0f} bytes a token"


def fails_half_way(error):
    def save(_tensors, path, metadata):
        path.write_bytes(b"half")
        raise error

    return save


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), PermissionError(13, "Permission denied")])
def test_a_write_that_fails_leaves_no_half_shard(tmp_path, target, rows, key, monkeypatch, error):
    with monkeypatch.context() as context:
        context.setattr(features, "save_file", fails_half_way(error))
        with pytest.raises(type(error)):
            extract(tmp_path, rows, target, key)
    assert list(tmp_path.iterdir()) == []
    extract(tmp_path, rows, target, key)


def test_a_disk_that_is_really_full_leaves_no_half_shard(tmp_path, target, rows, key):
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(SafetensorError, match="File too large"):
            extract(tmp_path, rows, target, key)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_writer_left_is_cleared_when_it_is_old(tmp_path, target, rows, key):
    old, new = (tmp_path / f".shard-00000.safetensors.{name}.partial" for name in ("old", "new"))
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    extract(tmp_path, rows, target, key)
    assert (old.exists(), new.exists()) == (False, True)  # another process may be writing the new one


KILLED = """
import json, os, pathlib, random, signal, sys, time
tests, folder = sys.argv[1:]
sys.path.insert(0, tests)
import torch
torch.set_num_threads(1)
from forks import forked
from tiny import build_rows, build_target
from spectrain.data.features import INDEX, extract_features, store_key

target = build_target("llama", dtype=torch.float32)
rows = build_rows(target, 160)
key = store_key(rows, target, "digest", (1, 4, 6), "float32")

def extract(name):
    extract_features(pathlib.Path(folder, name), rows, target, key, shard_tokens=20, progress=False)

started = time.perf_counter()
extract("whole")
whole, draw, shards = time.perf_counter() - started, random.Random(0), []
for _ in range(10):
    child = forked(lambda: extract("killed"))
    time.sleep(draw.uniform(0.1, 0.2) * whole)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    shards.append(len(list(pathlib.Path(folder, "killed").glob("*.safetensors"))))
    if pathlib.Path(folder, "killed", INDEX).exists():
        break
extract("killed")
print(json.dumps(shards))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
def test_ten_kills_at_random_leave_the_store_of_an_unbroken_run(tmp_path):
    tests = Path(__file__).parents[1]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tests.parent)}
    done = subprocess.run([sys.executable, "-c", KILLED, str(tests), str(tmp_path)], env=environment, check=True,
                          capture_output=True, text=True)  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    whole, killed = contents(tmp_path / "whole"), contents(tmp_path / "killed")
    between = [number for number in found if 0 < number < len(whole) - 1]
    assert len(set(between)) >= 3  # killed in the middle, and each went on where the one before was
    assert found == sorted(found)
    assert {name: data for name, data in killed.items() if not name.startswith(".")} == whole


# --- opening --------------------------------------------------------------------------------------------------------


@pytest.fixture
def read(monkeypatch):
    """Names of the files whose bytes are hashed."""
    names, real = [], shards.file_digest
    monkeypatch.setattr(shards, "file_digest", lambda path: names.append(path.name) or real(path))
    return names


def test_a_store_that_did_not_change_is_not_read_again(tmp_path, target, rows, key, read):
    extract(tmp_path, rows, target, key)
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert sorted(read) == names  # once, when they were written
    read.clear()
    before = (tmp_path / VERIFIED).read_bytes()
    FeatureStore(tmp_path, key)
    assert (read, (tmp_path / VERIFIED).read_bytes()) == ([], before)
    (tmp_path / names[1]).touch()
    FeatureStore(tmp_path, key)
    FeatureStore(tmp_path, key)
    assert read == [names[1]]


@pytest.mark.parametrize("text", ["", "{", "no JSON\n", '{"file": "shard-00000.safetensors"}\n', "[]\n", "\xff\n"])
def test_a_damaged_memory_only_costs_reading(tmp_path, target, rows, key, read, text):
    extract(tmp_path, rows, target, key)
    for number in range(2):
        read.clear()
        (tmp_path / VERIFIED).write_text(text, encoding="latin-1") if number == 0 else None
        FeatureStore(tmp_path, key)
        assert len(read) <= len(list(tmp_path.glob("*.safetensors")))
    assert len(read) <= 1  # behind a line that was cut off


def test_a_changed_file_of_the_same_size_is_found(tmp_path, target, rows, key):
    extract(tmp_path, rows, target, key)
    FeatureStore(tmp_path, key)
    damage(tmp_path / "shard-00002.safetensors", "flipped")
    for _ in range(2):
        with pytest.raises(SpectrainError, match=r"shard-00002\.safetensors is damaged"):
            FeatureStore(tmp_path, key)


def test_a_long_check_shows_its_progress(tmp_path, target, rows, key, monkeypatch, capsys):
    extract(tmp_path, rows, target, key)
    (tmp_path / VERIFIED).unlink()
    FeatureStore(tmp_path, key)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(shards, "SHOWN", 1000)
    (tmp_path / VERIFIED).unlink()
    FeatureStore(tmp_path, key)
    assert "checking features: 100%" in capsys.readouterr().err


def test_the_report_says_bytes_and_speed_of_what_was_extracted(tmp_path, target, rows, key):
    store = extract(tmp_path, rows, target, key)
    report = json.loads((tmp_path / REPORT).read_text())
    tokens = sum(len(row.ids) for row in rows)
    assert (report["tokens"], report["extracted_tokens"]) == (tokens, tokens)
    assert report["bytes_per_token"] == store.bytes_per_token()
    assert report["tokens_per_second"] == pytest.approx(tokens / report["seconds"])
    assert store.describe().endswith(f"extracted at {report['tokens_per_second']:,.0f} tokens a second")
    for name in (INDEX, "shard-00001.safetensors"):
        (tmp_path / name).unlink()
    extract(tmp_path, rows, target, key)
    assert 0 < json.loads((tmp_path / REPORT).read_text())["extracted_tokens"] < tokens


# --- long rows and large stores -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_row_of_32k_tokens(tmp_path, tiny_target):
    length = 32768
    target = tiny_target("llama", layers=1, hidden=16, context=length, dtype=torch.float32)
    ids = torch.randint(24, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [
        EncodedRow("long", "all", ids, [0] * 100 + [1] * (length - 100)),
        EncodedRow("short", "all", [1, 2], [0, 1]),
    ]
    store = extract(tmp_path, rows, target, store_key(rows, target, "digest", (0,), "bfloat16"))
    batch = store.batch([0, 1])
    assert batch.ids_BT.shape == (2, length)
    assert batch.ids_BT[0].tolist() == ids
    assert batch.taps_BTF.shape == (2, length, 16)
    assert int(batch.answer_BT.sum()) == length - 100 + 1


def fabricated(batch, _target, dtype, top_k=None):
    """Features of 1 KiB a token, without a model."""
    parts = defaultdict(list)
    for row in batch:
        length = len(row.ids)
        parts["ids"].append(torch.tensor(row.ids))
        parts["answer"].append(torch.tensor(row.mask, dtype=torch.bool))
        parts["hidden"].append(torch.zeros(length, 128, dtype=dtype))
        parts["taps"].append(torch.zeros(length, 128, dtype=dtype))
        parts["log_normaliser"].append(torch.zeros(length))
        parts["greedy"].append(torch.zeros(length, dtype=torch.long))
    return parts


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads resident memory from /proc")
def test_an_epoch_over_a_store_ten_times_as_large_takes_no_more_memory(tmp_path, target, monkeypatch):
    """2 MiB and 20 MiB of features in shards of 1/4 MiB."""
    monkeypatch.setattr(features, "row_features", fabricated)
    grown = {}
    for scale in (1, 10):
        rows = [EncodedRow(str(i), "all", [1] * (50 + i % 29), [0] + [1] * (49 + i % 29)) for i in range(32 * scale)]
        key = store_key(rows, target, "digest", TAPS, "float32")
        store = extract_features(tmp_path / str(scale), rows, target, key, shard_tokens=256, progress=False)
        del rows
        gc.collect()
        before, peak = resident(), 0
        for batch in plan_epoch([store.length(row) for row in range(len(store))], 512, 0, 0):
            store.batch(batch)
            peak = max(peak, resident())
        grown[scale] = peak - before
        assert len(store._open) <= features.OPEN_SHARDS
    size = sum(path.stat().st_size for path in (tmp_path / "10").glob("*.safetensors"))
    assert size > 20e6
    assert grown[10] < 10e6
