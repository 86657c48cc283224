"""The norms table."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from streamlens import schema
from streamlens.frames.columns import Labels, carried, place_columns, repeat
from streamlens.measure.growth import Sites
from streamlens.prompts import NONE


def norms(parts: Iterable[Sites], labels: Labels) -> pd.DataFrame:
    """The norms table, ordered by prompt and position, sites in the model's order."""
    parts = list(parts)
    first = parts[0]
    prompt, position = (np.concatenate([getattr(p, name) for p in parts]) for name in ("prompt", "position"))
    value = np.concatenate([p.value for p in parts])
    order = np.lexsort((position, prompt))
    n = len(first.sites) * len(first.measures)
    columns = {k: repeat(v, n) for k, v in place_columns(labels, prompt[order], position[order]).items()}
    kinds, measures = list(dict.fromkeys(site for site, _, _ in first.sites)), list(first.measures)
    codes = np.repeat([kinds.index(site) for site, _, _ in first.sites], len(measures)).astype(np.int8)
    for name, index in (("layer", 1), ("sublayer", 2)):
        columns[name] = np.tile(np.repeat(np.array([s[index] for s in first.sites], dtype=np.int32), len(measures)), len(order))
    columns["head"] = np.full(len(order) * n, NONE, dtype=np.int32)
    columns["site"] = pd.Categorical.from_codes(np.tile(codes, len(order)), categories=kinds)
    columns["measure"] = pd.Categorical.from_codes(
        np.tile(np.arange(len(measures), dtype=np.int8), n // len(measures) * len(order)), categories=measures
    )
    columns["value"] = value[order].reshape(-1)
    columns |= {k: v.repeat(n) for k, v in carried(labels.prompts, prompt[order]).items()}
    return schema.apply(pd.DataFrame(columns, copy=False), "norms")
