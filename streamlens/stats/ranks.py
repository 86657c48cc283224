"""Whether two measures put layers, spans or heads in the same order, with intervals from resampling prompts."""

from __future__ import annotations

import numpy as np
import pandas as pd

from streamlens.errors import InputError, choice
from streamlens.stats.means import CELLS, check_boot, interval, resample, table_columns

_PLACE = ["layer", "sublayer", "head", "span"]


def rank_agreement(
    ablation: pd.DataFrame,
    similarity: pd.DataFrame,
    metric: str = "loss",
    skip_first: bool = True,
    level: float = 0.95,
    n_boot: int = 2000,
    seed: int = 0,
) -> pd.DataFrame:
    """Does a cheap measure put layers in the order of what their removal costs? One row a measure: spearman and kendall (tau-b).

    `ablation` is an ablation table, its truth the mean delta of `metric`; `similarity` a similarity table (its pairs are compared with
    the spans of blocks that were removed), or another ablation table of the same units (a gradient estimate beside the exact sweep). Both
    are averaged over positions, then prompts; `skip_first` leaves position 0 out of the similarity. The intervals at `level`
    (`_low`, `_high`) resample prompts, the same for both, and rank again each time: layers are not exchangeable. n_units are ranked, of
    n_prompts; NaN where everything is tied. Raises InputError for tables of other prompts, or fewer than three units in common.
    """
    check_boot(level, n_boot)
    table_columns(ablation, ["prompt", "metric", "delta", *_PLACE, "unit"], "an ablation", "ablation")
    choice("metric", metric, ablation["metric"].unique())
    rows = []
    for measure, unit, estimate in _estimates(similarity, metric, skip_first):
        truth = _curve(ablation[(ablation["metric"] == metric) & (ablation["unit"] == unit)], "delta", "ablation")
        units = truth.columns.intersection(estimate.columns)
        if len(units) < 3 or not truth.index.equals(estimate.index):
            raise InputError(
                f"ablation and similarity must share their prompts and three {unit}s or more; got {len(units)} {unit}s in common, "
                f"{len(truth)} and {len(estimate)} prompts"
            )
        values = [table[units].to_numpy(np.float64) for table in (truth, estimate)]
        rows.append({"measure": measure, "unit": unit, "metric": metric} | _agreement(*values, level, n_boot, seed))
    return pd.DataFrame(rows)


def paired_means(
    ablation: pd.DataFrame, similarity: pd.DataFrame, measure: str, metric: str = "loss", skip_first: bool = True
) -> pd.DataFrame:
    """What :func:`rank_agreement` ranks: one row a layer, span or head with layer, sublayer, head, span, truth and estimate.

    These two are means, with their 95% intervals (_low, _high) from resampling prompts; NaN for a single prompt.
    """
    for name, unit, estimate in _estimates(similarity, metric, skip_first):
        if name == measure:
            truth = _curve(ablation[(ablation["metric"] == metric) & (ablation["unit"] == unit)], "delta", "ablation")
            units = truth.columns.intersection(estimate.columns)
            out = units.to_frame(index=False)
            for column, table in (("truth", truth[units].to_numpy()), ("estimate", estimate[units].to_numpy())):
                low, high = interval(table, 0.95, 2000, 0)
                out = out.assign(**{column: table.mean(0), f"{column}_low": low, f"{column}_high": high})
            return out
    raise InputError(f"measure must be one that the similarity has; got {measure!r}")


def _estimates(df: pd.DataFrame, metric: str, skip_first: bool):
    """(measure, unit, `[prompt, unit]`) of each measure that is held against the truth."""
    if "delta" in df.columns:
        table_columns(df, ["prompt", "metric", "method", "unit", *_PLACE], "an ablation", "similarity")
        for (method, unit), rows in df[df["metric"] == metric].groupby(["method", "unit"], observed=True):
            yield str(method), str(unit), _curve(rows, "delta", "similarity")
        return
    table_columns(df, ["prompt", "position", "layer", "layer_to", "measure", "value"], "a similarity", "similarity")
    later = df["position"] > 0
    df = df[later] if skip_first and later.any() else df
    df = df.assign(span=df["layer_to"] - df["layer"], sublayer=-1, head=-1)
    for measure, rows in df.groupby("measure", observed=True):
        yield str(measure), "block", _curve(rows, "value", "similarity")


def _curve(rows: pd.DataFrame, value: str, parameter: str) -> pd.DataFrame:
    """Means over positions, `[prompt, unit]`."""
    apart = ("method", "at", "together", "reference")  # target and sample are averaged
    several = [name for name in apart if value == "delta" and name in rows and rows[name].nunique() > 1]
    if several:
        raise InputError(f"{parameter} must hold one {several[0]}; got {rows[several[0]].nunique()}")
    table = rows.groupby(["prompt", *_PLACE], observed=True)[value].mean().unstack(_PLACE)
    return table.loc[:, table.notna().all()].astype(np.float64)


def _agreement(truth: np.ndarray, estimate: np.ndarray, level: float, n_boot: int, seed: int) -> dict[str, float]:
    n_prompts, n_units = truth.shape
    found = _correlations(truth.mean(0)[None], estimate.mean(0)[None])
    out: dict[str, float] = {}
    drawn = resample(n_prompts, n_boot, seed) / n_prompts
    step = max(1, CELLS // n_units**2)
    parts = (
        [_correlations(drawn[i : i + step] @ truth, drawn[i : i + step] @ estimate) for i in range(0, n_boot, step)]
        if n_prompts > 1
        else []
    )
    for index, name in enumerate(("spearman", "kendall")):
        out[name] = float(found[index][0])
        replicates = np.concatenate([p[index] for p in parts]) if parts else np.array([np.nan])
        tails = [(1 - level) / 2, (1 + level) / 2]
        known = replicates[~np.isnan(replicates)]
        out[f"{name}_low"], out[f"{name}_high"] = np.quantile(known, tails) if len(known) else (np.nan, np.nan)
    return out | {"n_units": n_units, "n_prompts": n_prompts}


def _correlations(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Spearman's rho and Kendall's tau-b of each row; ties share their mean rank."""
    signs = [np.sign(x[:, :, None] - x[:, None, :]) for x in (a, b)]
    ranks = [s.sum(2) for s in signs]  # twice the rank, less its mean
    tau = [(x * y).sum(axis) for x, y, axis in ((ranks[0], ranks[1], 1), (signs[0], signs[1], (1, 2)))]
    sizes = [np.sqrt((x * x).sum(axis) * (y * y).sum(axis)) for x, y, axis in ((*ranks, 1), (*signs, (1, 2)))]
    return tuple(np.divide(t, s, out=np.full(len(a), np.nan), where=s > 0) for t, s in zip(tau, sizes, strict=True))
