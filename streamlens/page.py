"""The figures of a report and one self-contained HTML page that shows them."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes

from streamlens import figures
from streamlens.summary import Tables, by_set, grown_layers, model_line, sets_table

_SHOWN_AS_WATERFALL = ("indirect_objects", "facts", "prompts")
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; background: #fff; }
img { max-width: 100%; } figure { margin: 2rem 0; } figcaption, footer { color: #555; }
table { border-collapse: collapse; } th, td { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #ddd; }
"""
_FILES = (
    "attribution.parquet: each component's share of each logit; ablation.parquet: each metric without each layer; norms.parquet: the "
    "stream's norms; card.parquet: the architecture. streamlens.schema.describe(name) says what each column means; "
    "streamlens.schema.read_parquet(path, name) reads one with its settings in .attrs. Figures are there as PDF and PNG."
)


def draw(tables: Tables) -> Iterator[tuple[str, Axes, str]]:
    """(file stem, axes, caption) of each figure that these tables can fill."""
    for name, rows in by_set(tables.attribution):
        if rows.component.isin(["head", "mlp"]).any():
            yield f"heads_{name}", figures.heads(rows), f"{name}: which heads and MLPs write the logit, mean over the set's prompts."
    for name, rows in by_set(tables.attribution):
        if name in _SHOWN_AS_WATERFALL:
            one = rows[rows.prompt == rows.prompt.iloc[0]]
            text = str(one.prompt_text.iloc[0])
            yield f"waterfall_{name}", figures.waterfall(one), f"How the logit after “{text}” comes about; the last bar is the logit."
    yield from _draw_removal(tables.ablation)
    growth = figures.growth(tables.norms, fit=grown_layers(tables.norms))
    yield "growth", growth, "Norm of the residual stream where it enters each layer, and after the last."


def _draw_removal(ablation: pd.DataFrame) -> Iterator[tuple[str, Axes, str]]:
    captions = {
        "loss": "Change of the loss (nats a token, all positions) without each block.",
        "kl": "Divergence of the last token's prediction from the untouched model's (nats), without each block, attention or MLP.",
    }
    for metric, caption in captions.items():
        if (ablation.metric == metric).any():
            yield f"removal_{metric}", figures.removal(ablation, metric=metric), caption


def write(folder: Path, tables: Tables, found: Sequence[str]) -> None:
    """Draw and save every figure (PDF, PNG) into `folder`, and index.html with the PNGs inside it."""
    shown = []
    with figures.style("paper", columns=2):
        for stem, ax, caption in draw(tables):
            figures.save(ax, folder / stem)
            shown.append(_figure((folder / f"{stem}.png").read_bytes(), caption))
    title = html.escape(f"streamlens report: {tables.card['model'].iloc[0]}")
    sets = sets_table(tables.attribution).to_html(index=False, border=0)
    said = "".join(f"<li>{html.escape(line)}</li>\n" for line in found)
    (folder / "index.html").write_text(
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n'
        f"<body>\n<h1>{title}</h1>\n<p>{html.escape(model_line(tables.card))}</p>\n{sets}\n<ul>\n{said}</ul>\n{''.join(shown)}"
        f"<footer><p>{html.escape(_FILES)}</p></footer>\n</body>\n</html>\n",
        encoding="utf-8",
    )


def _figure(png: bytes, caption: str) -> str:
    data, caption = base64.b64encode(png).decode(), html.escape(caption)
    return f'<figure><img alt="{caption}" src="data:image/png;base64,{data}"><figcaption>{caption}</figcaption></figure>\n'
