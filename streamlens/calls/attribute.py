"""Who wrote this logit: `sl.attribute`."""

from __future__ import annotations

import numpy as np
import pandas as pd

from streamlens import frames
from streamlens.arguments import MAX_TOKENS, batched, opened, parsed_for, watched
from streamlens.checks import CHECKS, check_printed, check_sums
from streamlens.errors import choice
from streamlens.measure import attribution as dla
from streamlens.models.loaded import Model
from streamlens.prompts import readouts


def attribute(
    model: Model,
    prompts: object,
    target: object = None,
    versus: object = None,
    positions: object = None,
    *,
    progress: bool = False,
    max_tokens: int = MAX_TOKENS,
    check: bool | str = True,
) -> pd.DataFrame:
    """Who wrote this logit? One row a component, whose `contribution`s sum to the model's own `logit`.

    `target` is a token (text or id), one a prompt, "next" or "top" (default); `versus` a token to subtract, or "mean".
    `positions` is "last" (default), "all" or indices over a prompt's own tokens. Contributions are in logits, exact on the
    untouched weights with the final norm's scale frozen; a head keeps its share of the value bias. See the design of the
    table in :data:`streamlens.schema.ATTRIBUTION`.

    `check`: True raises :class:`AdditivityError` where the sum misses the logit by more than the dtype's limit, "warn" warns,
    False does neither, "full" also compares every logit with what the model prints (a hook of yours on the unembedding is seen
    only there). Raises :class:`InputError` for bad input.

    Method: Elhage et al. 2021 (direct logit attribution), McGrath et al. 2023, eq. 7-10 (frozen norms).
    """
    opened(model)
    arguments = {"target": target, "versus": versus, "positions": positions, "max_tokens": max_tokens, "check": check}
    choice("check", check, CHECKS)
    parsed = parsed_for(model, prompts)
    wanted = readouts(parsed, model.tokenizer, target=target, versus=versus, positions=positions)
    shares = []
    for batch in watched(batched(model, parsed, max_tokens), progress, "attribute"):
        chosen = wanted.take(np.isin(wanted.prompt, batch.index))
        if len(chosen):
            shares.append(dla.attribute_batch(model.module, model.anatomy, batch, chosen))
            check_sums(model, parsed, shares[-1], check)
            if check == "full":
                check_printed(model, parsed, batch, shares[-1])
    df = frames.attribution(shares, dla.components(model.anatomy), frames.Labels(model.tokenizer, parsed))
    return frames.stamp(df, model, arguments, additivity_error=max(float(s.error.max()) for s in shares))
