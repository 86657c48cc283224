"""Text to ids and back, with any tokenizer that is called the way Hugging Face's are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from streamlens.errors import InputError


def encode(tokenizer, text: str, special: bool = True) -> list[int]:
    """The ids of `text`; with `special` also those that the tokenizer itself adds (a BOS), never any other."""
    if any(0xD800 <= ord(c) <= 0xDFFF for c in text):
        raise InputError(f"text must be whole characters; got half of a surrogate pair in {text[:40]!r}")
    return [int(i) for i in tokenizer(text, add_special_tokens=special)["input_ids"]]


def decode(tokenizer, ids: Sequence[int] | np.ndarray) -> str:
    """The text of `ids`, special tokens included."""
    return tokenizer.decode([int(i) for i in ids])


def pieces(tokenizer, ids: Sequence[int] | np.ndarray) -> list[str]:
    """The text of each id by itself: how a text is split into tokens."""
    return [decode(tokenizer, [i]) for i in ids]


def added(tokenizer, prompt_ids: Sequence[int] | np.ndarray, prompt_text: str, text: str) -> list[int]:
    """The ids that `text` adds to a prompt when it is tokenized behind it.

    Where that would change the prompt's own ids, or the prompt's text is not what its ids came from: the ids of `text` by itself.
    """
    base = [int(i) for i in prompt_ids]
    for special in (True, False):  # a chat prompt brings its special tokens in its text
        if encode(tokenizer, prompt_text, special) == base:
            joined = encode(tokenizer, prompt_text + text, special)
            if joined[: len(base)] == base:
                return joined[len(base) :]
    return encode(tokenizer, text, special=False)
