"""Where growth comes from, what depth is used for, how gradients flow back: `sl.decompose_norm`, `sl.depth_use`, `sl.gradient_norms`."""

from __future__ import annotations

from numbers import Real

import numpy as np
import pandas as pd

from streamlens import frames
from streamlens.arguments import MAX_TOKENS, arguments_of, batched, chosen_layers, parsed_for, positions_or_all, watched
from streamlens.checks import complain, demand_finite
from streamlens.errors import AdditivityError, InputError, choice
from streamlens.measure import depth, squares
from streamlens.measure.gradients import gradients_batch
from streamlens.measure.places import places_in
from streamlens.measure.units import variants
from streamlens.models import limits
from streamlens.models.loaded import Model


def decompose_norm(
    model: Model,
    prompts: object,
    positions: object = None,
    unit: str = "block",
    *,
    progress: bool = False,
    max_tokens: int = MAX_TOKENS,
    check: bool | str = True,
) -> pd.DataFrame:
    """Where does the stream's length come from? One row a pair of addends, whose `value`s sum to `total` = ||x_L||^2 at each position.

    The addends are what enters the first block and each block's write, or each sublayer's with `unit="sublayer"`; a row holds the
    squared length of one (both are the same) or twice the inner product of two, `layer` being that of the later. So the rows of one
    `layer` are what it grew the squared norm by: its own size, and its alignment with what stood there before.
    `positions` "all" by default; `check` as in :func:`attribute`, against the model's own final stream.

    Raises :class:`UnsupportedModelError` for a model with norms on the stream itself, through which no write keeps its length, and
    :class:`AdditivityError` where the rows miss the total.
    """
    arguments = arguments_of(locals())
    choice("unit", unit, squares.UNITS)
    addends, parsed = squares.addends_of(model.anatomy, unit), parsed_for(model, prompts)
    where = positions_or_all(parsed, positions)
    parts, limit = [], limits.of_sum(model.module)
    for batch in watched(batched(model, parsed, max_tokens), progress, "decompose norm"):
        parts.append(squares.squares_batch(model.module, model.anatomy, batch, places_in(batch, where), addends))
        error = float(np.nan_to_num(parts[-1].error, nan=np.inf).max())
        if error > limit and check is not False:
            message = f"{model.name}: the parts of the squared norm miss it by {error:.2g} of sum|parts| (limit {limit:.0e})"
            complain(AdditivityError(message), check)
    df = frames.norm_parts(parts, addends, frames.Labels(model.tokenizer, parsed))
    return frames.stamp(df, model, arguments, additivity_error=max(float(p.error.max()) for p in parts))


def depth_use(
    model: Model,
    prompts: object,
    unit: str = "block",
    positions: str = "all",
    *,
    layers: object = None,
    cut: float = 0.5,
    progress: bool = False,
    max_tokens: int = MAX_TOKENS,
    check: bool | str = True,
) -> pd.DataFrame:
    """What are the layers used for by later ones? One row a removed layer, a later layer and a statistic over each prompt's positions.

    Each layer in turn (its "block", "attn", "mlp", "mixer" or each "head") is taken away at every position but the first; `write` is the
    relative change of a later block's write, ||w - w'|| / ||w||, `prediction` the L2 distance of the predicted distributions.
    With `positions="future"` it is taken away up to a share `cut` of the prompt and measured after it, so that only what later
    tokens take from earlier ones counts. `layers`: which to take away, all by default.

    Raises :class:`InputError` for prompts too short, and :class:`NumericError` where a value is not finite.
    Source: Csordas, Manning & Potts 2025, Do language models use their depth efficiently? (they take the largest over positions
    and prompts: `statistic` "max", which :func:`streamlens.figures.depth_use` draws).
    """
    arguments = arguments_of(locals())
    choice("unit", unit, depth.UNITS)
    choice("positions", positions, depth.SPANS)
    if not (isinstance(cut, Real) and 0 < cut < 1):
        raise InputError(f"cut must lie between 0 and 1; got {cut!r}")
    parsed = parsed_for(model, prompts)
    taken = variants(model.anatomy, unit, chosen_layers(model, layers))
    if not taken:
        raise InputError(f"unit={unit!r}: none of the chosen layers of {model.name} has one")
    cuts = depth.cuts(parsed.lengths, positions, cut)
    parts = []
    for batch in watched(batched(model, parsed, max_tokens), progress, "depth use"):
        parts.append(depth.depth_use_batch(model.module, model.anatomy, batch, taken, cuts[batch.index]))
        after = np.array([v.layer for v in taken])[:, None] < np.arange(model.n_layers)
        bad = (~np.isfinite(parts[-1].write[after])).sum() + (~np.isfinite(parts[-1].prediction)).sum()
        demand_finite(model, "a change of a write or prediction", int(bad), check)
    df = frames.depth_use(parts, taken, unit, positions, frames.Labels(model.tokenizer, parsed))
    return frames.stamp(df, model, arguments)


def gradient_norms(
    model: Model,
    prompts: object,
    *,
    progress: bool = False,
    max_tokens: int = MAX_TOKENS,
    check: bool | str = True,
) -> pd.DataFrame:
    """How does the loss flow back? One row a layer and position: the norm of the gradient where the stream enters each block.

    The loss is each prompt's mean of -log p of its own next tokens (nats), so that a prompt's rows do not depend on its batch; one
    backward pass gives all of them. The last `layer`, n_layers, is the stream after the last block (site final). At a prompt's last
    position the gradient is 0, since nothing is predicted from it. The model is in eval mode and comes back as it was.

    Raises :class:`InputError` for a prompt of one token, and :class:`NumericError` where a value is not finite.
    """
    arguments = arguments_of(locals())
    parsed = parsed_for(model, prompts)
    if parsed.lengths.min() < 2:
        raise InputError("prompts must have 2 tokens or more, since the loss is of next tokens; got one of 1")
    parts = []
    for batch in watched(batched(model, parsed, max_tokens), progress, "gradient norms"):
        found = gradients_batch(model.module, model.anatomy, batch)
        demand_finite(model, "a gradient", int((~np.isfinite(found.value)).sum()), check)
        parts.append((batch, found))
    return frames.stamp(frames.gradients(parts, frames.Labels(model.tokenizer, parsed)), model, arguments)
