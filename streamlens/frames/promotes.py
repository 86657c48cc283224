"""The table of promoted tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from streamlens import schema
from streamlens.frames.columns import Labels, carried, place_columns
from streamlens.measure.components import Component
from streamlens.measure.promotes import DIRECTIONS, Promoted


def promotes(parts: Sequence[Promoted], chosen: Sequence[Component], labels: Labels) -> pd.DataFrame:
    """One row a token, ordered by prompt and position, components as asked, the tokens pushed up first."""
    prompt, position, ids, contribution = (
        np.concatenate([getattr(p, name) for p in parts]) for name in ("prompt", "position", "id", "contribution")
    )
    order = np.lexsort((position, prompt))
    row, component, direction, k = (index.reshape(-1) for index in np.indices(ids.shape, dtype=np.int32))
    row, target = order[row], ids[order].reshape(-1)
    kinds = list(dict.fromkeys(c.kind for c in chosen))
    codes = np.array([kinds.index(c.kind) for c in chosen], dtype=np.int8)
    columns = place_columns(labels, prompt[row], position[row])
    columns["component"] = pd.Categorical.from_codes(codes[component], categories=kinds)
    for name in ("layer", "sublayer", "head"):
        columns[name] = np.array([getattr(c, name) for c in chosen], dtype=np.int32)[component]
    columns["direction"] = pd.Categorical.from_codes(direction.astype(np.int8), categories=list(DIRECTIONS))
    columns |= {"k": k, "target": target.astype(np.int32), "target_token": labels.tokens(target)}
    columns |= {"contribution": contribution[order].reshape(-1)} | carried(labels.prompts, prompt[row])
    return schema.apply(pd.DataFrame(columns, copy=False), "promotes")
