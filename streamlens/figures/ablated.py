"""Maps of the ablation table: every head, every position, every span of blocks."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.ticker import MaxNLocator

from streamlens.errors import InputError, choice
from streamlens.figures import frames, labels
from streamlens.figures.ablation import axis_of, name_of
from streamlens.figures.style import DIVERGING, axes, plain_bar, title
from streamlens.stats import mean_interval

_NEEDED = ("prompt", "position", "target", "versus", "unit", "method", "layer", "sublayer", "span", "head", "metric", "delta")
_VALUES = ("delta", "recovered")
_DECADES = 1e-3  # of the largest: what is below it, and what a removal improves, has the first colour


def ablated_heads(df: pd.DataFrame, ax: Axes | None = None, metric: str = "logit_diff", value: str = "delta") -> Axes:
    """What breaks without each head: a layer × head map of the mean change of `metric` over prompts.

    `df` is an ablation table with the unit head. `value` "recovered" shows the share that activation patching leaves. Colours are centred
    at no change (0, or 1 where all is recovered) and reach to the largest. Several positions of a prompt, and samples, are averaged within
    it first. Raises InputError for a metric or a value that is not in the table, and for several models, methods or targets.
    """
    rows = _rows(df, ("head",), metric)
    frames.refuse_several(rows, names=["at", "sublayer"], may="")
    return _changes(rows, "head", metric, value, ax)


def ablated_positions(df: pd.DataFrame, ax: Axes | None = None, metric: str = "logit_diff", value: str = "delta") -> Axes:
    """What breaks without a layer at one position: a layer × position map of the mean change of `metric` over prompts.

    `df` is an ablation table of one unit made with at="each"; `value` and colours are those of :func:`ablated_heads`. One short prompt has
    its tokens below; prompts are aligned from their start. Raises InputError for heads, of which a layer has several, and as ablated_heads.
    """
    rows = _rows(df, ("block", "attn", "mlp", "mixer"), metric)
    if "at" not in rows or (rows["at"] < 0).any():
        raise InputError("df must hold changes at single positions: sl.ablate(..., at='each'); got changes at several")
    frames.refuse_several(rows, names=["unit", "span", "sublayer"], may="")
    ax = _changes(rows, "at", metric, value, ax)
    ax.set_xlabel(f"position at which {rows['unit'].iloc[0]} is changed")
    if rows["prompt"].nunique() == 1 and "at_token" in rows:
        tokens = rows.drop_duplicates("at").set_index("at")["at_token"]
        labels.token_axis(ax, tokens.reindex(range(rows["at"].max() + 1)).astype(object).fillna(""))
    return ax


def _changes(rows: pd.DataFrame, across: str, metric: str, value: str, ax: Axes | None) -> Axes:
    """A map of layers, from the first on top, and of what the column `across` counts, centred at no change."""
    choice("value", value, [v for v in _VALUES if v in rows.columns])
    rows = rows[rows[value].notna()]
    if rows.empty:
        raise InputError(f"df must hold a {value} of {metric}; got none that is defined")
    means = mean_interval(rows, value, ["layer", across])
    grid = np.full((int(means["layer"].max()) + 1, int(means[across].max()) + 1), np.nan)
    grid[means["layer"], means[across]] = means["mean"]
    middle = 1.0 if value == "recovered" else 0.0
    largest = float(np.nanmax(abs(grid - middle))) or 1.0
    ax = axes(ax, taller=1.25)
    colours = mpl.colormaps[DIVERGING].with_extremes(bad="0.88")
    norm = Normalize(middle - largest, middle + largest)
    mesh = ax.pcolormesh(*_edges(grid), grid, cmap=colours, norm=norm, edgecolors="face", linewidth=0.1)
    ax.set(xlabel=across, ylabel="layer", ylim=(len(grid) - 0.5, -0.5))
    ax.figure.colorbar(mesh, ax=ax).set_label(axis_of(metric) if value == "delta" else f"share of the {name_of(metric)} that is left")
    return _finished(ax, means)


def spans(df: pd.DataFrame, ax: Axes | None = None, metric: str = "loss") -> Axes:
    """What breaks without each run of neighbouring blocks: the triangle of first block × number of blocks, on a logarithmic scale.

    `df` is an ablation table with the unit block and several spans. A cell is the mean change of `metric` over prompts; the scale reaches
    over three decades, and what is smaller, or better without the blocks, has its first colour. Raises InputError for a metric that is
    not in the table or falls nowhere, and for several models, methods or targets.
    """
    rows = _rows(df, ("block",), metric)
    frames.refuse_several(rows, names=["at"], may="")
    means = mean_interval(rows, "delta", ["layer", "span"])
    grid = np.full((int(means["span"].max()), int(means["layer"].max()) + 1), np.nan)
    grid[means["span"] - 1, means["layer"]] = means["mean"]
    largest = float(np.nanmax(grid))
    if not largest > 0:
        raise InputError(f"df must hold a change of {metric} above 0; got {largest:.3g} at most: choose a metric that grows with damage")
    low = max(largest * _DECADES, float(np.nanmin(grid)))
    ax = axes(ax, taller=1.15)
    norm = LogNorm(low, largest if largest > low else low * 1.01)
    shown = np.where(np.isnan(grid), np.nan, np.maximum(grid, low))
    mesh = ax.pcolormesh(*_edges(grid, y=1), shown, cmap="viridis", norm=norm, edgecolors="face", linewidth=0.1)
    ax.set(xlabel="first block removed", ylabel="blocks removed")
    bar = plain_bar(ax.figure.colorbar(mesh, ax=ax, extend="min" if np.nanmin(grid) < low else "neither"))
    bar.set_label(axis_of(metric))
    return _finished(ax, means)


def _rows(df: pd.DataFrame, units: Sequence[str], metric: str) -> pd.DataFrame:
    """The rows of one metric that a map shows."""
    frames.columns(df, _NEEDED, "an ablation")
    if not set(df["unit"].unique()) <= set(units):
        raise InputError(f"df must hold the unit {' or '.join(units)}; got {', '.join(map(str, df['unit'].unique()))}")
    choice("metric", metric, df["metric"].unique())
    rows = df[df["metric"] == metric]
    frames.demand_layers(rows)
    frames.refuse_several(rows, names=["model", "method", "reference"], may="")
    frames.refuse_targets(rows)
    frames.refuse_repeated(rows)
    return rows


def _edges(grid: np.ndarray, y: int = 0) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(grid.shape[1] + 1) - 0.5, np.arange(grid.shape[0] + 1) - 0.5 + y


def _finished(ax: Axes, means: pd.DataFrame) -> Axes:
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(8, integer=True))
    ax.spines[:].set_visible(False)
    sample = labels.sample(means["n"])
    title(ax, sample if means["n"].max() == 1 else f"mean of {sample}")
    return ax
