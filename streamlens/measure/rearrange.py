"""Metrics of a model whose blocks run in other orders."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import nn

from streamlens.measure.ablation import Removal, Tick, overflowed
from streamlens.measure.metrics import Metric
from streamlens.measure.places import with_top
from streamlens.measure.readings import Readings, Rows, measure
from streamlens.models.anatomy import Anatomy
from streamlens.prompts import Readouts, TokenBatch
from streamlens.stream.rearranged import Order, Rearranged
from streamlens.stream.unembed import Unembed


def rearrange_batch(
    module: nn.Module,
    anatomy: Anatomy,
    batch: TokenBatch,
    orders: Sequence[Order],
    places: tuple[np.ndarray, np.ndarray],
    readouts: Readouts,
    wanted: tuple[Metric, ...],
    tick: Tick = lambda passes: None,
) -> Removal:
    """Metrics at `places` (prompt, position) and `readouts`, whose prompts are all in `batch`, under each order."""
    unembed, hidden = Unembed(module.get_submodule(anatomy.unembed), anatomy.logits), []
    with Rearranged(module, anatomy) as rearranged:
        clean = rearranged.record(batch.ids, batch.mask)
        tick(1.0)
        readouts = with_top(readouts, batch, clean, unembed)
        rows = Rows(batch, places, readouts)
        for order in orders:
            hidden.append(rows.of(rearranged.run(order)))
            tick(cost(order, anatomy.n_layers))
    table = Readings.empty(len(orders), len(rows.place), len(rows.target), wanted)
    measure(unembed, rows, rows.of(clean), dict(enumerate(hidden)), table, wanted)
    return Removal(*places, table.at_position, readouts, table.at_target, overflowed([rows.of(clean), *hidden]))


def cost(order: Order, n_layers: int) -> float:
    """Forward passes that one order takes."""
    return sum(len(item) if isinstance(item, tuple) else 1 for item in order) / n_layers
