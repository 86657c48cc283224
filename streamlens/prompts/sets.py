"""The prompt sets that come with the package, each prompt with a target and a versus of one token."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from importlib.resources import files

import numpy as np
import pandas as pd

from streamlens.errors import InputError, choice
from streamlens.prompts.text import added, encode

_FILES = ("indirect_objects", "facts", "agreement")
_REPEATED = "repeated"
_BLOCK_LENGTHS = (8, 12, 16, 24)  # tokens in the repeated block
_PER_LENGTH = 4  # prompts a block length
# Most to least like a plain word, in the vocabularies of BPE ("Ġ" for a space) and SentencePiece ("▁"); the last takes any with letters.
_WORDS = (r"[Ġ▁][a-z]{3,12}", r"[Ġ▁]?[A-Za-z]{2,}", r".*[A-Za-z].*")


def bundled_names() -> tuple[str, ...]:
    """The names of the bundled prompt sets."""
    return (*_FILES, _REPEATED)


def bundled(name: str, tokenizer: object, *, seed: int = 0) -> tuple[pd.DataFrame, int]:
    """One bundled set and the number of its prompts that were left out, since target or versus isn't one token for this tokenizer.

    One row a prompt: set, template (its wording), kind (what varies within a wording), prompt, target, versus. The sets:
    "indirect_objects" (two people, one of whom acts: target the other one; kind says which is named first: ABBA the other, BABA the one
    who acts), "facts", "agreement" (verb number with a noun of the other number in between; kind is the subject's number), and
    "repeated" (a block of random word-like tokens twice, without its last token: target the token that follows, versus another of the
    block; prompt, target and versus are ids, drawn from this tokenizer's vocabulary with `seed`; kind is the block's length).

    Indirect objects after Wang et al. 2022 (arXiv:2211.00593), agreement after Linzen et al. 2016 (arXiv:1611.01368), repeated tokens
    after Olsson et al. 2022 (arXiv:2209.11895), all worded anew. Raises InputError for an unknown name or no tokenizer.
    """
    choice("name", name, bundled_names())
    if tokenizer is None:
        raise InputError("tokenizer must be given for the bundled prompts; got None (give one to load(tokenizer=))")
    rows = _repeated(tokenizer, seed) if name == _REPEATED else _read(name)
    kept = [{"set": name, **row} for row in rows if name == _REPEATED or _fits(row, tokenizer)]
    columns = ["set", "template", "kind", "prompt", "target", "versus"]
    return pd.DataFrame(kept, columns=columns), len(rows) - len(kept)


def all_bundled(tokenizer: object, *, seed: int = 0) -> tuple[pd.DataFrame, int]:
    """All bundled sets under one another, and the number of prompts left out; see :func:`bundled`."""
    sets = [bundled(name, tokenizer, seed=seed) for name in bundled_names()]
    return pd.concat([df.astype(object) for df, _ in sets], ignore_index=True).infer_objects(), sum(left for _, left in sets)


def _read(name: str) -> list[dict]:
    with (files(__package__) / "data" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _fits(row: dict, tokenizer: object) -> bool:
    ids = encode(tokenizer, row["prompt"])
    target, versus = (added(tokenizer, ids, row["prompt"], row[side]) for side in ("target", "versus"))
    return len(target) == len(versus) == 1 and target != versus


def _repeated(tokenizer: object, seed: int) -> list[dict]:
    words, start = _word_ids(tokenizer, max(_BLOCK_LENGTHS)), _start(tokenizer)
    rng = np.random.default_rng(seed)
    rows = []
    for length in np.repeat(_BLOCK_LENGTHS, _PER_LENGTH).tolist():
        block = rng.choice(words, size=length, replace=False).tolist()
        prompt, versus = start + block + block[:-1], int(rng.choice(block[:-1]))
        kind = f"{length} tokens"
        rows.append({"template": "block_twice", "kind": kind, "prompt": prompt, "target": block[-1], "versus": versus})
    return rows


def _word_ids(tokenizer: object, at_least: int) -> Sequence[int]:
    """The ids of the vocabulary that look most like plain words."""
    tokens = tokenizer.convert_ids_to_tokens(list(range(tokenizer.vocab_size)))
    for pattern in _WORDS:
        ids = [i for i, token in enumerate(tokens) if isinstance(token, str) and re.fullmatch(pattern, token)]
        if len(ids) >= at_least:
            return ids
    raise InputError(f"tokenizer must have {at_least} tokens with letters for the prompt set {_REPEATED!r}; got {len(ids)}")


def _start(tokenizer: object) -> list[int]:
    """What this tokenizer puts before a text by itself (a BOS, mostly nothing)."""
    plain, special = encode(tokenizer, "a", special=False), encode(tokenizer, "a")
    return special[: next((n for n in range(len(special)) if special[n : n + len(plain)] == plain), 0)]
