"""Where the stream's length comes from: each layer's size and its alignment with what stood there before."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from streamlens.figures import frames, labels
from streamlens.figures.lines import layer_axis
from streamlens.figures.style import PALETTE, axes, thin, title
from streamlens.stats import growth_sources


def norm_parts(df: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Which layers the final squared norm comes from: their own size, and twice their inner product with what stood there before.

    `df` is a norm_parts table of one model. Bars are shares of the squared norm before the final norm, the mean over positions but the
    first, then over prompts: all of them, embedding included (layer -1), sum to 1. A thin line is the 95% interval of each from resampling
    prompts. Raises InputError for several models.
    """
    frames.columns(df, ("prompt", "position", "layer", "layer_to", "value", "total"), "a norm_parts")
    frames.refuse_several(df, names=["model"], may="")
    shares = growth_sources(df, skip_first=bool((df["position"] > 0).any()))
    ax = axes(ax)
    ax.axhline(0, color="0.6", linewidth=thin(), zorder=0)
    for shift, (source, color) in zip((-0.2, 0.2), (("size", PALETTE[0]), ("alignment", PALETTE[1])), strict=True):
        rows = shares[shares["source"] == source]
        bounds = np.abs(rows[["low", "high"]].to_numpy().T - rows["mean"].to_numpy())
        error = None if np.isnan(bounds).all() else bounds
        style = {"width": 0.4, "color": color, "label": source, "error_kw": {"elinewidth": thin(), "ecolor": "black"}}
        ax.bar(rows["layer"] + shift, rows["mean"], yerr=error, **style)
    layer_axis(ax, shares["layer"])
    ax.set(xlabel="layer (−1 is the embedding)", ylabel="share of the squared norm")
    n = labels.sample(shares["n"])
    title(ax, n if n == "1 prompt" else f"mean of {n}, 95% interval")
    ax.legend()
    return ax
