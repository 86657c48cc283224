"""How alike the streams at two depths are: `sl.similarity`."""

from __future__ import annotations

import numpy as np
import pandas as pd

from streamlens import frames
from streamlens.arguments import MAX_TOKENS, arguments_of, batched, parsed_for, positions_or_all, several, watched
from streamlens.checks import demand_finite
from streamlens.measure import similarity as alike
from streamlens.measure.places import places_in
from streamlens.models.loaded import Model


def similarity(
    model: Model,
    prompts: object,
    positions: object = None,
    *,
    measures: object = None,
    progress: bool = False,
    max_tokens: int = MAX_TOKENS,
    check: bool | str = True,
) -> pd.DataFrame:
    """How alike are the streams that enter `layer` and `layer_to`? One row a measure, pair and position; no unit.

    `layer_to` n_layers is the stream before the final norm. `measures`, all by default: block_influence (1 - cosine, neighbouring
    layers), relative_magnitude (|what the block adds| / |what the stream then is|) and angular_distance (arccos of the cosine over pi,
    every pair). `positions` "all" by default; Gromov et al. read "last". Measured beside what really breaks by
    :func:`streamlens.stats.rank_agreement`. Raises :class:`InputError`, and :class:`NumericError` where a value is not finite.

    Sources: Men et al. 2024 (ShortGPT), Gromov et al. 2024, Samragh et al. 2023.
    """
    arguments = arguments_of(locals())
    measures = several("measures", measures, alike.MEASURES)
    parsed = parsed_for(model, prompts)
    where = positions_or_all(parsed, positions)
    parts = []
    for batch in watched(batched(model, parsed, max_tokens), progress, "similarity"):
        parts.append(alike.measure_batch(model.module, model.anatomy, batch, places_in(batch, where), measures))
        demand_finite(model, "a similarity", int((~np.isfinite(parts[-1].value)).sum()), check)
    return frames.stamp(frames.similarity(parts, frames.Labels(model.tokenizer, parsed)), model, arguments)
