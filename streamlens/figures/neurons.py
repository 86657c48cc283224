"""Figures of attribution by neuron and by expert: the largest neurons of one logit, and each layer's experts."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from streamlens.errors import whole
from streamlens.figures import frames, labels
from streamlens.figures.style import NEGATIVE, POSITIVE, axes, thin, title

_NEEDED = ("prompt", "position", "token", "target", "target_token", "versus", "versus_token", "component", "layer", "contribution")
_SHARED = "0.6"


def neurons(df: pd.DataFrame, ax: Axes | None = None, top: int = 15) -> Axes:
    """Which neurons write the logit: bars of the `top` largest of all layers, named by layer and number.

    `df` is an attribution table by "neuron" of one prompt, position, target and versus. Raises InputError for several groups, and for
    `top` below 1.
    """
    frames.columns(df, (*_NEEDED, "neuron"), "an attribution by neuron")
    frames.refuse_groups(df)
    frames.refuse_repeated(df)
    whole("top", top, 1)
    rows = frames.parts(df, df["neuron"] >= 0, "a neuron")
    rows = rows.iloc[rows["contribution"].abs().argsort(kind="stable")[::-1][:top]]
    values, y = rows["contribution"].to_numpy(), np.arange(len(rows))
    ax = axes(ax, height=(len(rows) + 4.5) * 1.6 * mpl.rcParams["font.size"] / 72)
    ax.barh(y, values, height=0.7, color=np.where(values < 0, NEGATIVE, POSITIVE))
    ax.axvline(0, color="0.5", linewidth=thin())
    ax.set_yticks(y, [labels.component(row) for row in rows.to_dict("records")])
    ax.tick_params(axis="y", length=0)
    ax.set(ylim=(len(rows) - 0.4, -0.6), xlabel=f"contribution ({labels.unit(df)})")
    title(ax, f"{labels.target(df)} after {labels.visible(str(df['token'].iloc[0]))}")
    return ax


def experts(df: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """What each layer's experts write: one bar a layer, a piece an expert with its number; negative pieces to the left, shared ones grey.

    `df` is an attribution table by "expert" of one prompt, position, target and versus. Raises InputError for several groups.
    """
    frames.columns(df, (*_NEEDED, "expert"), "an attribution by expert")
    frames.refuse_groups(df)
    frames.refuse_repeated(df)
    rows = frames.parts(df, (df["expert"] >= 0) | (df["component"] == "shared_expert"), "an expert")
    rows = rows.assign(sublayer=rows.get("sublayer", 0))
    places = rows[["layer", "sublayer"]].drop_duplicates().apply(tuple, axis=1).to_list()
    ax = axes(ax, height=(len(places) + 5) * 1.6 * mpl.rcParams["font.size"] / 72)
    reach = {sign: np.zeros(len(places)) for sign in (-1, 1)}
    span = rows["contribution"].abs().groupby([rows["layer"], rows["sublayer"]]).sum().max()
    for row in rows.to_dict("records"):
        y, value = places.index((row["layer"], row["sublayer"])), row["contribution"]
        sign = -1 if value < 0 else 1
        colour = _SHARED if row["expert"] < 0 else POSITIVE if sign > 0 else NEGATIVE
        ax.barh(y, value, left=reach[sign][y], height=0.75, color=colour, edgecolor="white", linewidth=thin() / 2)
        if row["expert"] >= 0 and abs(value) > 0.05 * span:
            where = reach[sign][y] + value / 2
            ax.text(where, y, str(row["expert"]), ha="center", va="center", color="white", fontsize=mpl.rcParams["ytick.labelsize"])
        reach[sign][y] += value
    ax.axvline(0, color="0.3", linewidth=thin())
    ax.set_yticks(np.arange(len(places)), [f"{layer}.{sub}" if sub > 0 else str(layer) for layer, sub in places])
    ax.set(ylim=(len(places) - 0.4, -0.6), xlabel=f"contribution ({labels.unit(df)}; grey: shared experts)", ylabel="layer")
    title(ax, f"{labels.target(df)} after {labels.visible(str(df['token'].iloc[0]))}")
    return ax
