"""The figure of the norms table: how the residual stream grows with depth."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from streamlens.figures import frames, labels, lines
from streamlens.figures.style import axes, thin, title
from streamlens.stats import growth_rate, log_norms, mean_interval

_NEEDED = ("prompt", "position", "layer", "site", "measure", "value")
_MEASURES = {"l2": "residual stream norm (L2)", "rms": "residual stream RMS"}


def _geometric(rows: pd.DataFrame, groups: list[str]) -> pd.DataFrame:
    """Geometric means over positions, then prompts, with their intervals."""
    means = mean_interval(rows, "log", [*groups, "layer"])
    return means.assign(**{name: np.exp(means[name]) for name in ("mean", "low", "high")})


def _log_axis(ax: Axes) -> None:
    """Plain numbers, and never an axis with a single label: within a factor of 4 even steps, within two decades also at 2 and 5."""
    low, high = ax.get_ylim()
    decades = LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,))
    ax.yaxis.set_major_locator(MaxNLocator(6) if high < 4 * low else decades)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _draw_fit(ax: Axes, fit: pd.Series, curve: pd.DataFrame) -> None:
    """The fitted line over its range; in log space it goes through the mean of the range."""
    layers = curve[(curve["layer"] >= fit["first"]) & (curve["layer"] <= fit["last"])]
    x = layers["layer"].to_numpy(np.float64)
    y = np.exp(np.log(layers["mean"]).mean() + np.log(fit["rate"]) * (x - x.mean()))
    interval = "" if np.isnan(fit["low"]) else f" ({fit['low']:.3f} to {fit['high']:.3f})"
    label = f"×{fit['rate']:.3f}{interval} a layer, {fit['first']} to {fit['last']}"
    ax.plot(x, y, color="black", linewidth=thin(), linestyle=":", zorder=3, label=label)


def growth(
    df: pd.DataFrame,
    ax: Axes | None = None,
    measure: str = "l2",
    by: str | Sequence[str] | None = None,
    fit: Sequence[int] | None = None,
) -> Axes:
    """How the stream grows: its norm before each layer, and after the last, on a logarithmic axis.

    `df` is a norms table. A curve is the geometric mean over positions but the first, then over prompts, its band the 95% interval from
    resampling prompts; position 0, often a hundred times larger, is the thin dashed line. `by` names columns that get curves of their
    own, such as "model". `fit` = (first, last) adds the growth rate over these layers, inclusive, to the legend. Raises InputError for
    a measure that is not in the table, layers out of range, and several models that `by` does not name.
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
    if apart:
        ax.plot([], [], color="0.4", linestyle="--", linewidth=thin(), label="position 0")
    lines.layer_axis(ax, curves["layer"])
    _log_axis(ax)
    final = rows.loc[rows["site"] == "final", "layer"].unique()
    after = f" ({final[0]} is after the last)" if len(final) == 1 else ""
    ax.set(xlabel=f"layer{after}", ylabel=_MEASURES.get(measure, measure))
    n = labels.sample(curves["n"])
    title(ax, n if n == "1 prompt" else f"geometric mean of {n}, 95% interval")
    ax.legend()
    return ax
