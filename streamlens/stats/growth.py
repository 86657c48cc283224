"""How fast the stream grows: log norms of a norms table, averaged over positions, then prompts, and fitted against depth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from streamlens.errors import InputError, choice
from streamlens.stats.means import check_boot, interval, table_columns

_FLAT = 1e-24  # sum of squares of log norms below which they differ by rounding alone


def log_norms(df: pd.DataFrame, measure: str = "l2", by: Sequence[str] = ()) -> pd.DataFrame:
    """The rows of a norms table where the stream enters each block or leaves the last, with a column `log` = ln(value).

    These are the sites resid_pre (layer 0 to n_layers - 1) and final (layer n_layers). Raises InputError for a measure or a site
    that is not in the table, a value that has no logarithm, or rows that repeat within the groups of `by` (models put together
    without a `model` column).
    """
    df = _of_summary(df)
    table_columns(df, ["prompt", "position", "layer", "site", "measure", "value"], "a norms")
    choice("measure", measure, df["measure"].unique())
    rows = df[(df["measure"] == measure) & df["site"].isin(["resid_pre", "final"])]
    key = [name for name in dict.fromkeys(["model", *by, "prompt", "position", "layer", "site"]) if name in rows.columns]
    if rows.empty:
        raise InputError(f"df must have the sites resid_pre and final; got {', '.join(map(str, df['site'].unique()))}")
    if rows.duplicated(key).any():
        raise InputError(f"df must have one value for each {', '.join(key)}; got several: give each model its name in a column `model`")
    bad = ~(rows["value"] > 0) | np.isinf(rows["value"])
    if bad.any():
        first = float(rows.loc[bad, "value"].iloc[0])
        raise InputError(f"df must have norms above 0 and finite; got {int(bad.sum())} others, first {first!r}")
    return rows.assign(log=np.log(rows["value"]))


def _of_summary(df: pd.DataFrame) -> pd.DataFrame:
    """A norm_summary table by layer as a norms table of one prompt: its geometric means, at position 0 and at 1 for all later ones."""
    if not isinstance(df, pd.DataFrame) or "geometric_mean" not in df.columns:
        return df
    if not df["position"].isin([0, -1]).all():
        raise InputError('df must be a norms table, or a norm_summary with by="layer"; got one by position')
    return df.assign(prompt=0, value=df["geometric_mean"], position=(df["position"] != 0).astype("int32"))


def without_first(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of later positions than the first. Raises InputError where there are none."""
    later = rows[rows["position"] > 0]
    if later.empty:
        raise InputError("skip_first must be False where every row is a first position; got True")
    return later


def curves_by_model(df: pd.DataFrame, layers: Sequence[int] | None, skip_first: bool, measure: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """(model, mean log norm over positions `[prompt, layer]` within the range `layers`) of each model of a norms table."""
    rows = log_norms(df, measure)
    groups = rows.groupby("model", observed=True, sort=False) if "model" in df.columns else [(df.attrs.get("model", ""), rows)]
    for model, of_model in groups:
        curves = _curves(without_first(of_model) if skip_first else of_model)
        first, last = _range(layers, curves.columns)
        curves = curves.loc[:, list(range(first, last + 1))]
        if "geometric_mean" in of_model.columns:  # a summary's one curve stands for all of its prompts
            curves.attrs["n_prompts"] = int(of_model["n_prompts"].max())
        yield model, curves


def extent(curves: pd.DataFrame) -> dict[str, int]:
    """The layers that were fitted, and of how many prompts."""
    return {"first": int(curves.columns[0]), "last": int(curves.columns[-1]), "n_prompts": curves.attrs.get("n_prompts", len(curves))}


def _curves(rows: pd.DataFrame) -> pd.DataFrame:
    """Mean log norm over positions, `[prompt, layer]`."""
    curves = rows.groupby(["prompt", "layer"])["log"].mean().unstack("layer")
    if curves.isna().any(axis=None):
        raise InputError(f"df must have the same layers for every prompt; prompt {curves.index[curves.isna().any(axis=1)][0]} lacks some")
    return curves


def _range(layers: Sequence[int] | None, there: pd.Index) -> tuple[int, int]:
    """The range to fit, checked. Every layer in it must be there, else the fit would span a gap unseen."""
    lowest, highest = int(there.min()), int(there.max())
    if lowest == highest:
        raise InputError(f"df must have norms at two layers or more; got layer {lowest} alone")
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


def _fit(curves: pd.DataFrame, n_boot: int, seed: int) -> dict[str, float]:
    """Least squares of the mean curve against layer. The fit is linear in the curve, so the slope of a resampled mean is the
    resampled mean of the prompts' slopes: every replicate is refitted, in one product."""
    layer, values = curves.columns.to_numpy(np.float64), curves.to_numpy(np.float64)
    centred = layer - layer.mean()
    slopes = values @ centred / (centred @ centred)
    low, high = interval(slopes[:, None], 0.95, n_boot, seed)
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
    prompt, and for a norm_summary table, whose geometric means over all positions are fitted instead; r2 is that of the fit, NaN
    where the norm is constant. `skip_first` leaves out position 0, whose norm is often a hundred times the others'. Raises InputError
    for layers outside the model or fewer than two, and for a measure that is not in the table.
    Method: Heimersheim & Turner 2023, Residual stream norms grow exponentially over the forward pass; the interval is an addition.
    """
    check_boot(0.95, n_boot)
    fits = [
        {"model": model} | _fit(curves, n_boot, seed) | extent(curves) for model, curves in curves_by_model(df, layers, skip_first, measure)
    ]
    return pd.DataFrame(fits)
