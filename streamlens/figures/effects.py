"""The figure of the effects table: what a component does directly against what it does in all."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke

from streamlens.errors import whole
from streamlens.figures import frames, labels
from streamlens.figures.style import PALETTE, axes, thin, title
from streamlens.stats import mean_interval

_NEEDED = ("prompt", "position", "target", "target_token", "versus", "versus_token", "component", "layer", "head", "direct", "total")
_KINDS = {"head": "head", "attn": "attention", "mlp": "MLP", "mixer": "mixer", "other": "other"}
_MARKERS = dict(zip(_KINDS, "osDv^", strict=True))


def effects(df: pd.DataFrame, ax: Axes | None = None, top: int = 6) -> Axes:
    """Who is made up for by others: each component's total effect against its direct effect, with the line of no self-repair.

    `df` is an effects table. On the line a component's loss costs what it wrote; between the line and zero the others step in; above it
    they depended on what it wrote. A point is the mean over prompts (positions averaged within each first), and the title says how
    many; the `top` components with the largest effects are named. Raises InputError for several models, methods or targets.
    """
    frames.columns(df, _NEEDED, "an effects")
    frames.refuse_several(df, names=["model", "method"], may="")
    frames.refuse_targets(df)
    frames.refuse_repeated(df)
    whole("top", top, 0)
    points = _points(df)
    ax = axes(ax, taller=1.2)
    low, high = (f(points[["direct", "total"]].to_numpy()) for f in (np.min, np.max))
    room = 0.06 * ((high - low) or 1.0)
    ends = (low - room, high + room)
    for value in (ax.axhline, ax.axvline):
        value(0, color="0.8", linewidth=thin(), zorder=0)
    ax.plot(ends, ends, color="0.4", linestyle="--", linewidth=thin(), zorder=1, label="no self-repair")
    for (kind, word), colour in zip(_KINDS.items(), PALETTE, strict=False):
        of_kind = points[points["component"] == kind]
        if len(of_kind):
            look = {"s": 12, "color": colour, "alpha": 0.8, "linewidth": 0}
            ax.scatter(of_kind["direct"], of_kind["total"], marker=_MARKERS[kind], label=word, **look)
    ax.set(xlim=ends, ylim=ends, xlabel="direct effect (logits)", ylabel="total effect (logits)")
    _name(ax, points.loc[points[["direct", "total"]].abs().max(axis=1).sort_values(ascending=False).index[:top]])
    ax.legend(loc=_corner(points, sum(ends) / 2), frameon=True, facecolor="white", edgecolor="none")
    several = labels.sample(points["n"], frames.positions(df))
    title(ax, f"{labels.target(df)}, {df['method'].iloc[0]} ablation" if several == "1 prompt" else f"mean of {several}")
    return ax


def _points(df: pd.DataFrame) -> pd.DataFrame:
    key = ["component", "layer", "sublayer", "head"]
    rows = df.assign(component=df["component"].astype(str))
    sides = [mean_interval(rows, name, key).rename(columns={"mean": name})[[*key, name, "n"]] for name in ("direct", "total")]
    return sides[0].merge(sides[1].drop(columns="n"), on=key)


def _corner(points: pd.DataFrame, middle: float) -> str:
    """Of the two corners that the diagonal does not cross, the one with fewer points."""
    above, right = points["total"] > middle, points["direct"] > middle
    return "upper left" if (above & ~right).sum() < (right & ~above).sum() else "lower right"


def _name(ax: Axes, points: pd.DataFrame) -> None:
    """Names beside the points, on the side where there is room, those that would cover one another pushed apart."""
    low, high = ax.get_ylim()
    font = 0.93 * mpl.rcParams["font.size"]
    width, height = _inside(ax)
    line, letter = 1.1 * font / 72 / height * (high - low), 0.6 * font / 72 / width * (high - low)
    placed = []
    for row in points.sort_values("total").to_dict("records"):
        name, left, y = labels.component(row), row["direct"] > 0.5 * (low + high), row["total"]
        start = row["direct"] - left * (len(name) + 1) * letter
        ends = (start, start + (len(name) + 1) * letter)
        for other, at in placed:  # from the lowest up
            if other[0] < ends[1] and ends[0] < other[1] and abs(y - at) < line:
                y = at + line
        placed = sorted([*placed, (ends, y)], key=lambda item: item[1])
        where = {
            "textcoords": "offset points",
            "xytext": (-5 if left else 5, 0),
            "ha": "right" if left else "left",
            "va": "center",
            "annotation_clip": False,
            "path_effects": [withStroke(linewidth=2 * thin(), foreground="white")],  # the diagonal may pass behind
        }
        ax.annotate(name, (row["direct"], y), **where, fontsize=font)


def _inside(ax: Axes) -> tuple[float, float]:
    """Inches that the data get of a figure's width and height, about."""
    box = ax.get_position()
    return 0.9 * box.width * ax.figure.get_figwidth(), 0.9 * box.height * ax.figure.get_figheight()
