"""Means with bootstrap intervals, and the largest components.

The unit of resampling is the prompt, since the positions of one prompt depend on each other: a cluster bootstrap with percentile
intervals and a fixed seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real

import numpy as np
import pandas as pd

from streamlens.errors import InputError, whole

CELLS = 4_000_000  # numbers held at once while resampling: 32 MB
_COMPONENT = ("component", "layer", "sublayer", "head", "neuron", "expert", "source")


def columns(df: pd.DataFrame, names: Sequence[str], parameter: str) -> None:
    """Raise InputError unless `df` has the columns that a parameter names."""
    if not isinstance(df, pd.DataFrame):
        raise InputError(f"df must be a DataFrame; got {type(df).__name__}")
    missing = [name for name in names if name not in df.columns]
    if missing:
        raise InputError(f"{parameter} must name columns of df ({', '.join(map(str, df.columns))}); got {', '.join(map(repr, missing))}")


def table_columns(df: pd.DataFrame, names: Sequence[str], table: str, parameter: str = "df") -> None:
    """Raise InputError unless `df`, given as `parameter`, is a table of this kind ("a lens"), told by these columns."""
    if not isinstance(df, pd.DataFrame):
        raise InputError(f"{parameter} must be {table} table; got {type(df).__name__}")
    missing = [name for name in names if name not in df.columns]
    if missing:
        got = ", ".join(map(str, df.columns)) or "none"
        raise InputError(f"{parameter} must be {table} table with columns {', '.join(missing)}; got {got}")


def resample(n_units: int, n_boot: int, seed: int) -> np.ndarray:
    """How often each unit is drawn in each replicate, `[n_boot, n_units]`."""
    return np.random.default_rng(seed).multinomial(n_units, np.full(n_units, 1 / n_units), size=n_boot).astype(np.float64)


def check_boot(level: float, n_boot: int) -> None:
    if not (isinstance(level, Real) and 0 < level < 1):
        raise InputError(f"level must lie between 0 and 1; got {level!r}")
    whole("n_boot", n_boot, 1)


def interval(values: np.ndarray, level: float, n_boot: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Percentile interval of the mean over units (rows; NaN where a unit lacks the group) of each column of `values`.

    NaN for a column with fewer than two units, about whose spread nothing is known.
    """
    drawn, tails = resample(len(values), n_boot, seed), [(1 - level) / 2, (1 + level) / 2]
    bounds = np.full((2, values.shape[1]), np.nan)
    step = max(1, CELLS // n_boot)
    for start in range(0, values.shape[1], step):
        block = values[:, start : start + step]
        there = ~np.isnan(block)
        known = there.sum(0) > 1
        sums, counts = drawn @ np.where(there, block, 0.0)[:, known], drawn @ there[:, known].astype(np.float64)
        means = np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)
        quantile = np.nanquantile if np.isnan(means).any() else np.quantile
        bounds[:, start : start + step][:, known] = quantile(means, tails, axis=0)
    return bounds[0], bounds[1]


def _one_text_a_number(df: pd.DataFrame, by: Sequence[str], unit: str) -> None:
    """Tables of single prompts under one another all say prompt 0, and would count as one prompt."""
    if unit == "prompt" and "prompt_text" in df.columns:
        pairs = df[list(dict.fromkeys([*by, "prompt", "prompt_text"]))].drop_duplicates()
        repeated = pairs.duplicated([*by, "prompt"])
        if repeated.any():
            number = pairs.loc[repeated, "prompt"].iloc[0]
            raise InputError(f"df must number its prompts; got several texts as prompt {number}: renumber tables put together")


def mean_interval(
    df: pd.DataFrame,
    value: str,
    by: str | Sequence[str],
    unit: str = "prompt",
    level: float = 0.95,
    n_boot: int = 2000,
    seed: int = 0,
) -> pd.DataFrame:
    """The mean over prompts of a column, with an interval: one row a group of `by` with columns mean, low, high, n.

    Each prompt counts once: the rows of a group are first averaged within a prompt (`unit`), then over the n prompts that have it.
    low and high are the percentile bootstrap interval at `level` from resampling prompts, the same draw for every group; NaN where
    n is 1. Null values are left out. Raises InputError for an unknown column, no rows, or a level or n_boot out of range.
    """
    by = [by] if isinstance(by, str) else list(by)
    columns(df, [value], "value")
    columns(df, by, "by")
    columns(df, [unit], "unit")
    check_boot(level, n_boot)
    if not by or unit in by or value in by:
        raise InputError(f"by must name one column or more besides unit {unit!r} and value {value!r}; got {by}")
    _one_text_a_number(df, by, unit)
    rows = df[df[value].notna()]
    if rows.empty:
        raise InputError(f"df must have rows with a {value}; got none")
    groups = rows.groupby([*by, unit], observed=True)[value].mean().unstack(unit)
    values = groups.to_numpy(np.float64).T
    low, high = interval(values, level, n_boot, seed)
    out = groups.index.to_frame(index=False)
    return out.assign(mean=np.nanmean(values, axis=0), low=low, high=high, n=(~np.isnan(values)).sum(0))


def top_components(df: pd.DataFrame, n: int = 10, level: float = 0.95, n_boot: int = 2000, seed: int = 0) -> pd.DataFrame:
    """The `n` components of an attribution table whose mean contribution over prompts is largest in absolute value.

    One row a component (and a model, in a frame of several: `n` of each): component, layer, sublayer, head and what else splits it;
    mean, low and high in logits, as in :func:`mean_interval`; n, the number of prompts. Raises InputError for n below 1 or a missing
    column.
    """
    whole("n", n, 1)
    table_columns(df, ["component", "layer", "head", "contribution"], "an attribution")
    model = ["model"] if "model" in df.columns else []
    by = [*model, *(name for name in _COMPONENT if name in df.columns)]
    means = mean_interval(df, "contribution", by, level=level, n_boot=n_boot, seed=seed)
    means = means.sort_values("mean", key=np.abs, ascending=False, kind="stable")
    if not model:
        return means.head(n).reset_index(drop=True)
    return means.groupby("model", observed=True).head(n).sort_values("model", kind="stable").reset_index(drop=True)
