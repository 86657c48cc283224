import os

import pytest

from streamlens.errors import InputError
from streamlens.folder import MANIFEST, output_folder


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_folder_appears_only_when_the_block_ends(tmp_path):
    with output_folder(tmp_path / "deep" / "out") as work:
        (work / "a.txt").write_text("a")
        assert not (tmp_path / "deep" / "out").exists()
    assert names(tmp_path / "deep" / "out") == ["a.txt", MANIFEST]
    assert names(tmp_path / "deep") == ["out"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_stays_after_an_exception(tmp_path, error):
    with pytest.raises(error, match="stop"), output_folder(tmp_path / "deep" / "out") as work:
        (work / "a.txt").write_text("a")
        raise error("stop")
    assert names(tmp_path) == []


def test_exception_leaves_earlier_results(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a.txt").write_text("old")
    with pytest.raises(ValueError, match="stop"), output_folder(tmp_path / "out", overwrite=True) as work:
        (work / "a.txt").write_text("new")
        raise ValueError("stop")
    assert (tmp_path / "out" / "a.txt").read_text() == "old"
    assert names(tmp_path) == ["out"]


def test_empty_folder_is_taken(tmp_path):
    (tmp_path / "out").mkdir()
    with output_folder(tmp_path / "out") as work:
        (work / "a.txt").write_text("a")
    assert names(tmp_path / "out") == ["a.txt", MANIFEST]


def test_full_folder_is_refused(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="out must be a new or empty folder"), output_folder(tmp_path):
        pytest.fail("the block ran")


def test_file_is_refused(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(InputError, match="out must be a folder; got the file"), output_folder(tmp_path / "out", overwrite=True):
        pytest.fail("the block ran")


@pytest.mark.skipif(os.name != "posix", reason="a file as a parent is an OSError of another kind elsewhere")
def test_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="out must be a folder that can be written"), output_folder(tmp_path / "file" / "out"):
        pytest.fail("the block ran")


def test_overwrite_replaces_what_an_earlier_run_wrote_and_nothing_else(tmp_path):
    with output_folder(tmp_path / "out") as work:
        (work / "figures").mkdir()
        for name in ("a.txt", "figures/old.png"):
            (work / name).write_text("first")
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with output_folder(tmp_path / "out", overwrite=True) as work:
        (work / "figures").mkdir()
        for name in ("a.txt", "figures/new.png"):
            (work / name).write_text("second")
    assert names(tmp_path / "out") == ["a.txt", "figures", "mine.txt", MANIFEST]
    assert names(tmp_path / "out" / "figures") == ["new.png"]
    assert (tmp_path / "out" / "a.txt").read_text() == "second"
    assert names(tmp_path) == ["out"]
