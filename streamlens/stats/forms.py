"""Which law the stream's growth follows: per-layer ratios, three forms fitted to the same curve, and what initialisation predicts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from streamlens.errors import InputError
from streamlens.stats.growth import curves_by_model, extent, log_norms, without_first
from streamlens.stats.means import mean_interval, table_columns

FORMS = {
    "exponential": (np.log, np.exp),
    "linear": (lambda norm: norm, lambda fitted: fitted),
    "sqrt": (np.square, lambda fitted: np.sqrt(np.clip(fitted, 0, None))),
}
"""Each form is a straight line in depth of log norm, of norm, or of squared norm; the two functions go there and back."""


def growth_ratios(
    df: pd.DataFrame, skip_first: bool = True, measure: str = "l2", level: float = 0.95, n_boot: int = 2000, seed: int = 0
) -> pd.DataFrame:
    """By which factor each layer makes the stream grow: one row a layer (and model) with mean, low, high, n and arithmetic.

    From a norms table. mean is the geometric mean over positions, then prompts, of ||x_(l+1)|| / ||x_l||, with its interval from
    resampling prompts; arithmetic is the arithmetic mean of the same ratios, which is larger, and which the literature also reports.
    `skip_first` leaves out position 0. Raises InputError for a table with a single layer, or without positions after the first.
    """
    rows = log_norms(df, measure)
    rows = without_first(rows) if skip_first else rows
    model = ["model"] if "model" in df.columns else []
    rows = rows.sort_values([*model, "prompt", "position", "layer"])
    place = rows.groupby([*model, "prompt", "position"], observed=True, sort=False)
    step = place["layer"].shift(-1) - rows["layer"]
    rows = rows.assign(log=place["log"].shift(-1) - rows["log"])[step == 1]
    if rows.empty:
        raise InputError(f"df must hold neighbouring layers; got {sorted(df['layer'].unique())}")
    out = mean_interval(rows, "log", [*model, "layer"], level=level, n_boot=n_boot, seed=seed)
    plain = rows.assign(ratio=np.exp(rows["log"])).groupby([*model, "layer", "prompt"], observed=True)["ratio"].mean()
    out["arithmetic"] = plain.groupby([*model, "layer"], observed=True).mean().to_numpy()
    return out.assign(**{name: np.exp(out[name]) for name in ("mean", "low", "high")})


def growth_forms(df: pd.DataFrame, layers: Sequence[int] | None = None, skip_first: bool = True, measure: str = "l2") -> pd.DataFrame:
    """Exponential, linear or square-root growth: one row a form (and model) with intercept, slope, r2, first, last, n_prompts.

    From a norms table; the curve is the one that :func:`growth_rate` fits. Each form is a line in depth, by least squares: of log norm
    (exponential), of norm (linear), of squared norm (sqrt: what a random walk gives). r2 is always that of the norm itself, so that
    the three can be compared (for the exponential it is not that of :func:`growth_rate`, which is of log norm); it is below 0 where a
    form does worse than no growth, NaN where the norm is constant. Raises InputError for layers outside the model or fewer than two.
    """
    fits = []
    for model, curves in curves_by_model(df, layers, skip_first, measure):
        layer, norms = curves.columns.to_numpy(np.float64), np.exp(curves.to_numpy(np.float64).mean(0))
        for form, (there, _) in FORMS.items():
            slope, intercept = np.polyfit(layer, there(norms), 1)
            fit = {"model": model, "form": form, "intercept": intercept, "slope": slope}
            fits.append(fit | {"r2": _r2(norms, fitted(fit, layer))} | extent(curves))
    return pd.DataFrame(fits)


def fitted(fit: pd.Series | dict, layer: np.ndarray) -> np.ndarray:
    """The norm that a row of :func:`growth_forms` gives at these layers."""
    return FORMS[fit["form"]][1](fit["intercept"] + fit["slope"] * np.asarray(layer, dtype=np.float64))


def _r2(norms: np.ndarray, fit: np.ndarray) -> float:
    total = float(((norms - norms.mean()) ** 2).sum())
    if total <= 1e-24 * float((norms**2).sum()):  # constant but for rounding
        return np.nan
    return 1 - float(((norms - fit) ** 2).sum()) / total


def initial_growth(n_layers: int, variance: float = 0.5) -> pd.DataFrame:
    """What is expected of a pre-norm network at initialisation: columns layer (0 to n_layers), random_walk, low, high, relative to layer 0.

    random_walk is sqrt(1 + 2 l var), where each of the two sublayers of a layer adds an independent vector of `variance` times the
    embedding's mean square; low and high are sqrt(1 + l/2) and sqrt(1 + 3l/2), the bounds of Xiong et al. 2020 (arXiv 2002.04745,
    E||x_l||^2 between (1 + l/2) d and (1 + 3l/2) d; Xavier weights and uniform attention). Raises InputError for a variance below 0.
    """
    if not variance >= 0:
        raise InputError(f"variance must be 0 or more; got {variance!r}")
    layer = np.arange(n_layers + 1)
    walks = {"random_walk": 2 * variance, "low": 0.5, "high": 1.5}
    return pd.DataFrame({"layer": layer} | {name: np.sqrt(1 + rate * layer) for name, rate in walks.items()})


def growth_sources(df: pd.DataFrame, skip_first: bool = True, level: float = 0.95, n_boot: int = 2000, seed: int = 0) -> pd.DataFrame:
    """How much of the final squared norm each layer has brought, by size and by alignment: two rows a layer (and model).

    From a norm_parts table. source "size" is the squared length of what the layer added (of two sublayers, also their inner product),
    "alignment" twice its inner product with all that stood there before; mean, low and high are shares of ||x_L||^2, taken at each
    position and averaged over positions, then prompts, and n is the number of prompts. The means sum to 1; layer -1 is the embedding.
    `skip_first` leaves out position 0. Raises InputError for another table, or one without positions after the first.
    """
    table_columns(df, ["prompt", "position", "layer", "layer_to", "value", "total"], "a norm_parts")
    rows = without_first(df) if skip_first else df
    model = ["model"] if "model" in df.columns else []
    own = rows["layer"] == rows["layer_to"]
    rows = rows.assign(source=np.where(own, "size", "alignment"), share=rows["value"] / rows["total"])
    sums = rows.groupby([*model, "prompt", "position", "layer", "source"], observed=True)["share"].sum().reset_index()
    return mean_interval(sums, "share", [*model, "layer", "source"], level=level, n_boot=n_boot, seed=seed)
