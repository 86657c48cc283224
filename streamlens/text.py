"""The tables as a terminal shows them: what is largest first, sums that can be checked by eye."""

from __future__ import annotations

import pandas as pd

_GROUP = ["prompt", "position", "target", "versus"]


def component_name(row) -> str:
    """`L3 head 7`, `L12 mlp`, `embed`: a row of an attribution table in words."""
    place = f"L{row.layer} " if row.layer >= 0 else ""
    again = f".{row.sublayer}" if row.sublayer > 0 else ""
    parts = [row.head, *(getattr(row, name, -1) for name in ("neuron", "expert"))]
    source = f" <- {row.source_token!r} at {row.source}" if getattr(row, "source", -1) >= 0 else ""
    return f"{place}{row.component}{again}" + "".join(f" {number}" for number in parts if number >= 0) + source


def attribution_text(df: pd.DataFrame, top: int = 20) -> str:
    """For each logit its `top` largest contributions, the sum of the rest, and the logit that all of them sum to."""
    return "\n\n".join(_one_logit(group, top) for _, group in df.groupby(_GROUP, sort=False))


def _one_logit(group: pd.DataFrame, top: int) -> str:
    first = group.iloc[0]
    ordered = group.sort_values("contribution", key=abs, ascending=False, kind="stable")
    lines = [(component_name(row), row.contribution) for row in ordered.head(top).itertuples()]
    if len(ordered) > top:
        lines.append((f"{len(ordered) - top} others", ordered.contribution.iloc[top:].sum()))
    lines.append(("sum", group.contribution.sum()))
    lines.append(("logit", first.logit))
    width = max(16, *(len(name) for name, _ in lines))
    body = "\n".join(f"  {name:<{width}} {value:>10.4f}" for name, value in lines)
    return f"{_asked(first)}\n{body}"


def _asked(first: pd.Series) -> str:
    """Which logit, of which prompt, at which position."""
    against = f" - {str(first.versus_token)!r}" if first.versus != -1 else ""
    return f"{_place(first)}\nlogit of {str(first.target_token)!r}{against}"


def _place(first: pd.Series) -> str:
    return f"prompt {first.prompt}: {_shortened(str(first.prompt_text))!r}, position {first.position} ({str(first.token)!r})"


def _shortened(text: str, width: int = 60) -> str:
    return text if len(text) <= width else "..." + text[3 - width :]


def ablation_text(df: pd.DataFrame) -> str:
    """Mean change of each metric over prompts (each prompt counts once), one line a change; the untouched model's mean on top."""
    place = [name for name in ("unit", "layer", "sublayer", "span", "head", "expert") if name in df.columns]
    within = df.groupby([*place, "metric", "prompt"], observed=True)[["clean", "delta"]].mean()
    means = within.groupby(level=[*place, "metric"], observed=True).mean()
    clean = means.groupby(level="metric", observed=True)["clean"].first()
    table = means["delta"].unstack("metric")
    for level in place[2:]:
        table = _without_constant(table, level)
    untouched = ", ".join(f"{metric} {value:.4f}" for metric, value in clean.items())
    return f"untouched model: {untouched}\n{df.method.iloc[0]} (ablated - clean), mean over {_prompts(df)}\n{_table(table)}"


def lens_text(df: pd.DataFrame) -> str:
    """For each prompt and position, one line a layer: the likeliest tokens with their probabilities, then those asked about with rank."""
    return "\n\n".join(_one_lens(group) for _, group in df.groupby(["prompt", "position"], sort=False))


def _one_lens(group: pd.DataFrame) -> str:
    lines = []
    for (layer, site), rows in group.groupby(["layer", "site"], sort=False, observed=True):
        top, asked = rows[rows.k >= 0].sort_values("k"), rows[rows.k < 0]
        tokens = [f"{str(row.target_token)!r} {row.probability:.3f}" for row in top.itertuples()]
        tokens += [f"| {str(row.target_token)!r} {row.probability:.3f} rank {row.rank}" for row in asked.itertuples()]
        lines.append(f"  {layer:>3} {site:<10} {'  '.join(tokens)}")
    return "\n".join([_place(group.iloc[0]), *lines])


def effects_text(df: pd.DataFrame, top: int = 20) -> str:
    """For each logit the components with the `top` largest total effects, direct and indirect effect beside them."""
    return "\n\n".join(_one_effect(group, top) for _, group in df.groupby(_GROUP, sort=False))


def _one_effect(group: pd.DataFrame, top: int) -> str:
    ordered = group.sort_values("total", key=abs, ascending=False, kind="stable").head(top)
    table = ordered[["direct", "indirect", "total", "repair_heads", "repair_mlps", "repair_norm"]]
    table = table.assign(component=[component_name(row) for row in ordered.itertuples()])
    return f"{_asked(group.iloc[0])}\nclean - ablated ({group.method.iloc[0]}), {len(ordered)} of {len(group)} components\n" + _table(
        table.set_index("component")
    )


def similarity_text(df: pd.DataFrame) -> str:
    """Mean over prompts and positions of neighbouring layers' measures, one line a layer; position 0 left out where there are others."""
    rows = df[(df.layer_to == df.layer + 1) & ((df.position > 0) | (df.position.max() == 0))]
    table = rows.groupby(["layer", "measure"], observed=True)["value"].mean().unstack("measure")
    return f"each layer's stream and the next one's, mean over {_prompts(df)}\n{_table(table)}"


def norms_text(df: pd.DataFrame) -> str:
    """Mean of each measure over prompts and positions at each site, one line a layer; position 0 left out where there are others."""
    rows = df[df.position > 0] if (df.position > 0).any() else df
    rows = rows.assign(sublayer=rows.sublayer.clip(lower=0))  # the block's own sites stand in its first sublayer's line
    table = rows.groupby(["measure", "layer", "sublayer", "site"], observed=True)["value"].mean().unstack("site")
    order = [s for s in ("embed", "resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post", "final") if s in table.columns]
    table = table[[*order, *(s for s in table.columns if s not in order)]]
    left_out = ", position 0 left out" if len(rows) < len(df) else ""
    return f"mean over {_prompts(df)}{left_out}\n{_table(_without_constant(table, 'sublayer'))}"


def card_text(df: pd.DataFrame) -> str:
    """One fact a line."""
    width = max(map(len, df.columns))
    return "\n".join(f"{name:<{width}}  {df[name].iloc[0]}" for name in df.columns)


def _prompts(df: pd.DataFrame) -> str:
    n = df.prompt.nunique()
    return f"{n} prompt{'s' if n != 1 else ''}"


def _without_constant(table: pd.DataFrame, level: str) -> pd.DataFrame:
    """Drop an index level that tells nothing apart."""
    return table.droplevel(level) if len(table.index.unique(level)) == 1 else table


def _table(table: pd.DataFrame) -> str:
    table = table.copy()
    table.columns = list(table.columns)
    return table.reset_index().to_string(index=False, float_format="{:.4f}".format, na_rep="")
