"""The effects table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from streamlens import schema
from streamlens.frames.columns import Labels, carried, component_columns, place_columns, repeat, target_columns
from streamlens.measure.effects import Effects

_MEASURED = ("direct", "direct_recomputed", "total", "repair_heads", "repair_mlps")


def effects(parts: Sequence[Effects], method: str, labels: Labels) -> pd.DataFrame:
    """The effects table, ordered by prompt, position and target as asked, components in the model's order."""
    readouts = {name: np.concatenate([getattr(p.readouts, name) for p in parts]) for name in ("prompt", "position", "target", "versus")}
    order = np.lexsort((np.arange(len(readouts["prompt"])), readouts["position"], readouts["prompt"]))
    readouts, n = {name: v[order] for name, v in readouts.items()}, len(parts[0].components)
    groups = place_columns(labels, readouts["prompt"], readouts["position"]) | target_columns(
        labels, readouts["target"], readouts["versus"]
    )
    columns = {name: repeat(values, n) for name, values in groups.items()} | component_columns(parts[0].components, len(order))
    columns["method"] = pd.Categorical.from_codes(np.zeros(n * len(order), dtype=np.int8), categories=[method])
    columns |= {name: np.concatenate([getattr(p, name) for p in parts])[order].reshape(-1) for name in _MEASURED}
    columns["indirect"] = columns["total"] - columns["direct"]
    columns["repair_norm"] = columns["indirect"] - columns["repair_heads"] - columns["repair_mlps"]
    columns |= {name: values.repeat(n) for name, values in carried(labels.prompts, readouts["prompt"]).items()}
    return schema.apply(pd.DataFrame(columns, copy=False), "effects")
