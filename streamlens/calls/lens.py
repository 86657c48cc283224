"""What the stream says so far: `sl.lens`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from streamlens import frames
from streamlens.arguments import MAX_TOKENS, arguments_of, batched, parsed_for, several, watched
from streamlens.checks import demand_finite, demand_near
from streamlens.errors import InputError
from streamlens.measure import lens as logit_lens
from streamlens.measure.places import places_in
from streamlens.models.loaded import Model
from streamlens.prompts import positions as positions_of
from streamlens.prompts import readouts
from streamlens.prompts.plain import is_index


def lens(
    model: Model,
    prompts: object,
    positions: object = None,
    *,
    target: object = None,
    sites: object = ("resid_pre", "final"),
    norm: object = "recomputed",
    top_k: int = 5,
    progress: bool = False,
    max_tokens: int = MAX_TOKENS,
    check: bool | str = True,
) -> pd.DataFrame:
    """What would the model say if it ended here? One row a token, at one site of one layer at one position.

    The stream at each of `sites` (embed, resid_pre, resid_mid, resid_post, final; by default what every layer reads, and what the
    final norm reads, layer n_layers) goes through everything that stands behind the last block: final norm, projection, unembedding,
    multiplier and cap. At `final` these are the model's own logits. `norm`: "recomputed" takes the final norm's statistics from that
    stream, "frozen" keeps those of the model's own last stream, so that a logit is the sum of what was written so far; or both.
    A model without a final norm has one answer to both.

    The `top_k` likeliest tokens have `k` from 0; a named `target` ("top" by default: what the model says in the end; or a token,
    "next", "top3", several) has `k` -1. `rank` counts tokens with a strictly greater logit, `logit` is in logits as printed,
    `probability` is its softmax. `positions` "all" by default. `check="full"` compares `final` with what the model prints.
    Raises :class:`InputError`, :class:`UnsupportedModelError` where what stands behind the last block is no map of single positions,
    and :class:`NumericError` where a logit is not finite.

    Source: nostalgebraist 2020, "interpreting GPT: the logit lens".
    """
    arguments = arguments_of(locals())
    sites, norms = several("sites", sites, logit_lens.SITES), several("norm", norm, logit_lens.NORMS)
    if not is_index(top_k) or not 0 <= top_k <= model.anatomy.n_vocab:
        raise InputError(f"top_k must be from 0 to the vocabulary's {model.anatomy.n_vocab}; got {top_k!r}")
    parsed = replace(parsed_for(model, prompts), versus=None)
    if positions is None and parsed.positions is None:
        positions = "all"
    where = positions_of(parsed, positions)
    wanted = readouts(parsed, model.tokenizer, target=target, positions=positions)
    parts = []
    for batch in watched(batched(model, parsed, max_tokens), progress, "lens"):
        chosen = wanted.take(np.isin(wanted.prompt, batch.index))
        parts.append(logit_lens.lens_batch(model.module, model.anatomy, batch, places_in(batch, where), chosen, sites, norms, int(top_k)))
        bad = sum(int((~np.isfinite(tokens.logit)).sum()) for tokens in (parts[-1].top, parts[-1].target))
        demand_finite(model, "a logit of the lens", bad, check)
        if check == "full" and "final" in sites:
            demand_near(model, "the lens at `final`", logit_lens.printed_error(model.module, model.anatomy, batch, parts[-1]))
    return frames.stamp(frames.lens(parts, frames.Labels(model.tokenizer, parsed)), model, arguments)
