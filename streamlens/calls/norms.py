"""How the stream grows: `sl.norms`."""

from __future__ import annotations

import numpy as np
import pandas as pd

from streamlens import frames
from streamlens.arguments import MAX_TOKENS, batched, opened, parsed_for, several, watched
from streamlens.checks import CHECKS, demand_finite
from streamlens.errors import choice
from streamlens.measure import growth
from streamlens.measure.places import places_in
from streamlens.models.loaded import Model
from streamlens.prompts import positions as positions_of
from streamlens.stream.sites import SITES


def norms(
    model: Model,
    prompts: object,
    positions: object = None,
    *,
    measures: object = ("l2", "rms"),
    sites: object = None,
    progress: bool = False,
    max_tokens: int = MAX_TOKENS,
    check: bool | str = True,
) -> pd.DataFrame:
    """How does the stream grow? One row a measure at one site of one layer at one position, in the stream's own units.

    `measures`: "l2" and "rms". `sites`, all that the model has by default: embed, resid_pre, attn_out, mixer_out, resid_mid, mlp_out,
    other_out, resid_post and final (the stream just before the final norm; layer n_layers). `positions` "all" by default; padding is
    never among them. Raises :class:`InputError`, and :class:`NumericError` where a value is not finite.
    """
    opened(model)
    arguments = {k: v for k, v in locals().items() if k not in ("model", "prompts", "progress")}
    choice("check", check, CHECKS)
    measures, sites = several("measures", measures, growth.MEASURES), several("sites", sites, SITES)
    parsed = parsed_for(model, prompts)
    where = positions_of(parsed, "all" if positions is None and parsed.positions is None else positions)
    parts = []
    for batch in watched(batched(model, parsed, max_tokens), progress, "norms"):
        parts.append(growth.measure_batch(model.module, model.anatomy, batch, places_in(batch, where), sites, measures))
        demand_finite(model, "a norm", int((~np.isfinite(parts[-1].value)).sum()), check)
    return frames.stamp(frames.norms(parts, frames.Labels(model.tokenizer, parsed)), model, arguments)
