"""Summaries of the tables, DataFrame in and DataFrame out: means with bootstrap intervals, growth rates, the largest components.

The unit of resampling is the prompt, since the positions of one prompt depend on each other: a cluster bootstrap with percentile
intervals and a fixed seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real

import numpy as np
import pandas as pd

from streamlens.errors import InputError, choice, whole

_CELLS = 4_000_000  # numbers held at once while resampling: 32 MB
_FLAT = 1e-24  # sum of squares of log norms below which they differ by rounding alone
_COMPONENT = ("component", "layer", "sublayer", "head", "neuron", "expert", "source")


def _columns(df: pd.DataFrame, names: Sequence[str], parameter: str) -> None:
    if not isinstance(df, pd.DataFrame):
        raise InputError(f"df must be a DataFrame; got {type(df).__name__}")
    missing = [name for name in names if name not in df.columns]
    if missing:
        raise InputError(f"{parameter} must name columns of df ({', '.join(map(str, df.columns))}); got {', '.join(map(repr, missing))}")


def _resample(n_units: int, n_boot: int, seed: int) -> np.ndarray:
    """How often each unit is drawn in each replicate, `[n_boot, n_units]`."""
    return np.random.default_rng(seed).multinomial(n_units, np.full(n_units, 1 / n_units), size=n_boot).astype(np.float64)


def _check_boot(level: float, n_boot: int) -> None:
    if not (isinstance(level, Real) and 0 < level < 1):
        raise InputError(f"level must lie between 0 and 1; got {level!r}")
    whole("n_boot", n_boot, 1)


def _interval(values: np.ndarray, level: float, n_boot: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Percentile interval of the mean over units (rows; NaN where a unit lacks the group) of each column of `values`.

    NaN for a column with fewer than two units, about whose spread nothing is known.
    """
    drawn, tails = _resample(len(values), n_boot, seed), [(1 - level) / 2, (1 + level) / 2]
    bounds = np.full((2, values.shape[1]), np.nan)
    step = max(1, _CELLS // n_boot)
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
    _columns(df, [value], "value")
    _columns(df, by, "by")
    _columns(df, [unit], "unit")
    _check_boot(level, n_boot)
    if not by or unit in by or value in by:
        raise InputError(f"by must name one column or more besides unit {unit!r} and value {value!r}; got {by}")
    _one_text_a_number(df, by, unit)
    rows = df[df[value].notna()]
    if rows.empty:
        raise InputError(f"df must have rows with a {value}; got none")
    groups = rows.groupby([*by, unit], observed=True)[value].mean().unstack(unit)
    values = groups.to_numpy(np.float64).T
    low, high = _interval(values, level, n_boot, seed)
    out = groups.index.to_frame(index=False)
    return out.assign(mean=np.nanmean(values, axis=0), low=low, high=high, n=(~np.isnan(values)).sum(0))


def top_components(df: pd.DataFrame, n: int = 10, level: float = 0.95, n_boot: int = 2000, seed: int = 0) -> pd.DataFrame:
    """The `n` components of an attribution table whose mean contribution over prompts is largest in absolute value.

    One row a component (and a model, in a frame of several: `n` of each): component, layer, sublayer, head and what else splits it;
    mean, low and high in logits, as in :func:`mean_interval`; n, the number of prompts. Raises InputError for n below 1 or a missing
    column.
    """
    whole("n", n, 1)
    _columns(df, ["component", "layer", "head", "contribution"], "df")
    model = ["model"] if "model" in df.columns else []
    by = [*model, *(name for name in _COMPONENT if name in df.columns)]
    means = mean_interval(df, "contribution", by, level=level, n_boot=n_boot, seed=seed)
    means = means.sort_values("mean", key=np.abs, ascending=False, kind="stable")
    if not model:
        return means.head(n).reset_index(drop=True)
    return means.groupby("model", observed=True).head(n).sort_values("model", kind="stable").reset_index(drop=True)


def log_norms(df: pd.DataFrame, measure: str = "l2", by: Sequence[str] = ()) -> pd.DataFrame:
    """The rows of a norms table where the stream enters each block or leaves the last, with a column `log` = ln(value).

    These are the sites resid_pre (layer 0 to n_layers - 1) and final (layer n_layers). Raises InputError for a measure or a site
    that is not in the table, a value that has no logarithm, or rows that repeat within the groups of `by` (models put together
    without a `model` column).
    """
    _columns(df, ["prompt", "position", "layer", "site", "measure", "value"], "df")
    choice("measure", measure, df["measure"].unique())
    rows = df[(df["measure"] == measure) & df["site"].isin(["resid_pre", "final"])]
    key = [name for name in dict.fromkeys(["model", *by, "prompt", "position", "layer", "site"]) if name in rows.columns]
    if rows.empty:
        raise InputError(f"df must have the sites resid_pre and final; got {', '.join(map(str, df['site'].unique()))}")
    if rows.duplicated(key).any():
        raise InputError(f"df must have one value for each {', '.join(key)}; got several: give each model its name in a column `model`")
    bad = ~(rows["value"] > 0) | np.isinf(rows["value"])
    if bad.any():
        raise InputError(f"df must have norms above 0 and finite; got {int(bad.sum())} others, first {rows.loc[bad, 'value'].iloc[0]!r}")
    return rows.assign(log=np.log(rows["value"]))


def _curves(rows: pd.DataFrame, skip_first: bool) -> pd.DataFrame:
    """Mean log norm over positions, `[prompt, layer]`."""
    rows = rows[rows["position"] > 0] if skip_first else rows
    if rows.empty:
        raise InputError("skip_first must be False where every row is a first position; got True")
    curves = rows.groupby(["prompt", "layer"])["log"].mean().unstack("layer")
    if curves.isna().any(axis=None):
        raise InputError(f"df must have the same layers for every prompt; prompt {curves.index[curves.isna().any(axis=1)][0]} lacks some")
    return curves


def _range(layers: Sequence[int] | None, there: pd.Index) -> tuple[int, int]:
    """The range to fit, checked. Every layer in it must be there, else the fit would span a gap unseen."""
    lowest, highest = int(there.min()), int(there.max())
    legal = f"layers must be (first, last), inclusive, with {lowest} <= first < last <= {highest}"
    if layers is None:
        layers = (lowest, highest)
    if not isinstance(layers, (tuple, list)) or len(layers) != 2 or not all(isinstance(x, (int, np.integer)) for x in layers):
        raise InputError(f"{legal}; got {layers!r}")
    first, last = map(int, layers)
    if not lowest <= first < last <= highest:
        raise InputError(f"{legal}; got {layers!r}")
    gaps = sorted(set(range(first, last + 1)) - set(there))
    if gaps:
        raise InputError(f"layers must be a range whose every layer is in df; got {layers!r}, and df lacks {gaps}")
    return first, last


def _fit(curves: pd.DataFrame, first: int, last: int, n_boot: int, seed: int) -> dict[str, float]:
    """Least squares of the mean curve against layer. The fit is linear in the curve, so the slope of a resampled mean is the
    resampled mean of the prompts' slopes: every replicate is refitted, in one product."""
    layer = np.arange(first, last + 1, dtype=np.float64)
    values = curves.loc[:, list(range(first, last + 1))].to_numpy(np.float64)
    centred = layer - layer.mean()
    slopes = values @ centred / (centred @ centred)
    low, high = _interval(slopes[:, None], 0.95, n_boot, seed)
    mean = values.mean(0)
    total = float(((mean - mean.mean()) ** 2).sum())
    residual = float(((mean - mean.mean() - slopes.mean() * centred) ** 2).sum())
    r2 = 1 - residual / total if total > _FLAT else np.nan
    return {"rate": float(np.exp(slopes.mean())), "low": float(np.exp(low[0])), "high": float(np.exp(high[0])), "r2": r2}


def growth_rate(
    df: pd.DataFrame,
    layers: Sequence[int] | None = None,
    skip_first: bool = True,
    measure: str = "l2",
    n_boot: int = 2000,
    seed: int = 0,
) -> pd.DataFrame:
    """By which factor the stream's norm grows a layer: one row a model with model, rate, low, high, r2, first, last, n_prompts.

    From a norms table. For each prompt, log norm is averaged over positions at resid_pre of layer l (and, at l = n_layers, at final);
    its mean over prompts is fitted against l by least squares over `layers` = (first, last), inclusive, by default all of them.
    rate = exp(slope); low and high are its 95% percentile interval from resampling prompts and refitting each time, NaN for a single
    prompt; r2 is that of the fit, NaN where the norm is constant. `skip_first` leaves out position 0, whose norm is often a hundred
    times the others'. Raises InputError for layers outside the model or fewer than two, and for a measure that is not in the table.
    Method: Heimersheim & Turner 2023, Residual stream norms grow exponentially over the forward pass; the interval is an addition.
    """
    _check_boot(0.95, n_boot)
    rows = log_norms(df, measure)
    groups = rows.groupby("model", observed=True, sort=False) if "model" in df.columns else [(df.attrs.get("model", ""), rows)]
    fits = []
    for model, of_model in groups:
        curves = _curves(of_model, skip_first)
        first, last = _range(layers, curves.columns)
        fits.append({"model": model, **_fit(curves, first, last, n_boot, seed), "first": first, "last": last, "n_prompts": len(curves)})
    return pd.DataFrame(fits)
