"""Figures of attribution by source: which head wrote the logit from where, and which input tokens did through all heads."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize

from streamlens.errors import InputError, whole
from streamlens.figures import frames, labels
from streamlens.figures.style import DIVERGING, axes, title

_NEEDED = ("prompt", "position", "token", "target", "target_token", "versus", "versus_token", "component", "layer", "head", "contribution")
_SOURCE = (*_NEEDED, "source", "source_token")
_LINE = 40  # characters of a line of the token strip


def sources(df: pd.DataFrame, ax: Axes | None = None, top: int = 12) -> Axes:
    """Which head wrote the logit from which position: a head × source map of contributions, of the `top` heads with the largest ones.

    `df` is an attribution table by "source" of one prompt, position, target and versus. Heads are sorted by layer. Colours are centred
    at 0. Raises InputError for several groups, a table without single heads, and `top` below 1.
    """
    rows = _parts(df)
    whole("top", top, 1)
    if (rows["head"] < 0).any():
        raise InputError("df must hold single heads; got their sum, as by='token' gives: take by='source'")
    head = [name for name in ("layer", "sublayer", "head") if name in rows]
    grid = rows.pivot_table(index=head, columns="source", values="contribution", aggfunc="sum", observed=True)
    kept = grid.abs().max(axis=1).nlargest(top).index
    grid = grid.loc[grid.index.isin(kept)]
    ax = axes(ax, height=(len(grid) + 7) * 1.5 * mpl.rcParams["font.size"] / 72)
    limit = float(grid.abs().to_numpy().max()) or 1.0
    edges = np.arange(grid.shape[1] + 1) - 0.5, np.arange(len(grid) + 1) - 0.5
    mesh = ax.pcolormesh(*edges, grid.to_numpy(), cmap=DIVERGING, norm=Normalize(-limit, limit), edgecolors="face", linewidth=0.1)
    names = [labels.component(dict(zip(head, key, strict=True)) | {"component": "head"}) for key in grid.index]
    ax.set_yticks(np.arange(len(grid)), names)
    labels.token_axis(ax, rows.drop_duplicates("source").set_index("source")["source_token"].reindex(grid.columns))
    ax.invert_yaxis()
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.figure.colorbar(mesh, ax=ax).set_label(f"contribution ({labels.unit(df)})")
    title(ax, f"{labels.target(df)} after {labels.visible(str(df['token'].iloc[0]))}")
    return ax


def tokens(df: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Which input tokens wrote the logit through all heads directly: the prompt as wrapped text, coloured by contribution.

    `df` is an attribution table by "token", or by "source", whose heads are summed, of one prompt, position, target and versus.
    Colours are centred at 0. Raises InputError for several groups.
    """
    rows = _parts(df)
    shares = rows.groupby("source", observed=True)["contribution"].sum()
    texts = rows.drop_duplicates("source").set_index("source")["source_token"].reindex(shares.index)
    shown = [labels.visible(str(text))[1:-1] for text in texts]
    lines = _wrapped([len(text) for text in shown])
    ax = axes(ax, height=(lines[-1][0] + 5) * 2.1 * mpl.rcParams["font.size"] / 72)
    limit = float(shares.abs().max()) or 1.0
    look = ScalarMappable(Normalize(-limit, limit), DIVERGING)
    for text, share, (line, start) in zip(shown, shares, lines, strict=True):
        colour = look.to_rgba(share)
        ax.barh(line, len(text), left=start, height=0.82, color=colour)
        ink = "white" if np.dot(colour[:3], (0.299, 0.587, 0.114)) < 0.5 else "black"
        ax.text(
            start + len(text) / 2,
            line,
            text,
            ha="center",
            va="center",
            color=ink,
            family="monospace",
            parse_math=False,
            fontsize=_small(ax),
        )
    ax.set(xlim=(0, _LINE), ylim=(lines[-1][0] + 0.6, -0.6))
    ax.set_axis_off()
    bar = ax.figure.colorbar(look, ax=ax, orientation="horizontal", shrink=0.6)
    bar.set_label(f"contribution through all heads ({labels.unit(df)})")
    title(ax, f"{labels.target(df)} after {labels.visible(str(df['token'].iloc[0]))}")
    return ax


def _parts(df: pd.DataFrame) -> pd.DataFrame:
    """The rows that have a source, of one group."""
    frames.columns(df, _SOURCE, "an attribution by source")
    frames.refuse_groups(df)
    frames.refuse_repeated(df)
    return frames.parts(df, df["source"] >= 0, "a source")


def _wrapped(widths: list[int]) -> list[tuple[int, int]]:
    """(line, first column) of each token, in lines of `_LINE` characters; a token is never broken."""
    places, line, column = [], 0, 0
    for width in widths:
        if column and column + width > _LINE:
            line, column = line + 1, 0
        places.append((line, column))
        column += width
    return places


def _small(ax: Axes) -> float:
    """Points of a monospaced letter that is as wide as one column of the strip."""
    width = ax.figure.get_figwidth() * 72 * 0.88
    return min(mpl.rcParams["font.size"] * 1.1, width / _LINE / 0.61)
