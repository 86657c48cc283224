"""Whatever a user calls prompts, as one array of token ids a prompt."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from streamlens.errors import InputError
from streamlens.prompts.plain import is_index, plain
from streamlens.prompts.text import decode, encode

RESERVED = ("prompt", "target", "versus", "position", "corrupted")
# The columns of all result tables with rows of prompts. `schema` has them too, but it needs pandas, which may not come in this way;
# tested equal.
_TABLE_COLUMNS = (
    "prompt prompt_text position token target target_token versus versus_token component layer sublayer head neuron expert source "
    "attention contribution logit unit method span together at at_token reference sample seed blocks n_removed metric clean ablated "
    "delta recovered site measure value direct direct_recomputed total indirect repair_heads repair_mlps repair_norm layer_to norm k "
    "rank probability model source_token log_probability direction sublayer_to component_to positions statistic cut loss"
)
TABLE_COLUMNS = frozenset(_TABLE_COLUMNS.split())
_LEGAL = "a str, a list of str, token ids, a tokenizer's output, chat messages or a DataFrame with the column 'prompt'"


@dataclass(frozen=True)
class Prompts:
    """The prompts of a call, one entry a prompt everywhere.

    `ids` are int64 arrays [pos] without padding. `texts` are the prompts' texts: the ids decoded where ids were given, the numbers
    themselves where there is no tokenizer. `columns` are a DataFrame's further columns, carried into the result. `targets`, `versus`,
    `positions` and `corrupted` are its reserved columns as given (None in a cell that is missing), or None where it has no such column.
    `vocab_size` bounds the ids of targets; None leaves them unchecked.
    """

    ids: tuple[np.ndarray, ...]
    texts: tuple[str, ...]
    columns: Mapping[str, tuple] = field(default_factory=dict)
    targets: tuple | None = None
    versus: tuple | None = None
    positions: tuple | None = None
    corrupted: tuple | None = None
    vocab_size: int | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens a prompt, int64 [prompt]."""
        return np.array([len(ids) for ids in self.ids], dtype=np.int64)


def parse(prompts: object, tokenizer: object, *, max_length: int | None, vocab_size: int) -> Prompts:
    """Read prompts of any accepted kind.

    `prompts` is a str, a list of str, token ids (a tensor or array [batch, pos] or [pos], lists of unequal length), a tokenizer's
    output (rows cut to its attention mask), chat messages (a list of {"role", "content"}: one prompt through the tokenizer's template,
    with the generation prompt; a list of such lists: several), or a DataFrame with `prompt` (each cell any of these) and, as wanted,
    `target`, `versus`, `position`, `corrupted` and columns to carry. No BOS is added beyond what the tokenizer itself adds.

    Raises InputError for no prompt, an empty one, one of more than `max_length` tokens, ids outside [0, vocab_size), text without a
    tokenizer, or a carried column that is named like a column of a result.
    """
    frame = prompts if _is_frame(prompts) else None
    rows = _rows(prompts) if frame is None else _prompt_column(frame)
    if not rows:
        raise InputError(f"prompts must hold at least one prompt ({_LEGAL}); got none")
    ids, texts = [], []
    for i, row in enumerate(rows):
        row_ids, text = _encode(row, tokenizer, f"prompts[{i}]")
        _check(row_ids, max_length, vocab_size, f"prompts[{i}]")
        ids.append(np.array(row_ids, dtype=np.int64))
        texts.append(_text(row_ids, tokenizer) if text is None else text)
    return Prompts(tuple(ids), tuple(texts), vocab_size=vocab_size, **({} if frame is None else _frame_columns(frame)))


def _is_frame(value: object) -> bool:
    pandas = sys.modules.get("pandas")  # whoever made a DataFrame has imported it
    return pandas is not None and isinstance(value, pandas.DataFrame)


def _rows(prompts: object) -> list:
    """One entry a prompt: a str, a list of ids or a list of messages."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping):
        return _tokenized(prompts)
    rows = plain(prompts)
    if not isinstance(rows, list):
        raise InputError(f"prompts must be {_LEGAL}; got {type(prompts).__name__}")
    one = rows and (all(map(is_index, rows)) or all(isinstance(row, Mapping) for row in rows))
    return [rows] if one else rows


def _tokenized(encoding: Mapping) -> list:
    """The rows of a tokenizer's output, each cut to the tokens that its attention mask keeps."""
    if "input_ids" not in encoding:
        raise InputError(f"prompts as a mapping must have 'input_ids'; got the keys {', '.join(map(repr, encoding)) or 'none'}")
    rows = _nested(plain(encoding["input_ids"]))
    if "attention_mask" not in encoding:
        return rows
    masks = _nested(plain(encoding["attention_mask"]))
    if [len(row) for row in rows] != [len(mask) for mask in masks]:
        raise InputError("prompts['attention_mask'] must have the shape of prompts['input_ids']; got another shape")
    return [_unpadded(row, mask, i) for i, (row, mask) in enumerate(zip(rows, masks, strict=True))]


def _nested(rows: object) -> list:
    if not isinstance(rows, list):
        raise InputError(f"prompts as a mapping must hold lists, arrays or tensors; got {type(rows).__name__}")
    return [rows] if all(is_index(row) for row in rows) else rows


def _unpadded(row: list, mask: list, i: int) -> list:
    kept = np.flatnonzero(mask)
    if len(kept) and kept[-1] - kept[0] + 1 != len(kept):
        raise InputError(f"prompts['attention_mask'][{i}] must keep one run of tokens, padding only at its ends; got a gap")
    return [row[k] for k in kept]


def _encode(row: object, tokenizer: object, where: str) -> tuple[list[int], str | None]:
    """The ids of one prompt, and its text where it came as text."""
    if isinstance(row, str):
        text, special = row, True
    elif isinstance(row, list) and row and all(isinstance(message, Mapping) for message in row):
        text, special = _chat(row, tokenizer, where), False  # the template writes the special tokens itself
    else:
        return _given_ids(row, where), None
    if tokenizer is None:
        raise InputError(f"{where} is text but there is no tokenizer: give one to load(tokenizer=), or give token ids; got {text[:40]!r}")
    return encode(tokenizer, text, special) if text else [], text


def _given_ids(row: object, where: str) -> list[int]:
    if not isinstance(row, list) or not all(map(is_index, row)):
        raise InputError(f"{where} must be text, whole-number token ids or chat messages; got {_shown(row)}")
    return row


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:60]}..."


def _chat(messages: list, tokenizer: object, where: str) -> str:
    for message in messages:
        if not {"role", "content"} <= set(message):
            raise InputError(f"{where} must be messages with 'role' and 'content'; got the keys {', '.join(map(repr, message)) or 'none'}")
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise InputError(f"{where} is chat messages but the tokenizer has no chat template; give text or token ids")
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # a template may raise anything, on purpose, over roles and their order
        raise InputError(f"{where} does not fit the tokenizer's chat template: {error}") from error


def _check(ids: list[int], max_length: int | None, vocab_size: int, where: str) -> None:
    if not len(ids):
        raise InputError(f"{where} must have at least one token; got an empty prompt")
    if max_length is not None and len(ids) > max_length:
        raise InputError(f"{where} must have at most {max_length} tokens, the model's context; got {len(ids)}")
    for position, i in enumerate(ids):
        if not 0 <= i < vocab_size:
            raise InputError(f"{where} must have token ids from 0 to {vocab_size - 1}; got {i} at position {position}")


def _text(ids: list[int], tokenizer: object) -> str:
    return " ".join(map(str, ids)) if tokenizer is None else decode(tokenizer, ids)


def _prompt_column(frame) -> list:
    names = list(frame.columns)
    if "prompt" not in names:
        raise InputError(f"prompts as a DataFrame must have the column 'prompt'; got {', '.join(map(repr, names)) or 'no columns'}")
    for name in names:
        if not isinstance(name, str) or names.count(name) > 1:
            raise InputError(f"prompts as a DataFrame must have text as column names, each once; got {name!r}")
        if name in TABLE_COLUMNS and name not in RESERVED:
            raise InputError(f"prompts as a DataFrame must not carry a column named like one of the result; rename {name!r}")
    return plain(list(frame["prompt"]))


def _frame_columns(frame) -> dict:
    """The reserved columns under their names in Prompts, and the carried ones."""
    homes = {"target": "targets", "versus": "versus", "position": "positions", "corrupted": "corrupted"}
    out = {home: tuple(map(_cell, frame[name])) for name, home in homes.items() if name in frame.columns}
    out["columns"] = {name: tuple(frame[name].tolist()) for name in frame.columns if name not in RESERVED}
    for name in out["columns"]:
        _warn_if_misspelt(name, frame.columns)
    return out


def _warn_if_misspelt(name: str, names: Collection[str]) -> None:
    """Say so where a carried column is nearly one that would have been read: unread, `targt` leaves every target to the model."""
    near = difflib.get_close_matches(name.strip().lower(), [known for known in RESERVED if known not in names], n=1, cutoff=0.85)
    if near:
        text = f"prompts have a column {name!r}, which is carried along unread; did you mean {near[0]!r}?"
        warnings.warn(text, stacklevel=6)  # the line that called streamlens


def _cell(value: object) -> object:
    """A cell as a plain value; pandas writes a missing one as NaN, and whole numbers beside it as floats."""
    value = plain(value)
    if isinstance(value, float):
        return None if value != value else int(value) if value.is_integer() else value
    return None if type(value).__name__ in ("NAType", "NaTType") else value
