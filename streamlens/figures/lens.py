"""The figure of the lens table: what the model would say at each layer, over the tokens of one prompt."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator

from streamlens.errors import InputError, choice
from streamlens.figures import frames, labels
from streamlens.figures.style import SEQUENTIAL, axes, title

_NEEDED = ("prompt", "position", "token", "layer", "site", "norm", "target", "target_token", "k", "probability")
_SHOWN = {"top": 0, "target": -1}
_DARK = 0.55  # text on cells of this probability and more is white
_SMALLEST = 0.75  # of the font, where cells are narrow
_ROOM = 0.9  # of a cell's width, so that neighbours do not run together
_WORD = 6  # letters of a token that a smaller font makes room for
_LETTER = 0.57  # width of a letter over its height
_NARROWEST = 0.27  # the same of an i
_DIGIT = 0.64  # the same of a digit
_GAP = 0.3  # between two numbers, over their height


def lens(df: pd.DataFrame, ax: Axes | None = None, show: str = "top") -> Axes:
    """What the model would say if it ended at a layer: a layer × position map of the likeliest token, coloured by its probability.

    `df` is a lens table of one prompt and one norm, with one site a layer (resid_pre and final, as by default). Of a single position all
    the likeliest tokens that it holds stand side by side, the likeliest first. `show="target"` colours the probability of the named
    target instead, and writes its rank (0 is the likeliest; in thousands, 12k, where cells are narrow); the title names it where it is
    one. Raises InputError for several prompts, models, norms, sites of one layer or targets of one position, and for a table without the
    rows that are shown.
    """
    frames.columns(df, _NEEDED, "a lens")
    choice("show", show, _SHOWN)
    frames.refuse_several(df, names=["model", "prompt", "norm"], may="")
    across = "k" if show == "top" and df["position"].nunique() == 1 and df["k"].max() > 0 else "position"
    rows = df[df["k"] >= 0] if across == "k" else df[df["k"] == _SHOWN[show]]
    if rows.empty:
        raise InputError(f"df must have rows of k={_SHOWN[show]} for show={show!r}; got k from {df['k'].min()} to {df['k'].max()}")
    if rows.duplicated([across, "layer"]).any():
        several = "site of a layer" if rows.groupby(["layer"])["site"].nunique().max() > 1 else "target of a position"
        raise InputError(f"df must hold one {several}; got several: select one")
    columns, layers = (np.sort(rows[name].unique()) for name in (across, "layer"))
    font = 0.8 * mpl.rcParams["font.size"]
    ax = axes(ax, height=(1.45 * len(layers) * font + 8 * mpl.rcParams["font.size"]) / 72)
    grid = rows.pivot(index="layer", columns=across, values="probability").to_numpy()
    edges = (np.arange(len(columns) + 1) - 0.5, np.arange(len(layers) + 1) - 0.5)
    look = {"cmap": mpl.colormaps[SEQUENTIAL].with_extremes(bad="0.88"), "vmin": 0, "vmax": 1, "edgecolors": "white", "linewidth": 0.3}
    if not _fit(ax, len(columns), font):  # lines between such narrow cells would be all that is seen
        look |= {"edgecolors": "face", "linewidth": 0.1}
    mesh = ax.pcolormesh(*edges, grid, **look)
    _axes(ax, rows, across, columns, layers)
    written = _write(ax, rows, across, columns, layers, font, show)
    ax.figure.colorbar(mesh, ax=ax).set_label("probability")
    title(ax, _title(rows, show, written, several=across == "k"))
    return ax


def _axes(ax: Axes, rows: pd.DataFrame, across: str, columns: np.ndarray, layers: np.ndarray) -> None:
    ax.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(layers) - 0.5, -0.5), ylabel="layer")
    if across == "k":
        token = labels.visible(str(rows["token"].iloc[0]), 12)
        ax.set_xticks(range(len(columns)), [str(k + 1) for k in columns])
        ax.set_xlabel(f"likeliest tokens after {token}, the likeliest first", parse_math=False)
    else:
        tokens = rows.drop_duplicates("position").set_index("position")["token"]
        at = np.arange(0, len(columns), int(np.ceil(1.3 * mpl.rcParams["font.size"] / _cell(ax, len(columns)))))
        ax.xaxis.set_major_locator(FixedLocator(at))
        names = [_bare(str(tokens[p]), 12) for p in columns[at]]
        ax.set_xticklabels(names, rotation=45, ha="right", rotation_mode="anchor", parse_math=False)
        ax.set_xlabel("token")
    step = max(1, round(len(layers) / 12))
    ticks = np.arange(0, len(layers), step)
    ax.set_yticks(ticks, [str(layers[i]) for i in ticks])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def _write(ax: Axes, rows: pd.DataFrame, across: str, columns: np.ndarray, layers: np.ndarray, font: float, show: str) -> bool:
    """The token (or the target's rank) in every cell, cut to its width, nothing where not one letter fits. Whether any is written."""
    cell = _cell(ax, len(columns))
    if show == "target":
        font, n = _digits(cell, font)
        texts = [_rank(r, n) if n else "" for r in rows["rank"]]
    else:
        n, font = _fit(ax, len(columns), font), max(_SMALLEST * font, min(font, _ROOM * cell / (_WORD * _LETTER)))
        texts = [_cut(str(t), _ROOM * cell / font) if n else "" for t in rows["target_token"]]
    x, y = np.searchsorted(columns, rows[across]), np.searchsorted(layers, rows["layer"])
    for i, j, text, probability in zip(x, y, texts, rows["probability"], strict=True):
        colour = "white" if probability >= _DARK else "black"
        if text:
            ax.text(i, j, text, fontsize=font, color=colour, ha="center", va="center", clip_on=True, parse_math=False)
    return any(texts)


def _cell(ax: Axes, n: int) -> float:
    """Points that one of `n` cells beside one another is wide, a colour bar beside them all."""
    return ax.get_position().width * 0.82 * ax.figure.get_figwidth() * 72 / n


def _fit(ax: Axes, n: int, font: float) -> int:
    """Letters that fit into one of `n` cells."""
    return int(_cell(ax, n) / (_LETTER * font))


def _digits(cell: float, font: float) -> tuple[float, int]:
    """A font, up to a quarter smaller than `font` so that three digits fit, and how many fit into a cell of so many points."""
    font = max(_SMALLEST * font, min(font, cell / (3 * _DIGIT + _GAP)))
    return font, int((cell / font - _GAP) / _DIGIT + 1e-6)


def _rank(rank: int, longest: int) -> str:
    """A rank, in thousands (12k) where it is too long, and … where that is too long as well."""
    texts = (str(rank), f"{rank / 1000:.0f}k" if rank >= 1000 else "…")
    return next((text for text in texts if len(text) <= longest), "…")


def _title(rows: pd.DataFrame, show: str, written: bool, several: bool) -> str:
    norm = "" if rows["norm"].iloc[0] == "recomputed" else ", final norm frozen"
    if show == "top":
        return f"{'' if written else 'probability of the '}likeliest token{'s' if several else ''} at each layer{norm}"
    named = labels.visible(str(rows["target_token"].iloc[0])) if rows["target"].nunique() == 1 else "target"
    return f"{'rank and ' if written else ''}probability of {named}{norm}"


def _cut(text: str, room: float) -> str:
    """As much of a token as fits into so many times the size of the font, … for the rest or for all of it; "" where that is too much."""
    candidates = (_bare(text, n) for n in range(min(24, int(room / _NARROWEST) + 1), 1, -1))
    return next((kept for kept in (*candidates, "…") if labels.width(kept) <= room), "")


def _bare(text: str, longest: int) -> str:
    """A token without quotes and outer spaces, since cells are narrow; of a space alone its sign."""
    return labels.visible(text.strip() or text.replace(" ", "␣"), max(longest, 2))[1:-1]
