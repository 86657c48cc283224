"""Words in figures: names of components, tokens made visible, and what a mean was taken over."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.textpath import text_to_path

_WORDS = {"mlp": "MLP", "mlp_bias": "MLP bias", "pos_embed": "pos. embed", "neuron_rest": "other neurons"}


def component(row: Mapping[str, object]) -> str:
    """A component's short name: "L12 H3", "MLP 20", "attn bias 4", "embed", "heads" for their sum. `row` is one of an attribution table."""
    name, layer = str(row["component"]), int(row["layer"])
    sublayer = f".{row['sublayer']}" if row.get("sublayer", -1) > 0 else ""
    if name == "head":
        label = f"L{layer}{sublayer} H{row['head']}" if layer >= 0 else "heads"
    else:
        label = _WORDS.get(name, name.replace("_", " ")) + (f" {layer}{sublayer}" if layer >= 0 else "")
    parts = [f"{word}{row[column]}" for column, word in (("neuron", "#"), ("expert", "#"), ("source", "from ")) if row.get(column, -1) >= 0]
    return " ".join([label, *parts])


@cache
def _glyphs(font: str) -> frozenset[int]:
    return frozenset(get_font(font).get_charmap())


def width(text: str) -> float:
    """How wide a text is, over the size of its font."""
    return _width(text, findfont(FontProperties()))


@cache
def _width(text: str, font: str) -> float:
    return text_to_path.get_text_width_height_descent(text, FontProperties(fname=font, size=100), False)[0] / 100


def visible(text: str, longest: int = 24) -> str:
    """A token in quotes with its spaces, long runs of them counted; what the font cannot draw is escaped, since matplotlib would draw an
    empty box and warn."""
    glyphs = _glyphs(findfont(FontProperties()))
    text = re.sub(" {4,}", lambda run: f"␣×{len(run[0])}", text)
    shown = [c if c.isprintable() and ord(c) in glyphs else c.encode("unicode_escape").decode() for c in text]
    kept = shown if len(shown) <= longest else [*shown[: longest - 1], "…"]
    return f"“{''.join(kept)}”"


def token_axis(ax: Axes, texts: pd.Series) -> None:
    """Tokens along the axis, every one or, of many, as many as can be read."""
    cell = ax.get_position().width * 0.8 * ax.figure.get_figwidth() * 72 / len(texts)  # points, beside a colour bar
    step = int(np.ceil(1.1 * mpl.rcParams["font.size"] / cell))
    at = np.arange(0, len(texts), step)
    ax.set_xticks(at, [visible(str(text), longest=12) for text in texts.iloc[at]], rotation=90, parse_math=False)


def target(rows: pd.DataFrame) -> str:
    """What the logit is of: the first row's target, less its versus."""
    row = rows.iloc[0]
    less = {-1: "", -2: " − mean"}.get(int(row["versus"]), f" − {visible(str(row['versus_token']))}")
    return f"{visible(str(row['target_token']))}{less}"


def unit(rows: pd.DataFrame) -> str:
    """What contributions are counted in: nats where log-probabilities are read."""
    return "nats" if "log_probability" in rows.columns else "logits"


def whole(rows: pd.DataFrame) -> str:
    """What the contributions of a group sum to."""
    if "log_probability" in rows.columns:
        return "log p + entropy"
    return "logit" if rows["versus"].iloc[0] == -1 else "logit difference"


def sample(n: pd.Series, positions: pd.Series | None = None) -> str:
    """How many prompts a mean is over, and how many positions of each where there are several."""
    prompts = f"{n.max()} prompts" if n.max() > 1 else "1 prompt"
    if n.min() < n.max():
        prompts = f"{n.min()} to {prompts}"
    if positions is None or positions.max() < 2:
        return prompts
    each = f"{positions.max()}" if positions.min() == positions.max() else f"{positions.min()} to {positions.max()}"
    return f"{prompts}, {each} positions{' each' if n.max() > 1 else ''}"
