"""What can be said of one vector of the stream: its length, its coordinates' spread, its largest coordinate."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection

import numpy as np
import torch
from jaxtyping import Float, Float64, Int, Int64, Shaped
from torch import Tensor

MEASURES = ("l2", "rms", "mean", "std", "max_abs", "max_index")
"""l2, the length; rms, the length over sqrt(d_model); mean and std of the coordinates (std is what a centred norm is made of:
l2 of the centred vector = std * sqrt(d_model)); the largest absolute coordinate, and which one it is."""

OF_A_PROMPT = "massive"
"""How many coordinates are massive, which the whole prompt decides; the rule is of what a block hands on."""

MASSIVE, TIMES_MEDIAN = 100.0, 1000.0
"""A coordinate is massive above 100 and from 1000 times the median of its prompt's (Sun et al. 2024, arXiv 2402.17762)."""


FEW_THREADS = 4
"""With up to so many, one that does everything to a block of rows while the block is in its cache is faster than all that share each
kernel: starting them takes longer than a kernel does."""

_BLOCK = 2**19  # bytes
_FROM = {"rms": ("l2",), "std": ("l2", "mean"), "max_abs": ("max_index",)}


def measured(
    x: Float[Tensor, "row d_model"], wanted: Collection[str], beside: Float[Tensor, "row d_model"] | None = None
) -> dict[str, Float64[np.ndarray, " row"]]:
    """At least the wanted measures of each vector, and `inner`, its inner product with the vector `beside` it, where there is one."""
    needed = {name for measure in wanted for name in _FROM.get(measure, (measure,))}
    out = (_by_blocks if _few_threads(x) else _by_kernels)(x, beside, needed)
    if "l2" in out:
        out["rms"] = out["l2"] / x.shape[-1] ** 0.5
    if "std" in wanted:
        out["std"] = _std(x, out["rms"], out["mean"])
    return out


def inner(one: Float[Tensor, "*row width"], other: Float[Tensor, "*row width"]) -> Float64[np.ndarray, "*row"]:
    """Inner products of vectors."""
    return np.vecdot(one.numpy(), other.numpy()).astype(float) if _few_threads(one) else array(torch.linalg.vecdot(one, other))


def array(x: Shaped[Tensor, "*row"]) -> Float64[np.ndarray, "*row"]:
    """Of numbers that are few beside what they were taken from."""
    return x.detach().cpu().double().numpy()


def _few_threads(x: Tensor) -> bool:
    return x.device.type == "cpu" and torch.get_num_threads() <= FEW_THREADS


def _by_blocks(x: Tensor, beside: Tensor | None, needed: Collection[str]) -> dict[str, Float64[np.ndarray, " row"]]:
    """l2, mean, inner, max_index and max_abs, block by block of rows."""
    rows, other = x.numpy(), None if beside is None else beside.numpy()
    n, width = rows.shape
    out = {name: np.empty(n) for name in needed if name in ("l2", "mean")} | ({} if other is None else {"inner": np.empty(n)})
    index, ones = np.empty(n, dtype=np.int64), np.ones(width, dtype=rows.dtype)
    step = max(1, _BLOCK // (width * rows.itemsize))
    size = np.empty((min(step, n), width), dtype=rows.dtype)
    for start in range(0, n, step):
        part = slice(start, start + step)
        block = rows[part]
        if "l2" in out:
            out["l2"][part] = np.vecdot(block, block)
        if "mean" in out:
            out["mean"][part] = np.vecdot(block, ones)
        if other is not None:
            out["inner"][part] = np.vecdot(block, other[part])
        if "max_index" in needed:
            np.abs(block, out=size[: len(block)]).argmax(-1, out=index[part])
    if "l2" in out:
        np.sqrt(out["l2"], out=out["l2"])
    if "mean" in out:
        out["mean"] /= width
    if "max_index" in needed:
        out |= {"max_index": index.astype(float), "max_abs": np.abs(rows[np.arange(n), index]).astype(float)}
    return out


def _by_kernels(x: Tensor, beside: Tensor | None, needed: Collection[str]) -> dict[str, Float64[np.ndarray, " row"]]:
    """The same, one kernel after the other: for an accelerator, and for many threads."""
    out: dict[str, Tensor] = {}
    if "l2" in needed:
        out["l2"] = torch.linalg.vector_norm(x, dim=-1)
    if "mean" in needed:
        out["mean"] = x.mean(-1)
    if beside is not None:
        out["inner"] = torch.linalg.vecdot(x, beside)
    if "max_index" in needed:
        size = x.abs()
        out["max_index"] = size.argmax(-1)
        out["max_abs"] = size.gather(-1, out["max_index"][:, None])[:, 0]
    return {name: array(value) for name, value in out.items()}


def _std(
    x: Float[Tensor, "row d_model"], rms: Float64[np.ndarray, " row"], mean: Float64[np.ndarray, " row"]
) -> Float64[np.ndarray, " row"]:
    """sqrt(rms^2 - mean^2), which is a pass less than the definition; where the two cancel, by the definition."""
    size = np.abs(mean)
    std = np.sqrt(np.maximum((rms - size) * (rms + size), 0))
    cancels = np.flatnonzero(size > 0.7 * rms)
    if len(cancels):
        std[cancels] = array(x[torch.from_numpy(cancels).to(x.device)].std(-1, correction=0))
    return std


def massive(
    x: Float[Tensor, "batch pos d_model"], lengths: Int[np.ndarray, " batch"], largest: Float[np.ndarray, "batch pos"]
) -> Int64[np.ndarray, "batch pos"]:
    """How many coordinates are massive at each position, of prompts of these lengths whose `largest` coordinate is known.

    The median is over the prompt's own tokens and all of their coordinates.
    """
    counts = np.zeros(largest.shape, dtype=np.int64)
    memory = np.empty((largest.shape[1], x.shape[-1]), dtype=np.float64 if x.dtype == torch.float64 else np.float32)
    for row, length in enumerate(lengths):
        if (largest[row, :length] > MASSIVE).any():
            size = np.abs(x[row, :length].cpu().to(torch.promote_types(x.dtype, torch.float32)).numpy(), out=memory[:length])
            where = np.flatnonzero(size > MASSIVE)
            above = size.reshape(-1)[where]
            candidates = np.sort(above)[::-1]
            found = _far_above(candidates, size)
            if found:
                counts[row, :length] = np.bincount(where[above >= candidates[found - 1]] // size.shape[1], minlength=length)
    return counts


def _far_above(candidates: Float[np.ndarray, " some"], size: Float[np.ndarray, "pos d_model"]) -> int:
    """How many of some of these absolute coordinates, the largest first, are at least :data:`TIMES_MEDIAN` times the median of all.

    Each is asked by counting how many lie at or below its thousandth part, from the largest on, since of hundreds above 100 often one is;
    a median would take longer than some counts.
    """

    def falls_short(i: int) -> bool:
        return 2 * int(np.count_nonzero(size <= candidates[i] / TIMES_MEDIAN)) < size.size

    found, next_one = 0, 1
    while next_one <= len(candidates) and not falls_short(next_one - 1):
        found, next_one = next_one, 2 * next_one
    return bisect_left(range(len(candidates)), True, found, min(next_one - 1, len(candidates)), key=falls_short)
