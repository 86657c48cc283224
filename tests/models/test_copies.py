"""Converted copies: made once, kept safely, out of a file that is whole or in parts."""

import os
import sys
import time
from pathlib import Path

import pytest

from streamlens.errors import SourceError
from streamlens.models import copies


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A GGUF file and an empty cache, with a conversion that writes one small file and counts its runs."""
    runs = []

    def write(gguf, folder):
        runs.append(folder)
        folder.mkdir()
        (folder / "weights").write_bytes(gguf.read_bytes() * 2)
        copies._write_manifest(folder)

    monkeypatch.setattr(copies, "_write", write)
    monkeypatch.setenv("STREAMLENS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model.gguf").write_bytes(b"some weights")
    return tmp_path / "model.gguf", runs


def copy_of(*parts):
    return copies.converted_copy("tiny", parts, copies.digest_of(*parts))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_copy_is_made_once_and_keyed_by_content_and_version(kept, monkeypatch):
    gguf, runs = kept
    first = copy_of(gguf)
    assert copy_of(gguf) == first
    assert len(runs) == 1
    assert names(first.parent) == [first.name]  # nothing unfinished is left behind
    gguf.write_bytes(b"other weights")
    assert copy_of(gguf) != first
    monkeypatch.setattr("transformers.__version__", "5.99")
    assert copy_of(gguf).name.endswith("transformers-5.99")
    assert len(runs) == 3


@pytest.mark.parametrize("damage", ["cut", "flip", "absent", "no manifest", "broken manifest", "a file in its place"])
def test_damaged_copy_is_made_again(kept, damage):
    gguf, runs = kept
    copy = copy_of(gguf)
    weights, manifest = copy / "weights", copy / "streamlens.json"
    whole = weights.read_bytes()
    if damage == "cut":
        weights.write_bytes(whole[:5])
    elif damage == "flip":
        weights.write_bytes(b"S" + whole[1:])
    elif damage == "absent":
        weights.unlink()
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "broken manifest":
        manifest.write_text("{")
    else:
        copies.shutil.rmtree(copy)
        copy.write_text("in the way")
    assert copy_of(gguf) == copy
    assert weights.read_bytes() == whole
    assert len(runs) == 2
    assert names(copy.parent) == [copy.name]


def test_process_that_was_slower_takes_the_others_copy(kept, monkeypatch):
    gguf, runs = kept
    write = copies._write

    def slow(source, folder):
        write(source, folder)
        monkeypatch.setattr(copies, "_write", write)
        copy, slow.inode = copy_of(gguf), None
        slow.inode = copy.stat().st_ino

    monkeypatch.setattr(copies, "_write", slow)
    copy = copy_of(gguf)
    assert len(runs) == 2
    assert copy.stat().st_ino == slow.inode
    assert names(copy.parent) == [copy.name]


def test_interrupted_conversion_leaves_nothing(kept, monkeypatch):
    def interrupted(gguf, folder):
        folder.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(copies, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        copy_of(kept[0])
    assert names(copies.cache_folder()) == []


def test_what_a_killed_process_left_is_swept_after_a_day(kept):
    old, young = copies.cache_folder() / ".unfinished-old", copies.cache_folder() / ".unfinished-young"
    for folder in (old, young):
        folder.mkdir(parents=True)
    os.utime(old, (time.time() - 2 * 24 * 3600,) * 2)
    copy_of(kept[0])
    assert young.exists()
    assert not old.exists()


def test_cache_that_cannot_be_written_is_one_line(kept, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("STREAMLENS_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(SourceError, match=r"cannot keep a copy in .*cache .*; set STREAMLENS_CACHE to another folder"):
        copy_of(kept[0])


def test_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("STREAMLENS_CACHE", "/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert copies.cache_folder() == Path("/own")
    monkeypatch.delenv("STREAMLENS_CACHE")
    assert copies.cache_folder() == Path("/xdg/streamlens")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(sys, "platform", "linux")
    assert copies.cache_folder() == Path.home() / ".cache/streamlens"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert copies.cache_folder() == Path.home() / "Library/Caches/streamlens"


def test_parts_are_joined_in_their_order(kept, tmp_path):
    gguf, runs = kept
    whole = copy_of(gguf)
    parts = [tmp_path / f"model.gguf.part{number}" for number in range(3)]
    for part, data in zip(parts, (b"some", b" wei", b"ghts"), strict=True):
        part.write_bytes(data)
    assert copies.digest_of(*parts) == copies.digest_of(gguf)
    assert copy_of(*parts) == whole  # the same bytes, so the same copy
    assert len(runs) == 1
    turned = copy_of(*parts[::-1])
    assert (turned / "weights").read_bytes() == b"ghts weisome" * 2
    assert names(whole.parent) == sorted([whole.name, turned.name])  # the joined file is gone


def test_join_never_writes_over_a_file(tmp_path):
    (tmp_path / "whole").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        copies.join([], tmp_path / "whole")
