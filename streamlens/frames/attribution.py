"""The attribution table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from streamlens import schema
from streamlens.frames.columns import Labels, carried, component_columns, place_columns, repeat, target_columns
from streamlens.measure.attribution import Component, Shares


def attribution(shares: Iterable[Shares], components: Sequence[Component], labels: Labels) -> pd.DataFrame:
    """The attribution table, ordered by prompt, position and target as asked, components in the model's order."""
    shares = list(shares)
    parts = {name: np.concatenate([getattr(s.readouts, name) for s in shares]) for name in ("prompt", "position", "target", "versus")}
    contribution = np.concatenate([s.contribution for s in shares])
    logit = np.concatenate([s.logit for s in shares])
    if len(shares) > 1:
        order = np.lexsort((np.arange(len(logit)), parts["position"], parts["prompt"]))
        parts, contribution, logit = {n: v[order] for n, v in parts.items()}, contribution[order], logit[order]
    n = len(components)
    groups = place_columns(labels, parts["prompt"], parts["position"]) | target_columns(labels, parts["target"], parts["versus"])
    groups |= {"logit": logit}
    columns = {name: repeat(values, n) for name, values in groups.items()}
    columns |= component_columns(components, len(logit)) | {"contribution": contribution.reshape(-1)}
    columns |= {name: values.repeat(n) for name, values in carried(labels.prompts, parts["prompt"]).items()}
    return schema.apply(pd.DataFrame(columns, copy=False), "attribution")
