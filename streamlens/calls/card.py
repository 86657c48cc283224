"""The architecture card: `sl.card`."""

from __future__ import annotations

from collections import Counter

import pandas as pd

from streamlens import frames
from streamlens.arguments import opened
from streamlens.models.card import config_facts
from streamlens.models.loaded import Model
from streamlens.models.placement import placement_facts
from streamlens.models.verify import probe_ids


def card(model: Model) -> pd.DataFrame:
    """The architecture as one row, one column a fact: sizes, positions, norms, experts, multipliers, parameters and costs.

    Counts are checked against the real parameters; norm placement, multipliers and the logit softcap are what the proof at
    load saw, not what the config or the family's name says. 0 stands for an absent number, "none" for an absent kind, nan
    for an absent softcap (and for a multiplier that is not one number).
    """
    opened(model, whole_blocks=True)
    facts = config_facts(model.module, Counter(layer.path for layer in model.anatomy.layers))
    facts["n_layers"] = model.n_layers
    facts |= placement_facts(model.module, model.anatomy, probe_ids(model.module))
    return frames.stamp(frames.card(model.name, facts), model, {})
