"""Token batches: prompts of like length together, padded on the right, within a budget of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int64

from streamlens.errors import InputError
from streamlens.prompts.parse import Prompts
from streamlens.prompts.plain import is_index


@dataclass(frozen=True)
class TokenBatch:
    """Some of the prompts as one tensor; row b holds prompt `index[b]`."""

    index: Int64[np.ndarray, " batch"]
    ids: Int64[torch.Tensor, "batch pos"]  # padded on the right
    mask: Bool[torch.Tensor, "batch pos"]  # True at a prompt's own tokens


def batches(prompts: Prompts, max_tokens: int, *, equal_length: bool = False, pad_id: int = 0) -> list[TokenBatch]:
    """Every prompt in exactly one batch, batch * pos at most `max_tokens`; a longer prompt is a batch by itself.

    The longest come first, so that what does not fit in memory fails at once; prompts of one length keep their order.
    With `equal_length` a batch holds one length only and no padding. Raises InputError for `max_tokens` below 1.
    """
    if not is_index(max_tokens) or max_tokens < 1:
        raise InputError(f"max_tokens must be a whole number from 1; got {max_tokens!r}")
    lengths = prompts.lengths
    groups: list[list[int]] = []
    for i in np.argsort(-lengths, kind="stable").tolist():
        if groups and _fits(groups[-1], i, lengths, max_tokens, equal_length):
            groups[-1].append(i)
        else:
            groups.append([i])
    return [_padded(prompts, group, pad_id) for group in groups]


def _fits(group: list[int], i: int, lengths: np.ndarray, max_tokens: int, equal_length: bool) -> bool:
    longest = int(lengths[group[0]])
    return (len(group) + 1) * longest <= max_tokens and (not equal_length or int(lengths[i]) == longest)


def _padded(prompts: Prompts, group: list[int], pad_id: int) -> TokenBatch:
    lengths = prompts.lengths[group]
    mask = np.arange(lengths.max()) < lengths[:, None]
    ids = np.full(mask.shape, pad_id, dtype=np.int64)
    ids[mask] = np.concatenate([prompts.ids[i] for i in group])
    return TokenBatch(np.array(group, dtype=np.int64), torch.from_numpy(ids), torch.from_numpy(mask))
