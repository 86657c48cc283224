"""Bytes and characters as tokens: there and back, and through streamlens' own calls."""

import json

import pytest

from streamlens.decoder.tokenizer import FILE, ByteTokenizer, CharacterTokenizer, saved_tokenizer
from streamlens.errors import InputError, SourceError
from streamlens.prompts.text import added, decode, encode, pieces

LETTERS = CharacterTokenizer("abc", "^")


def test_bytes_go_there_and_back():
    text = "x = 1  # ×—\n"
    ids = encode(ByteTokenizer(), text)
    assert ids == list(text.encode())
    assert decode(ByteTokenizer(), ids) == text
    assert pieces(ByteTokenizer(), encode(ByteTokenizer(), "a—")) == ["a", "\\xe2", "\\x80", "\\x94"]
    assert ByteTokenizer().decode(65) == "A"


def test_characters_start_with_their_first_token():
    assert encode(LETTERS, "cab") == [3, 2, 0, 1]
    assert encode(LETTERS, "cab", special=False) == [2, 0, 1]
    assert decode(LETTERS, [3, 2, 0, 1]) == "^cab"
    assert encode(LETTERS, "ca b\n") == encode(LETTERS, "cab")
    assert CharacterTokenizer("a b", "^")("a b")["input_ids"] == [3, 0, 1, 2]
    assert LETTERS.vocab_size == 4
    assert added(LETTERS, [3, 2, 0], "ca", "b") == [1]
    assert added(LETTERS, [3, 2, 0], "^ca", "b") == [1]  # the text of ids, which names the first token itself


def test_other_characters_and_ids_are_refused():
    with pytest.raises(InputError, match=r"text must be of the characters abc\^; got 'é'"):
        LETTERS("aé")
    with pytest.raises(InputError, match="ids must be from 0 to 255; got 256"):
        ByteTokenizer().decode([1, 256])
    with pytest.raises(InputError, match="each once"):
        CharacterTokenizer("aba", "^")


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), LETTERS])
def test_saved_and_found(tokenizer, tmp_path):
    assert saved_tokenizer(tmp_path) is None
    tokenizer.save_pretrained(tmp_path)
    assert saved_tokenizer(tmp_path) == tokenizer


@pytest.mark.parametrize("text", ["[]", "{", json.dumps({"kind": "words"}), json.dumps({"kind": "bytes", "size": 3})])
def test_other_files_are_refused(text, tmp_path):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(SourceError, match="is no tokenizer of streamlens"):
        saved_tokenizer(tmp_path)
