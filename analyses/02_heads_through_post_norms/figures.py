"""The scatter, the table and the sentence, from the Parquet file alone: no model is opened.

python figures.py [DIR]
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import streamlens as sl
from streamlens.errors import InputError, StreamLensError
from streamlens.figures.style import PALETTE

METHODS = {"streamlens": "streamlens", "transformerlens": "TransformerLens"}
MARKERS = "osD^"


def read(results: Path) -> pd.DataFrame:
    path = results / "heads.parquet"
    if not path.is_file():
        raise InputError(f"results must be a folder with heads.parquet, which run.py writes; got {str(results)!r}")
    return pd.read_parquet(path)


def table(df: pd.DataFrame) -> pd.DataFrame:
    """A row a model: heads, the largest share by intervention, and each method's largest miss, in logits."""
    rows = {}
    for model, heads in df.groupby("model", sort=False):
        misses = {name: (heads[name] - heads.intervention).abs().max() for name in METHODS}
        rows[model] = {"heads": len(heads), "largest share": heads.intervention.abs().max()} | misses | {"refusal": heads.refusal.iloc[0]}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("model")


def sentence(df: pd.DataFrame) -> str:
    """What the first model says, which is the real one where it is installed."""
    heads = df[df.model == df.model.iloc[0]]
    top = heads.loc[heads.intervention.abs().idxmax()]
    return (
        f"In {top.model} zeroing head {top['head']} of layer {top.layer} with every norm frozen takes {top.intervention:.2f} off the logit "
        f"difference; streamlens says {top.streamlens:.2f}, TransformerLens {top.transformerlens:.2f}."
    )


def draw(df: pd.DataFrame) -> Figure:
    """A panel a method, its share of every head against the intervention's; on the diagonal it is right."""
    width, height = mpl.rcParams["figure.figsize"]
    figure = Figure(figsize=(width, 1.1 * height), layout="constrained")
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    for ax, (method, name) in zip(axes, METHODS.items(), strict=True):
        _panel(ax, df, method)
        ax.set_title(name)
        ax.set_xlabel("zeroing the head, norms frozen (logits)")
    axes[0].set_ylabel("share of the head (logits)")
    axes[0].legend(loc="upper left")
    return figure


def _panel(ax: Axes, df: pd.DataFrame, method: str) -> None:
    ax.axline((0, 0), slope=1, color="0.6", linewidth=0.6, zorder=0)
    refused = []
    for number, (model, heads) in enumerate(df.groupby("model", sort=False)):
        if heads[method].isna().all():
            refused.append(model)
            continue
        ax.scatter(
            heads.intervention, heads[method], s=9, marker=MARKERS[number], color=PALETTE[number], alpha=0.75, linewidths=0, label=model
        )
    first = df[df.model == df.model.iloc[0]]
    top = first.loc[first.intervention.abs().idxmax()]
    right = abs(top[method] - top.intervention) < 0.1 * abs(top.intervention)  # else the label must not hide its neighbours
    where = {"xytext": (-5, 2), "ha": "right"} if right else {"xytext": (0, -5), "ha": "center", "va": "top"}
    ax.annotate(f"L{top.layer}H{top['head']}", (top.intervention, top[method]), textcoords="offset points", **where)
    if refused:
        ax.text(0.98, 0.02, f"refused: {', '.join(refused)}", transform=ax.transAxes, ha="right", va="bottom", color="0.35")


def main(argv: list[str]) -> int:
    results = Path(argv[0]) if argv else Path(__file__).parent / "results"
    try:
        df = read(results)
        with sl.figures.style("paper", columns=2):
            paths = sl.figures.save(draw(df), results / "heads_through_post_norms")
    except StreamLensError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(df).to_string(float_format=lambda x: f"{x:.2g}"))
    print(sentence(df))
    print("\n".join(map(str, paths)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
