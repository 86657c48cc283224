"""The figure of the ablation table: what each layer's removal does to a metric."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes

from streamlens.errors import InputError, choice
from streamlens.figures import frames, labels, lines
from streamlens.figures.style import axes, thin, title
from streamlens.stats import mean_interval

_NEEDED = ("prompt", "position", "target", "versus", "unit", "method", "layer", "metric", "delta")
_UNITS = ("block", "attn", "mlp", "mixer")
_METRICS = {
    "loss": "Δ loss (nats)",
    "kl": "KL divergence (nats)",
    "js": "JS divergence (nats)",
    "target_logit": "Δ target logit (logits)",
    "logit_diff": "Δ logit difference (logits)",
    "target_rank": "Δ rank of the target",
    "top1_agree": "Δ top-1 agreement",
    "target_logprob": "Δ log probability of the target (nats)",
    "l2": "L2 distance of probabilities",
}


def axis_of(metric: str) -> str:
    """How an axis names the change of a metric."""
    return _METRICS.get(metric, f"Δ {metric}")


def name_of(metric: str) -> str:
    """A metric in words, without its unit."""
    return axis_of(metric).removeprefix("Δ ").partition(" (")[0]


def removal(df: pd.DataFrame, ax: Axes | None = None, metric: str = "loss", by: str | Sequence[str] | None = None) -> Axes:
    """What breaks without a layer: the change of `metric` against the layer removed, one curve a unit (block, attn, mlp, mixer).

    `df` is an ablation table. A curve is the mean of delta over prompts (positions averaged within each first), its band the 95%
    interval from resampling prompts. `by` names columns with several values that get curves of their own, such as "model" or
    "method". Raises InputError for a metric that is not in the table, for heads (which have no single layer's curve), and for several
    models, methods, spans or targets that `by` does not name.
    """
    frames.columns(df, _NEEDED, "an ablation")
    by = frames.grouping(df, by)
    if {"layer", "delta"} & set(by):
        raise InputError(f"by must name columns other than the two axes, layer and delta; got {by}")
    choice("metric", metric, df["metric"].unique())
    rows = df[df["metric"] == metric]
    if not rows["unit"].isin(_UNITS).all():
        got = ", ".join(rows["unit"].unique())
        heads = "; of heads figures.ablated_heads draws a map" if "head" in got else ""
        raise InputError(f"df must hold the units block, attn, mlp or mixer, one curve each; got {got}{heads}")
    frames.demand_layers(rows)
    frames.refuse_several(rows, by)
    frames.refuse_several(rows[rows["unit"] != "block"], by, names=["sublayer"])  # a block has none, -1
    frames.refuse_targets(rows, by, may=" or name it in by=")
    frames.refuse_repeated(rows)
    groups = list(dict.fromkeys([*by, "unit"]))
    means = mean_interval(rows, "delta", [*groups, "layer"])
    means["unit"] = pd.Categorical(means["unit"], categories=_UNITS)
    looks = lines.looks(means.sort_values(groups)[groups])
    ax = axes(ax)
    ax.axhline(0, color="0.6", linewidth=thin(), zorder=0)
    for key, look in looks.items():
        lines.draw(ax, lines.of(means, groups, key), lines.name(key), look)
    lines.layer_axis(ax, means["layer"])
    ax.set(xlabel="layer", ylabel=axis_of(metric))
    interval = "" if means["n"].max() == 1 else ", 95% interval"
    title(ax, f"mean of {labels.sample(means['n'])}{interval}" if interval else labels.sample(means["n"]))
    ax.legend()
    return ax
