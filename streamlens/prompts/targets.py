"""Which logit is read: targets and versus, as token ids beside their prompt and position."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from jaxtyping import Int64

from streamlens.errors import InputError
from streamlens.prompts.parse import Prompts
from streamlens.prompts.plain import is_index, plain
from streamlens.prompts.positions import asked
from streamlens.prompts.positions import positions as resolve
from streamlens.prompts.text import added, pieces

NONE = -1  # no versus
MEAN = -2  # versus: the mean over the vocabulary
_NEXT = -3  # target: the prompt's own next token, filled in here
TOP = -4  # target: the model's own likeliest token, TOP - 1 the second likeliest and so on, filled in by fill_top
_KEYWORDS = {"target": {None: TOP, "top": TOP, "next": _NEXT}, "versus": {None: NONE, "mean": MEAN}}
_SEVERAL = re.compile(r"top([1-9]\d*)")  # target: the K likeliest
_GLUED = "([{<>\"'“‘«-–—/\\_@#$&*"  # behind these (and behind a space) a word is written without a space


@dataclass(frozen=True)
class Readouts:
    """What is read: one entry a (prompt, position, target, versus), ordered by prompt, position and the order of the targets."""

    prompt: Int64[np.ndarray, " row"]
    position: Int64[np.ndarray, " row"]
    target: Int64[np.ndarray, " row"]  # token ids; TOP and below where the model's likeliest are still to be filled in
    versus: Int64[np.ndarray, " row"]  # token ids; NONE or MEAN

    def __len__(self) -> int:
        return len(self.prompt)

    @property
    def place(self) -> Int64[np.ndarray, " row"]:
        """The same number for rows of the same prompt and position, in their order."""
        return np.unique(np.stack([self.prompt, self.position]), axis=1, return_inverse=True)[1].reshape(-1)

    @property
    def distinct(self) -> Int64[np.ndarray, " distinct"]:
        """Indices of the rows that repeat no row before them."""
        return np.sort(np.unique(np.stack([getattr(self, f.name) for f in fields(self)]), axis=1, return_index=True)[1])

    def take(self, rows: np.ndarray) -> Readouts:
        """The chosen rows, by index or by mask."""
        return Readouts(*(getattr(self, f.name)[rows] for f in fields(self)))


NO_READOUTS = Readouts(*(np.zeros(0, dtype=np.int64) for _ in fields(Readouts)))


def readouts(prompts: Prompts, tokenizer: object, *, target: object = None, versus: object = None, positions: object = None) -> Readouts:
    """Resolve targets, versus and positions to one row a logit that is read.

    `target` is a str or an id for every prompt, a list with one a prompt (several for a single prompt), or a list with a list a prompt.
    "next" is each position's own next token (no row at a prompt's last token), "top" the model's own likeliest token and "top5" its
    five likeliest, each with rows of its own (TOP, see :func:`fill_top`). `versus` likewise, or "mean" (the mean over the vocabulary),
    or None; several of one prompt pair up with its targets, one goes with all. These words are keywords first, and refused on the side
    where they mean nothing: give the id to mean the token of that text. None stands for the DataFrame's column, else target "top" and
    no versus. `positions` as in :func:`positions`.

    A str is the one token that it adds to its prompt when tokenized behind it (by itself, where the prompt's ids would change).
    Raises InputError where that is not one token (showing the split), for an id outside the vocabulary, a versus equal to its target,
    a repeated target, and "next" where only last tokens are read. Warns once where a leading space was probably forgotten.
    """
    where = resolve(prompts, positions)
    wanted = asked(prompts, positions)
    given = {"target": target, "versus": versus}
    columns = {"target": prompts.targets, "versus": prompts.versus}
    ids, forgotten = {}, {}
    for name, value in given.items():
        if name == "target" and value is None:
            _refuse_gaps(columns[name])
        entries = _entries(columns[name] if value is None else value, len(prompts), name, from_column=value is None)
        ids[name] = [
            [token for e in entries[i] for token in _tokens(e, prompts, i, tokenizer, name, forgotten)] for i in range(len(prompts))
        ]
    if forgotten:
        _warn(forgotten)
    rows = [
        _prompt_rows(prompts.ids[i], i, where[i], wanted[i], _pairs(ids["target"][i], ids["versus"][i], i)) for i in range(len(prompts))
    ]
    out = Readouts(*np.concatenate(rows, axis=1))
    if not len(out):
        raise InputError("target 'next' must have a next token to read; got prompts of a single token only")
    _check_differ(out)
    return out


def fill_top(readouts: Readouts, top: Int64[np.ndarray, " row"]) -> Readouts:
    """Replace TOP and what is below it by the model's likeliest ids, `top` [row] (read only where the target is one of these).

    A row that then repeats another target of its place is left out, and so is one of several likeliest tokens that is its own versus.
    Raises InputError where a place is left without a row, its versus being the likeliest token itself.
    """
    out = replace(readouts, target=np.where(readouts.target <= TOP, top, readouts.target).astype(np.int64))
    same = (out.target == out.versus) & (readouts.target <= TOP)
    if same.any():
        place = out.place
        out = out.take(~same | ~np.isin(place, place[~same]))
    _check_differ(out)
    return out.take(out.distinct)


def _refuse_gaps(column: tuple | None) -> None:
    """A prompt without its target would be read at the likeliest token, among others that are read at theirs."""
    missing = [i for i, value in enumerate(column or ()) if value is None]
    if missing and len(missing) < len(column):
        raise InputError(f"target must be given for every prompt or for none, 'top' for the likeliest; got none for prompt {missing[0]}")


def _entries(value: object, n: int, name: str, from_column: bool) -> list[list]:
    """What was given, as a list of entries a prompt."""
    value = plain(value)
    if not isinstance(value, list):
        return [[value]] * n
    if not value:
        raise InputError(f"{name} must be at least one token; got an empty list")
    if n == 1 and not from_column and not any(isinstance(v, list) for v in value):
        return [value]
    if len(value) != n:
        raise InputError(f"{name} must be one for all prompts or a list with one (or one list) for each of {n}; got a list of {len(value)}")
    if [] in value:
        raise InputError(f"{name} must be at least one token a prompt; got an empty list for prompt {value.index([])}")
    return [v if isinstance(v, list) else [v] for v in value]


def _tokens(entry: object, prompts: Prompts, i: int, tokenizer: object, name: str, forgotten: dict) -> list[int]:
    """The ids of one entry, or the codes of its keyword: one, but for the K likeliest."""
    several = _SEVERAL.fullmatch(entry) if isinstance(entry, str) and name == "target" else None
    if several is None:
        return [_token(entry, prompts, i, tokenizer, name, forgotten)]
    n = int(several[1])
    if prompts.vocab_size is not None and n > prompts.vocab_size:
        raise InputError(f"target {entry!r} must not be more than the vocabulary's {prompts.vocab_size} tokens; got it for prompt {i}")
    return [TOP - rank for rank in range(n)]


def _token(entry: object, prompts: Prompts, i: int, tokenizer: object, name: str, forgotten: dict) -> int:
    """The id of one entry, or the code of its keyword. A text that probably lacks its leading space is noted in `forgotten`."""
    if entry is None or (isinstance(entry, str) and entry in _KEYWORDS[name]):
        return _KEYWORDS[name][entry]
    if isinstance(entry, str):
        _refuse_the_others(entry, i, name)
        entry = _text_token(entry, prompts, i, tokenizer, name, forgotten)
    elif not is_index(entry):
        raise InputError(f"{name} must be text, a token id or {_keywords(name)}; got {entry!r} for prompt {i}")
    if entry < 0 or (prompts.vocab_size is not None and entry >= prompts.vocab_size):
        raise InputError(f"{name} must be a token id from 0 on, below the vocabulary's {prompts.vocab_size}; got {entry} for prompt {i}")
    return int(entry)


def _refuse_the_others(text: str, i: int, name: str) -> None:
    """A keyword of the other side was hardly meant as the token of that text, and would be read as one without a word."""
    other = "versus" if name == "target" else "target"
    if text in _KEYWORDS[other] or (other == "target" and _SEVERAL.fullmatch(text)):
        raise InputError(f"{name} {text!r} is a keyword of {other} alone: give the id to mean that text's token; got it for prompt {i}")


def _keywords(name: str) -> str:
    words = [repr(k) for k in _KEYWORDS[name] if k is not None]
    return " or ".join([*words, "'top5' and the like"] if name == "target" else words)


def _text_token(text: str, prompts: Prompts, i: int, tokenizer: object, name: str, forgotten: dict) -> int:
    if tokenizer is None:
        raise InputError(f"{name} is text but there is no tokenizer: give one to load(tokenizer=), or give a token id; got {text!r}")
    ids, prompt = added(tokenizer, prompts.ids[i], prompts.texts[i], text), prompts.texts[i]
    spaced = added(tokenizer, prompts.ids[i], prompt, f" {text}") if _may_lack_space(prompt, text) else []
    if len(ids) != 1:
        split = f"{len(ids)}: {pieces(tokenizer, ids)}" if ids else "none"
        first = f"; its first piece, id {ids[0]}, is one" if ids else ""
        hint = f"; with a leading space, {' ' + text!r}, it is one" if len(spaced) == 1 else first
        raise InputError(f"{name} must be one token; got {text!r}, which is {split}, behind prompt {i}{hint}")
    if len(spaced) == 1 and spaced != ids:
        forgotten.setdefault((name, text), i)
    return ids[0]


def _may_lack_space(prompt: str, text: str) -> bool:
    return text[:1].isalnum() and not prompt[-1:].isspace() and prompt[-1:] not in _GLUED


def _warn(forgotten: dict) -> None:
    (name, text), i = next(iter(forgotten.items()))
    others = f" (and {len(forgotten) - 1} more)" if len(forgotten) > 1 else ""
    warnings.warn(
        f"{name} {text!r}{others} continues prompt {i} without a space; {' ' + text!r} is one token too and mostly the likelier one",
        UserWarning,
        stacklevel=4,  # the line that called streamlens
    )


def _pairs(targets: Sequence[int], versus: Sequence[int], i: int) -> list[tuple[int, int]]:
    """Each target of a prompt with its versus; one of either goes with all of the other."""
    n = max(len(targets), len(versus))
    if any(len(side) not in (1, n) for side in (targets, versus)):
        raise InputError(f"versus must be one or as many as the {len(targets)} targets of prompt {i}; got {len(versus)}")
    pairs = list(zip(list(targets) * (n // len(targets)), list(versus) * (n // len(versus)), strict=True))
    if len(set(pairs)) < n:
        raise InputError(f"target must name each token once for one versus; got a repeated one for prompt {i}")
    return pairs


def _prompt_rows(ids: np.ndarray, i: int, where: np.ndarray, wanted: object, pairs: list[tuple[int, int]]) -> Int64[np.ndarray, "4 row"]:
    """The rows of one prompt, by position and then in the order of its pairs."""
    parts = []
    for target, versus in pairs:
        at = where[where < len(ids) - 1] if target == _NEXT else where
        if not len(at) and wanted != "all":
            raise InputError(f"positions must hold one before the last token for target 'next'; got {wanted!r} for prompt {i}")
        tokens = ids[at + 1] if target == _NEXT else np.full(len(at), target)
        parts.append(np.stack([np.full(len(at), i), at, tokens, np.full(len(at), versus)]))
    rows = np.concatenate(parts, axis=1).astype(np.int64)
    return rows[:, np.argsort(rows[1], kind="stable")]


def _check_differ(readouts: Readouts) -> None:
    same = np.flatnonzero(readouts.target == readouts.versus)
    if len(same):
        row = same[0]
        place = f"prompt {readouts.prompt[row]}, position {readouts.position[row]}"
        raise InputError(f"versus must differ from target; got token {readouts.target[row]} as both at {place}")
