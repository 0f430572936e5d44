"""What is written appears whole or not at all, whatever goes wrong; nothing is left lying beside it."""

import errno
import json
import os

import pytest

from spectrain import files
from spectrain.files import (
    atomic_file,
    atomic_folder,
    file_digest,
    json_digest,
    json_list_digest,
    replace_folder,
    whole_lines,
    write_json,
)

FAILURES = [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), RuntimeError("writer")]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_replaces_the_old_one_and_is_readable_by_others(tmp_path):
    path = tmp_path / "deep" / "a.txt"
    for text in ("one", "two"):
        with atomic_file(path) as partial:
            assert partial.parent == path.parent
            partial.write_text(text)
        assert path.read_text() == text
    assert names(path.parent) == ["a.txt"]
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
def test_a_failed_file_leaves_the_old_one(tmp_path, failure):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def write():
        with atomic_file(path) as partial:
            partial.write_text("half")
            raise failure

    with pytest.raises(type(failure)):
        write()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("write", [atomic_file, atomic_folder])
def test_errors_name_what_was_to_be_written(tmp_path, write):
    with pytest.raises(OSError, match=r"cannot be written \(.*\); choose another place: '/proc/x'"), write("/proc/x"):
        pass
    with pytest.raises(OSError, match="File too large") as error, write(tmp_path / "a"):
        raise OSError(errno.EFBIG, "File too large")
    assert error.value.__notes__ == [f"{files.WRITING}{tmp_path / 'a'}"]


def test_a_file_that_cannot_be_put_in_place_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    monkeypatch.setattr(files.os, "replace", _fail)
    with pytest.raises(OSError, match="No space left"):
        write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert names(tmp_path) == ["a.json"]


def _fail(*_args, **_keywords):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}])
def test_what_is_no_json_is_refused_before_a_byte_is_written(tmp_path, value):
    with pytest.raises((ValueError, TypeError)):
        write_json(tmp_path / "a.json", {"a": value})
    assert names(tmp_path) == []


def test_json_keeps_its_order_and_its_letters(tmp_path):
    write_json(tmp_path / "a.json", {"τ": 1, "a": [None]})
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert text.index("τ") < text.index('"a"')
    assert text.endswith("\n")


@pytest.mark.parametrize("old", [True, False])
def test_a_folder_takes_its_place(tmp_path, old):
    path = tmp_path / "b"
    if old:
        path.mkdir()
        (path / "stale").write_text("x")
    with atomic_folder(path) as partial:
        assert not list(partial.iterdir())
        (partial / "sub").mkdir()
        (partial / "sub" / "a").write_text("new")
    assert names(tmp_path) == ["b"]
    assert names(path) == ["sub"]
    assert path.stat().st_mode & 0o777 == 0o755
    assert (path / "sub" / "a").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
@pytest.mark.parametrize("old", [True, False])
def test_a_failed_folder_leaves_the_old_one(tmp_path, failure, old):
    path = tmp_path / "b"
    if old:
        path.mkdir()
        (path / "a").write_text("old")

    def write():
        with atomic_folder(path) as partial:
            (partial / "a").write_text("half")
            raise failure

    with pytest.raises(type(failure)):
        write()
    assert names(tmp_path) == (["b"] if old else [])
    assert not old or (path / "a").read_text() == "old"


@pytest.mark.parametrize("failing", [1, 2])
def test_a_folder_that_cannot_be_renamed_leaves_the_old_one(tmp_path, monkeypatch, failing):
    path, calls, rename = tmp_path / "b", [], os.rename
    path.mkdir()
    (path / "a").write_text("old")

    def sometimes(source, destination):
        calls.append(source)
        if len(calls) == failing:
            raise OSError(errno.EIO, "Input/output error")
        rename(source, destination)

    monkeypatch.setattr(files.os, "rename", sometimes)

    def write():
        with atomic_folder(path) as partial:
            (partial / "a").write_text("new")

    with pytest.raises(OSError, match="Input/output"):
        write()
    assert names(tmp_path) == ["b"]
    assert (path / "a").read_text() == "old"


def test_a_complete_folder_is_renamed_over_another(tmp_path):
    for name in ("new", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text(name)
    replace_folder(tmp_path / "new", tmp_path / "b")
    assert names(tmp_path) == ["b"]
    assert (tmp_path / "b" / "a").read_text() == "new"


@pytest.mark.parametrize("torn", [b"", b'{"a": "\xe2\x80', b"{"])
def test_whole_lines_cut_off_a_torn_end(tmp_path, torn):
    path = tmp_path / "a.jsonl"
    rows = ['{"a": "one\u2028two\x85three"}', '{"a": 2}']
    path.write_bytes("".join(row + "\n" for row in rows).encode() + torn)
    assert whole_lines(path) == rows
    assert path.read_bytes() == "".join(row + "\n" for row in rows).encode()
    path.write_bytes(torn)
    assert whole_lines(path) == []
    assert path.read_bytes() == b""


def test_digests(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert file_digest(tmp_path / "a") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert json_digest({"a": 1, "b": [1.0]}) == json_digest({"b": [1.0], "a": 1})
    assert json_digest([1, 2]) != json_digest([2, 1])


@pytest.mark.parametrize("values", [[], [1], [["é", {"b": [0, 1], "a": None}], "x", 2.5]])
def test_a_list_has_the_same_digest_piece_by_piece(values):
    assert json_list_digest(iter(values)) == json_digest(values)
