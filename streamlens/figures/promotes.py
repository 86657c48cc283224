"""The figure of promoted tokens: what one component pushes up, and what down."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from streamlens.errors import InputError, whole
from streamlens.figures import frames, labels
from streamlens.figures.style import NEGATIVE, POSITIVE, axes, thin, title

_NEEDED = ("prompt", "position", "token", "component", "layer", "head", "direction", "k", "target_token", "contribution")


def promotes(df: pd.DataFrame, ax: Axes | None = None, top: int = 10) -> Axes:
    """Which tokens a component pushes up and down: bars of the `top` largest in either direction, in logits above the mean token's.

    `df` is the table of one component at one position of one prompt. Raises InputError for several of these, and for `top` below 1.
    """
    frames.columns(df, _NEEDED, "a promotes")
    whole("top", top, 1)
    place = [name for name in ("model", "prompt", "position", "component", "layer", "sublayer", "head") if name in df.columns]
    groups = df[place].drop_duplicates()
    if len(groups) > 1:
        differ = ", ".join(name for name in place if groups[name].nunique() > 1)
        raise InputError(f"df must hold one component at one position of one prompt; got {len(groups)} that differ in {differ}: select one")
    rows = df[df["k"] < top].sort_values("contribution", ascending=False).drop_duplicates("target")
    names = [labels.visible(str(text)) for text in rows["target_token"]]
    ax = axes(ax, height=(len(rows) + 4.5) * 1.6 * mpl.rcParams["font.size"] / 72)
    y, values = np.arange(len(rows)), rows["contribution"].to_numpy()
    ax.barh(y, values, height=0.7, color=np.where(values < 0, NEGATIVE, POSITIVE))
    ax.axvline(0, color="0.5", linewidth=thin())
    ax.set_yticks(y, names, parse_math=False)
    ax.tick_params(axis="y", length=0)
    ax.set(ylim=(len(rows) - 0.4, -0.6), xlabel="contribution (logits above the mean token)")
    title(ax, f"{labels.component(df.iloc[0].to_dict())} after {labels.visible(str(df['token'].iloc[0]))}")
    return ax
