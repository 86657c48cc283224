"""What can be said of one vector of the stream: its length, its coordinates' spread, its largest coordinate."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

MEASURES = ("l2", "rms", "mean", "std", "max_abs", "max_index")
"""l2, the length; rms, the length over sqrt(d_model); mean and std of the coordinates (std is what a centred norm is made of:
l2 of the centred vector = std * sqrt(d_model)); the largest absolute coordinate, and which one it is."""

OF_A_PROMPT = "massive"
"""How many coordinates are massive, which the whole prompt decides; the rule is of what a block hands on."""

MASSIVE, TIMES_MEDIAN = 100.0, 1000.0
"""A coordinate is massive above 100 and from 1000 times the median of its prompt's (Sun et al. 2024, arXiv 2402.17762)."""


def measured(x: Float[Tensor, "row d_model"], wanted: Collection[str]) -> dict[str, Float[Tensor, " row"]]:
    """The wanted measures of each vector."""
    out: dict[str, Tensor] = {}
    if {"l2", "rms", "std"} & set(wanted):
        out["l2"] = torch.linalg.vector_norm(x, dim=-1)
        out["rms"] = out["l2"] / x.shape[-1] ** 0.5
    if {"mean", "std"} & set(wanted):
        out["mean"] = x.mean(-1)
    if "std" in wanted:
        out["std"] = _std(x, out["rms"], out["mean"])
    if {"max_abs", "max_index"} & set(wanted):
        out["max_abs"], out["max_index"] = largest_coordinate(x)
    return {name: out[name] for name in wanted if name in out}


def _std(x: Float[Tensor, "row d_model"], rms: Float[Tensor, " row"], mean: Float[Tensor, " row"]) -> Float[Tensor, " row"]:
    """sqrt(rms^2 - mean^2), which is a pass less than the definition; where the two cancel, by the definition."""
    std = ((rms - mean.abs()) * (rms + mean.abs())).clamp_min(0).sqrt()
    cancels = mean.abs() > 0.7 * rms
    if bool(cancels.any()):
        std[cancels] = x[cancels].std(-1, correction=0)
    return std


def largest_coordinate(x: Float[Tensor, "row d_model"]) -> tuple[Float[Tensor, " row"], Float[Tensor, " row"]]:
    """The largest absolute coordinate of each vector, and which one it is."""
    size = x.abs()
    # On a CPU, torch's own argmax takes several times as long as numpy's.
    index = torch.from_numpy(size.numpy().argmax(-1)) if size.device.type == "cpu" else size.argmax(-1)
    return size.gather(-1, index[:, None])[:, 0], index.to(x.dtype)


def massive(
    x: Float[Tensor, "batch pos d_model"], lengths: Int[np.ndarray, " batch"], largest: Float[Tensor, "batch pos"]
) -> Int[Tensor, "batch pos"]:
    """How many coordinates are massive at each position, of prompts of these lengths whose `largest` coordinate is known.

    The median is over the prompt's own tokens and all of their coordinates.
    """
    counts = np.zeros(largest.shape, dtype=np.int64)
    large = (largest > MASSIVE).cpu().numpy()
    for row in np.flatnonzero(large.any(-1)):
        at = np.flatnonzero(large[row, : lengths[row]])
        size = np.abs(x[row, : lengths[row]].cpu().numpy())
        candidates = np.sort(size[at][size[at] > MASSIVE])
        least = _least_massive(size, candidates)
        if least < len(candidates):
            counts[row, at] = np.count_nonzero(size[at] >= candidates[least], axis=-1)
    return torch.from_numpy(counts)


def _least_massive(size: np.ndarray, candidates: np.ndarray) -> int:
    """The first candidate at whose thousandth part or below at least half of all coordinates lie: bisected, without a median's sort."""
    low, high = 0, len(candidates)
    while low < high:
        middle = (low + high) // 2
        below = np.count_nonzero(size <= candidates[middle] / TIMES_MEDIAN)
        low, high = (low, middle) if 2 * below >= size.size else (middle + 1, high)
    return low
