"""Summaries of any number of prompts in constant memory: sums that merge, and a sketch of the distribution that merges too.

Counts, sums, sums of squares and of logarithms, smallest and largest are kept for every column and group of positions, and the
quantiles come from a logarithmic histogram (DDSketch: Masson, Rim & Lee 2019, PVLDB 12): a quantile is within a relative
:data:`ACCURACY` of the value that stands at its rank. However the prompts are split into batches, counts, extremes and quantiles
are the same, and the sums are to the rounding of float64.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float64, Int64

from streamlens.errors import InputError
from streamlens.measure.growth import Column, Measured

GROUPS = ("layer", "position")
"""One row for position 0 and one for all later ones; or one row for every position."""

ACCURACY = 0.005
QUANTILES = {"q05": 0.05, "q25": 0.25, "median": 0.5, "q75": 0.75, "q95": 0.95}
NO_MEAN = "max_index"  # the number of a coordinate, of which there is no mean

_GAMMA = (1 + ACCURACY) / (1 - ACCURACY)
_SMALLEST = 1e-30  # what is smaller counts as 0
_OFFSET = 1 - int(np.floor(np.log(_SMALLEST) / np.log(_GAMMA)))  # the first bin above 0 is 1
_BINS = 2**15  # on either side of 0: up to 1e100 and more
_PENDING = 2**21  # values that wait to be sorted into the sketch: 16 MB


@dataclass
class Running:
    """Of the columns of batches that :meth:`add` has seen; `group` says which positions are put together."""

    group: str = "layer"
    columns: tuple[Column, ...] = ()
    n_prompts: Int64[np.ndarray, " group"] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    count: Int64[np.ndarray, "group column"] = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    sums: dict[str, Float64[np.ndarray, "group column"]] = field(default_factory=dict)
    _keys: Int64[np.ndarray, " bin"] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    _held: Int64[np.ndarray, " bin"] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    _pending: list[Int64[np.ndarray, " value"]] = field(default_factory=list)

    def add(self, batch: Measured) -> None:
        """Take in a batch; its prompts must not stand in another one."""
        kept = [i for i, column in enumerate(batch.columns) if column.measure != NO_MEAN]
        columns = tuple(batch.columns[i] for i in kept)
        if self.columns and columns != self.columns:
            raise InputError("batches must have the same sites and measures to be summarised together")
        self.columns = columns
        group = np.minimum(batch.position, 1) if self.group == "layer" else batch.position
        self._grow(int(group.max()) + 1)
        for g in np.unique(group):
            self._add(int(g), batch.value[group == g][:, kept], len(np.unique(batch.prompt[group == g])))

    def merge(self, other: Running) -> None:
        """Take in what another one has seen of other prompts."""
        if (self.group, self.columns) != (other.group, other.columns):
            raise InputError("summaries must have the same sites, measures and groups to be merged")
        self._grow(len(other.count))
        part = slice(0, len(other.count))
        self.n_prompts[part] += other.n_prompts
        self.count[part] += other.count
        for name, total in self.sums.items():
            _JOIN[name](total[part], other.sums[name], out=total[part])
        other._compact()
        self._hold(other._keys, other._held)

    def _grow(self, n_groups: int) -> None:
        more, width = n_groups - len(self.count), len(self.columns)
        if more > 0:
            self.n_prompts = np.concatenate([self.n_prompts, np.zeros(more, dtype=np.int64)])
            self.count = np.concatenate([self.count.reshape(-1, width), np.zeros((more, width), dtype=np.int64)])
            for name, start in _START.items():
                old = self.sums.get(name, np.zeros((0, width)))
                self.sums[name] = np.concatenate([old, np.full((more, width), start)])

    def _add(self, g: int, value: Float64[np.ndarray, "row column"], n_prompts: int) -> None:
        self.n_prompts[g] += n_prompts
        self.count[g] += len(value)
        self.sums["sum"][g] += value.sum(0)
        self.sums["square"][g] += np.square(value).sum(0)
        with np.errstate(divide="ignore", invalid="ignore"):  # the logarithm of what is not positive makes its sum nan or -inf
            self.sums["log"][g] += np.log(value).sum(0)
        np.minimum(self.sums["min"][g], value.min(0), out=self.sums["min"][g])
        np.maximum(self.sums["max"][g], value.max(0), out=self.sums["max"][g])
        place = (g * len(self.columns) + np.arange(len(self.columns))) * 2 * _BINS + _BINS
        self._pending.append((place + _bins(value)).ravel())
        if sum(map(len, self._pending)) > _PENDING:
            self._compact()

    # -- the sketch ----------------------------------------------------------------------------------------------
    def _compact(self) -> None:
        if self._pending:
            keys, held = np.unique(np.concatenate(self._pending), return_counts=True)
            self._pending = []
            self._hold(keys, held)

    def _hold(self, keys: np.ndarray, held: np.ndarray) -> None:
        merged, index = np.unique(np.concatenate([self._keys, keys]), return_inverse=True)
        self._held = np.bincount(index, np.concatenate([self._held, held])).astype(np.int64)
        self._keys = merged

    def quantile(self, q: float) -> Float64[np.ndarray, "group column"]:
        """The value at rank q (n - 1), rounded down, to a relative :data:`ACCURACY`; nan where there are none."""
        self._compact()
        n = self.count.ravel()
        starts = np.concatenate([[0], np.cumsum(n)])[:-1]
        seen = np.cumsum(self._held)
        at = np.searchsorted(seen, starts + np.floor(q * np.maximum(n - 1, 0)), side="right")
        values = np.full(len(n), np.nan)
        there = n > 0
        values[there] = _values(self._keys[at[there]] % (2 * _BINS) - _BINS)
        return np.clip(values.reshape(self.count.shape), self.sums["min"], self.sums["max"])

    def statistics(self) -> dict[str, Float64[np.ndarray, "group column"]]:
        """mean, std (over all values), geometric_mean (nan where a value is not above 0), min, the quantiles, max."""
        n = np.where(self.count > 0, self.count, np.nan)
        mean = self.sums["sum"] / n
        std = np.sqrt(np.maximum(self.sums["square"] / n - mean**2, 0))
        log = np.where(self.sums["min"] > 0, self.sums["log"], np.nan) / n
        quantiles = {name: self.quantile(q) for name, q in QUANTILES.items()}
        return {"mean": mean, "std": std, "geometric_mean": np.exp(log), "min": self.sums["min"]} | quantiles | {"max": self.sums["max"]}

    @property
    def kept(self) -> int:
        """Numbers that are kept: what memory grows with."""
        self._compact()
        return 2 * len(self._keys) + self.count.size * (1 + len(self.sums))


_START = {"sum": 0.0, "square": 0.0, "log": 0.0, "min": np.inf, "max": -np.inf}
_JOIN = {"sum": np.add, "square": np.add, "log": np.add, "min": np.minimum, "max": np.maximum}


def _bins(value: np.ndarray) -> Int64[np.ndarray, "row column"]:
    size = np.abs(value)
    index = np.ceil(np.log(np.maximum(size, _SMALLEST)) / np.log(_GAMMA)).astype(np.int64) + _OFFSET
    return np.where(size > _SMALLEST, np.sign(value).astype(np.int64) * np.minimum(index, _BINS - 1), 0)


def _values(bins: np.ndarray) -> np.ndarray:
    """The middle of each bin, in the relative sense."""
    size = 2 * np.exp((np.abs(bins) - _OFFSET) * np.log(_GAMMA)) / (_GAMMA + 1)
    return np.where(bins == 0, 0.0, np.sign(bins) * size)
