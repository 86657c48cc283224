"""How figures look and are saved: sizes of journals and screens, colours that the colour-blind can tell apart, same bytes twice."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colorbar import Colorbar
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from streamlens.errors import InputError, choice

# Okabe & Ito 2008, less the yellow, which is faint on white.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
POSITIVE, NEGATIVE, TOTAL = PALETTE[0], PALETTE[1], "0.35"
DIVERGING = "RdBu"  # blue where a contribution is positive, as POSITIVE
SEQUENTIAL = "Blues"

_WIDTHS = {"paper": {1: 3.25, 2: 6.75}, "notebook": {1: 6.0, 2: 10.0}, "talk": {1: 6.5, 2: 12.0}}  # inches
_HEIGHT = {1: 0.72, 2: 0.42}  # of the width
_FONT = {"paper": 7.5, "notebook": 10.0, "talk": 15.0}  # points
_LINE = {"paper": 1.1, "notebook": 1.6, "talk": 2.5}  # points
_DPI = {"paper": 200, "notebook": 110, "talk": 110}

# A PDF needs TrueType for journals that refuse Type 3; the salt and the missing dates make the bytes the same twice.
_SAVING = {"pdf.fonttype": 42, "svg.hashsalt": "streamlens", "svg.fonttype": "path"}
_METADATA = {"pdf": {"CreationDate": None, "ModDate": None}, "svg": {"Date": None}, "png": {}}


def _settings(name: str, columns: int) -> dict[str, object]:
    font, line, width = _FONT[name], _LINE[name], _WIDTHS[name][columns]
    small = font - 0.5 if name == "paper" else font - 1
    return {
        **_SAVING,
        "figure.figsize": (width, width * _HEIGHT[columns]),
        "figure.dpi": _DPI[name],
        "savefig.dpi": 300 if name == "paper" else "figure",
        "font.family": "DejaVu Sans",
        "font.size": font,
        "axes.titlesize": font,
        "axes.labelsize": font,
        "xtick.labelsize": small,
        "ytick.labelsize": small,
        "legend.fontsize": small,
        "legend.frameon": False,
        "axes.prop_cycle": mpl.cycler(color=PALETTE),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlepad": font * 0.7,
        "lines.linewidth": line,
        "lines.markersize": line * 2,
        **{f"{part}.linewidth": line * 0.55 for part in ("axes", "patch", "grid")},
        **{f"{axis}tick.major.width": line * 0.55 for axis in "xy"},
        **{f"{axis}tick.minor.width": line * 0.4 for axis in "xy"},
        **{f"{axis}tick.major.size": font * 0.35 for axis in "xy"},
        **{f"{axis}tick.minor.size": font * 0.2 for axis in "xy"},
    }


@contextmanager
def style(name: str = "paper", columns: int = 1) -> Iterator[None]:
    """Figures made inside the `with` block have the look of a "paper", a "notebook" or a "talk", one or two columns wide.

    A paper's columns are 3.25 and 6.75 inches wide with text of 7 to 7.5 points. Raises InputError for another name or number.
    """
    choice("name", name, _WIDTHS)
    choice("columns", columns, _WIDTHS[name])
    with mpl.rc_context(_settings(name, columns)):
        yield


class ShownFigure(Figure):
    """A figure that Jupyter shows as the last value of a cell, without pyplot."""

    def _repr_png_(self) -> bytes:
        buffer = BytesIO()
        self.savefig(buffer, format="png", dpi=self.dpi)
        return buffer.getvalue()


def new_axes(height: float | None = None, taller: float = 1.0) -> Axes:
    """Axes on a figure of their own, as wide as the style says; `height` in inches, else the style's times `taller`."""
    width, usual = mpl.rcParams["figure.figsize"]
    figure = ShownFigure(figsize=(width, height or usual * taller), layout="constrained")
    FigureCanvasAgg(figure)
    return figure.add_subplot()


def axes(ax: Axes | None, height: float | None = None, taller: float = 1.0) -> Axes:
    """The Axes given, or new ones. Raises InputError for what are no Axes."""
    if ax is not None and not isinstance(ax, Axes):
        raise InputError(f"ax must be matplotlib Axes; got {type(ax).__name__}")
    return ax or new_axes(height, taller)


def thin() -> float:
    """Points of a line beside the data: a baseline, a fit."""
    return 0.6 * mpl.rcParams["lines.linewidth"]


def title(ax: Axes, text: str) -> None:
    """A title broken into lines that fit a narrow figure; no mathematics in it, since tokens may hold dollar signs."""
    points = ax.get_window_extent().width * 72 / ax.figure.dpi
    characters = max(20, int(1.1 * points / (0.58 * ax.title.get_fontsize())))  # a letter is a little over half as wide as high
    ax.set_title("\n".join(textwrap.wrap(text, characters, break_on_hyphens=False)), parse_math=False)


def plain_log_axis(ax: Axes) -> None:
    """Plain numbers, and never an axis with a single label: within a factor of 8 even steps, within two decades also at 2 and 5."""
    low, high = ax.get_ylim()
    decades = LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,))
    ax.yaxis.set_major_locator(MaxNLocator(6) if high < 8 * low else decades)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def plain_bar(bar: Colorbar) -> Colorbar:
    """Plain numbers beside logarithmic colours."""
    bar.formatter = FuncFormatter(lambda value, _: f"{value:g}")
    bar.minorformatter = NullFormatter()
    return bar


def save(fig_or_ax: Figure | Axes, path_stem: str | Path, formats: Sequence[str] = ("pdf", "png")) -> list[Path]:
    """Write a figure once a format ("pdf", "png", "svg") to `path_stem` plus its ending, and give the paths.

    The same figure gives the same bytes, without a date. Missing folders are made. A figure that cannot be drawn leaves no file.
    Raises InputError for another format or something that is not a figure.
    """
    figure = fig_or_ax.get_figure(root=True) if isinstance(fig_or_ax, Axes) else fig_or_ax
    if not isinstance(figure, Figure):
        raise InputError(f"fig_or_ax must be a matplotlib Figure or Axes; got {type(fig_or_ax).__name__}")
    formats = [formats] if isinstance(formats, str) else list(formats)
    for ending in formats:
        choice("formats", ending, _METADATA)
    stem = Path(path_stem)
    drawn = []
    with mpl.rc_context(_SAVING):
        for ending in formats:
            buffer = BytesIO()
            figure.savefig(buffer, format=ending, metadata=_METADATA[ending])
            drawn.append((stem.with_name(f"{stem.name}.{ending}"), buffer.getvalue()))
    stem.parent.mkdir(parents=True, exist_ok=True)
    for path, data in drawn:
        path.write_bytes(data)
    return [path for path, _ in drawn]
