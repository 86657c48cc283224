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

_BLOCK = 2**20  # bytes
_READ = {"l2": ("square",), "rms": ("square",), "mean": ("sum",), "std": ("square", "sum"), "max_abs": ("index",), "max_index": ("index",)}
_FOLLOWS = {
    "l2": lambda found: np.sqrt(found["square"]),
    "rms": lambda found: found["l2"] / found.width**0.5,
    "mean": lambda found: found["sum"] / found.width,
    "std": lambda found: np.sqrt(np.maximum((found["rms"] - found["mean"]) * (found["rms"] + found["mean"]), 0)),
    "max_abs": lambda found: np.abs(found["largest"]).astype(float),
    "max_index": lambda found: found["index"].astype(float),
}


class Found(dict[str, Shaped[np.ndarray, " row"]]):
    """What was read of some vectors; the measures that follow from it are worked out when they are first asked for.

    Best after the pass: beside a running model, whose matrices fill the processor's caches, small steps take several times as long.
    """

    def __init__(self, width: int):
        super().__init__()
        self.width = width

    def unread(self, measures: Collection[str]) -> set[str]:
        """What these measures follow from and was not read yet."""
        return {name for measure in measures for name in _READ[measure] if name not in self}

    def __missing__(self, measure: str) -> Float64[np.ndarray, " row"]:
        self[measure] = _FOLLOWS[measure](self)
        return self[measure]


class Reader:
    """Reads vectors; its memory serves one tensor after the other."""

    def __init__(self) -> None:
        self._size, self._ones = np.empty((0, 0)), np.empty(0)

    def read(
        self, found: Found, x: Float[Tensor, "row d_model"], measures: Collection[str], beside: Float[Tensor, "row d_model"] | None = None
    ) -> Float64[np.ndarray, " row"] | None:
        """Add to `found` what these measures follow from; the answer is the vectors' inner products with those `beside` them, if any."""
        missing = found.unread(measures)
        out = self._by_blocks(x, beside, missing) if _few_threads(x) else _by_kernels(x, beside, missing)
        inner = out.pop("inner", None)
        found |= out
        if missing & {"square", "sum"} and {"square", "sum"} <= found.keys():
            _std_where_sums_cancel(found, x)
        return inner

    def _by_blocks(self, x: Tensor, beside: Tensor | None, missing: Collection[str]) -> dict[str, Shaped[np.ndarray, " row"]]:
        """Block by block of rows."""
        rows, other = x.numpy(), None if beside is None else beside.numpy()
        n, width = rows.shape
        step = max(1, _BLOCK // (width * rows.itemsize))
        if self._size.shape != (step, width) or self._size.dtype != rows.dtype:
            self._size, self._ones = np.empty((step, width), dtype=rows.dtype), np.ones(width, dtype=rows.dtype)
        out = {name: np.empty(n, dtype=np.int64 if name == "index" else float) for name in missing}
        if other is not None:
            out["inner"] = np.empty(n)
        for start in range(0, n, step):
            part = slice(start, start + step)
            block = rows[part]
            if "square" in out:
                np.vecdot(block, block, out=out["square"][part])
            if "sum" in out:
                np.vecdot(block, self._ones, out=out["sum"][part])
            if other is not None:
                np.vecdot(block, other[part], out=out["inner"][part])
            if "index" in out:
                np.abs(block, out=self._size[: len(block)]).argmax(-1, out=out["index"][part])
        if "index" in out:
            out["largest"] = rows[np.arange(n), out["index"]]
        return out


def inner(one: Float[Tensor, "*row width"], other: Float[Tensor, "*row width"]) -> Float64[np.ndarray, "*row"]:
    """Inner products of vectors."""
    return np.vecdot(one.numpy(), other.numpy()).astype(float) if _few_threads(one) else array(torch.linalg.vecdot(one, other))


def array(x: Shaped[Tensor, "*row"]) -> Float64[np.ndarray, "*row"]:
    """Of numbers that are few beside what they were taken from."""
    return x.detach().cpu().double().numpy()


def _few_threads(x: Tensor) -> bool:
    return x.device.type == "cpu" and torch.get_num_threads() <= FEW_THREADS


def _by_kernels(x: Tensor, beside: Tensor | None, missing: Collection[str]) -> dict[str, Shaped[np.ndarray, " row"]]:
    """What a :class:`Reader` reads, one kernel after the other: for an accelerator, and for many threads."""
    out: dict[str, Tensor] = {}
    if "square" in missing:
        out["square"] = torch.linalg.vector_norm(x, dim=-1).square()
    if "sum" in missing:
        out["sum"] = x.sum(-1)
    if beside is not None:
        out["inner"] = torch.linalg.vecdot(x, beside)
    if "index" in missing:
        out["index"] = x.abs().argmax(-1)
        out["largest"] = x.gather(-1, out["index"][:, None])[:, 0]
    return {name: value.cpu().numpy() if name == "index" else array(value) for name, value in out.items()}


def _std_where_sums_cancel(found: Found, x: Float[Tensor, "row d_model"]) -> None:
    """By its definition, where what it follows from would not give it."""
    cancels = np.flatnonzero(found["sum"] ** 2 > 0.5 * found.width * found["square"])
    if len(cancels):
        std = found["std"]
        std[cancels] = array(x[torch.from_numpy(cancels).to(x.device)].std(-1, correction=0))


def massive(
    x: Float[Tensor, "batch pos d_model"], lengths: Int[np.ndarray, " batch"], largest: Float[np.ndarray, "batch pos"]
) -> Int64[np.ndarray, "batch pos"]:
    """How many coordinates are massive at each position, of prompts of these lengths whose `largest` coordinate is known.

    The median is over the prompt's own tokens and all of their coordinates.
    """
    counts = np.zeros(largest.shape, dtype=np.int64)
    values = x.cpu().numpy()
    memory = np.empty(values.shape[1:], dtype=values.dtype)
    for row, length in enumerate(lengths):
        tops = largest[row, :length].astype(values.dtype)
        large = np.sort(tops[tops > MASSIVE])[::-1]
        if not len(large):
            continue
        size = np.abs(values[row, :length], out=memory[:length])
        n_rows = _far_above(large, size)
        if n_rows:
            # From the last such row's largest on every coordinate is massive, and up to the next row's none: the search is for between.
            lowest, highest_other = large[n_rows - 1], large[n_rows] if n_rows < len(large) else MASSIVE
            rows = np.flatnonzero(tops >= lowest)
            inside = size[rows]
            candidates = np.sort(inside[(inside > highest_other) & (inside < lowest)])[::-1]
            found = _far_above(candidates, size)
            counts[row, rows] = np.count_nonzero(inside >= (candidates[found - 1] if found else lowest), axis=-1)
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
