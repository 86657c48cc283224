"""The ablation table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from streamlens import schema
from streamlens.frames.columns import Labels, carried, place_columns, repeat, target_columns
from streamlens.measure.ablation import Removal, Variant
from streamlens.prompts import NONE


def ablation(removals: Iterable[Removal], changes: Sequence[Variant], unit: str, method: str, labels: Labels) -> pd.DataFrame:
    """The ablation table: for each prompt, position and target its metrics, under each change in turn."""
    parts = [frame for r in removals for frame in _removal_parts(r, changes, labels)]
    df = schema.concat(parts, "ablation") if len(parts) > 1 else schema.apply(parts[0], "ablation")
    df["unit"], df["method"] = (pd.Categorical.from_codes(np.zeros(len(df), dtype=np.int8), categories=[word]) for word in (unit, method))
    return schema.apply(df.sort_values(["prompt", "position", "layer", "sublayer"], kind="stable"), "ablation")


def _removal_parts(removal: Removal, changes: Sequence[Variant], labels: Labels) -> Iterable[pd.DataFrame]:
    """One frame a metric, without the rows whose inputs are absent."""
    none = np.full(len(removal.prompt), NONE)
    r = removal.readouts
    groups = (
        (removal.prompt, removal.position, none, none, removal.at_position),
        (r.prompt, r.position, r.target, r.versus, removal.at_target),
    )
    for prompt, position, target, versus, metrics in groups:
        for name, (clean, changed) in metrics.items():
            rows = np.flatnonzero(~np.isnan(clean))
            if not len(rows):
                continue
            n = len(changes)
            columns = place_columns(labels, prompt[rows], position[rows]) | target_columns(labels, target[rows], versus[rows])
            columns = {key: repeat(values, n) for key, values in (columns | {"clean": clean[rows]}).items()}
            columns |= {
                key: np.tile(np.array([getattr(c, key) for c in changes], dtype=np.int32), len(rows)) for key in ("layer", "sublayer")
            }
            columns |= {"span": np.ones(len(rows) * n, dtype=np.int32), "head": np.full(len(rows) * n, NONE, dtype=np.int32)}
            columns |= {
                "ablated": changed[:, rows].T.reshape(-1),
                "metric": pd.Categorical.from_codes(np.zeros(len(rows) * n, dtype=np.int8), [name]),
            }
            columns["delta"] = columns["ablated"] - columns["clean"]
            columns |= {"unit": pd.Categorical([""] * len(rows) * n), "method": pd.Categorical([""] * len(rows) * n)}
            columns |= {key: values.repeat(n) for key, values in carried(labels.prompts, prompt[rows]).items()}
            yield pd.DataFrame(columns, copy=False)
