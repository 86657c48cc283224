"""What can be said of one vector of the stream: its length, its coordinates' spread, its largest coordinate."""

from __future__ import annotations

from collections.abc import Collection

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

MEASURES = ("l2", "rms", "mean", "std", "max_abs", "max_index", "massive")
"""l2, the length; rms, the length over sqrt(d_model); mean and std of the coordinates (std is what a centred norm is made of:
l2 of the centred vector = std * sqrt(d_model)); the largest absolute coordinate, which one it is, and how many are massive."""

MASSIVE, TIMES_MEDIAN = 100.0, 1000.0
"""A coordinate is massive above 100 and from 1000 times the median of its prompt's (Sun et al. 2024, arXiv 2402.17762)."""


def measured(x: Float[Tensor, "row d_model"], wanted: Collection[str]) -> dict[str, Float[Tensor, " row"]]:
    """The wanted measures of each vector, but for `massive`, which needs the whole prompt."""
    out: dict[str, Tensor] = {}
    width = x.shape[-1] ** 0.5
    if {"l2", "rms"} & set(wanted):
        out["l2"] = torch.linalg.vector_norm(x, dim=-1)
        out["rms"] = out["l2"] / width
    if {"mean", "std"} & set(wanted):
        out["mean"] = x.mean(-1)
    if "std" in wanted:
        out["std"] = torch.linalg.vector_norm(x - out["mean"][:, None], dim=-1) / width
    if {"max_abs", "max_index"} & set(wanted):
        out["max_abs"], out["max_index"] = largest_coordinate(x)
    return {name: out[name] for name in wanted if name in out}


def largest_coordinate(x: Float[Tensor, "row d_model"]) -> tuple[Float[Tensor, " row"], Float[Tensor, " row"]]:
    """The largest absolute coordinate of each vector, and which one it is."""
    size = next(n for n in (64, 32, 16, 8, 4, 2, 1) if x.shape[-1] % n == 0)
    blocks = x.abs().unflatten(-1, (-1, size))  # a maximum with its index is slow: so of block maxima, then inside one block
    value, block = blocks.amax(-1).max(-1)
    inside = blocks[torch.arange(len(x), device=x.device), block].argmax(-1)
    return value, (block * size + inside).to(x.dtype)


def massive(x: Float[Tensor, "batch pos d_model"], mask: Bool[Tensor, "batch pos"]) -> Int[Tensor, "batch pos"]:
    """How many coordinates are massive at each position; the median is over the prompt's own tokens and all coordinates."""
    counts = torch.zeros(mask.shape, dtype=torch.long, device=x.device)
    for row, there in enumerate(mask.to(x.device)):
        size = x[row, there].abs()
        candidates = size[size > MASSIVE].sort().values
        least = _least_massive(size, candidates)
        if least < len(candidates):
            counts[row, there] = (size >= candidates[least]).sum(-1)
    return counts


def _least_massive(size: Tensor, candidates: Tensor) -> int:
    """The first candidate at whose thousandth part or below at least half of all coordinates lie: bisected, without a median's sort."""
    low, high = 0, len(candidates)
    while low < high:
        middle = (low + high) // 2
        below = int((size <= candidates[middle] / TIMES_MEDIAN).sum())
        low, high = (low, middle) if 2 * below >= size.numel() else (middle + 1, high)
    return low
