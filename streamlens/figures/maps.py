"""Maps over layers: the stream's norm at every position, and what depth is used for."""

from __future__ import annotations

from numbers import Real

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize

from streamlens.errors import InputError, choice
from streamlens.figures import frames, labels
from streamlens.figures.lines import layer_label
from streamlens.figures.style import axes, plain_bar, title
from streamlens.stats import log_norms

_MAP = "viridis"
_TOKENS = 24  # more would not be legible under a map


def norm_map(df: pd.DataFrame, ax: Axes | None = None, measure: str = "l2") -> Axes:
    """The stream's norm at every layer, from the first down, and position, on a logarithmic colour scale that position 0 does not swallow.

    `df` is a norms table of one model; of several prompts a cell is their geometric mean. The scale reaches over the positions from 1 on;
    what position 0 has beyond it gets the last colour, and the colour bar says how large it is. One short prompt has its tokens below.
    Raises InputError for several models, and for a measure that is not in the table.
    """
    frames.columns(df, ("prompt", "position", "layer", "site", "measure", "value"), "a norms")
    frames.refuse_several(df, names=["model"], may="")
    rows = log_norms(df, measure)
    cells = np.exp(rows.groupby(["layer", "position"])["log"].mean()).unstack("position")
    later = cells.loc[:, cells.columns > 0] if (cells.columns > 0).any() else cells
    low, high = float(np.nanmin(later)), float(np.nanmax(later))
    ax = axes(ax, taller=1.1)
    edges = [np.append(index - 0.5, index[-1] + 0.5) for index in (cells.columns.to_numpy(float), cells.index.to_numpy(float))]
    mesh = ax.pcolormesh(*edges, cells, cmap=_MAP, norm=LogNorm(low, high if high > low else low * 1.01), rasterized=True)
    top, bottom = float(np.nanmax(cells)), float(np.nanmin(cells))
    extend = {(False, False): "neither", (True, False): "max", (False, True): "min", (True, True): "both"}[top > high, bottom < low]
    bar = plain_bar(ax.figure.colorbar(mesh, ax=ax, extend=extend))
    bar.set_label("norm" if extend == "neither" else f"norm (position 0: {_range(cells[0])})")
    ax.set(xlabel="position", ylabel=layer_label(rows))
    ax.invert_yaxis()
    if rows["prompt"].nunique() == 1 and cells.shape[1] <= _TOKENS and "token" in rows:
        tokens = rows.drop_duplicates("position").sort_values("position")
        ax.set_xticks(tokens["position"], [labels.visible(str(t)) for t in tokens["token"]], rotation=90, parse_math=False)
    n = rows["prompt"].nunique()
    title(ax, "1 prompt" if n == 1 else f"geometric mean of {n} prompts")
    return ax


def depth_use(df: pd.DataFrame, ax: Axes | None = None, statistic: str = "max", limit: float | None = None) -> Axes:
    """What depth is used for: by how much the write of each later layer, from the first down, changes when a layer is taken away.

    `df` is a depth_use table of one unit ("head" excepted) and one kind of positions. A cell is the relative change of the write of
    the layer on the vertical axis without the one on the horizontal: the largest over positions and prompts (`statistic` "max", as
    published), or the mean over both ("mean"). Colours reach to `limit`, by default the largest change but for the uppermost twentieth;
    what lies beyond has the last colour. Raises InputError for several models, units or kinds of positions, and for a `limit` that is
    not above 0.
    """
    frames.columns(df, ("prompt", "unit", "layer", "layer_to", "positions", "measure", "statistic", "value"), "a depth_use")
    choice("statistic", statistic, df["statistic"].unique())
    frames.refuse_several(df, names=["model", "unit", "positions"], may="")
    if df["unit"].iloc[0] == "head":
        raise InputError("df must hold whole layers; got heads: average or select them, since a layer has several")
    if limit is not None and not (isinstance(limit, Real) and limit > 0):
        raise InputError(f"limit must be above 0; got {limit!r}")
    rows = df[(df["statistic"] == statistic) & (df["measure"] == "write")]
    if rows.empty:
        raise InputError("df must hold a later layer's write; got none: take away another layer than the last")
    cells = rows.groupby(["layer_to", "layer"])["value"].agg("max" if statistic == "max" else "mean").unstack("layer")
    last = int(max(cells.index.max(), cells.columns.max()))
    every = np.arange(last + 1)
    cells = cells.reindex(index=every, columns=every)
    top = limit or max(float(np.nanquantile(cells, 0.95)), 1e-12)
    ax = axes(ax, taller=1.2)
    edges = np.arange(last + 2) - 0.5
    mesh = ax.pcolormesh(edges, edges, cells, cmap=_MAP, norm=Normalize(0, top), rasterized=True)
    largest = float(np.nanmax(cells))
    bar = ax.figure.colorbar(mesh, ax=ax, extend="max" if largest > top else "neither")
    bar.set_label(f"relative change of the write (largest {largest:.3g})" if largest > top else "relative change of the write")
    where = {"all": "at every position but the first", "future": "at earlier positions alone"}[df["positions"].iloc[0]]
    ax.set(xlabel=f"{df['unit'].iloc[0]} taken away", ylabel="layer whose write changes")
    ax.invert_yaxis()
    title(ax, f"{statistic} of {labels.sample(pd.Series([df['prompt'].nunique()]))}, taken away {where}")
    ax.spines[:].set_visible(False)
    return ax


def _range(values: pd.Series) -> str:
    """The least and the largest value, to three digits, without an exponent up to a million."""
    return " to ".join(f"{float(format(value, '.3g')):g}" for value in (values.min(), values.max()))
