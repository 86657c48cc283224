"""The norms table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from streamlens import schema
from streamlens.frames.columns import Labels, carried, place_columns, repeat
from streamlens.measure.growth import Column, Measured
from streamlens.measure.running import Running
from streamlens.prompts import NONE


def norms(parts: Iterable[Measured], labels: Labels) -> pd.DataFrame:
    """The norms table, ordered by prompt and position, columns in the model's order."""
    parts = list(parts)
    names = parts[0].columns
    prompt, position = (np.concatenate([getattr(p, name) for p in parts]) for name in ("prompt", "position"))
    value = np.concatenate([p.value for p in parts]) if len(parts) > 1 else parts[0].value
    order, n = np.lexsort((position, prompt)), len(names)
    value = value if (np.diff(order) == 1).all() else value[order]
    columns = {k: repeat(v, n) for k, v in place_columns(labels, prompt[order], position[order]).items()}
    columns |= measure_columns(names, len(order))
    columns["value"] = value.reshape(-1)
    columns |= {k: v.repeat(n) for k, v in carried(labels.prompts, prompt[order]).items()}
    return schema.apply(pd.DataFrame(columns, copy=False), "norms")


def measure_columns(names: Sequence[Column], times: int) -> dict:
    """The columns that name a measure at a site, all of them `times` times over."""
    site, layer, sublayer, head, measure = zip(*names, strict=True)
    numbers = {"layer": layer, "sublayer": sublayer, "head": head}
    columns: dict = {name: np.tile(np.array(values, dtype=np.int32), times) for name, values in numbers.items()}
    for name, values in {"site": site, "measure": measure}.items():
        kinds = {kind: code for code, kind in enumerate(dict.fromkeys(values))}
        codes = np.array([kinds[value] for value in values], dtype=np.int8)
        columns[name] = pd.Categorical.from_codes(np.tile(codes, times), categories=list(kinds))
    return columns


def norm_summary(running: Running) -> pd.DataFrame:
    """The norm_summary table: groups of positions in order, columns in the model's order; groups without values have no row."""
    n_groups, n = running.count.shape
    position = np.array([0, NONE])[:n_groups] if running.group == "layer" else np.arange(n_groups)
    columns = {"position": position.repeat(n).astype(np.int32)} | measure_columns(running.columns, n_groups)
    columns |= {"n": running.count.ravel(), "n_prompts": running.n_prompts.repeat(n)}
    columns |= {name: value.ravel() for name, value in running.statistics().items()}
    df = pd.DataFrame(columns)
    return schema.apply(df[df["n"] > 0], "norm_summary")
