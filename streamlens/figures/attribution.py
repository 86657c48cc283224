"""Figures of the attribution table: every head and MLP at once, and the largest components of one logit."""

from __future__ import annotations

from numbers import Real

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import Normalize
from matplotlib.ticker import FixedLocator, MaxNLocator

from streamlens.errors import InputError, whole
from streamlens.figures import frames, labels
from streamlens.figures.style import DIVERGING, NEGATIVE, POSITIVE, TOTAL, axes, thin, title
from streamlens.stats import mean_interval

_NEEDED = ("prompt", "position", "target", "target_token", "versus", "versus_token", "component", "layer", "head", "contribution", "logit")
# The columns beside the heads, and whose rows they sum.
_BESIDE = {
    "attn": ("attn",),
    "mixer": ("mixer",),
    "MLP": ("mlp", "mlp_bias", "neuron", "neuron_rest", "expert", "shared_expert"),
}
_CLOSES = 2e-2  # the widest limit of the additivity check, that of bf16; what is further off lacks rows
_NO_BY = ": a figure shows one"


def _cells(df: pd.DataFrame) -> pd.DataFrame:
    """One row a cell: column ("head" or one beside), layer, head, and the mean over prompts with its interval."""
    column = {part: name for name, parts in _BESIDE.items() for part in parts} | {"head": "head"}
    rows = df.assign(column=df["component"].astype(str).map(column)).dropna(subset="column")
    rows = rows[rows["layer"] >= 0]  # a sum over all heads stands in no layer
    if rows.empty:
        raise InputError(f"df must have heads or MLPs; got components {', '.join(map(str, df['component'].unique()))}")
    frames.refuse_several(rows[rows["column"] == "head"], names=["sublayer"], may=_NO_BY)
    # Split rows (neurons, source positions) are summed first: the mean is over prompts, not over parts.
    key = ["prompt", "position", "column", "layer", "head"]
    sums = rows.groupby(key, observed=True)["contribution"].sum().reset_index()
    return mean_interval(sums, "contribution", ["column", "layer", "head"])


def _grid(cells: pd.DataFrame, n_layers: int, n_columns: int) -> np.ndarray:
    grid = np.full((n_layers, n_columns), np.nan)
    grid[cells["layer"], cells["head"].clip(lower=0)] = cells["mean"]
    return grid


def _limit(cells: pd.DataFrame) -> float:
    """The largest mean, unless it is one of the few largest MLPs: beside a last MLP of 7 logits, heads of 0.5 would all be white."""
    size = cells["mean"].abs()
    is_head = cells["column"] == "head"
    if is_head.any() and not is_head.all():
        return float(min(size.max(), max(2 * size[is_head].max(), size[~is_head].quantile(0.9)))) or 1.0
    return float(size.max()) or 1.0


def _draw_cells(ax: Axes, cells: pd.DataFrame, norm: Normalize) -> QuadMesh:
    """The heads as one mesh and each column beside them as another, a gap between; ticks for both."""
    # Edges close the hairlines that PDF viewers show between cells.
    look = {"cmap": mpl.colormaps[DIVERGING].with_extremes(bad="0.88"), "norm": norm, "edgecolors": "face", "linewidth": 0.1}
    n_layers, n_heads = int(cells["layer"].max()) + 1, int(cells["head"].max()) + 1
    edges, ticks = np.arange(n_layers + 1) - 0.5, {}
    right, wide = n_heads - 0.5, max(1.0, 0.1 * n_heads)
    if n_heads:
        grid = _grid(cells[cells["column"] == "head"], n_layers, n_heads)
        mesh = ax.pcolormesh(np.arange(n_heads + 1) - 0.5, edges, grid, **look)
        ticks = {int(x): f"{x:.0f}" for x in MaxNLocator(8, integer=True).tick_values(0, n_heads - 1) if 0 <= x < n_heads}
    for name in _BESIDE:
        beside = cells[cells["column"] == name]
        if len(beside):
            left = right + 0.5 * wide
            right = left + wide
            mesh = ax.pcolormesh([left, right], edges, _grid(beside, n_layers, 1), **look)
            ticks[left + wide / 2] = name
    ax.set(xlim=(-0.5, right), ylim=(n_layers - 0.5, -0.5), xlabel="head", ylabel="layer")
    ax.xaxis.set_major_locator(FixedLocator(list(ticks)))
    ax.set_xticklabels(ticks.values())
    ax.yaxis.set_major_locator(MaxNLocator(8, integer=True))
    return mesh


def _head_title(df: pd.DataFrame, cells: pd.DataFrame) -> str:
    several = labels.sample(cells["n"], frames.positions(df))
    if cells["n"].max() == 1:
        return labels.target(df) if several == "1 prompt" else f"mean over {several.removeprefix('1 prompt, ')}"
    widest = np.nanmax((cells["high"] - cells["low"]) / 2)
    return f"mean of {several}; 95% intervals up to ±{widest:.2g}"


def heads(df: pd.DataFrame, ax: Axes | None = None, limit: float | None = None) -> Axes:
    """Which heads and MLPs write the logit: a layer × head map of contributions, the MLPs as a column beside it.

    `df` is an attribution table of one model and one target a position. Of several prompts it shows the mean over prompts (positions
    averaged within each first); the title says how many, and half the width of the widest 95% interval. Colours are centred at 0 and
    reach to ±`limit` logits, by default the largest mean shown, unless that is one of the tenth of MLPs that outgrow every head twice;
    what lies beyond has the last colour, and the colour bar says so. Embedding, biases and softcap have no place in the map. Raises
    InputError for several models or targets, and for a `limit` that is not above 0.
    """
    frames.columns(df, _NEEDED, "an attribution")
    frames.refuse_several(df, names=["model"], may=_NO_BY)
    frames.refuse_targets(df)
    frames.refuse_repeated(df)
    if not np.isfinite(df["contribution"]).all():
        raise InputError(f"df must hold finite contributions; got {int((~np.isfinite(df['contribution'])).sum())} that are not")
    if limit is not None and not (isinstance(limit, Real) and limit > 0):
        raise InputError(f"limit must be above 0, in logits; got {limit!r}")
    cells = _cells(df)
    ax = axes(ax, taller=1.25)
    largest = cells["mean"].iloc[cells["mean"].abs().argmax()]
    top = limit or _limit(cells)
    mesh = _draw_cells(ax, cells, Normalize(-top, top))
    title(ax, _head_title(df, cells))
    ax.spines[:].set_visible(False)
    beyond = abs(largest) > top
    bar = ax.figure.colorbar(mesh, ax=ax, extend="both" if beyond else "neither")
    bar.set_label(f"contribution ({labels.unit(df)}; largest {largest:.3g})" if beyond else f"contribution ({labels.unit(df)})")
    return ax


def _one_group(df: pd.DataFrame) -> None:
    frames.refuse_groups(df)
    logit, parts = df["logit"].iloc[0], df["contribution"]
    if abs(parts.sum() - logit) > max(_CLOSES, 1.01 * (df.attrs.get("additivity_error") or 0)) * parts.abs().sum():
        raise InputError(f"df must hold every row of its group; got rows that sum to {parts.sum():.4g} where the logit is {logit:.4g}")


def _bars(df: pd.DataFrame, top: int) -> tuple[list[str], np.ndarray]:
    """Names and values of the bars: the `top` largest, and the sum of the others where they are more than one."""
    rows = df.iloc[df["contribution"].abs().argsort(kind="stable")[::-1]]
    kept = rows if len(rows) <= top + 1 else rows.head(top)
    names = [labels.component(row) for row in kept.to_dict("records")]
    values = kept["contribution"].to_list()
    if len(kept) < len(rows):
        names.append(f"{len(rows) - len(kept)} others")
        values.append(rows["contribution"].iloc[len(kept) :].sum())
    return names, np.array(values)


def waterfall(df: pd.DataFrame, ax: Axes | None = None, top: int = 12) -> Axes:
    """How one logit comes about: bars of the `top` largest contributions, each from where the one above ended, down to the logit.

    `df` is the attribution table of one prompt, position, target and versus, with every row: the smaller components are summed in one
    bar, so that the last bar is the logit. Raises InputError for several groups, missing rows or `top` below 1.
    """
    frames.columns(df, _NEEDED, "an attribution")
    whole("top", top, 1)
    _one_group(df)
    names, values = _bars(df, top)
    ends, logit = np.cumsum(values), float(df["logit"].iloc[0])
    ax = axes(ax, height=(len(values) + 4.5) * 1.75 * mpl.rcParams["font.size"] / 72)
    rows = np.arange(len(values))
    ax.barh(rows, values, left=ends - values, height=0.7, color=np.where(values < 0, NEGATIVE, POSITIVE))
    ax.barh([len(values)], [logit], height=0.7, color=TOTAL)
    ax.use_sticky_edges = False  # else a running sum that returns to its extreme ends on the frame
    ax.vlines(ends, rows, rows + 1, color="0.5", linewidth=thin(), zorder=0)
    ax.axvline(0, color="0.7", linewidth=thin(), zorder=0)
    ax.set_yticks(np.arange(len(values) + 1), [*names, labels.whole(df)])
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(values) + 0.6, -0.6)
    numbers = [*(f"{value:+.2f}".replace("-", "−") for value in values), f"{logit:.2f}".replace("-", "−")]
    for y, number in enumerate(numbers):
        where = {"xycoords": ("axes fraction", "data"), "va": "center", "annotation_clip": False}
        ax.annotate(number, (1.01, y), **where, fontsize=mpl.rcParams["ytick.labelsize"])
    ax.set_xlabel(f"{labels.unit(df)}, summed from the top")
    title(ax, f"{labels.target(df)} after {labels.visible(str(df['token'].iloc[0]))}")
    return ax
