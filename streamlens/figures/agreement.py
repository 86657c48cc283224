"""A cheap measure beside what removal really costs."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from streamlens.errors import InputError, choice
from streamlens.figures import frames
from streamlens.figures.ablation import axis_of
from streamlens.figures.style import PALETTE, axes, thin, title
from streamlens.stats import rank_agreement
from streamlens.stats.ranks import paired_means

_NAMES = {"block_influence": "block influence", "angular_distance": "angular distance", "relative_magnitude": "relative magnitude"}
_NAMED = 40  # points that can be told apart by their numbers


def agreement(
    ablation: pd.DataFrame, similarity: pd.DataFrame, ax: Axes | None = None, measure: str | None = None, metric: str = "loss"
) -> Axes:
    """Does a similarity say what removal costs? One point a layer (or span), its mean `measure` against the measured change of `metric`.

    `ablation` and `similarity` are those of :func:`streamlens.stats.rank_agreement`, whose Kendall and Spearman coefficients stand in the
    title with their 95% intervals. `measure` may be left out where there is one. Layers are named by their numbers, those
    that cost most first, as far as there is room; thin lines are the 95% intervals of both means from resampling prompts. Raises
    InputError for a measure that is not there, and as rank_agreement does.
    """
    frames.columns(ablation, ("prompt", "layer", "metric", "delta", "unit"), "an ablation")
    frames.columns(similarity, ("prompt", "layer"), "a similarity or an ablation")
    found = rank_agreement(ablation, similarity, metric)
    if measure is None and len(found) > 1:
        raise InputError(f"measure must be one of {', '.join(map(repr, found['measure']))}; got None")
    measure = found["measure"].iloc[0] if measure is None else measure
    choice("measure", measure, found["measure"])
    points, row = paired_means(ablation, similarity, measure, metric), found[found["measure"] == measure].iloc[0]
    ax = axes(ax)
    single = len(points) <= _NAMED and (points["span"] == 1).all() and (points["head"] < 0).all()
    ax.scatter(points["estimate"], points["truth"], color=PALETTE[0], s=8 if single else 5, linewidth=0)
    if single:
        _spread(ax, points)
        _name(ax, points)
    ax.set(xlabel=_NAMES.get(measure, f"{measure} estimate"), ylabel=axis_of(metric))
    title(ax, "; ".join(_coefficient(row, name) for name in ("kendall", "spearman")))
    return ax


def _spread(ax: Axes, points: pd.DataFrame) -> None:
    """Crosses over the intervals, where there are any."""
    if points["truth_low"].notna().any():
        sizes = [abs(points[[f"{name}_low", f"{name}_high"]].sub(points[name], axis=0).to_numpy().T) for name in ("truth", "estimate")]
        look = {"fmt": "none", "ecolor": PALETTE[0], "alpha": 0.4, "elinewidth": thin(), "zorder": 0}
        ax.errorbar(points["estimate"], points["truth"], yerr=sizes[0], xerr=sizes[1], **look)


def _name(ax: Axes, points: pd.DataFrame) -> None:
    font = 0.7 * mpl.rcParams["font.size"]
    ax.autoscale_view()  # else the limits are only found when the figure is drawn
    placed = np.empty((0, 2))
    for point in points.sort_values("truth", key=abs, ascending=False).itertuples():
        at = ax.transData.transform((point.estimate, point.truth)) * 72 / ax.figure.dpi
        if (np.abs(placed - at) < (1.4 * font, 0.9 * font)).all(axis=1).any():
            continue
        placed = np.vstack([placed, at])
        ax.annotate(str(point.layer), (point.estimate, point.truth), (2, 2), textcoords="offset points", fontsize=font, color="0.3")


def _coefficient(row: pd.Series, name: str) -> str:
    interval = "" if pd.isna(row[f"{name}_low"]) else f" ({row[f'{name}_low']:.2f} to {row[f'{name}_high']:.2f})"
    return f"{'τ' if name == 'kendall' else 'ρ'} = {row[name]:.2f}{interval}".replace("-", "−").replace(" ", "\u00a0")
