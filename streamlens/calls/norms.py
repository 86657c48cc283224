"""How the stream grows: `sl.norms`."""

from __future__ import annotations

import numpy as np
import pandas as pd

from streamlens import frames
from streamlens.arguments import MAX_TOKENS, batched, opened, parsed_for, several, watched
from streamlens.checks import CHECKS, demand_finite
from streamlens.errors import choice
from streamlens.measure import growth, sinks
from streamlens.measure.places import places_in
from streamlens.models.loaded import Model
from streamlens.prompts import positions as positions_of

_BY_NAME = (growth.HEAD, growth.PATTERN)  # many rows, and slower: only where they are asked for


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

    `sites`, all but the last two by default: embed, resid_pre, attn_out, mixer_out, resid_mid, mlp_out, other_out, resid_post, final
    (the stream just before the final norm; layer n_layers); norm, each norm that reads the stream (`sublayer` counts them in a layer);
    head_out, each head's write (branch norm and multiplier included, biases not); pattern, each head's attention.

    `measures` (None for all that need no pattern): l2, rms, mean, std, max_abs, max_index and massive (how many coordinates are,
    by the rule of Sun et al. 2024) of a vector. Of a write also relative (its l2 over that of the stream it is added to: in parallel blocks
    the one that enters), cosine to that stream, and its signed length along and its length across it. Of a norm scale, 1/sigma, and
    gain, 1/sigma times the root mean square of its weight: by which the length of a write of no particular direction is multiplied.
    Of a pattern to_first, the weight on position 0 (the model attends eagerly for it).

    `positions` "all" by default; padding is never among them. Raises :class:`InputError`, and :class:`NumericError` where a value is
    not finite. Sources: Heimersheim & Turner 2023; Csordas et al. 2025 (relative, cosine); Gu et al. 2024 (to_first).
    """
    opened(model)
    arguments = {k: v for k, v in locals().items() if k not in ("model", "prompts", "progress")}
    choice("check", check, CHECKS)
    if measures is None:
        measures = [m for m in growth.MEASURES if m != sinks.MEASURE]
    sites = [s for s in growth.SITES if s not in _BY_NAME] if sites is None else sites
    measures, sites = several("measures", measures, growth.MEASURES), several("sites", sites, growth.SITES)
    meter = growth.Meter(model.module, model.anatomy, sites, measures)
    parsed = parsed_for(model, prompts)
    where = positions_of(parsed, "all" if positions is None and parsed.positions is None else positions)
    parts = []
    for batch in watched(batched(model, parsed, max_tokens), progress, "norms"):
        parts.append(meter.batch(batch, places_in(batch, where)))
        demand_finite(model, "a norm", int((~np.isfinite(parts[-1].value)).sum()), check)
    return frames.stamp(frames.norms(parts, frames.Labels(model.tokenizer, parsed)), model, arguments)
