"""The attribution table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from streamlens import schema
from streamlens.frames.columns import Labels, carried, component_columns, place_columns, repeat, target_columns
from streamlens.frames.sources import by_source
from streamlens.measure.attribution import Component, Shares


def attribution(shares: Sequence[Shares], components: Sequence[Component], labels: Labels, number: str | None = None) -> pd.DataFrame:
    """The attribution table, ordered by prompt, position and target as asked, components in the model's order.

    `number` names the column that tells split rows apart: "neuron", "expert" or "source".
    """
    parts = {name: np.concatenate([getattr(s.readouts, name) for s in shares]) for name in ("prompt", "position", "target", "versus")}
    parts["logit"] = np.concatenate([s.logit for s in shares])
    if shares[0].entropy is not None:
        parts["log_probability"] = parts["logit"] - np.concatenate([s.entropy for s in shares])
    n, which, columns = by_source(shares) if number == "source" else _by_component(shares, number)
    if len(shares) > 1:
        order = np.lexsort((np.arange(len(parts["logit"])), parts["position"], parts["prompt"]))
        moved = _moved(order, n)
        parts, columns = {name: v[order] for name, v in parts.items()}, {name: v[moved] for name, v in columns.items()}
        n, which = (n, which) if isinstance(n, int) else (n[order], which[moved])
    groups = place_columns(labels, parts["prompt"], parts["position"]) | target_columns(labels, parts["target"], parts["versus"])
    groups |= {name: parts[name] for name in ("logit", "log_probability") if name in parts}
    columns |= {name: repeat(values, n) for name, values in groups.items()} | component_columns(components, which)
    if number == "source":
        columns["source_token"] = labels.at(columns["prompt"], columns["source"])
    columns |= {name: values.repeat(n) for name, values in carried(labels.prompts, parts["prompt"]).items()}
    return schema.apply(pd.DataFrame(columns, copy=False), "attribution")


def _by_component(shares: Sequence[Shares], number: str | None) -> tuple[int, int, dict[str, np.ndarray]]:
    """One row a component at every readout: rows a readout, readouts, and the columns that differ from row to row."""
    columns = {"contribution": np.concatenate([s.contribution for s in shares])}
    if number is not None:
        columns[number] = np.concatenate([s.numbers for s in shares])
    n_readouts, n = columns["contribution"].shape
    return n, n_readouts, {name: values.reshape(-1) for name, values in columns.items()}


def _moved(order: np.ndarray, n: int | np.ndarray) -> np.ndarray:
    """The rows of readouts, `n` a readout, in the order of the readouts `order`."""
    n = np.broadcast_to(n, order.shape)
    starts = np.cumsum(n) - n
    first = np.cumsum(n[order]) - n[order]
    return np.arange(int(n.sum())) + np.repeat(starts[order] - first, n[order])
