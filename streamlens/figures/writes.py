"""Writes beside the stream that they are added to, and gradients: curves over layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from streamlens.errors import InputError, choice
from streamlens.figures import frames, labels, lines
from streamlens.figures.style import axes, plain_log_axis, thin, title
from streamlens.stats import mean_interval

_NORMS = ("prompt", "position", "layer", "site", "measure", "value")
_MEASURES = {
    "relative": "write / stream (L2 over L2)",
    "cosine": "cosine of write and stream",
    "along": "length of the write along the stream",
    "across": "length of the write across the stream",
    "l2": "norm of the write (L2)",
    "rms": "RMS of the write",
}
_WORDS = {"attn_out": "attn", "mlp_out": "MLP", "mixer_out": "mixer", "other_out": "other"}


def writes(df: pd.DataFrame, ax: Axes | None = None, measure: str = "relative", by: str | Sequence[str] | None = None) -> Axes:
    """How large the writes are beside the stream, or how they lie to it: `measure` against layer, a curve a kind of sublayer.

    `df` is a norms table with `measure` (relative, cosine, along, across, l2 or rms) at attn_out, mlp_out and the like. A curve is the mean
    over positions but the first, then over prompts, its band the 95% interval from resampling prompts. `by` names columns that get curves
    of their own, such as "model". Raises InputError for a measure without rows of writes, for a table of position 0 alone, and for several
    models, or several sublayers of one kind, that `by` does not name.
    """
    frames.columns(df, _NORMS, "a norms")
    by = frames.grouping(df, by)
    choice("measure", measure, _MEASURES)
    rows = df[(df["measure"] == measure) & df["site"].isin(_WORDS) & (df["position"] > 0)]
    if rows.empty:
        raise InputError(f"df must have {measure} of writes at positions from 1 on: sl.norms(..., measures={measure!r}); got none")
    frames.refuse_several(rows, by, names=["model"])
    frames.refuse_several(rows, by, names=["sublayer"])
    rows = rows.assign(site=rows["site"].astype(str).map(_WORDS))
    groups = list(dict.fromkeys([*by, "site"]))
    means = mean_interval(rows, "value", [*groups, "layer"])
    ax = axes(ax)
    if measure in ("cosine", "along"):
        ax.axhline(0, color="0.6", linewidth=thin(), zorder=0)
    elif (means["mean"] > 0).all():  # the first MLP may write many times what it reads
        ax.set_yscale("log")
    for key, look in lines.looks(means[groups]).items():
        lines.draw(ax, lines.of(means, groups, key), lines.name(key), look)
    lines.layer_axis(ax, means["layer"])
    if ax.get_yscale() == "log":
        plain_log_axis(ax)
    ax.set(xlabel="layer", ylabel=_MEASURES[measure])
    _mean_title(ax, means, "mean")
    ax.legend()
    return ax


def gradients(df: pd.DataFrame, ax: Axes | None = None, by: str | Sequence[str] | None = None) -> Axes:
    """How the loss's gradient flows back: its norm where the stream enters each block, on a logarithmic axis.

    `df` is a gradients table. A curve is the geometric mean over positions but the first (and but those without a gradient, as the last
    position after the last block), then over prompts, its band the 95% interval from resampling prompts. `by` names columns that get
    curves of their own, such as "model". Raises InputError for several models that `by` does not name and for a table without gradients.
    """
    frames.columns(df, ("prompt", "position", "layer", "value"), "a gradients")
    by = frames.grouping(df, by)
    frames.refuse_several(df, by, names=["model"])
    rows = df[(df["value"] > 0) & (df["position"] > 0)]
    if rows.empty:
        raise InputError("df must have gradients above 0 at positions from 1 on; got none")
    means = mean_interval(rows.assign(log=np.log(rows["value"])), "log", [*by, "layer"])
    means = means.assign(**{name: np.exp(means[name]) for name in ("mean", "low", "high")})
    ax = axes(ax)
    ax.set_yscale("log")
    for key, look in lines.looks(means[by]).items():
        lines.draw(ax, lines.of(means, by, key), lines.name(key), look)
    lines.layer_axis(ax, means["layer"])
    ax.set(xlabel=lines.layer_label(df), ylabel="norm of the loss gradient")
    _mean_title(ax, means, "geometric mean")
    if by:
        ax.legend()
    return ax


def _mean_title(ax: Axes, means: pd.DataFrame, mean: str) -> None:
    n = labels.sample(means["n"])
    title(ax, n if n == "1 prompt" else f"{mean} of {n}, 95% interval")
