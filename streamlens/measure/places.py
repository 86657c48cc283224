"""Where in a batch the rows of a call stand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from streamlens.prompts import TOP, Readouts, TokenBatch, fill_top
from streamlens.stream.unembed import Unembed


def flat_index(batch: TokenBatch, prompt: Int64[np.ndarray, " row"], position: Int64[np.ndarray, " row"]) -> Int64[np.ndarray, " row"]:
    """Index into the batch's `[batch * pos]` of each (prompt, position); every prompt must be in the batch."""
    row_of = np.full(int(batch.index.max()) + 1, -1)
    row_of[batch.index] = np.arange(len(batch.index))
    return row_of[prompt] * batch.ids.shape[1] + position


def places_in(batch: TokenBatch, where: Sequence[np.ndarray]) -> tuple[Int64[np.ndarray, " row"], Int64[np.ndarray, " row"]]:
    """(prompt, position) of every place that is read in a batch, ordered by prompt; `where` holds each prompt's positions."""
    inside = np.sort(batch.index)
    return np.repeat(inside, [len(where[i]) for i in inside]), np.concatenate([where[i] for i in inside])


def at(hidden: Float[Tensor, "batch pos width"], flat: np.ndarray) -> Float[Tensor, "row width"]:
    """Rows of a batch's tensor by their flat index."""
    return hidden.reshape(-1, hidden.shape[-1])[torch.from_numpy(flat).to(hidden.device)]


def ids_on(device: torch.device, readouts: Readouts) -> tuple[Int64[Tensor, " row"], Int64[Tensor, " row"]]:
    """(target, versus) of the readouts, on a device."""
    return torch.from_numpy(readouts.target).to(device), torch.from_numpy(readouts.versus).to(device)


def with_top(readouts: Readouts, batch: TokenBatch, hidden: Float[Tensor, "batch pos d_model"], unembed: Unembed) -> Readouts:
    """The readouts with the clean run's likeliest tokens where the target is "top" or "top5"."""
    top = readouts.target <= TOP
    if not top.any():
        return readouts
    rank = TOP - readouts.target[top]
    flat, row = np.unique(flat_index(batch, readouts.prompt[top], readouts.position[top]), return_inverse=True)
    ids = np.zeros(len(readouts), dtype=np.int64)
    ids[top] = unembed.top(at(hidden, flat), int(rank.max()) + 1).cpu().numpy()[row, rank]
    return fill_top(readouts, ids)


def ordinals(*keys: Int64[np.ndarray, " row"]) -> Int64[np.ndarray, " row"]:
    """The how-many-eth of the rows with its keys each row is, from 0: a backward pass, or a compare, serves one of them."""
    order = np.lexsort(keys)
    new = np.ones(len(order), dtype=bool)
    new[1:] = np.any([key[order][1:] != key[order][:-1] for key in keys], axis=0)
    starts = np.maximum.accumulate(np.where(new, np.arange(len(order)), 0))
    out = np.empty(len(order), dtype=np.int64)
    out[order] = np.arange(len(order)) - starts
    return out
