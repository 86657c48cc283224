"""The lens table."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from streamlens import schema
from streamlens.frames.columns import Labels, carried, place_columns
from streamlens.measure.lens import Lens, Tokens
from streamlens.prompts import NONE


def lens(parts: Iterable[Lens], labels: Labels) -> pd.DataFrame:
    """The lens table, ordered by prompt and position, sites in the model's order, the named targets before the top."""
    parts = list(parts)
    sites, norms = parts[0].sites, parts[0].norms
    blocks = [block for p in parts for block in (_block(p.prompt, p.position, p.top), _targets(p))]
    rows = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
    # Ties keep the order in which the targets were asked for.
    order = np.lexsort([rows[name] for name in ("k", "norm", "site", "position", "prompt")])
    rows = {name: values[order] for name, values in rows.items()}
    kinds = list(dict.fromkeys(site for site, _ in sites))
    codes, layers = np.array([kinds.index(s) for s, _ in sites], dtype=np.int8), np.array([layer for _, layer in sites], dtype=np.int32)
    columns = place_columns(labels, rows["prompt"], rows["position"])
    columns |= {"layer": layers[rows["site"]], "site": pd.Categorical.from_codes(codes[rows["site"]], categories=kinds)}
    columns |= {"norm": pd.Categorical.from_codes(rows["norm"].astype(np.int8), categories=list(norms))}
    columns |= {"target": rows["id"].astype(np.int32), "target_token": labels.tokens(rows["id"])}
    columns |= {name: rows[name] for name in ("k", "rank", "logit", "probability")}
    columns |= carried(labels.prompts, rows["prompt"])
    return schema.apply(pd.DataFrame(columns, copy=False), "lens")


def _targets(part: Lens) -> dict[str, np.ndarray]:
    block = _block(part.readouts.prompt, part.readouts.position, Tokens(**{k: v[..., None] for k, v in vars(part.target).items()}))
    return block | {"k": np.full_like(block["k"], NONE)}


def _block(prompt: np.ndarray, position: np.ndarray, tokens: Tokens) -> dict[str, np.ndarray]:
    """The long form of tokens `[site, norm, row, k]`."""
    site, norm, row, k = (index.reshape(-1) for index in np.indices(tokens.id.shape, dtype=np.int32))
    values = {name: value.reshape(-1) for name, value in vars(tokens).items()}
    return {"prompt": prompt[row], "position": position[row], "site": site, "norm": norm, "k": k} | values
