"""Where a measure is read: positions over each prompt's own tokens."""

from __future__ import annotations

import numpy as np

from streamlens.errors import InputError
from streamlens.prompts.parse import Prompts
from streamlens.prompts.plain import is_index, plain

_LEGAL = "'last', 'all', an index, a list of indices, or one of these a prompt"


def positions(prompts: Prompts, positions: object = None) -> list[np.ndarray]:
    """The positions of each prompt that are read: int64 arrays [read], ascending, each position once.

    `positions` is "last", "all", an index, a list of indices for every prompt, or a list with one list (or "last" or "all") a prompt.
    Negative indices count from a prompt's end. None stands for the DataFrame's `position` column, else "last".
    Raises InputError for an index outside a prompt.
    """
    given = zip(asked(prompts, positions), prompts.ids, strict=True)
    return [_resolve(one, len(ids), i) for i, (one, ids) in enumerate(given)]


def asked(prompts: Prompts, positions: object = None) -> list:
    """What is asked of each prompt: "last", "all", an index or a list of indices, not yet checked against its length."""
    value = plain(positions)
    if value is None:
        return ["last"] * len(prompts) if prompts.positions is None else list(prompts.positions)
    if not isinstance(value, list) or (value and all(map(is_index, value))):
        return [value] * len(prompts)
    if len(value) != len(prompts):
        raise InputError(f"positions must be {_LEGAL}; got a list of {len(value)} for {len(prompts)} prompts")
    return value


def _resolve(one: object, length: int, i: int) -> np.ndarray:
    if one == "last":
        return np.array([length - 1], dtype=np.int64)
    if one == "all":
        return np.arange(length, dtype=np.int64)
    indices = one if isinstance(one, list) else [one]
    if not indices or not all(map(is_index, indices)):
        raise InputError(f"positions must be {_LEGAL}; got {one!r} for prompt {i}")
    for index in indices:
        if not -length <= index < length:
            raise InputError(f"positions must be from {-length} to {length - 1} for prompt {i}, which has {length} tokens; got {index}")
    return np.unique(np.array(indices, dtype=np.int64) % length)
