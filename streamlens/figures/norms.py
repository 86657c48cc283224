"""The growth curve of the norms table, with what it is compared to: a fit, three laws of growth, initialisation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from streamlens.errors import InputError
from streamlens.figures import frames, labels, lines
from streamlens.figures.style import axes, plain_log_axis, thin, title
from streamlens.stats import growth_forms, growth_rate, initial_growth, log_norms, mean_interval
from streamlens.stats.forms import fitted

_NEEDED = ("prompt", "position", "layer", "site", "measure", "value")
_MEASURES = {"l2": "residual stream norm (L2)", "rms": "residual stream RMS"}


def _geometric(rows: pd.DataFrame, groups: list[str]) -> pd.DataFrame:
    """Geometric means over positions, then prompts, with their intervals."""
    means = mean_interval(rows, "log", [*groups, "layer"])
    return means.assign(**{name: np.exp(means[name]) for name in ("mean", "low", "high")})


def _draw_fit(ax: Axes, fit: pd.Series, curve: pd.DataFrame) -> None:
    """The fitted line over its range; in log space it goes through the mean of the range."""
    layers = curve[(curve["layer"] >= fit["first"]) & (curve["layer"] <= fit["last"])]
    x = layers["layer"].to_numpy(np.float64)
    y = np.exp(np.log(layers["mean"]).mean() + np.log(fit["rate"]) * (x - x.mean()))
    interval = "" if np.isnan(fit["low"]) else f" ({fit['low']:.3f} to {fit['high']:.3f})"
    label = f"×{fit['rate']:.3f}{interval} a layer, {fit['first']} to {fit['last']}"
    ax.plot(x, y, color="black", linewidth=thin(), linestyle=":", zorder=3, label=label)


def _compare(ax: Axes, rows: pd.DataFrame, curves: pd.DataFrame, by: list[str], forms, initial: float | None, measure: str) -> None:
    """The laws that a single curve is held against."""
    if forms is None and initial is None:
        return
    if by and len(curves[by].drop_duplicates()) > 1:
        raise InputError(f"forms and initial must stand beside one curve; got {len(curves[by].drop_duplicates())}")
    if forms is not None:
        shown = ax.get_ylim()
        fits = growth_forms(rows, forms, skip_first=bool((rows["position"] > 0).any()), measure=measure)
        for (_, row), dashes in zip(fits.iterrows(), (":", "--", "-."), strict=True):
            layers = np.arange(row["first"], row["last"] + 1)
            norm = fitted(row, layers)
            label = f"{row['form']} (R² {row['r2']:.3f})"
            ax.plot(layers, np.where(norm > 0, norm, np.nan), color="black", linewidth=thin(), linestyle=dashes, zorder=3, label=label)
        ax.set_ylim(shown)  # a straight line may fall to 0 within the range
    if initial is not None:
        expected = initial_growth(int(curves["layer"].max()), float(initial))
        start = curves.loc[curves["layer"].idxmin(), "mean"]
        band = [start * expected[name] for name in ("low", "high")]
        ax.fill_between(expected["layer"], *band, color="0.5", alpha=0.2, linewidth=0, label="Xiong et al., pre-norm")
        label = f"random walk, variance {initial:g}"
        ax.plot(expected["layer"], start * expected["random_walk"], color="0.4", linewidth=thin(), label=label)


def growth(
    df: pd.DataFrame,
    ax: Axes | None = None,
    measure: str = "l2",
    by: str | Sequence[str] | None = None,
    fit: Sequence[int] | None = None,
    forms: Sequence[int] | None = None,
    initial: float | None = None,
) -> Axes:
    """How the stream grows: its norm before each layer, and after the last, on a logarithmic axis.

    `df` is a norms table. A curve is the geometric mean over positions but the first, then over prompts, its band the 95% interval from
    resampling prompts; position 0, often a hundred times larger, is the thin dashed line. `by` names columns that get curves of their
    own, such as "model". `fit` = (first, last) adds the growth rate over these layers, inclusive, to the legend; `forms` = (first, last)
    the exponential, linear and square-root fits with the R² of each, and `initial` what is expected of a pre-norm network at
    initialisation, from the curve's first value on: the random walk whose sublayers write `initial` times the embedding's mean square,
    and the bounds of Xiong et al. 2020 (see :func:`streamlens.stats.initial_growth`). Raises InputError for a measure that is not in the
    table, layers out of range, several models that `by` does not name, and `forms` or `initial` beside several curves.
    """
    frames.columns(df, _NEEDED, "a norms")
    by = frames.grouping(df, by)
    frames.refuse_several(df, by, names=["model"])
    rows = log_norms(df, measure, by)
    later = rows["position"] > 0
    apart = later.any() and not later.all()
    curves = _geometric(rows[later] if apart else rows, by)
    first = _geometric(rows[~later], by) if apart else curves.head(0)
    ax = axes(ax)
    ax.set_yscale("log")
    alone = "positions from 1 on" if later.any() else "position 0"
    for key, look in lines.looks(curves[by]).items():
        curve, start = lines.of(curves, by, key), lines.of(first, by, key)
        lines.draw(ax, curve, lines.name(key) or alone, look)
        ax.plot(start["layer"], start["mean"], color=look[0], linestyle="--", linewidth=thin())
        if fit is not None:
            rate = growth_rate(lines.of(df, by, key), fit, skip_first=bool(later.any()), measure=measure)
            _draw_fit(ax, rate.iloc[0], curve)
    _compare(ax, rows, curves, by, forms, initial, measure)
    if apart:
        ax.plot([], [], color="0.4", linestyle="--", linewidth=thin(), label="position 0")
    lines.layer_axis(ax, curves["layer"])
    plain_log_axis(ax)
    ax.set(xlabel=lines.layer_label(rows), ylabel=_MEASURES.get(measure, measure))
    n = labels.sample(curves["n"])
    title(ax, n if n == "1 prompt" else f"geometric mean of {n}, 95% interval")
    ax.legend()
    return ax
