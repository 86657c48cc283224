"""What a report says in a few lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from streamlens import stats
from streamlens.text import component_name

DIVERGENCES = ("kl", "js")
"""Metrics that compare with the clean run already: they have no change."""


@dataclass(frozen=True)
class Tables:
    """The four tables of a report."""

    card: pd.DataFrame
    attribution: pd.DataFrame
    ablation: pd.DataFrame
    norms: pd.DataFrame


def summarise(tables: Tables, found: Sequence[str]) -> str:
    """The report's summary: the model, the sets with their largest writers, and what was :func:`found <findings>`."""
    sets = sets_table(tables.attribution).to_string(index=False)
    return "\n".join([model_line(tables.card), "", sets, "", *found])


def findings(tables: Tables, left_out: int, seed: int = 0) -> list[str]:
    """A line each: the layers that matter most, growth, and the checks."""
    without, lines = f"without one block (mean of {tables.ablation.prompt.nunique()} prompts)", []
    for metric, text in worst_layers(tables.ablation).items():
        lines += [f"{without}, {metric if metric in DIVERGENCES else f'change of the {metric}'}: {text}"]
    lines += [growth_line(tables.norms, seed)]
    lines += [f"worst additivity error: {tables.attribution.attrs['additivity_error']:.1e} of the sum of absolute contributions"]
    if left_out:
        lines += [f"bundled prompts left out (target or versus not one token for this tokenizer): {left_out}"]
    return lines


def model_line(card: pd.DataFrame) -> str:
    """The model in one line."""
    fact = card.iloc[0]
    return (
        f"{fact['model']}: {fact['n_layers']} layers x {fact['n_heads']} heads, d_model {fact['d_model']}, "
        f"{fact['parameters'] / 1e6:.1f} M parameters, {fact['dtype']}"
    )


def sets_table(attribution: pd.DataFrame, top: int = 3) -> pd.DataFrame:
    """One row a prompt set: prompts, how often target beats versus, mean logit, and the heads and MLPs with the largest mean share."""
    return pd.DataFrame([_set_row(name, rows, top) for name, rows in by_set(attribution)])


def by_set(df: pd.DataFrame):
    """(name, rows) of each prompt set; prompts of one's own are one set named `prompts`."""
    return df.groupby("set", observed=True, sort=False) if "set" in df.columns else [("prompts", df)]


def _set_row(name: str, rows: pd.DataFrame, top: int) -> dict[str, object]:
    logits = rows.drop_duplicates(["prompt", "position", "target", "versus"])
    compared = logits[logits.versus != -1]
    row = {"set": name, "prompts": logits.prompt.nunique()}
    if len(compared):
        row["target > versus"] = f"{int((compared.logit > 0).sum())}/{len(compared)}"
    row["mean logit diff" if len(compared) == len(logits) else "mean logit"] = f"{logits.logit.mean():.2f}"
    for kind in ("head", "mlp"):
        of_kind = rows[rows.component == kind]
        largest = stats.top_components(of_kind, top, n_boot=1) if len(of_kind) else of_kind.head(0)
        row[f"{kind}s that write most"] = ", ".join(f"{short_name(r)} {r.mean:+.2f}" for r in largest.itertuples(name="Row"))
    return row


def short_name(row) -> str:
    """`L3H7`, `L12`: a head or an MLP in a table whose column says which of them it is."""
    return f"L{row.layer}H{row.head}" if row.head >= 0 else f"L{row.layer}" if row.layer >= 0 else component_name(row)


def worst_layers(ablation: pd.DataFrame, top: int = 3) -> dict[str, str]:
    """For loss, kl and the logit difference the blocks whose removal moves it most for the worse: `L0 +8.1, L29 +2.0, L1 +1.9`."""
    out = {}
    blocks = ablation[ablation.unit == "block"]
    for metric, sign in (("loss", 1), ("kl", 1), ("logit_diff", -1)):
        rows = blocks[blocks.metric == metric]
        if len(rows):
            means = rows.groupby(["layer", "prompt"])["delta"].mean().groupby("layer").mean()
            largest = means.loc[(sign * means).sort_values(ascending=False).index[:top]]
            out[metric] = ", ".join(f"L{layer} {value:+.2f}" for layer, value in largest.items())
    return out


def growth_line(norms: pd.DataFrame, seed: int = 0) -> str:
    """The growth of the stream's norm with its interval."""
    fit = stats.growth_rate(norms, grown_layers(norms), skip_first=bool((norms.position > 0).any()), seed=seed).iloc[0]
    interval = f" (95% interval {fit.low:.4f} to {fit.high:.4f})" if pd.notna(fit.low) else ""
    return f"the stream's norm grows x{fit.rate:.4f} a layer{interval}, layers {fit['first']} to {fit['last']}, r2 {fit.r2:.2f}"


def grown_layers(norms: pd.DataFrame) -> tuple[int, int]:
    """The layers that a report fits: all but the first block's jump from the embedding and the last block's, where there are enough."""
    n_layers = int(norms.layer.max())  # that of the site `final`
    return (1, n_layers - 1) if n_layers > 3 else (0, n_layers)
