"""The training table."""

from __future__ import annotations

import numpy as np
import pandas as pd

from streamlens import schema
from streamlens.decoder.history import History
from streamlens.prompts import NONE

MEASURES = ("loss", "gradient_norm", "learning_rate", "attention_logit", "stream_norm")


def training(history: History) -> pd.DataFrame:
    """The training table, ordered by step: each step's measures, then those of each layer where the model was looked into."""
    parts = []
    for code, name in enumerate(MEASURES):
        value = getattr(history, name)
        steps = history.step if value.ndim == 1 else history.looked
        layers = np.array([NONE]) if value.ndim == 1 else np.arange(value.shape[1])
        parts.append((np.repeat(steps, len(layers)), np.tile(layers, len(steps)), np.full(value.size, code), value.reshape(-1)))
    step, layer, measure, value = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.argsort(step, kind="stable")
    columns = {
        "step": step[order].astype(np.int32),
        "layer": layer[order].astype(np.int32),
        "measure": pd.Categorical.from_codes(measure[order], categories=list(MEASURES)),
        "value": value[order],
    }
    return schema.apply(pd.DataFrame(columns, copy=False), "training")
