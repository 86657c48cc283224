"""The contributions of one batch while they come in, and as they leave: one row a readout, one column a component."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64, Int32, Int64
from torch import Tensor

from streamlens.measure.components import Component
from streamlens.measure.splits import Part
from streamlens.prompts import Readouts
from streamlens.stream.readout import Key


@dataclass(frozen=True)
class Sources:
    """The parts of some components, one a source position; those behind the position that is read are 0 and no rows."""

    component: Int64[np.ndarray, " head"]  # which columns of the shares they are the parts of
    contribution: Float64[np.ndarray, "row head source"]
    attention: Float64[np.ndarray, "row head source"] | None  # None where heads are summed


@dataclass(frozen=True)
class Shares:
    """Contributions of one batch: every component at every readout."""

    readouts: Readouts  # prompt is the index into all prompts of the call
    contribution: Float64[np.ndarray, "row component"]
    logit: Float64[np.ndarray, " row"]
    error: Float64[np.ndarray, " row"]  # |sum - logit| / sum|parts|
    numbers: Int32[np.ndarray, "row component"] | None = None  # which neuron or expert a component is; -1 for neither
    sources: Sources | None = None
    components: tuple[Component, ...] = ()  # what the columns are about
    entropy: Float64[np.ndarray, " row"] | None = None  # by which `logit` is above the log-probability, where that is read


class Table:
    """Takes what one backward pass after another gives at the places `found`; those that share a column are summed in it."""

    def __init__(self, found: dict[Key, tuple[Component, ...]], readouts: Readouts, dtype: torch.dtype):
        self.components = tuple(component for place in found.values() for component in place)
        self.columns = _columns(found)
        self.readouts, n = readouts, len(readouts)
        self.contribution = torch.zeros(n, len(self.components), dtype=dtype)
        self.logit, self.gap = torch.zeros(n, dtype=dtype), torch.zeros(n, dtype=dtype)
        self.entropy = torch.full((n,), torch.nan, dtype=dtype)
        self.numbers: Tensor | None = None
        self.sources: dict[int, Tensor] = {}  # by the first column that they are the parts of
        self.attention: dict[int, Tensor] = {}

    def put(self, key: Key, rows: np.ndarray, values: Float[Tensor, "row ..."]) -> None:
        """`values` `[row]` or `[row, component]` of the place `key`."""
        _add(self.contribution[:, self.columns[key]], rows, values.reshape(len(rows), -1))

    def put_part(self, key: Key, rows: np.ndarray, part: Part) -> None:
        """What the write at `key` was split into."""
        self.put(key, rows, part.shares)
        columns, n, at = self.columns[key], len(self.readouts), torch.from_numpy(rows)
        if part.numbers is not None:
            if self.numbers is None:
                self.numbers = torch.full(self.contribution.shape, -1, dtype=torch.int32)
            self.numbers[:, columns][at] = part.numbers.int().cpu()
        for kept, values in ((self.sources, part.sources), (self.attention, part.attention)):
            if values is not None:
                _add(kept.setdefault(columns.start, values.new_zeros(n, *values.shape[1:], device="cpu")), rows, values)
        self.gap[at] = torch.maximum(self.gap[at], part.gap.to(self.gap))

    def finished(self) -> tuple[Shares, float]:
        """The contributions, and by how much of sum|parts| the parts of a write miss its own share at worst."""
        contribution, logit, sources = self.contribution.double(), self.logit.double(), self._sources()
        total, size = contribution.sum(-1), contribution.abs().sum(-1)
        if sources is not None:
            whole, parts = contribution[:, torch.from_numpy(sources.component)], torch.from_numpy(sources.contribution)
            total = total - whole.sum(-1) + parts.sum((1, 2))
            size = size - whole.abs().sum(-1) + parts.abs().sum((1, 2))
        size = size.clamp_min(1e-300)
        error, gap = (total - logit).abs() / size, float((self.gap / size).max())
        numbers = None if self.numbers is None else self.numbers.numpy()
        entropy = None if self.entropy.isnan().all() else self.entropy.double().numpy()
        return Shares(self.readouts, contribution.numpy(), logit.numpy(), error.numpy(), numbers, sources, self.components, entropy), gap

    def _sources(self) -> Sources | None:
        if not self.sources:
            return None
        starts = sorted(self.sources)
        component = np.concatenate([np.arange(start, start + self.sources[start].shape[1]) for start in starts])
        parts, attention = (
            torch.cat([kept[start] for start in starts], 1).double().numpy() if kept else None for kept in (self.sources, self.attention)
        )
        return Sources(component, parts, attention)


def _columns(found: dict[Key, tuple[Component, ...]]) -> dict[Key, slice]:
    """The columns of each place; a place without components adds to those of the heads before it."""
    start, columns, heads = 0, {}, slice(0, 0)
    for key, place in found.items():
        columns[key] = slice(start, start + len(place)) if place else heads
        heads = columns[key] if place and place[0].kind == "head" else heads
        start += len(place)
    return columns


def _add(table: Tensor, rows: np.ndarray, values: Tensor) -> None:
    if len(rows) == len(table):
        table += values.cpu()
    else:
        table[torch.from_numpy(rows)] += values.cpu()
