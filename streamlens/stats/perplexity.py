"""Perplexities of an ablation table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from streamlens.errors import InputError
from streamlens.stats.means import mean_interval, table_columns


def perplexity(
    ablation: pd.DataFrame, by: str | Sequence[str] = "layer", level: float = 0.95, n_boot: int = 2000, seed: int = 0
) -> pd.DataFrame:
    """The perplexity under each change: one row a group of `by` with clean, ablated, low, high, ratio, ratio_low, ratio_high, n.

    exp of the mean loss in nats: over the positions of a prompt, then over the n prompts. low and high belong to ablated; they and the
    ratio's (ablated / clean, of the same prompts) are exp of the interval of the mean, as in :func:`mean_interval`. Raises InputError for
    a table without losses.
    """
    table_columns(ablation, ["metric", "clean", "ablated", "delta"], "an ablation", "ablation")
    rows = ablation[ablation["metric"] == "loss"]
    if rows.empty:
        raise InputError(f"ablation must hold the metric loss; got {', '.join(map(str, ablation['metric'].unique())) or 'none'}")
    means = {name: mean_interval(rows, name, by, level=level, n_boot=n_boot, seed=seed) for name in ("clean", "ablated", "delta")}
    out = means["ablated"][[by] if isinstance(by, str) else list(by)].copy()
    out["clean"] = np.exp(means["clean"]["mean"])
    for prefix, name, source in (("", "ablated", "ablated"), ("ratio_", "ratio", "delta")):
        out[name] = np.exp(means[source]["mean"])
        out[f"{prefix}low"], out[f"{prefix}high"] = np.exp(means[source]["low"]), np.exp(means[source]["high"])
    return out.assign(n=means["ablated"]["n"])
