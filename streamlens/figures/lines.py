"""Curves over layers: a mean over prompts with the band of its interval, one curve a group."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from streamlens.figures.style import PALETTE

_DASHES = ("-", "--", ":", "-.")


def looks(groups: pd.DataFrame) -> dict[tuple, tuple[str, str]]:
    """(colour, dashes) for each row of `groups`. With two or more columns the last one chooses the dashes, so that curves to be
    compared share a colour; with one column, or one value in the last, colours alone tell them apart while they last."""
    if not groups.shape[1]:
        return {(): (PALETTE[0], _DASHES[0])}
    keys = list(dict.fromkeys(groups.itertuples(index=False, name=None)))
    tails = list(dict.fromkeys(key[-1] for key in keys))
    if groups.shape[1] > 1 and len(tails) > 1:
        heads = list(dict.fromkeys(key[:-1] for key in keys))
        place = {(*head, tail): (i, j) for (i, head), (j, tail) in product(enumerate(heads), enumerate(tails))}
    else:
        place = {key: (i, i // len(PALETTE)) for i, key in enumerate(keys)}
    return {key: (PALETTE[place[key][0] % len(PALETTE)], _DASHES[place[key][1] % len(_DASHES)]) for key in keys}


def draw(ax: Axes, curve: pd.DataFrame, label: str, look: tuple[str, str]) -> None:
    """One curve of `layer`, `mean`, `low`, `high`; without a band where there is no interval."""
    colour, dashes = look
    curve = curve.sort_values("layer")
    marker = "o" if len(curve) <= 40 and dashes == "-" else ""  # more would run together, and dots hide the dashes
    ax.plot(curve["layer"], curve["mean"], color=colour, linestyle=dashes, marker=marker, label=label)
    if curve["low"].notna().any():
        ax.fill_between(curve["layer"], curve["low"], curve["high"], color=colour, alpha=0.2, linewidth=0)


def of(df: pd.DataFrame, by: Sequence[str], key: Sequence[object]) -> pd.DataFrame:
    """The rows of one group; all of them where `by` is empty."""
    for column, value in zip(by, key, strict=True):
        df = df[df[column] == value]
    return df


def name(values: Sequence[object]) -> str:
    """A curve's name in the legend."""
    return ", ".join(map(str, values))


def layer_axis(ax: Axes, layers: pd.Series) -> None:
    """Whole layers as ticks, few enough to stay apart on a narrow figure of a deep model."""
    span = max(1, layers.max() - layers.min())
    ax.set_xlim(layers.min() - 0.02 * span - 0.2, layers.max() + 0.02 * span + 0.2)
    ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))


def layer_label(df: pd.DataFrame) -> str:
    """The axis of layers at whose input something is read, and after the last (site final)."""
    last = df.loc[df["site"] == "final", "layer"].unique() if "site" in df.columns else ()
    return f"layer ({last[0]} is after the last)" if len(last) == 1 else "layer"
