"""Tokenizers that need no training: one token a byte of UTF-8, or one a character of a small alphabet.

They answer the calls that streamlens makes of any tokenizer, and are saved as one small JSON file beside a decoder's weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from streamlens.errors import InputError, SourceError

FILE = "streamlens_tokenizer.json"
"""Its file in a model's folder."""


@dataclass(frozen=True)
class ByteTokenizer:
    """Ids are the bytes of UTF-8. A byte that is no whole character by itself decodes to its number, as in ``\\xe2``."""

    @property
    def vocab_size(self) -> int:
        return 256

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode("utf-8"))}

    def decode(self, ids: int | Iterable[int]) -> str:
        return bytes(_checked(ids, self.vocab_size)).decode("utf-8", errors="backslashreplace")

    def convert_ids_to_tokens(self, ids: Iterable[int]) -> list[str]:
        return [self.decode(i) for i in ids]

    def save_pretrained(self, folder: str | os.PathLike) -> None:
        _save(folder, {"kind": "bytes"})


@dataclass(frozen=True)
class CharacterTokenizer:
    """Ids are places in an alphabet; the last id is the first token of every text, which text may also name by its `bos`.

    Spaces and line ends that the alphabet has not are for the reader, and no tokens.
    """

    characters: str
    bos: str

    def __post_init__(self) -> None:
        every = self.characters + self.bos
        if len(self.bos) != 1 or not self.characters or len(set(every)) != len(every):
            raise InputError(
                f"characters and bos must be characters, each once, and bos one of its own; got {self.characters!r}, {self.bos!r}"
            )

    @property
    def vocab_size(self) -> int:
        return len(self.characters) + 1

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """Raises :class:`InputError` for a character that the alphabet has not."""
        index = {character: i for i, character in enumerate(self.characters + self.bos)}
        unknown = next((character for character in text if character not in index and not character.isspace()), None)
        if unknown is not None:
            raise InputError(f"text must be of the characters {self.characters + self.bos}; got {unknown!r}")
        start = [len(self.characters)] if add_special_tokens else []
        return {"input_ids": start + [index[character] for character in text if character in index]}

    def decode(self, ids: int | Iterable[int]) -> str:
        return "".join((self.characters + self.bos)[i] for i in _checked(ids, self.vocab_size))

    def convert_ids_to_tokens(self, ids: Iterable[int]) -> list[str]:
        return [self.decode(i) for i in ids]

    def save_pretrained(self, folder: str | os.PathLike) -> None:
        _save(folder, {"kind": "characters", "characters": self.characters, "bos": self.bos})


def saved_tokenizer(folder: str | os.PathLike) -> ByteTokenizer | CharacterTokenizer | None:
    """The tokenizer that `save_pretrained` left in a folder, None where there is none. Raises :class:`SourceError` for another file."""
    file = Path(folder) / FILE
    if not file.is_file():
        return None
    kinds = {"bytes": ByteTokenizer, "characters": CharacterTokenizer}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        return kinds[values.pop("kind")](**values)
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise SourceError(f"{file} is no tokenizer of streamlens: {error!r}") from error


def _save(folder: str | os.PathLike, values: dict) -> None:
    (Path(folder) / FILE).write_text(json.dumps(values) + "\n", encoding="utf-8")


def _checked(ids: int | Iterable[int], n: int) -> list[int]:
    ids = [int(i) for i in (ids if hasattr(ids, "__iter__") else [ids])]
    outside = next((i for i in ids if not 0 <= i < n), None)
    if outside is not None:
        raise InputError(f"ids must be from 0 to {n - 1}; got {outside}")
    return ids
