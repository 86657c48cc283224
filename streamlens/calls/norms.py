"""How the stream grows: `sl.norms`, and `sl.norm_summary` for more prompts than a table holds."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from streamlens import frames
from streamlens.arguments import MAX_TOKENS, arguments_of, batched, parsed_for, positions_or_all, several, watched
from streamlens.checks import demand_finite
from streamlens.errors import choice
from streamlens.measure import growth, running, sinks
from streamlens.measure.places import places_in
from streamlens.models.loaded import Model
from streamlens.prompts import Prompts

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

    `measures` (None for all that need no pattern): l2, rms, mean, std, max_abs and max_index of a vector, and of what enters or leaves a
    block massive: how many coordinates are, by the rule of Sun et al. 2024. Of a write also relative (its l2 over that of the stream it is
    added to: in parallel blocks the one that enters), cosine to that stream, its signed length along and its length across it. Of a norm
    scale, 1/sigma, and gain, 1/sigma times the root mean square of its weight: by which the length of a write of no particular
    direction is multiplied. Of a pattern to_first, the weight on position 0 (the model attends eagerly for it).

    `positions` "all" by default; padding is never among them. Raises :class:`InputError`, and :class:`NumericError` where a value is
    not finite. Sources: Heimersheim & Turner 2023; Csordas et al. 2025 (relative, cosine); Gu et al. 2024 (to_first).
    """
    arguments = arguments_of(locals())
    parsed = parsed_for(model, prompts)
    parts = list(_batches(model, parsed, positions, measures, sites, progress, max_tokens, check))
    return frames.stamp(frames.norms(parts, frames.Labels(model.tokenizer, parsed)), model, arguments)


def norm_summary(
    model: Model,
    prompts: object,
    positions: object = None,
    by: str = "layer",
    *,
    measures: object = ("l2", "rms"),
    sites: object = None,
    progress: bool = False,
    max_tokens: int = MAX_TOKENS,
    check: bool | str = True,
) -> pd.DataFrame:
    """The same over any number of prompts in constant memory: one row a measure at one site, with mean, quantiles and more.

    `by` "layer" puts positions from 1 on together (`position` -1) and position 0, whose norm is often a hundred times theirs, apart;
    "position" gives every position a row. Every position of every prompt counts once: n values of n_prompts prompts, their mean, std,
    geometric_mean, min, q05, q25, median, q75, q95 and max. The sums merge exactly but for rounding; quantiles come from a mergeable
    sketch and are within 0.5% of the value at their rank. Other parameters, and what is raised, as in :func:`norms`; for intervals, which
    need each prompt's own values, take that table. Source of the sketch: Masson, Rim & Lee 2019 (DDSketch).
    """
    arguments = arguments_of(locals())
    choice("by", by, running.GROUPS)
    parsed, summary = parsed_for(model, prompts), running.Running(by)
    for part in _batches(model, parsed, positions, measures, sites, progress, max_tokens, check):
        summary.add(part)
    return frames.stamp(frames.norm_summary(summary), model, arguments)


def _batches(
    model: Model,
    parsed: Prompts,
    positions: object,
    measures: object,
    sites: object,
    progress: bool,
    max_tokens: int,
    check: bool | str,
) -> Iterator[growth.Measured]:
    if measures is None:
        measures = [m for m in growth.MEASURES if m != sinks.MEASURE]
    sites = [s for s in growth.SITES if s not in _BY_NAME] if sites is None else sites
    measures, sites = several("measures", measures, growth.MEASURES), several("sites", sites, growth.SITES)
    meter = growth.Meter(model.module, model.anatomy, sites, measures)
    where = positions_or_all(parsed, positions)
    for batch in watched(batched(model, parsed, max_tokens), progress, "norms"):
        part = meter.batch(batch, places_in(batch, where))
        demand_finite(model, "a norm", part.value.size - int(np.count_nonzero(np.isfinite(part.value))), check)
        yield part
