"""The similarity table."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from streamlens import schema
from streamlens.frames.columns import Labels, carried, place_columns, repeat
from streamlens.measure.similarity import Similar


def similarity(parts: Iterable[Similar], labels: Labels) -> pd.DataFrame:
    """The similarity table, ordered by prompt and position, then by measure, span and layer."""
    parts = list(parts)
    pairs, n = parts[0].pairs, len(parts[0].pairs)
    prompt, position = (np.concatenate([getattr(p, name) for p in parts]) for name in ("prompt", "position"))
    value, order = np.concatenate([p.value for p in parts]), np.lexsort((position, prompt))
    columns = {k: repeat(v, n) for k, v in place_columns(labels, prompt[order], position[order]).items()}
    for name, index in (("layer", 1), ("layer_to", 2)):
        columns[name] = np.tile(np.array([pair[index] for pair in pairs], dtype=np.int32), len(order))
    measures = list(dict.fromkeys(pair[0] for pair in pairs))
    codes = np.tile(np.array([measures.index(pair[0]) for pair in pairs], dtype=np.int8), len(order))
    columns |= {"measure": pd.Categorical.from_codes(codes, categories=measures), "value": value[order].reshape(-1)}
    columns |= {k: v.repeat(n) for k, v in carried(labels.prompts, prompt[order]).items()}
    return schema.apply(pd.DataFrame(columns, copy=False), "similarity")
