"""Rows by source position: a component of several parts has one row for each position up to the one that is read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from streamlens.measure.attribution import Shares


def by_source(shares: Sequence[Shares]) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """How many rows each readout has, the component of every row, and the columns that differ from row to row."""
    parts = [_of_batch(s) for s in shares]
    counts, which, columns = zip(*parts, strict=True)
    return np.concatenate(counts), np.concatenate(which), {name: np.concatenate([c[name] for c in columns]) for name in columns[0]}


def _of_batch(shares: Shares) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    n_components = shares.contribution.shape[1]
    ordinal = np.full(n_components, -1)
    ordinal[shares.sources.component] = np.arange(len(shares.sources.component))
    counts = np.where(ordinal < 0, 1, shares.readouts.position[:, None] + 1)
    cell = np.repeat(np.arange(counts.size), counts.reshape(-1))
    readout, which = np.divmod(cell, n_components)
    first = np.cumsum(counts) - counts.reshape(-1)
    is_part = ordinal[which] >= 0
    source = np.where(is_part, np.arange(len(cell)) - first[cell], -1).astype(np.int32)
    contribution = shares.contribution[readout, which]
    at = readout[is_part], ordinal[which[is_part]], source[is_part]
    contribution[is_part] = shares.sources.contribution[at]
    columns = {"contribution": contribution, "source": source}
    if shares.sources.attention is not None:
        columns["attention"] = np.full(len(cell), np.nan)
        columns["attention"][is_part] = shares.sources.attention[at]
    return counts.sum(1), which, columns
