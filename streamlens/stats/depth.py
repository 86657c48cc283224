"""What each depth does for the prediction: the share of the logit that it writes, where it is settled, and where heads rest."""

from __future__ import annotations

import pandas as pd

from streamlens.errors import InputError
from streamlens.stats.means import mean_interval, table_columns


def sink_rate(df: pd.DataFrame, threshold: float = 0.3) -> pd.DataFrame:
    """How many heads attend to position 0: one row a layer (and model), and layer -1 for all, with rate, mean and n_prompts.

    From a norms table with the measure to_first at every position. A head is a sink on a prompt where the mean over the prompt's queries
    (position 0's own included) of its attention to position 0 is above `threshold`; rate is the share of (prompt, head) that are,
    mean the mean attention. Published with prompts of 64 tokens and 0.3 by Gu et al. 2024 (arXiv 2410.10781). Raises InputError for
    a table without to_first.
    """
    rows = df[df["measure"] == "to_first"] if "measure" in df.columns else df.head(0)
    if rows.empty:
        raise InputError('df must be a norms table with the measure to_first: sl.norms(..., sites="pattern", measures="to_first")')
    model = ["model"] if "model" in df.columns else []
    alpha = rows.groupby([*model, "layer", "sublayer", "head", "prompt"], observed=True)["value"].mean().reset_index()
    alpha["sink"] = alpha["value"] > threshold
    parts = [alpha, alpha.assign(layer=-1)]
    both = pd.concat(parts).groupby([*model, "layer"], observed=True)
    out = both.agg(rate=("sink", "mean"), mean=("value", "mean"), n_prompts=("prompt", "nunique"))
    return out.reset_index()


def logit_by_depth(df: pd.DataFrame, level: float = 0.95, n_boot: int = 2000, seed: int = 0) -> pd.DataFrame:
    """How much of the final logit each depth writes: one row a layer (and model) with mean, low, high, n, cumulative and share.

    From an attribution table: contributions are summed over a layer's components at each position and target, then averaged over
    positions and prompts (logits). Layer -1 holds what belongs to no layer (embeddings, unembedding bias, softcap), layer n_layers the
    final norm's bias. cumulative adds the means up in that order, and share is mean over the mean logit. Raises InputError for a table
    without contributions.
    """
    needed = ["prompt", "position", "target", "versus", "layer", "contribution"]
    table_columns(df, needed, "an attribution")
    model = ["model"] if "model" in df.columns else []
    sums = df.groupby([*model, *needed[:-1]], observed=True)["contribution"].sum().reset_index()
    out = mean_interval(sums, "contribution", [*model, "layer"], level=level, n_boot=n_boot, seed=seed)
    by_model = out.groupby(model, observed=True)["mean"] if model else out["mean"]
    out["cumulative"] = by_model.cumsum()
    return out.assign(share=out["mean"] / (by_model.transform("sum") if model else out["mean"].sum()))


def settled_layer(df: pd.DataFrame) -> pd.DataFrame:
    """The layer at which a prediction is settled: one row a prompt and position (and model, and norm) with layer, n_layers and depth.

    From a lens table with sites resid_pre and final and `top_k` 1 or more. layer is the first one from which the lens's likeliest token
    is, there and at every later layer, the one that the model says in the end; n_layers where only the last block makes it so. depth is
    layer / n_layers. Raises InputError for a table without likeliest tokens, or without the last stream.
    """
    table_columns(df, ["prompt", "position", "layer", "site", "target", "k"], "a lens")
    rows = df[(df["k"] == 0) & df["site"].isin(["resid_pre", "final"])]
    if rows.empty or not (rows["site"] == "final").any():
        raise InputError("df must be a lens table with top_k=1 or more at the sites resid_pre and final")
    key = [name for name in ("model", "norm", "prompt", "prompt_text", "position", "token") if name in df.columns]
    rows = rows.sort_values("layer", kind="stable")
    groups = rows.groupby(key, observed=True, sort=True)
    last = groups["layer"].transform("max")
    differs = rows["layer"].where(rows["target"] != groups["target"].transform("last"), -1)
    out = rows.assign(differs=differs, n_layers=last).groupby(key, observed=True)[["differs", "n_layers"]].max().reset_index()
    out = out.rename(columns={"differs": "layer"}).assign(layer=lambda d: d["layer"] + 1)
    return out.assign(depth=out["layer"] / out["n_layers"])
