"""Batches follow from seed and step; the text that every Python ships, each paragraph once."""

import pytest
import torch

from streamlens.decoder.data import Text, batch_of, file_text, python_text, split
from streamlens.errors import InputError


def test_a_step_has_its_batch_whenever_it_is_asked_for():
    data = Text(python_text(), length=16)
    later = batch_of(data, 4, seed=3, step=7)
    torch.manual_seed(1)
    batch_of(data, 4, seed=3, step=6)
    assert torch.equal(batch_of(data, 4, seed=3, step=7).ids, later.ids)
    assert not torch.equal(batch_of(data, 4, seed=3, step=8).ids, later.ids)
    assert not torch.equal(batch_of(data, 4, seed=4, step=7).ids, later.ids)


def test_the_users_generator_is_left_alone():
    torch.manual_seed(5)
    wanted = torch.rand(1)
    torch.manual_seed(5)
    batch_of(Text("abcdef", length=3), 4, seed=0, step=0)
    assert torch.equal(torch.rand(1), wanted)


def test_rows_of_a_text_start_anywhere():
    text = "abcdefgh"
    rows = batch_of(Text(text, length=6), 200, seed=0, step=0).ids
    assert rows.dtype == torch.int64
    assert {bytes(row.tolist()).decode() for row in rows} == {"abcdef", "bcdefg", "cdefgh"}


def test_python_text_has_no_paragraph_twice():
    text = python_text()
    assert len(text) > 200_000
    assert "Assert statements are a convenient way" in text
    paragraphs = [p for p in text.removesuffix("\n").split("\n\n") if p]
    assert len(set(paragraphs)) == len(paragraphs)


def test_split_cuts_between_paragraphs():
    assert split("one\n\ntwo\n\nthree\n\nf", held_out=0.2) == ("one\n\ntwo\n\n", "three\n\nf")
    train, held = split(python_text())
    assert train + held == python_text()
    assert 0.1 <= len(held) / len(train + held) < 0.15


def test_a_file_is_a_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xffabc")
    assert Text(file_text(tmp_path / "a.txt"), length=4).ids.tolist() == [255, 97, 98, 99]


def test_what_is_no_text_is_refused(tmp_path):
    with pytest.raises(InputError, match="path must be a text file"):
        file_text(tmp_path / "none")
    with pytest.raises(InputError, match="at least length = 8 bytes; got 3"):
        Text("abc", length=8)
    with pytest.raises(InputError, match=r"held_out must be between 0 and 1; got 1\.0"):
        split("a\n\nb", held_out=1.0)
    with pytest.raises(InputError, match="a paragraph's end in its first 90%"):
        split("one line", held_out=0.1)


def test_a_text_is_known_by_its_bytes():
    assert repr(Text("abcd", length=2)) != repr(Text("abce", length=2))
    assert "abcd" not in repr(Text("abcd", length=2))
