"""The figure of pruned models: what is lost as blocks go."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from streamlens.errors import choice
from streamlens.figures import frames, labels, lines
from streamlens.figures.ablation import axis_of
from streamlens.figures.style import axes, thin, title
from streamlens.stats import mean_interval


def pruning(df: pd.DataFrame, ax: Axes | None = None, metric: str = "loss") -> Axes:
    """What is lost as blocks go: the mean of `metric` against the number of blocks removed, one curve an order.

    `df` is the ablation table of :func:`streamlens.prune`. A curve starts at the untouched model and is the mean over prompts (positions
    and random orders averaged within each first), its band the 95% interval from resampling prompts. Raises InputError for a metric that
    is not in the table, several models, and several targets.
    """
    frames.columns(df, ("prompt", "position", "target", "versus", "method", "metric", "clean", "ablated", "n_removed"), "a pruning")
    choice("metric", metric, df["metric"].unique())
    rows = df[df["metric"] == metric]
    frames.refuse_several(rows, names=["model"], may="")
    frames.refuse_targets(rows)
    frames.refuse_repeated(rows)
    start = rows.assign(ablated=rows["clean"], n_removed=0)
    means = mean_interval(pd.concat([start, rows]), "ablated", ["method", "n_removed"])
    means = means.assign(layer=means["n_removed"])
    ax = axes(ax)
    ax.axhline(means["mean"][means["n_removed"] == 0].iloc[0], color="0.6", linewidth=thin(), zorder=0)
    methods = pd.DataFrame({"method": list(dict.fromkeys(rows["method"].astype(str)))})
    for key, look in lines.looks(methods).items():
        lines.draw(ax, lines.of(means, ["method"], key), lines.name(key), look)
    lines.layer_axis(ax, means["n_removed"])
    ax.set(xlabel="blocks removed", ylabel=axis_of(metric).removeprefix("Δ "))
    sample = labels.sample(means["n"])
    title(ax, sample if means["n"].max() == 1 else f"mean of {sample}, 95% interval")
    ax.legend()
    return ax
