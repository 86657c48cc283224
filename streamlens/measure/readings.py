"""Where a sweep reads its metrics, and the numbers that it finds there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from streamlens.measure import metrics as m
from streamlens.measure.metrics import Logits, Metric
from streamlens.measure.places import at, flat_index, ids_on
from streamlens.prompts import Readouts, TokenBatch
from streamlens.stream.unembed import Unembed

TOGETHER = 4
"""Changes whose logits are made together, where there are as many: so many times fewer rows of clean logits are held."""


class Rows:
    """The (prompt, position)s at which anything is read, each once, ordered by place in the batch."""

    def __init__(self, batch: TokenBatch, places: tuple[np.ndarray, np.ndarray], readouts: Readouts):
        at_place, at_target = flat_index(batch, *places), flat_index(batch, readouts.prompt, readouts.position)
        self.flat = np.unique(np.concatenate([at_place, at_target]))
        self.place = np.searchsorted(self.flat, at_place)  # index into flat of each place
        self.target = np.searchsorted(self.flat, at_target)
        self.readouts = readouts
        following = torch.full(batch.ids.shape, -1)
        following[:, :-1] = torch.where(batch.mask[:, 1:], batch.ids[:, 1:], -1)
        self.following = following.reshape(-1)[torch.from_numpy(self.flat)]

    def of(self, hidden: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "row d_model"]:
        return at(hidden, self.flat)


@dataclass(frozen=True)
class Readings:
    """Metrics of one batch: of the clean run `[row]` and under every change `[variant, row]`; nan where a metric's inputs are absent."""

    at_position: dict[str, tuple[np.ndarray, np.ndarray]]
    at_target: dict[str, tuple[np.ndarray, np.ndarray]]

    @classmethod
    def empty(cls, n_changes: int, n_places: int, n_targets: int, wanted: tuple[Metric, ...]) -> Readings:
        def full(names: Sequence[str], n: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
            return {name: (np.full(n, np.nan), np.full((n_changes, n), np.nan)) for name in names}

        return cls(
            full([m.name_of(w) for w in m.of_positions(wanted)], n_places), full([w for w in wanted if w in m.TARGET_METRICS], n_targets)
        )


@torch.no_grad()
def measure(unembed: Unembed, rows: Rows, clean: Tensor, hidden: Mapping[int, Tensor], table: Readings, wanted: tuple[Metric, ...]) -> None:
    """Fill a table, `hidden` by number of the change, a few rows at a time: their clean logits are made once, and nothing else is held.

    The changed logits of several changes are made together, since a product of few rows takes as long as one of many.
    """
    changed, scratch = list(hidden), None
    at_once = next(unembed.chunks(len(clean) * max(1, len(hidden))), slice(1)).stop
    for chunk in _even(len(clean), at_once // max(1, min(len(hidden), TOGETHER)) or 1):
        base = Logits(unembed.logits(clean[chunk]))
        scratch = torch.empty_like(base.logits) if scratch is None else scratch
        view = _Chunk(rows, chunk, clean.device)
        view.put(table.at_position, view.place, m.clean_position_metrics(base, view.following, wanted))
        view.put(table.at_target, view.target, m.target_metrics(base, *view.targets, wanted))
        for part in _even(len(hidden), max(1, at_once // (chunk.stop - chunk.start))):
            numbers = changed[part]
            logits = unembed.logits(torch.cat([hidden[number][chunk] for number in numbers]))
            for number, own in zip(numbers, logits.chunk(len(numbers)), strict=True):
                run = Logits(own, scratch)
                view.put(table.at_position, view.place, m.position_metrics(base, run, view.following, wanted), number)
                view.put(table.at_target, view.target, m.target_metrics(run, *view.targets, wanted), number)
            del logits, own, run  # before the next are made


def _even(n: int, size: int) -> Iterator[slice]:
    """Slices of 0 to `n`, of at most `size` each and nearly equal, the longest first."""
    count = -(-n // size)
    return (slice(-(-n * i // count), -(-n * (i + 1) // count)) for i in range(count))


class _Chunk:
    """The table's rows whose place is within a slice of the rows that are read."""

    def __init__(self, rows: Rows, chunk: slice, device: torch.device):
        def inside(index: np.ndarray) -> tuple[np.ndarray, Tensor]:
            table_rows = np.flatnonzero((index >= chunk.start) & (index < chunk.stop))
            return table_rows, torch.from_numpy(index[table_rows] - chunk.start).to(device)

        self.following = rows.following[chunk].to(device)
        self.place, self.target = inside(rows.place), inside(rows.target)
        self.targets = (self.target[1], *ids_on(device, rows.readouts.take(self.target[0])))

    def put(self, store: dict, where: tuple[np.ndarray, Tensor], values: dict[str, Tensor], number: int | None = None) -> None:
        """Values a row of the chunk (or, with a target, a row of the table already) into the table."""
        table_rows, index = where
        for name, value in values.items():
            column = store[name][0] if number is None else store[name][1][number]
            column[table_rows] = (value if name in m.TARGET_METRICS else value[index]).double().cpu().numpy()
