"""Maps of the ablation table: every head, and every span of blocks."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.ticker import MaxNLocator

from streamlens.errors import InputError, choice
from streamlens.figures import frames, labels
from streamlens.figures.ablation import axis_of
from streamlens.figures.style import DIVERGING, axes, title
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
    rows = _rows(df, "head", metric)
    choice("value", value, [v for v in _VALUES if v in df.columns])
    frames.refuse_several(rows, names=["sublayer"], may="")
    rows = rows[rows[value].notna()]
    means = mean_interval(rows, value, ["layer", "head"])
    grid = np.full((int(means["layer"].max()) + 1, int(means["head"].max()) + 1), np.nan)
    grid[means["layer"], means["head"]] = means["mean"]
    middle = 1.0 if value == "recovered" else 0.0
    largest = float(np.nanmax(abs(grid - middle))) or 1.0
    ax = axes(ax, taller=1.25)
    colours = mpl.colormaps[DIVERGING].with_extremes(bad="0.88")
    norm = Normalize(middle - largest, middle + largest)
    mesh = ax.pcolormesh(*_edges(grid), grid, cmap=colours, norm=norm, edgecolors="face", linewidth=0.1)
    ax.set(xlabel="head", ylabel="layer", ylim=(len(grid) - 0.5, -0.5))
    ax.figure.colorbar(mesh, ax=ax).set_label(axis_of(metric) if value == "delta" else f"{metric} recovered")
    return _finished(ax, means)


def spans(df: pd.DataFrame, ax: Axes | None = None, metric: str = "loss") -> Axes:
    """What breaks without each run of neighbouring blocks: the triangle of first block × number of blocks, on a logarithmic scale.

    `df` is an ablation table with the unit block and several spans. A cell is the mean change of `metric` over prompts; the scale reaches
    over three decades, and what is smaller, or better without the blocks, has its first colour. Raises InputError for a metric that is
    not in the table or falls nowhere, and for several models, methods or targets.
    """
    rows = _rows(df, "block", metric)
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
    bar = ax.figure.colorbar(mesh, ax=ax, extend="min" if np.nanmin(grid) < low else "neither")
    bar.set_label(axis_of(metric))
    return _finished(ax, means)


def _rows(df: pd.DataFrame, unit: str, metric: str) -> pd.DataFrame:
    """The rows of one metric that a map shows."""
    frames.columns(df, _NEEDED, "an ablation")
    if set(df["unit"].unique()) != {unit}:
        raise InputError(f"df must hold the unit {unit}; got {', '.join(map(str, df['unit'].unique()))}")
    choice("metric", metric, df["metric"].unique())
    rows = df[df["metric"] == metric]
    several = ["model", "method", "at", "reference", *["span"] * (unit != "block")]
    frames.refuse_several(rows, names=several, may="")
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
